"""What a rank's process asks for when it meets the others, on fakes."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch

from netlayer.config import build_config
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
