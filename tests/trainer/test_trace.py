"""`--trace`: which steps, and what is in the file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.watch.trace import chrome_trace
from netlayer.config.tree import EvaluationConfig
from netlayer.errors import ConfigError
from netlayer.store.meeting import meeting_place
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Trainer, run
from trainer.plan import resolve
from trainer.trace import StepTracer, parse_steps
from trainer.train import train

from .conftest import tiny_job


def slices(file: Path) -> list[dict[str, Any]]:
    trace = json.loads(file.read_text())
    assert trace.keys() == chrome_trace([]).keys()
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert event["ts"] >= 0
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize(("text", "steps"), [("3-5", [3, 4, 5]), ("7", [7]), ("last", [9]), ("9-9", [9])])
def test_steps_are_one_or_a_range_or_the_last(text: str, steps: list[int]) -> None:
    assert list(parse_steps(text, 3, 9)) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2-5", "must lie in the steps of this run, 3-9"),
        ("8-10", "must lie in"),
        ("5-4", "ends before it begins; give 4-5"),
        ("first", "names no steps"),
        ("3-", "names no steps"),
    ],
)
def test_other_steps_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_steps(text, 3, 9)


@pytest.mark.parametrize(("steps", "written_at"), [(range(2, 4), 4), (range(5, 7), 6)])
def test_the_file_is_there_as_soon_as_the_steps_are_over(
    text_folder: Path, corpus: Corpus, tmp_path: Path, steps: range, written_at: int
) -> None:
    job, file = tiny_job(text_folder, optimizer={"steps": 6}), tmp_path / "trace.json"
    there, wrote = list[int](), list[int]()
    tracer = StepTracer(steps, file, job.parallel.layout, 0)
    trainer = Trainer(job, corpus, 0, RankInfo(0, 1, torch.device("cpu")))

    def note(comm: Any) -> bool:
        is_written = tracer.add(comm)
        if is_written:
            wrote.append(comm.step)
        if file.is_file():
            there.append(comm.step)
        return is_written

    run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, on_comm=note)
    tracer.write()
    assert there[:1] == wrote == ([] if written_at == 6 else [written_at])
    found = slices(file)
    assert {event["args"]["step"] for event in found} == set(steps)
    assert {event["name"] for event in found} >= {"forward 0.0", "backward 0.0", "optimizer"}


def test_fewer_steps_than_asked_for_say_which(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job, file = tiny_job(text_folder, optimizer={"steps": 3}), tmp_path / "trace.json"
    tracer = StepTracer(range(2, 10), file, job.parallel.layout, 0)
    trainer = Trainer(job, corpus, 0, RankInfo(0, 1, torch.device("cpu")))
    run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, on_comm=tracer.add)
    tracer.write()
    assert json.loads(file.read_text())["otherData"]["steps"] == "2-3"


def test_a_pipeline_shows_both_ranks_their_computation_and_their_messages(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    job = tiny_job(text_folder, 2, parallel={"dp": 1, "pp": 2}, optimizer={"steps": 5})
    with meeting_place() as place:
        url = place.init_method("traced")
        train(resolve(job, corpus, ranks=2, init_method=url, backend="gloo", out=tmp_path, seed=0, trace=range(3, 5)))
    found = slices(tmp_path / "trace.json")
    assert {event["args"]["step"] for event in found} == {3, 4}
    counts = Counter((event["pid"], event["name"].split()[0]) for event in found)
    micro_batches = 2 * 4  # in two steps of 8 sequences, 2 at a time
    for rank in (0, 1):
        for name in ("forward", "backward", "send", "recv"):
            assert counts[rank, name] == micro_batches, (rank, name)
        assert counts[rank, "optimizer"] == counts[rank, "step"] == 2
        assert counts[rank, "all_reduce"] == 2 * 2  # of the norm, and of the losses
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 (tp=0, pp=0, dp=0)", "rank 1 (tp=0, pp=1, dp=0)"}
    arrows = [event["pid"] for event in events if event["ph"] == "s"]
    assert Counter(arrows) == {0: micro_batches, 1: micro_batches}
