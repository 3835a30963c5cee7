"""Proves a pipeline schedule right before it runs: complete, in order, free of deadlock, bounded in memory.

A schedule that passes cannot hang for its own reasons on a backend that matches the messages of a channel by order.
Not covered: that computation and tensors are right, which belongs to who runs it.
"""

from __future__ import annotations

from collections import Counter

from netlayer.config.tree import JobConfig
from netlayer.workload.memory import in_flight
from netlayer.workload.messages import DIRECTIONS, NUM_SLOTS
from netlayer.workload.schedule import Kind, Phase, Schedule, micro_batches
from netlayer.workload.schedule_simulation import Costs, simulate
from netlayer.workload.zero_bubble import of_job

MANY_ACTIONS = 10_000
"""Of a pipeline; to prove them right takes a few seconds."""
_BEFORE: dict[Kind, Kind] = {"backward": "forward", "weights": "backward"}
_PHASES: tuple[Phase, ...] = ("warm-up", "steady", "cool-down")


def check_schedule(schedule: Schedule, *, depth: int = 1, max_in_flight: int | None = None) -> None:
    """Raise ValueError, with what is wrong and where, unless all of this holds.

    - There is a stage, a micro-batch and a chunk: of nothing, all else would hold.
    - Every stage runs the forward and the backward of every (micro-batch, chunk) once, the forward first; and where
      weights' gradients come apart, those at most once, after the backward.
    - The phases follow each other: forwards (warm-up), forward and backward in turn (steady), backwards (cool-down).
      So a stage never holds more activations than its warm-up and one more forward make, and those whose weights'
      gradients wait.
    - Every message has one sender and one receiver, and both sides have the messages of a channel in the same order.
    - No stage holds more than `max_in_flight` activations at once, each of one micro-batch and chunk, if that is given.
    - It ends: with `depth` receives posted ahead, and with coupled communication; also where a GPU has but one queue
      for all its streams, with one receive posted ahead, and with none where messages go through the memory of peers.
    """
    for name in ("num_stages", "num_micro_batches", "num_chunks"):
        if getattr(schedule, name) < 1:
            raise ValueError(f"schedule.{name} = {getattr(schedule, name)}: must be at least 1")
    for stage in range(schedule.num_stages):
        _check_complete(schedule, stage)
        _check_phases(schedule, stage)
        peak = schedule.peak_in_flight(stage)
        if max_in_flight is not None and peak > max_in_flight:
            raise ValueError(
                f"stage {stage}: holds {peak} activations at once, and memory is for {max_in_flight}; use a schedule "
                "with a shorter warm-up, fewer chunks, or fewer micro-batches"
            )
    _check_orders(schedule)
    costs = Costs.even(schedule, 1.0, 2.0, 0.1)
    simulate(schedule, costs, depth=depth)
    for coupled in (False, True):
        simulate(schedule, costs, coupled=coupled, one_queue=True)
        simulate(schedule, costs, coupled=coupled, one_queue=True, depth=0, slots=NUM_SLOTS)


def check_job(job: JobConfig) -> Schedule:
    """`check_schedule` of what a job's stages will run in a full batch, within what `memory` counts for them; gives it.

    Raises:
        ValueError: as there.
    """
    schedule = of_job(job, micro_batches(job))
    if job.parallel.pp > 1:
        check_schedule(schedule, max_in_flight=max(in_flight(job, stage) for stage in range(job.parallel.pp)))
    return schedule


def num_actions(job: JobConfig) -> int:
    """Passes of all stages in a full batch: what the time of `check_job` grows with; 0 where there is none to check."""
    parallel = job.parallel
    return 2 * parallel.pp * parallel.vpp * micro_batches(job) if parallel.pp > 1 else 0


def _check_complete(schedule: Schedule, stage: int) -> None:
    actions = schedule.stages[stage]
    expected = {(m, c) for m in range(schedule.num_micro_batches) for c in range(schedule.num_chunks)}
    for kind in DIRECTIONS:
        count = Counter((a.micro_batch, a.chunk) for a in actions if a.kind == kind)
        odd = sorted(expected ^ set(count)) + sorted(pair for pair, times in count.items() if times > 1)
        if odd:
            raise ValueError(
                f"stage {stage}: the {kind} of micro-batch {odd[0][0]}, chunk {odd[0][1]} comes {count[odd[0]]} times; "
                f"each of {schedule.num_micro_batches} x {schedule.num_chunks} comes once"
            )
    begun: dict[Kind, set[tuple[int, int]]] = {"forward": set(), "backward": set(), "weights": set()}
    for action in actions:
        pair = (action.micro_batch, action.chunk)
        before = _BEFORE.get(action.kind)
        if before is not None and pair not in begun[before]:
            raise ValueError(f"stage {stage}: the {action} comes before its {before}; put it behind that")
        if action.kind == "weights" and pair in begun["weights"]:
            raise ValueError(f"stage {stage}: the {action} comes again; compute them once")
        begun[action.kind].add(pair)


def _check_phases(schedule: Schedule, stage: int) -> None:
    actions = schedule.stages[stage]
    parts = {phase: [a.kind for a in actions if a.phase == phase and a.kind != "weights"] for phase in _PHASES}
    steady = parts["steady"]
    in_turn = steady == ["forward", "backward"] * (len(steady) // 2)
    passes = [a.phase for a in actions if a.kind != "weights"]
    in_order = passes == [phase for phase in _PHASES for _ in parts[phase]]
    if not in_order or not in_turn or "backward" in parts["warm-up"] or "forward" in parts["cool-down"]:
        raise ValueError(
            f"stage {stage}: phases must be forwards (warm-up), forward and backward in turn (steady), backwards "
            "(cool-down); label the actions so"
        )


def _check_orders(schedule: Schedule) -> None:
    traffic = [schedule.traffic(stage) for stage in range(schedule.num_stages)]
    for stage, own in enumerate(traffic):
        for direction in DIRECTIONS:
            other = schedule.receiver(stage, direction)
            sent, received = own.outgoing(direction), traffic[other].incoming(direction)
            if sent != received:
                at = next((i for i, pair in enumerate(zip(sent, received, strict=False)) if pair[0] != pair[1]), -1)
                difference = f"{sent[at]} against {received[at]}" if at >= 0 else f"{len(sent)} against {len(received)}"
                raise ValueError(
                    f"stage {stage} sends to stage {other} in another order than that one receives: {difference}; "
                    "messages of a channel are matched by order"
                )
