"""Where windows are worth it: on fakes of NCCL, its version and its GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.sharded import prepare
from collectives.transport.windows import are_worth_it

GROUP: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(supports_tensor_alloc=lambda _: True))


class World:
    """A communicator of four ranks of which this is the second; the others' words are given."""

    def __init__(self, others: str | None = None, kind: str = "cuda") -> None:
        self.device, self.ranks, self.asked = torch.device(kind), [0, 1, 2, 3], 0
        self._others = others

    def all_gather_text(self, text: str, _what: str) -> list[str]:
        self.asked += 1
        other = text if self._others is None else self._others
        return [other, text, text, other]


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "here")
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [1, 2])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def worth(world: World, group: Any = GROUP, has_room: bool = True) -> bool:
    return are_worth_it(group, world, has_room=has_room)  # type: ignore[arg-type]


def test_they_are_where_all_of_the_group_is_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worth(World())
    assert worth(World("True on another host")), "ranks of other groups count for nothing"
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    assert worth(World())
    assert not worth(World("True on another host"))
    assert not worth(World("False on here")), "a peer's GPU cannot, or is full"
    assert not worth(World(), has_room=False)


@pytest.mark.parametrize("group", [None, GROUP])
def test_every_rank_is_asked_also_by_those_that_have_none(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    world = World()
    assert not worth(world, group)
    assert world.asked == 1, "the other ranks wait for this one"


def test_other_backends_and_devices_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = World(kind="cpu")
    assert not worth(cpu)
    assert cpu.asked == 0
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:gloo")
    assert not worth(World())


def test_a_gpu_that_nccl_makes_no_memory_for_has_none() -> None:
    lacking = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(supports_tensor_alloc=lambda _: False))
    assert not worth(World(), lacking)


class Ranks(World):
    """As many ranks, of which the last wants something else, if that is given."""

    def __init__(self, other: str | None = None) -> None:
        super().__init__()
        self._other = other

    def all_gather_ints(self, values: list[int], _what: str) -> list[list[int]]:
        return [values, values, values, values if self._other is None else [0]]

    def all_gather_text(self, text: str, what: str) -> list[str]:
        return [text, text, text, self._other or text] if what == "arguments" else super().all_gather_text(text, what)


def resolved(monkeypatch: pytest.MonkeyPatch, ranks: Ranks | None, windows: Any, stage: int = 2) -> bool:
    """What a rank on a GPU gets; without ranks no collective may be asked for."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 4)
    monkeypatch.setattr(dist, "ProcessGroup", SimpleNamespace)
    monkeypatch.setattr(prepare, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(prepare, "Communicator", lambda *_: ranks or pytest.fail("a collective"))
    return prepare.resolve_windows(windows, GROUP, torch.device("cuda", 0), 1 << 20, stage)


def test_a_group_without_nccl_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo")
    assert [resolved(monkeypatch, None, windows) for windows in ("auto", False, True)] == [False, False, True]


def test_windows_are_taken_where_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(monkeypatch, Ranks(), "auto")
    assert not resolved(monkeypatch, Ranks(), "auto", stage=3)
    assert not resolved(monkeypatch, Ranks(), False)
