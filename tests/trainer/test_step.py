"""Steps as graphs: what they compute is what steps by operation do. Capturing itself is CUDA's, and needs it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.trainer import layout_ranks
from tests.trainer.layout_ranks import CPU, Trained
from tests.trainer.test_layouts import LLAMA, PARALLEL, job_of
from trainer.loop import Trainer
from trainer.optim import build_optimizer
from trainer.parallel import ParallelModel
from trainer.step import GraphedSteps, Replay, Steps

NUM_GPUS = torch.cuda.device_count()
EPS = 1e-5  # keeps AdamW from dividing rounding by itself, where a gradient is zero


def capture_later(launched: list[int], launch: Callable[[], None]) -> Replay:
    """In place of CUDA's: what is captured runs with every replay, and not before."""
    launched.append(0)

    def replay() -> None:
        launched[-1] += 1
        launch()

    return replay


def close(got: Trained, expected: Trained, tolerance: float) -> None:
    assert got.losses == pytest.approx(expected.losses, abs=tolerance)
    assert got.norms == pytest.approx(expected.norms, rel=tolerance)
    for name, value in expected.parameters.items():
        assert float((got.parameters[name] - value).norm()) <= tolerance * float(value.norm()), name


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_graph_computes_with_the_data_and_the_learning_rate_of_its_step(name: str) -> None:
    job = stepped_by(name, job_of({}, {"dtype": "float32", "layers": 1}, {}, EPS))
    launched: list[int] = []
    graphed = functools.partial(GraphedSteps, capture=functools.partial(capture_later, launched))
    expected = layout_ranks.take_steps(job, 0, CPU, Steps)
    close(layout_ranks.take_steps(job, 0, CPU, graphed), expected, 0.0)
    assert launched == [3, 3]  # each number of micro-batches has a graph, behind three steps by operation


def test_a_closed_graph_is_gone_at_once() -> None:
    """The end of NCCL's groups waits for graphs that hold calls of theirs."""
    job = job_of({}, {"dtype": "float32", "layers": 1}, {}, EPS)
    model = ParallelModel(job, 3, 0, CPU)
    graphs: list[weakref.ref[Replay]] = []

    def capture(launch: Callable[[], None]) -> Replay:
        replay = functools.partial(launch)
        graphs.append(weakref.ref(replay))
        return replay

    steps = GraphedSteps(model, model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk)), 1.0, capture)
    for step in range(1, 6):
        steps.begin(step)
        steps.run(step, layout_ranks.batches(job, step, 0), 1e-3)
    [graph] = graphs
    assert graph() is not None
    trainer = mock.Mock(steps=steps)
    trainer.model.close.side_effect = lambda: graphs.append(graph) if graph() else None
    Trainer.close(trainer)
    trainer.model.close.assert_called_once_with()
    assert graphs == [graph]  # it went first


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"job\.loop\.cuda_graph = True: cannot be had with job\.parallel\.pp = 2"):
        _with_graph(job_of({"pp": 2}, {}, {}))
    job = job_of({}, {"layers": 1}, {})
    model = ParallelModel(job, 3, 0, CPU)
    with pytest.raises(ValueError, match="give AdamW or LAMB"):
        GraphedSteps(model, model.optimizer(lambda chunk: chunk.optimizer(torch.optim.SGD, lr=0.1)), 0.0)


def stepped_by(name: str, job: JobConfig) -> JobConfig:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"name": name})})


def _with_graph(job: JobConfig) -> JobConfig:
    tree = job.model_dump(exclude_unset=True)
    return JobConfig.model_validate({**tree, "loop": {"cuda_graph": True}})


