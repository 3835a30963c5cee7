"""The trainer's events: one stream a rank, whole, with what was launched and nothing else; rows stay as they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from collectives.watch.monitor import Monitor
from netlayer.config.tree import EvaluationConfig
from netlayer.errors import CheckFailed
from netlayer.launch.rank import RankContext, RankEnv
from netlayer.observe.events import Event, Mark, Origin, Segment, read_events, split_collectives
from netlayer.store.meeting import meeting_place
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Trainer, run
from trainer.observe import monitored
from trainer.plan import Plan, resolve
from trainer.train import TrainResult, train

from .conftest import tiny_job

ENV = RankEnv()
STEPS = 3
ALONE = RankInfo(0, 1, torch.device("cpu"))


def trained(text_folder: Path, corpus: Corpus, out: Path, **sections: dict[str, object]) -> TrainResult:
    """Two pipeline stages."""
    job = tiny_job(text_folder, 2, parallel={"dp": 1, "pp": 2}, optimizer={"steps": STEPS}, **sections)
    out.mkdir(exist_ok=True)
    with meeting_place() as place:
        url = place.init_method("observed")
        return train(resolve(job, corpus, ranks=2, init_method=url, backend="gloo", out=out, seed=0))


def test_every_rank_writes_what_it_launched(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETLAYER_NODE", "node-7")
    with_events = trained(text_folder, corpus, tmp_path / "on")
    reader = read_events(tmp_path / "on")
    events = list(reader)
    assert not reader.notes
    segments = [event for event in events if isinstance(event, Segment)]
    counts = Counter((each.origin.rank, each.step, each.segment, each.name) for each in segments)
    micro_batches = 4  # 8 sequences, 2 at a time
    for rank in (0, 1):
        for step in range(1, STEPS + 1):
            of = {
                (segment, name): number
                for (of_rank, of_step, segment, name), number in counts.items()
                if of_rank == rank and of_step == step and segment not in ("wait", "gc")
            }
            assert of == {
                ("step", "step"): 1,
                ("data", "batches of the step"): 1,
                ("forward", "forward"): micro_batches,
                ("backward", "backward"): micro_batches,
                ("optimizer", "optimizer"): 1,
                # Activations go one way, gradients the other; norm and losses are summed.
                ("collective", "send"): micro_batches,
                ("collective", "recv"): micro_batches,
                ("collective", "all_reduce"): 2,
            } | ({("weights", "weights"): micro_batches} if rank == 1 else {})  # of a zero-bubble schedule
        assert counts[rank, None, "evaluation", "evaluates"] == 2
    marks = [(event.origin.rank, event.name) for event in events if isinstance(event, Mark)]
    assert sorted(marks) == [(rank, name) for rank in (0, 1) for name in ("run_end", "run_start")]
    assert {(event.origin.rank, event.origin.tp, event.origin.pp, event.origin.dp) for event in events} == {
        (0, 0, 0, 0),
        (1, 0, 1, 0),
    }
    split = split_collectives(reader.table())
    assert set(split["num_seen"].to_pylist()) == {2}, "every collective and message is there on both of its ranks"
    assert set(split["error_ns"].to_pylist()) == {0}, "one host has one clock"
    start = next(event for event in events if isinstance(event, Mark) and event.name == "run_start")
    assert start.attributes is not None
    assert start.attributes["layout"] == {"tp": 1, "pp": 2, "dp": 1, "vpp": 1, "cp": 1, "dp_replicate": 1}
    assert start.attributes["node"] == "node-7"

    without = trained(text_folder, corpus, tmp_path / "off", observe={"enabled": False})
    assert not (tmp_path / "off" / "events").exists()
    assert [row["loss"] for row in with_events.steps] == [row["loss"] for row in without.steps]
    assert [row.keys() for row in with_events.steps] == [row.keys() for row in without.steps]


class Kept:
    """A transport that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, events: Sequence[Event]) -> int:
        self.events += events
        return 0

    def close(self) -> None:
        pass


def test_a_loss_that_is_no_number_is_a_mark(text_folder: Path, corpus: Corpus) -> None:
    kept = Kept()
    monitor = Monitor(kept, Origin(rank=0), interval_s=600)
    job = tiny_job(text_folder, optimizer={"steps": 4})
    trainer = Trainer(job, corpus, 0, ALONE, monitor=monitor)

    def spoil(row: dict[str, object]) -> None:
        if row["step"] == 1:
            for chunk in trainer.model.chunks:
                chunk.register_forward_hook(lambda _module, _args, loss: loss * math.nan)

    with pytest.raises(CheckFailed, match="the loss is nan"):
        run(trainer, EvaluationConfig(), spoil, lambda _row: None)
    monitor.close()
    [mark] = [event for event in kept.events if isinstance(event, Mark)]
    assert mark.name == "nan"
    assert "the loss is nan on rank 0" in (mark.text or "")
    assert mark.step in (2, 3)


def plan_of(text_folder: Path, corpus: Corpus, out: Path) -> Plan:
    return resolve(tiny_job(text_folder), corpus, ranks=1, init_method="", backend="gloo", out=out, seed=0)


def test_a_folder_that_cannot_be_written_costs_the_events_alone(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "events").touch()  # a file
    with monitored(RankContext(ENV), plan_of(text_folder, corpus, tmp_path), ALONE, 0) as monitor:
        assert monitor is None


def test_starts_are_counted_and_a_failure_is_said(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    plan = plan_of(text_folder, corpus, tmp_path)
    with pytest.raises(KeyError), monitored(RankContext(ENV), plan, ALONE, 0):
        raise KeyError("<b>x</b>")
    with monitored(RankContext(ENV), plan, ALONE, 7) as monitor:
        assert monitor is not None
    marks = [event for event in read_events(tmp_path) if isinstance(event, Mark)]
    assert [(mark.origin.attempt, mark.name, mark.step) for mark in marks] == [
        (0, "run_start", 0),
        (0, "failure", None),
        (1, "run_start", 7),
        (1, "restart", 7),
        (1, "run_end", None),
    ]
    assert "<b>x</b>" in (marks[1].text or "")
