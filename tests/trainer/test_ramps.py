"""Learning rate and batch size as functions of the step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import BatchConfig, OptimizerConfig, ParallelConfig, build_config
from netlayer.errors import ConfigError
from trainer.ramps import batch_size, learning_rate

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def config_of(schedule: str, **keys: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"schedule": schedule, **keys})


@pytest.mark.parametrize(
    ("schedule", "at_60", "at_100", "at_110"),
    [("cosine", 0.6, 0.2 + 0.8 * 0.024472, 0.2), ("linear", 0.6, 0.28, 0.2), ("constant", 1.0, 1.0, 1.0)],
)
def test_learning_rate_rises_then_falls_as_the_schedule_says(
    schedule: str, at_60: float, at_100: float, at_110: float
) -> None:
    config = config_of(schedule, lr=1.0, warmup_steps=10, steps=110, min_lr_ratio=0.2)
    assert [learning_rate(config, step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert [learning_rate(config, step) for step in (60, 100, 110)] == pytest.approx([at_60, at_100, at_110], rel=1e-5)


def test_wsd_is_stable_and_falls_in_its_last_share() -> None:
    config = config_of("wsd", lr=2.0, warmup_steps=10, steps=100, min_lr_ratio=0.5, decay_share=0.2)
    assert {learning_rate(config, step) for step in range(10, 81)} == {2.0}
    assert [learning_rate(config, step) for step in (85, 90, 100)] == pytest.approx([1.75, 1.5, 1.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup_steps", "expected"), [(0, 0.1), (1, 1.0), (20, 0.05)])
def test_a_job_of_one_step_has_a_learning_rate(schedule: str, warmup_steps: int, expected: float) -> None:
    config = config_of(schedule, lr=1.0, warmup_steps=warmup_steps, steps=1, min_lr_ratio=0.1)
    no_fall = schedule == "constant" and warmup_steps == 0
    assert learning_rate(config, 1) == pytest.approx(1.0 if no_fall else expected)


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 500),
    warmup_steps=st.integers(0, 600),
    min_lr_ratio=st.floats(0, 0.99),
    decay_share=st.floats(0.001, 0.99),
)
def test_learning_rate_never_leaves_its_bounds_nor_rises_after_the_warm_up(
    schedule: str, steps: int, warmup_steps: int, min_lr_ratio: float, decay_share: float
) -> None:
    keys = {"steps": steps, "warmup_steps": warmup_steps, "min_lr_ratio": min_lr_ratio, "decay_share": decay_share}
    config = config_of(schedule, lr=1.0, **keys)
    rates = [learning_rate(config, step) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 1 for rate in rates)
    rising, falling = rates[:warmup_steps], rates[max(0, warmup_steps - 1) :]
    assert rising == sorted(rising)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(falling))
    if schedule != "constant" and warmup_steps < steps:
        assert rates[-1] == pytest.approx(min_lr_ratio, abs=1e-12)


@st.composite
def ramps(draw: st.DrawFn) -> tuple[BatchConfig, int]:
    """A batch that a job would take, and the number of its data-parallel ranks."""
    micro_batch_size, dp = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    unit = micro_batch_size * dp
    total = draw(st.integers(1, 40))
    start = draw(st.integers(0, total))
    increment = draw(st.integers(1, 50)) if start else 0
    sizes = {"global_batch_size": total * unit, "start_size": start * unit, "increment": increment * unit}
    return BatchConfig(micro_batch_size=micro_batch_size, increment_steps=draw(st.integers(1, 30)), **sizes), dp


@given(ramp=ramps(), steps=st.integers(0, 300))
def test_a_ramp_grows_in_whole_micro_batches(ramp: tuple[BatchConfig, int], steps: int) -> None:
    batch, dp = ramp
    sizes = [batch_size(batch, step) for step in range(1, steps + 1)]
    assert sizes == sorted(sizes)
    assert all(size % (batch.micro_batch_size * dp) == 0 for size in sizes)
    assert all((batch.start_size or batch.global_batch_size) <= size <= batch.global_batch_size for size in sizes)
    assert sizes[: batch.increment_steps] == [batch.start_size or batch.global_batch_size] * min(
        steps, batch.increment_steps
    )


@given(ramp=ramps())
def test_a_ramp_ends_at_the_global_size(ramp: tuple[BatchConfig, int]) -> None:
    batch, dp = ramp
    last = batch.global_batch_size // (batch.micro_batch_size * dp) * batch.increment_steps + 1
    assert batch_size(batch, last) == batch.global_batch_size


def test_a_ramp_holds_each_size_for_its_steps_and_stops_at_the_global_size() -> None:
    batch = BatchConfig(global_batch_size=20, micro_batch_size=2, start_size=4, increment=6, increment_steps=2)
    assert [batch_size(batch, step) for step in range(1, 9)] == [4, 4, 10, 10, 16, 16, 20, 20]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"start_size": 32, "increment": 16},
            r"job\.batch\.start_size = 32: is above job\.batch\.global_batch_size = 16",
        ),
        ({"start_size": 8}, r"job\.batch\.increment = 0: takes no batch from job\.batch\.start_size = 8 to 16"),
        ({"increment": 8}, r"job\.batch\.increment = 8: has no effect"),
        ({"start_size": 4, "increment": 8}, r"job\.batch\.start_size = 4: must be a multiple of .* = 4 x 2"),
        ({"start_size": 8, "increment": 4}, r"job\.batch\.increment = 4: must be a multiple of .* = 4 x 2"),
        ({"global_batch_size": 12}, r"job\.batch\.global_batch_size = 12: must be a multiple of .* = 4 x 2"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(batch: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(
            {"job": {"batch": {"global_batch_size": 16, "micro_batch_size": 4, **batch}, "parallel": {"dp": 2}}}
        )


def test_a_ramp_of_interleaved_stages_grows_by_whole_rounds() -> None:
    parallel = ParallelConfig(dp=1, pp=2, vpp=2).model_dump()
    batch = {"global_batch_size": 16, "micro_batch_size": 2, "start_size": 4, "increment": 2}
    tree = {"cluster": {"gpus_per_server": 2}, "job": {"parallel": parallel, "batch": batch}}
    with pytest.raises(ConfigError, match=r"job\.batch\.increment = 2: must be .* = 2 x 1 x 2 interleaved stages"):
        build_config(tree)
    batch["increment"] = 4
    assert build_config(tree).job.batch.increment == 4
