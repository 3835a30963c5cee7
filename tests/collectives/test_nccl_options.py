"""What NCCL's communicators are asked for, on a fake of torch's options."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.sharded.prepare import open_groups
from collectives.transport.nccl_options import nccl_options


class Options:
    """Of `dist.ProcessGroupNCCL`, which builds without CUDA have not."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=-1, cta_policy=-1)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    there = SimpleNamespace(Options=Options, NCCL_CTA_POLICY_ZERO=2)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", there, raising=False)
    return there


@pytest.mark.usefixtures("nccl")
def test_only_what_is_asked_for_is_set() -> None:
    plain = nccl_options(None)
    assert (plain.is_high_priority_stream, plain.config.max_ctas, plain.config.cta_policy) == (False, -1, -1)
    assert plain._timeout == timedelta(minutes=10)
    asked = nccl_options(timedelta(seconds=5), max_ctas=4, is_urgent=True, zero_ctas=True)
    assert (asked.is_high_priority_stream, asked.config.max_ctas, asked.config.cta_policy) == (True, 4, 2)
    assert asked._timeout == timedelta(seconds=5)


def test_an_older_torch_knows_no_policy(nccl: SimpleNamespace) -> None:
    del nccl.NCCL_CTA_POLICY_ZERO
    assert nccl_options(None, zero_ctas=True).config.cta_policy == -1


@pytest.mark.parametrize(("backend", "windows"), [("nccl", True), ("nccl", False), ("gloo", True)])
@pytest.mark.usefixtures("nccl")
def test_groups_for_windows_ask_for_copy_engines(monkeypatch: pytest.MonkeyPatch, backend: str, windows: bool) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: f"cpu:{backend}")
    monkeypatch.setattr(dist, "new_group", lambda _ranks, **settings: made.append(settings))
    monkeypatch.setattr("collectives.sharded.prepare.timeout_of", lambda *_: timedelta(seconds=5))
    open_groups(None, torch.device("cpu"), ("gather", "reduce"), windows=windows)
    asks = backend == "nccl" and windows
    assert [settings["pg_options"] is not None for settings in made] == [asks, asks]
    assert all(settings["pg_options"].config.cta_policy == 2 for settings in made if asks)
