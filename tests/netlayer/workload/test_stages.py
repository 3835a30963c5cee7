"""What each pipeline stage holds: all of the model once, and no stage much more work than it must."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import JobConfig
from netlayer.workload.flops import half_block_flops, head_flops, step_flops
from netlayer.workload.schedule import Schedule, interleaved, one_forward_one_backward
from netlayer.workload.schedule_simulation import Costs, simulate
from netlayer.workload.stages import balanced, count_parts, half_blocks, num_layers, parts_of, run_of
from netlayer.workload.zero_bubble import defer_weight_grads
from trainer.commands.preview import size
from trainer.model.gpt import GPT, Block


def job_of(pp: int, vpp: int = 1, balance: bool = True, micro_batches: int = 8, **model: object) -> JobConfig:
    batch = {"global_batch_size": micro_batches, "micro_batch_size": 1}
    parallel = {"pp": pp, "vpp": vpp, "dp": 1, "balance": balance}
    return JobConfig.model_validate({"model": {"preset": "7b", **model}, "parallel": parallel, "batch": batch})


def runs_of(job: JobConfig) -> list[range]:
    """By virtual stage."""
    return [run_of(job, stage, chunk) for chunk in range(job.parallel.vpp) for stage in range(job.parallel.pp)]


@given(
    pp=st.integers(1, 6),
    vpp=st.integers(1, 4),
    each=st.integers(1, 3),
    vocab=st.sampled_from([256, 50_304, 131_072, 1_000_000]),
    parallel_block=st.booleans(),
    balance=st.booleans(),
)
def test_every_half_block_is_in_one_run_and_no_run_is_empty(
    pp: int, vpp: int, each: int, vocab: int, parallel_block: bool, balance: bool
) -> None:
    vpp = vpp if pp > 1 else 1
    job = job_of(pp, vpp, balance, pp * 2, layers=pp * vpp * each, vocab_size=vocab, parallel_block=parallel_block)
    runs = runs_of(job)
    assert list(itertools.chain(*runs)) == list(half_blocks(range(job.model.layers)))
    assert all(runs)
    whole = all(run.start % 2 == 0 for run in runs)
    assert whole or (balance and not parallel_block)
    assert balance or len({len(run) for run in runs}) == 1


def step_of(job: JobConfig) -> float:
    """By FLOPs, messages free, weights' gradients postponed."""
    pp, vpp, num = job.parallel.pp, job.parallel.vpp, job.batch.global_batch_size
    forward = [[0.0] * vpp for _ in range(pp)]
    for virtual, run in enumerate(runs_of(job)):
        forward[virtual % pp][virtual // pp] = sum(half_block_flops(job.model, half // 2)[half % 2] for half in run)
    forward[-1][-1] += head_flops(job.model)
    schedule: Schedule = interleaved(pp, num, vpp) if vpp > 1 else one_forward_one_backward(pp, num)
    costs = Costs(forward, [[2 * time for time in times] for times in forward], [0.0] * pp)
    return simulate(defer_weight_grads(schedule), costs).step_s


@pytest.mark.no_cover  # to trace it would take most of its time
@pytest.mark.parametrize(
    ("pp", "vpp", "num", "model", "at_most"),
    [
        (2, 2, 8, {}, 0.982),
        (2, 1, 8, {}, 0.983),
        (4, 2, 16, {}, 0.963),
        (2, 2, 8, {"vocab_size": 131_072}, 0.94),
        (4, 1, 16, {"vocab_size": 131_072}, 0.87),
        (4, 2, 16, {"vocab_size": 131_072}, 0.85),
        (4, 2, 16, {"preset": "1.3b"}, 0.85),
        (4, 2, 16, {"vocab_size": 131_072, "parallel_block": True}, 0.86),
        (8, 6, 48, {"preset": "175b"}, 1.0),  # nothing to gain with two layers a chunk, and nothing lost
    ],
    ids=str,
)
def test_a_step_of_a_balanced_pipeline_is_shorter_on_paper(
    pp: int, vpp: int, num: int, model: dict[str, object], at_most: float
) -> None:
    found = step_of(job_of(pp, vpp, True, num, **model)) / step_of(job_of(pp, vpp, False, num, **model))
    assert at_most - 0.02 < found <= at_most


def test_the_7b_model_in_two_stages_of_two_chunks_is_cut_in_the_midst_of_a_layer() -> None:
    job = job_of(2, 2)
    assert runs_of(job) == [range(16), range(16, 32), range(32, 49), range(49, 64)]
    assert [num_layers(job, stage) for stage in range(2)] == [16.5, 15.5]
    assert "pp 2 (16.5 + 15.5 layers), vpp 2, dp 1" in size(job, "nccl")
    assert "pp 2, vpp 2, dp 1" in size(job_of(2, 2, balance=False), "nccl")
    assert "pp 16 (0.5 to 2.5 layers each), dp 1" in size(job_of(16, vocab_size=131_072, micro_batches=16), "nccl")


def test_parts_of_a_run() -> None:
    assert parts_of(range(3, 9)) == {1: "mlp", 2: "whole", 3: "whole", 4: "attention"}
    assert parts_of(range(2, 3)) == {1: "attention"}
    assert parts_of(range(0)) == {}


@given(first=st.integers(0, 9), length=st.integers(1, 9))
def test_parts_are_counted_as_they_are_told(first: int, length: int) -> None:
    halves = range(first, first + length)
    assert count_parts(halves) == Counter(parts_of(halves).values())


def test_one_run_is_all_of_it() -> None:
    assert balanced((1.0,) * 6, 1.0, 1, 1) == (0, 6)


def test_costs_are_the_flops_of_a_step() -> None:
    model = job_of(1, attention_window=512, window_pattern="wf", activation="swiglu", kv_heads=8).model
    halves = sum(sum(half_block_flops(model, layer)) for layer in range(model.layers))
    assert 3 * model.seq_len * (halves + head_flops(model)) == pytest.approx(step_flops(model, 1).done)


def test_too_few_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 parts of the model for 4 runs: lower pp or vpp, or add layers"):
        balanced((1.0,) * 6, 1.0, 2, 2, unit=2)


def test_parts_of_a_block_hold_the_block_between_them() -> None:
    config = job_of(1, layers=2, hidden=32, heads=4, ffn_hidden=64, vocab_size=300).model

    def parameters(halves: range) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: parameter.shape for name, parameter in GPT(config, halves).named_parameters()}

    first, second = parameters(range(1)), parameters(range(1, 4))
    assert not set(first) & set(second)
    assert first | second == parameters(range(4))
    with pytest.raises(ValueError, match="of a parallel block there is no mlp alone"):
        Block(config.model_copy(update={"parallel_block": True}), 1, None, "mlp")
