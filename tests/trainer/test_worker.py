"""What a rank's process asks for when it meets the others, on fakes."""

from __future__ import annotations

import json
import resource
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch

from netlayer.config import build_config
from netlayer.errors import ConfigError
from trainer import worker


def test_meeting_and_collectives_have_timeouts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mock.Mock(return_value={})
    monkeypatch.setattr(worker, "open_world", opened)
    job = build_config({"job": {"store": {"timeout_s": 7.0}, "parallel": {"distributed_timeout_s": 90.5}}}).job
    env = mock.Mock(rank=1, world_size=2)
    place, _ = worker.meet_at(mock.Mock(env=env), job, "redis://127.0.0.1:1/run", "gloo")
    assert (place.rank, place.device) == (1, torch.device("cpu"))
    given = opened.call_args.kwargs
    assert (given["timeout"], given["collective_timeout"]) == (timedelta(seconds=7), timedelta(seconds=90.5))
    assert build_config({"job": {}}).job.parallel.distributed_timeout_s == 600


def test_a_row_that_does_not_fit_is_no_row_and_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "metrics.jsonl").open("wb", buffering=0) as file:
        worker.append_row(file, {"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # the system writes what fits, and refuses the rest
        try:
            with pytest.raises(
                ConfigError, match=r"--out = .*metrics\.jsonl: cannot be written \(File too large\); make"
            ):
                worker.append_row(file, {"step": 2, "loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        worker.append_row(file, {"step": 3})
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == [{"step": 1}, {"step": 3}]