def test_steps_inside_the_backward_pass_are_those_behind_it_to_the_bit(tmp_path: Path) -> None:
    """With accumulation, tied tables, recomputation, replicas and evaluations between.

    Their norm is summed in another order.
    """
    jobs = [unclipped(job_of({"dp": 2}, model, {})) for model in (LLAMA, {**PARALLEL, "recompute": "full"})]
    jobs.append(unclipped(job_of({"dp_replicate": 2}, {"layers": 1}, {})))
    half = len(jobs)
    jobs += [stepping_in_backward(job) for job in jobs]
    with meeting_place() as place:
        url = place.init_method("in_backward")
        found = launch(layout_ranks.run_steps, 2, args=(jobs, url), log_dir=tmp_path)[0]
    for expected, got in zip(found[:half], found[half:], strict=True):
        assert got.losses == expected.losses
        assert got.norms == pytest.approx(expected.norms, rel=1e-12)
        assert all(torch.equal(got.parameters[name], value) for name, value in expected.parameters.items())


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU with CUDA")
def test_on_gpus_steps_inside_the_backward_pass_train_as_those_behind_it(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [{}, {**PARALLEL, "recompute": "full"}]
    jobs = [unclipped(job_of({"dp": 2}, {"dtype": "bfloat16", "hidden": 128, **model}, {}, EPS)) for model in models]
    jobs += [stepping_in_backward(job) for job in jobs]
    with meeting_place() as place:
        url = place.init_method("in_backward")
        found = launch(layout_ranks.run_steps, 2, args=(jobs, url, "nccl"), log_dir=tmp_path)[0]
    for expected, got in zip(found[: len(models)], found[len(models) :], strict=True):
        close(got, expected, 2e-3)


def test_a_step_inside_the_backward_pass_does_not_stand_behind_it() -> None:
    job = stepping_in_backward(unclipped(job_of({}, {}, {})))
    model = ParallelModel(job, 3, 0, CPU)
    [chunk] = model.chunks
    optimizer = model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk, step_in_backward=True))
    before = [slot.piece.detach().clone() for slot in model.slots]
    steps = Steps(model, optimizer)
    with mock.patch.object(optimizer, "step") as behind:
        steps.begin(1)
        steps.run(1, layout_ranks.batches(job, 1, 0), 1e-3)
    behind.assert_called_once_with()
    assert chunk.step_in_backward
    assert not any(torch.equal(slot.piece, old) for slot, old in zip(model.slots, before, strict=True))


def unclipped(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"max_grad_norm": 0.0})})


def stepping_in_backward(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"overlap": job.overlap.model_copy(update={"step_in_backward": True})})


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler hides what it knows of its own, but not from "error"
@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU with CUDA")
@pytest.mark.parametrize(
    ("model", "name"),
    [({}, "adamw"), ({**PARALLEL, "compile": True}, "adamw"), ({}, "lamb")],
    ids=["serial", "parallel block, compiled", "LAMB"],
)
def test_on_a_gpu_a_graph_trains_as_steps_by_operation_do(model: dict[str, Any], name: str) -> None:
    job = stepped_by(name, job_of({}, {"dtype": "bfloat16", "hidden": 128, **model}, {}, EPS))
    device = torch.device("cuda", 0)
    eager, graphed = (layout_ranks.take_steps(job, 0, device, kind) for kind in (Steps, GraphedSteps))
    close(graphed, eager, 2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU with CUDA")
def test_on_a_gpu_a_graph_is_the_steps_by_operation_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all algorithms are deterministic: whatever parts the two in long runs is rounding, then."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch takes its products for undetermined
    model = {"dtype": "bfloat16", "hidden": 128}
    jobs = [stepped_by(name, job_of({}, model, {})) for name in ("adamw", "lamb")]
    with meeting_place() as place:
        args = jobs, place.init_method("graphs"), "nccl"
        [found] = launch(layout_ranks.run_deterministic_graphs, 1, args=args, log_dir=tmp_path)
    for eager, graphed in found:
        close(graphed, eager, 0.0)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs with CUDA")
def test_on_gpus_a_graph_of_a_layout_trains_as_steps_by_operation_do(tmp_path: Path) -> None:
    ranks = 4 if NUM_GPUS >= 4 else 2
    layouts = [{"tp": 2, "dp": 2}, {"tp": 4}, {"dp": 4}] if ranks == 4 else [{"tp": 2}, {"dp": 2}]
    models: list[dict[str, Any]] = [{}, PARALLEL]
    jobs = [
        job_of(each, {"dtype": "bfloat16", "hidden": 128, **model}, {}, EPS) for each in layouts for model in models
    ]
    with meeting_place() as place:
        url = place.init_method("graphs")
        found = launch(layout_ranks.run_graphs, ranks, args=(jobs, url, "nccl"), log_dir=tmp_path)[0]
    for eager, graphed in found:
        close(graphed, eager, 2e-3)
