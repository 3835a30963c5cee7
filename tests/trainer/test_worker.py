"""What a rank's process asks for when it meets the others, on fakes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from netlayer.config.tree import build_config
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing, RanksMissing
from netlayer.launch.rank import RankContext, RankEnv
from netlayer.store.arrivals import await_all
from trainer import worker
from trainer.checkpoint.meta import Meta
from trainer.data.prepare import Corpus
from trainer.plan import Plan

from .conftest import tiny_job


def test_meeting_and_collectives_have_timeouts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mock.Mock(return_value={})
    monkeypatch.setattr(worker, "open_world", opened)
    job = build_config({"job": {"store": {"timeout_s": 7.0}, "parallel": {"distributed_timeout_s": 90.5}}}).job
    waited = {}
    for launcher in ("netlayer", "torchrun"):
        context = RankContext(RankEnv(rank=1, world_size=2, launcher=launcher))
        place, _ = worker.init_process_groups(context, job, "redis://127.0.0.1:1/run", "gloo")
        assert (place.rank, place.device) == (1, torch.device("cpu"))
        waited[launcher] = opened.call_args.kwargs["timeout"]
        assert opened.call_args.kwargs["collective_timeout"] == timedelta(seconds=90.5)
    # Ranks of other launchers prepare the text each for itself: a host that has none of it cached takes longer.
    assert waited == {"netlayer": timedelta(seconds=7), "torchrun": timedelta(seconds=90.5)}
    assert build_config({"job": {}}).job.parallel.distributed_timeout_s == 600


def test_the_first_verdict_of_the_watch_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, monitor, fail = mock.Mock(), mock.Mock(), mock.Mock()
    monkeypatch.setattr(worker, "Watch", watch)
    context = RankContext(RankEnv(rank=1, world_size=2), fail=fail)
    error = CheckFailed("a peer is gone")
    with worker._watched(context, build_config({"job": {}}).job, monitor):
        for _ in range(2):  # the watch looks on while the main thread leaves
            watch.call_args.kwargs["on_failure"](error)
    monitor.mark.assert_called_once_with("failure", "a peer is gone")
    fail.assert_called_once_with(error)


def test_who_has_waited_in_vain_hears_which_key_lets_it_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RanksMissing("waiting for rank 0: 1 of 2 have come", (0,))
    monkeypatch.setattr(worker, "open_world", mock.Mock(side_effect=missing))
    context = RankContext(RankEnv(rank=1, world_size=2, launcher="torchrun"))
    with pytest.raises(RanksMissing, match=r"have come; .* job\.store\.timeout_s above 600$") as caught:
        worker.init_process_groups(context, build_config({"job": {}}).job, "env://", "gloo")
    assert caught.value.missing == (0,)


def asked(monkeypatch: pytest.MonkeyPatch, work: Plan) -> Mapping[str, str]:
    """What a rank says must be the same on all ranks, in the order in which differences are looked for."""
    opened = mock.Mock(return_value={})
    monkeypatch.setattr(worker, "open_world", opened)
    worker.meet(RankContext(RankEnv(world_size=2, launcher="torchrun")), work)
    same: Mapping[str, str] = opened.call_args.kwargs["same"]
    return same


@pytest.fixture
def work(text_folder: Path, corpus: Corpus, tmp_path: Path) -> Plan:
    return Plan(tiny_job(text_folder, ranks=2), corpus, "env://", "gloo", tmp_path, 0)


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        ({"seed": 1}, "--seed"),
        ({"trace": range(3, 5)}, "--trace"),
        ({"is_shared": False}, "--out"),
        ({"sections": {"optimizer": {"lr": 0.5}}}, "job.optimizer.lr"),
        ({"sections": {"data": {"max_mib": 1.5}}}, "job.data.max_mib"),
        ({"sections": {"parallel": {"zero": 2}}}, "job.parallel.zero"),
    ],
)
def test_ranks_that_were_asked_for_other_runs_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, work: Plan, text_folder: Path, other: dict[str, Any], differing: str
) -> None:
    sections = other.pop("sections", {})
    theirs = replace(work, **other, job=tiny_job(text_folder, 2, **sections))
    first, second = (asked(monkeypatch, each) for each in (work, theirs))
    assert [name for name in {**first, **second} if first.get(name) != second.get(name)] == [differing]


def test_what_rightly_differs_between_hosts_may(monkeypatch: pytest.MonkeyPatch, work: Plan, tmp_path: Path) -> None:
    theirs = tiny_job(
        tmp_path, 2,
        store={"timeout_s": 5.0}, launch={"grace_s": 1.0}, metrics={"tensorboard": True}, nccl={"hca": "mlx5_1"},
    )  # fmt: skip
    other_paths = replace(work, job=theirs, out=tmp_path / "elsewhere")
    assert asked(monkeypatch, work) == asked(monkeypatch, other_paths)


def test_other_text_and_another_checkpoint_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, work: Plan, tmp_path: Path
) -> None:
    (tmp_path / "facts.json").write_text('{"text": "another", "digests": {"tokenizer.json": "another"}}')
    meta = Meta(tmp_path, 4, 0, 1, 1, {"model": {}}, {}, {"rank.pt": "00000001"})
    found = {Path("a"): meta, Path("b"): replace(meta, path=Path("b")), Path("c"): replace(meta, digests={})}
    monkeypatch.setattr(worker, "find", lambda path, **_has_files: found[path])
    elsewhere = replace(work, corpus=replace(work.corpus, folder=tmp_path))
    plain, other = (asked(monkeypatch, each) for each in (work, elsewhere))
    assert [name for name in plain if plain[name] != other[name]] == ["text"]
    assert plain["checkpoint"] == "none"
    a, b, c = (asked(monkeypatch, replace(work, resume=resume))["checkpoint"] for resume in found)
    assert a == b != c
    assert all(said.startswith("step 4 ") for said in (a, b, c))


def test_ranks_of_different_runs_hear_what_differs_and_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, work: Plan, text_folder: Path
) -> None:
    slower = replace(work, job=tiny_job(text_folder, 2, optimizer={"lr": 0.5}))
    told, store = [asked(monkeypatch, each) for each in (work, slower)], dist.HashStore()  # type: ignore[attr-defined]

    def one(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            await_all(store, rank, 2, same=told[rank], timeout=timedelta(seconds=20), patience_s=0.1)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        [said] = set(pool.map(one, range(2)))
    assert re.match(r"job\.optimizer\.lr = .*: on rank \d, but .* on rank \d; start every rank", said)
    assert "0.5" in said


@pytest.mark.parametrize(("visible", "on_node", "index"), [(1, "2", 0), (1, None, 0), (2, "2", 1), (1, "1", None)])
def test_a_task_of_srun_computes_on_the_one_gpu_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, visible: int, on_node: str | None, index: int | None
) -> None:
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if on_node:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", on_node)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(worker, "open_world", mock.Mock(return_value={}))
    job, context = build_config({"job": {}}).job, RankContext(RankEnv(1, 2, 1, 2, "slurm"))
    if index is None:
        with pytest.raises(HardwareMissing, match=r"2 ranks want a GPU each, 1 found.*--gpu-bind=none"):
            worker.init_process_groups(context, job, "env://", "nccl")
    else:
        assert worker.init_process_groups(context, job, "env://", "nccl")[0].device == torch.device("cuda", index)


def work_in(folder: Path) -> mock.Mock:
    return mock.Mock(job=build_config({"job": {}}).job, out=folder, continues=False)


def test_a_run_s_own_error_is_what_its_sinks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[BaseException]()

    @contextlib.contextmanager
    def sinks(*_: object, **__: object) -> Iterator[list[object]]:
        try:
            yield []
        except BaseException as exc:
            told.append(exc)
            raise

    monkeypatch.setattr(worker, "open_sinks", sinks)
    cause = CheckFailed("step 3: the loss is nan")
    with pytest.raises(CheckFailed) as caught, worker._Rows(mock.Mock(env=mock.Mock(rank=0)), work_in(tmp_path)):
        raise cause
    assert caught.value is cause
    assert told == [cause]


def test_the_first_rank_says_that_its_corpus_is_in_use(tmp_path: Path) -> None:
    for rank in (0, 1):
        work = work_in(tmp_path)
        with worker._Rows(mock.Mock(env=mock.Mock(rank=rank)), work) as rows:
            rows.add_evaluation({"step": 0, "validation_loss": 1.0})
            rows.add_step({"step": 1, "checkpoint_s": 0.0})  # so soon after, it need not
        assert work.corpus.note_in_use.call_count == (rank == 0)


@pytest.mark.parametrize(
    ("variables", "setting"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128,expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"},
            "garbage_collection_threshold:0.8,expandable_segments:True",
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, ""),
    ],
)
def test_segments_expand_unless_the_environment_says_how_memory_is_held(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], setting: str
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with mock.patch("torch._C._accelerator_setAllocatorSettings") as settings:
        worker._use_expandable_segments()
    assert settings.mock_calls == ([mock.call(setting)] if setting else [])
