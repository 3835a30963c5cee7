"""Schedules against what the papers say of them, and the validator against schedules that are broken on purpose."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import JobConfig
from netlayer.workload.schedule import (
    Action,
    Schedule,
    bubble_fraction,
    forward_only,
    interleaved,
    micro_batches,
    of_layout,
    one_forward_one_backward,
)
from netlayer.workload.schedule_check import check_job, check_schedule, num_actions
from netlayer.workload.schedule_simulation import Costs, _Stage, flops_costs, simulate


@st.composite
def schedules(draw: st.DrawFn, kinds: tuple[str, ...] = ("1f1b", "eager", "interleaved")) -> Schedule:
    p = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(kinds))
    if kind == "interleaved":
        return interleaved(p, p * draw(st.integers(1, 4)), draw(st.integers(1, 4)) if p > 1 else 1)
    return one_forward_one_backward(p, draw(st.integers(1, 14)), eager=kind == "eager")


def bubble_of(schedule: Schedule) -> float:
    return bubble_fraction(schedule.num_stages, schedule.num_micro_batches, schedule.num_chunks)


@pytest.mark.no_cover  # to trace it would take most of its time
@given(schedule=schedules(), depth=st.integers(1, 4))
def test_every_schedule_is_proved_right(schedule: Schedule, depth: int) -> None:
    check_schedule(schedule, depth=depth)


@pytest.mark.no_cover  # to trace it would take most of its time
@given(schedule=schedules(), coupled=st.booleans())
def test_the_bubble_is_the_formula_where_messages_are_free(schedule: Schedule, coupled: bool) -> None:
    timeline = simulate(schedule, Costs.even(schedule, 1.0, 2.0), coupled=coupled)
    assert timeline.bubble == pytest.approx(bubble_of(schedule))
    assert timeline.ideal_s == pytest.approx(3.0 * schedule.num_micro_batches * schedule.num_chunks)


@pytest.mark.no_cover  # to trace it would take most of its time
@given(
    schedule=schedules(kinds=("eager", "interleaved")),
    transfer_s=st.floats(0.0, 0.3),
    depth=st.integers(1, 3),
)
def test_only_the_way_through_the_pipeline_exposes_decoupled_transfers(
    schedule: Schedule, transfer_s: float, depth: int
) -> None:
    """The first micro-batch's way down and the last gradient's way up: 2 (p v - 1) transfers, the others are hidden."""
    timeline = simulate(schedule, Costs.even(schedule, 1.0, 2.0, transfer_s), depth=depth)
    if depth == 1:  # nor does a GPU with one queue for all its streams lose anything
        alone = simulate(schedule, Costs.even(schedule, 1.0, 2.0, transfer_s), one_queue=True)
        assert alone.step_s == pytest.approx(timeline.step_s)
    without = timeline.ideal_s * (1 + bubble_of(schedule))
    num_virtual = schedule.num_stages * schedule.num_chunks
    assert timeline.step_s == pytest.approx(without + 2 * (num_virtual - 1) * transfer_s)


@pytest.mark.no_cover  # to trace it would take most of its time
@given(schedule=schedules(), data=st.data())
def test_decoupled_is_never_slower_than_coupled(schedule: Schedule, data: st.DataObject) -> None:
    p, v = schedule.num_stages, schedule.num_chunks
    times = st.floats(0.1, 3.0)
    by_stage = st.lists(st.lists(times, min_size=v, max_size=v), min_size=p, max_size=p)
    links = st.lists(st.floats(0.0, 1.0), min_size=p, max_size=p)
    costs = Costs(data.draw(by_stage), data.draw(by_stage), data.draw(links))
    decoupled, coupled = simulate(schedule, costs), simulate(schedule, costs, coupled=True)
    assert decoupled.step_s <= coupled.step_s + 1e-9
    assert decoupled.step_s >= decoupled.ideal_s - 1e-9
    for timeline in (decoupled, coupled):
        for actions in timeline.computed:  # a stage computes one thing at a time
            assert all(one[2] <= two[1] + 1e-9 for one, two in itertools.pairwise(actions))
        arrived = {
            (schedule.receiver(stage, message.direction), message): end
            for stage, sent in enumerate(timeline.sent)
            for message, _, end in sent
        }
        for stage, actions in enumerate(timeline.computed):
            for action, start, _ in actions:
                message = schedule.incoming(stage, action)
                assert message is None or arrived[stage, message] <= start + 1e-9


def test_a_transfer_costs_plain_1f1b_every_micro_batch_and_eager_only_the_ends() -> None:
    def steps(num_micro_batches: int, eager: bool) -> float:
        schedule = one_forward_one_backward(4, num_micro_batches, eager=eager)
        costs = Costs.even(schedule, 1.0, 2.0, 0.2)
        return simulate(schedule, costs).step_s - simulate(schedule, Costs.even(schedule, 1.0, 2.0)).step_s

    assert steps(40, eager=True) == pytest.approx(steps(8, eager=True))
    # A stage's warm-up of p - 1 - s micro-batches goes round p - s - 1 links and back: 2 (p - 1) / p transfers each.
    assert steps(40, eager=False) - steps(8, eager=False) == pytest.approx(0.2 * 32 * 2 * 3 / 4)


@pytest.mark.no_cover  # to trace it would take most of its time
@given(p=st.integers(1, 6), m=st.integers(1, 12))
def test_1f1b_holds_as_many_activations_as_stages_behind_it(p: int, m: int) -> None:
    plain, eager = one_forward_one_backward(p, m), one_forward_one_backward(p, m, eager=True)
    assert [plain.peak_in_flight(stage) for stage in range(p)] == [min(m, p - stage) for stage in range(p)]
    assert [eager.peak_in_flight(s) for s in range(p)] == [min(m, 2 * (p - 1 - s) + 1) for s in range(p)]


@pytest.mark.no_cover  # to trace it would take most of its time
@given(p=st.integers(2, 5), groups=st.integers(1, 4), v=st.integers(1, 3))
def test_interleaved_memory_and_order_are_those_of_megatron(p: int, groups: int, v: int) -> None:
    schedule = interleaved(p, p * groups, v)
    total = p * groups * v
    for stage, actions in enumerate(schedule.stages):
        warm_up = min(total, 2 * (p - 1 - stage) + (v - 1) * p)
        assert sum(action.phase == "warm-up" for action in actions) == warm_up
        assert schedule.peak_in_flight(stage) == min(total, warm_up + 1)
        forwards = [action for action in actions if action.kind == "forward"]
        backwards = [action for action in actions if action.kind == "backward"]
        for k in range(total):
            chunk, micro_batch = k // p % v, k // (p * v) * p + k % p
            assert (forwards[k].micro_batch, forwards[k].chunk) == (micro_batch, chunk)
            assert (backwards[k].micro_batch, backwards[k].chunk) == (micro_batch, v - 1 - chunk)


def test_the_steady_phase_of_a_small_pipeline_reads_as_drawn() -> None:
    letters = {"forward": "F", "backward": "B"}
    lines = [
        " ".join(f"{letters[a.kind]}{a.micro_batch}" for a in actions)
        for actions in one_forward_one_backward(3, 4).stages
    ]
    assert lines == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_the_last_stage_of_an_interleaved_pipeline_sends_to_the_first() -> None:
    schedule = interleaved(2, 2, 2)
    down = schedule.outgoing(1, Action("forward", 0, 0, "warm-up"))
    assert down is not None
    assert (down.direction, down.micro_batch, down.chunk, schedule.receiver(1, "forward")) == ("forward", 0, 1, 0)
    up = schedule.outgoing(0, Action("backward", 0, 1, "steady"))
    assert up is not None
    assert (up.direction, up.chunk, schedule.receiver(0, "backward")) == ("backward", 0, 1)
    assert schedule.outgoing(1, Action("forward", 0, 1, "steady")) is None
    assert schedule.incoming(0, Action("forward", 0, 0, "warm-up")) is None


def test_two_receives_ahead_deadlock_where_a_gpu_has_one_queue() -> None:
    """Why a channel on CUDA posts one receive ahead: a second one waits at the head of the queue, before a send."""
    for schedule in (one_forward_one_backward(2, 2), interleaved(4, 8, 2)):
        costs = Costs.even(schedule, 1.0, 2.0)
        simulate(schedule, costs, depth=2)
        with pytest.raises(ValueError, match="deadlock: stage 0 at the post of the"):
            simulate(schedule, costs, depth=2, one_queue=True)


def test_a_receive_ahead_through_peer_memory_deadlocks_where_a_gpu_has_one_queue() -> None:
    """Why nothing is posted ahead there: the wait for a message holds up the queue, and with it a send."""
    for schedule in (one_forward_one_backward(2, 2), one_forward_one_backward(8, 16), interleaved(4, 8, 2)):
        costs = Costs.even(schedule, 1.0, 2.0)
        ahead = simulate(schedule, costs, slots=2)
        with pytest.raises(ValueError, match="deadlock: stage 0 at the post of the"):
            simulate(schedule, costs, slots=2, one_queue=True)
        assert simulate(schedule, costs, depth=0, slots=2, one_queue=True).step_s == pytest.approx(ahead.step_s)


def test_a_send_waits_for_a_slot() -> None:
    schedule = forward_only(2, 6, 1)
    costs = Costs([[1.0], [10.0]], [[0.0], [0.0]], [0.0, 0.0])
    for slots, at in ((2, [1, 2, 3, 11, 21, 31]), (4, [1, 2, 3, 4, 5, 11])):
        timeline = simulate(schedule, costs, depth=0, slots=slots)
        assert [arrival for _, _, arrival in timeline.sent[0]] == pytest.approx(at)


def test_a_slow_stage_sets_the_pace() -> None:
    schedule = one_forward_one_backward(3, 10)
    costs = Costs([[1.0], [2.0], [1.0]], [[2.0], [4.0], [2.0]], [0.0, 0.0, 0.0])
    timeline = simulate(schedule, costs)
    assert timeline.ideal_s == pytest.approx(60.0)
    # The slow stage waits for the first forward before it (1) and, after its second forward, for the first gradient
    # (1 + 2 = 3 after its first forward, of which the second one covers 2); its last gradient is used after it.
    assert timeline.step_s == pytest.approx(1.0 + 1.0 + 60.0 + 2.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: one_forward_one_backward(0, 1), "num_stages = 0"),
        (lambda: one_forward_one_backward(1, 0), "num_micro_batches = 0"),
        (lambda: interleaved(2, 2, 0), "num_chunks = 0"),
        (lambda: interleaved(1, 2, 2), "nothing to interleave"),
        (lambda: interleaved(2, 3, 2), "multiple of the 2 stages"),
        (lambda: bubble_fraction(0, 1), "num_stages = 0"),
        (lambda: simulate(interleaved(2, 2, 1), Costs([], [], []), depth=-1), "depth = -1"),
        (lambda: check_schedule(Schedule("mine", 1, 1, ())), r"schedule\.num_stages = 0: must be at least 1"),
        (lambda: check_schedule(Schedule("mine", 1, 0, ((),))), r"schedule\.num_micro_batches = 0: must be"),
        (lambda: check_schedule(Schedule("mine", 0, 1, ((),))), r"schedule\.num_chunks = 0: must be at least 1"),
        (lambda: simulate(interleaved(2, 2, 1), Costs([[1.0]], [[1.0]], [0.0])), r"forward_s = .* shape \[2\]\[1\]"),
        (
            lambda: simulate(interleaved(2, 2, 2), Costs([[1.0, 1.0]] * 2, [[1.0]] * 2, [0.0] * 2)),
            r"costs\.backward_s = .*: must have shape \[2\]\[2\]",
        ),
        (
            lambda: simulate(interleaved(2, 2, 1), Costs([[1.0]] * 2, [[1.0]] * 2, [0.0])),
            r"costs\.transfer_s = \[0\.0\]: must have length 2",
        ),
    ],
)
def test_bad_arguments_are_value_errors(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def _with_stage(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    stages = list(schedule.stages)
    stages[stage] = tuple(actions)
    return replace(schedule, stages=tuple(stages))


def _swapped(schedule: Schedule, stage: int, first: int, second: int) -> Schedule:
    actions = list(schedule.stages[stage])
    actions[first], actions[second] = actions[second], actions[first]
    return _with_stage(schedule, stage, actions)


def deadlock() -> Schedule:
    """Stage 0 wants its first gradient before it sends the second activation; stage 1 the other way round."""
    first = [Action("forward", 0, 0, "steady"), Action("backward", 0, 0, "steady")]
    first += [Action("forward", 1, 0, "steady"), Action("backward", 1, 0, "steady")]
    second = [Action("forward", 0, 0, "warm-up"), Action("forward", 1, 0, "warm-up")]
    second += [Action("backward", 0, 0, "cool-down"), Action("backward", 1, 0, "cool-down")]
    return Schedule("1f1b", 1, 2, (tuple(first), tuple(second)))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: _with_stage(one_forward_one_backward(2, 2), 1, []), "comes 0 times"),
        (lambda: _with_stage(s := one_forward_one_backward(1, 2), 0, [*s.stages[0], s.stages[0][0]]), "comes 2 times"),
        (lambda: _swapped(one_forward_one_backward(2, 2), 1, 0, 1), "comes before its forward"),
        (lambda: _swapped(one_forward_one_backward(3, 4), 0, 0, 1), "in another order"),
        (
            lambda: _with_stage(
                s := one_forward_one_backward(1, 2), 0, [a._replace(phase="warm-up") for a in s.stages[0]]
            ),
            "phases must be",
        ),
        (deadlock, "deadlock: stage 0 at the receive of the gradient of micro-batch 0 .*; stage 1 at the receive of"),
    ],
)
def test_what_is_broken_is_found(broken: Callable[[], Schedule], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_schedule(broken())


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (4, 1), (2, 2)])
def test_what_a_job_runs_is_proved_within_the_memory_that_is_counted_for_it(
    pp: int, vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobConfig.model_validate({"parallel": {"pp": pp, "vpp": vpp, "dp": 1}, "batch": {"micro_batch_size": 1}})
    check_job(job)
    of_stages = of_layout(job.parallel.layout, micro_batches(job)).stages
    assert num_actions(job) == (sum(map(len, of_stages)) if pp > 1 else 0)
    monkeypatch.setattr("netlayer.workload.schedule_check.in_flight", lambda _job, _stage: 1)
    if pp > 1:
        with pytest.raises(ValueError, match="activations at once, and memory is for 1"):
            check_job(job)


def test_a_memory_budget_is_held() -> None:
    schedule = one_forward_one_backward(4, 8)
    check_schedule(schedule, max_in_flight=4)
    with pytest.raises(ValueError, match="stage 0: holds 4 activations at once, and memory is for 3"):
        check_schedule(schedule, max_in_flight=3)


@settings(max_examples=5)
@given(schedule=schedules())
def test_actions_of_a_round_are_all_actions(schedule: Schedule) -> None:
    for stage in range(schedule.num_stages):
        assert list(itertools.chain(*schedule.rounds(stage))) == list(schedule.stages[stage])


@pytest.mark.parametrize(
    ("schedule", "longest"),
    [
        (one_forward_one_backward(3, 6), 1),
        (one_forward_one_backward(3, 6, eager=True), 2),
        (interleaved(3, 6, 2), 2),
    ],
    ids=lambda one: one.name if isinstance(one, Schedule) else "",
)
def test_what_a_round_is_does_not_depend_on_the_name(schedule: Schedule, longest: int) -> None:
    for name in ("1f1b", "mine"):
        renamed = replace(schedule, name=name)
        assert {max(map(len, renamed.rounds(stage))) for stage in range(3)} == {longest}
        check_schedule(renamed)


def test_stages_advance_in_turn_and_are_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each one that went on, all before it were asked once more, and could do nothing."""
    asked, schedule = list[int](), one_forward_one_backward(16, 32)
    advance = _Stage.advance
    monkeypatch.setattr(_Stage, "advance", lambda stage: asked.append(stage.stage) or advance(stage))
    simulate(schedule, Costs.even(schedule, 1.0, 2.0, 0.1))
    assert asked == [*range(16)] * (len(asked) // 16)


def test_schedules_need_no_torch() -> None:
    code = "import sys, netlayer.workload.schedule, netlayer.workload.schedule_check; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("full", 3)])
def test_a_backward_pass_is_twice_a_forward_and_blocks_may_run_again(recompute: str, times: int) -> None:
    tree = {"model": {"layers": 4, "recompute": recompute}, "parallel": {"pp": 2, "dp": 1}}
    costs = flops_costs(JobConfig.model_validate({**tree, "batch": {"global_batch_size": 8, "micro_batch_size": 1}}))
    assert costs.backward_s[0][0] == times * costs.forward_s[0][0]
    assert costs.forward_s[1][0] > 0
