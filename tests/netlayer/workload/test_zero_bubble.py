"""Schedules whose weights' gradients wait: what that gains, what it takes, and what the proof says of broken ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import JobConfig
from netlayer.workload.schedule import Action, Schedule, interleaved, of_layout, one_forward_one_backward
from netlayer.workload.schedule_check import check_schedule
from netlayer.workload.schedule_simulation import Costs, simulate
from netlayer.workload.zero_bubble import _Walk, defer_weight_grads, of_job, why_no_zero_bubble
from tests.netlayer.workload.test_schedule import deadlock, schedules

LETTERS = {"forward": "F", "backward": "B", "weights": "W"}


@pytest.mark.no_cover  # to trace it would take most of its time
@given(schedule=schedules(), depth=st.integers(1, 4))
def test_what_waits_is_computed_behind_its_backward_pass_and_moves_nothing_else(schedule: Schedule, depth: int) -> None:
    found = defer_weight_grads(schedule)
    most = [schedule.peak_in_flight(stage) + stage for stage in range(schedule.num_stages)]
    assert all(found.peak_in_flight(stage) <= number for stage, number in enumerate(most))
    check_schedule(found, depth=depth, max_in_flight=max(most))
    passes = tuple(tuple(action for action in actions if action.kind != "weights") for actions in found.stages)
    assert passes == schedule.stages
    assert [found.traffic(stage) for stage in range(found.num_stages)] == [
        schedule.traffic(stage) for stage in range(schedule.num_stages)
    ]


@pytest.mark.no_cover  # to trace it would take most of its time
@given(schedule=schedules(kinds=("1f1b", "interleaved")))
def test_of_the_bubble_the_forwards_are_left(schedule: Schedule) -> None:
    """Where all three computations take as long, and the stages have enough of them."""
    found = simulate(defer_weight_grads(schedule), Costs.even(schedule, 1.0, 2.0))
    before = simulate(schedule, Costs.even(schedule, 1.0, 2.0))
    assert found.ideal_s == pytest.approx(before.ideal_s)
    assert found.step_s <= before.step_s
    if schedule.num_micro_batches >= schedule.num_stages:
        assert found.step_s == pytest.approx(found.ideal_s + schedule.num_stages - 1)


@pytest.mark.no_cover  # to trace it would take most of its time
@given(schedule=schedules(), share=st.floats(0.3, 0.6), backward_s=st.floats(1.5, 2.5), transfer_s=st.floats(0.0, 0.1))
def test_with_other_times_it_is_not_the_slower_one(
    schedule: Schedule, share: float, backward_s: float, transfer_s: float
) -> None:
    costs = replace(Costs.even(schedule, 1.0, backward_s, transfer_s), weight_gradient_share=share)
    assert simulate(defer_weight_grads(schedule), costs).step_s <= simulate(schedule, costs).step_s + 1e-9


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        (one_forward_one_backward(3, 3), ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 W0 B2 W1 W2", None]),
        (interleaved(2, 2, 2), ["F0 F1 F0' F1' B0' W0' B1' B0 W1' W0 B1", "F0 F1 F0' B0' F1' B1' B0 B1 W0' W1' W0 W1"]),
    ],
)
def test_small_ones_read_as_drawn(schedule: Schedule, lines: list[str | None]) -> None:
    for actions, line in zip(defer_weight_grads(schedule).stages, lines, strict=True):
        drawn = " ".join(f"{LETTERS[a.kind]}{a.micro_batch}{chr(39) * a.chunk}" for a in actions)
        assert line is None or drawn == line


@pytest.mark.no_cover  # to trace it would take most of its time
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (3, 2, 24), (3, 3, 24), (4, 2, 16), (4, 1, 8), (2, 1, 8)])
def test_about_as_few_wait_as_must(p: int, v: int, m: int) -> None:
    schedule = interleaved(p, m, v) if v > 1 else one_forward_one_backward(p, m)
    shortest = _Walk(schedule, m * v).ends
    must = next(num for num in range(m * v + 1) if _Walk(schedule, num).ends == shortest)
    found = defer_weight_grads(schedule)
    assert max(map(len, found.deferred)) <= 2 * must
    for stage, (actions, deferred) in enumerate(zip(found.stages, found.deferred, strict=True)):
        for one, two in itertools.pairwise(actions):  # what would gain nothing is whole
            wanted = found.outgoing(stage, one) is not None
            assert wanted or one.kind != "backward" or two[:3] != ("weights", *one[1:3])
        last = max(index for index, action in enumerate(actions) if action.kind == "backward")
        if stage == 0:  # nobody waits for that: its reduction hides under all of it
            assert last == len(actions) - 1
            assert actions[last][1:3] not in deferred


def test_one_stage_and_one_that_gains_nothing_stay_as_they_are() -> None:
    alone = one_forward_one_backward(1, 4)
    assert defer_weight_grads(alone) is alone


def test_a_job_postpones_where_it_can() -> None:
    def job(**sections: object) -> JobConfig:
        tree = {"parallel": {"pp": 2, "vpp": 2, "dp": 1}, "batch": {"micro_batch_size": 1}}
        return JobConfig.model_validate(tree | sections)

    assert of_job(job(), 8) == defer_weight_grads(interleaved(2, 8, 2))
    assert why_no_zero_bubble(job()) is None
    for sections, why in (
        ({"parallel": {"pp": 1, "dp": 1}}, "pp is 1"),
        ({"overlap": {"pp": False}}, "overlap.pp is false"),
        ({"model": {"recompute": "full"}}, "recompute is full"),
        ({"model": {"recompute_modules": "layernorm"}}, "recompute_modules is layernorm"),
        ({"model": {"compile": True}}, "compile is true"),
        ({"overlap": {"zero_bubble": False}}, None),
    ):
        other = job(**sections)
        assert of_job(other, 8) == of_layout(other.parallel.layout, 8)
        assert why is None or why in (why_no_zero_bubble(other) or "")


def _without(schedule: Schedule, index: int, *put: Action) -> Schedule:
    first = list(schedule.stages[0])
    first[index : index + 1] = put
    return replace(schedule, stages=(tuple(first), *schedule.stages[1:]))


def test_weights_gradients_before_their_pass_or_twice_are_found() -> None:
    schedule = one_forward_one_backward(2, 2)
    backward = next(action for action in schedule.stages[0] if action.kind == "backward" and action.micro_batch == 0)
    weights, at = backward._replace(kind="weights"), schedule.stages[0].index(backward)
    check_schedule(_without(schedule, at, backward, weights))
    with pytest.raises(ValueError, match="weights of micro-batch 0, chunk 0 comes before its backward"):
        check_schedule(_without(schedule, at, weights, backward))
    with pytest.raises(ValueError, match="weights of micro-batch 0, chunk 0 comes again"):
        check_schedule(_without(schedule, at, backward, weights, weights))


def test_stages_that_wait_for_each_other_are_a_deadlock() -> None:
    with pytest.raises(ValueError, match="schedule 1f1b: deadlock"):
        defer_weight_grads(deadlock())
