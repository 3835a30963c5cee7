"""Pipeline schedules with decoupled and with coupled messages, on a stack of MLP layers (technique `pp` of `overlap`).

Every row is one schedule with one of the two systems; both take turns on the same data, after their gradients were
compared with a single process that runs the whole model. Not covered: data parallelism, the optimiser, several hosts.

Definitions of the figures, with p stages, v chunks per stage, m micro-batches:
- `compute_ms`: the slowest stage's step with its messages removed and all else done: the ideal.
- `bubble`: step over compute, minus 1; `bubble_formula`: (p - 1) / (m v), for equal stages and free messages.
- `transfer_ms`: one message alone on its link, all links busy, as measured here; `transfer_bw_gbs`: its rate.
- `expected_ms`: the schedule simulated (`netlayer.workload.schedule_simulation`) with the measured times of every
  action and message: the cost of the schedule itself, transfers included. `step_over_expected`: the loss beyond it.
- `formula_ms`: compute (1 + formula) + 2 (p v - 1) transfers, if only the first pass down and the last one up the
  pipeline are exposed. `step_over_formula`: step over that.
- `sends_hidden_*`: share of the sends' time that overlaps with computation of their stage, by phase; None: no sends.
- `exposed_comm`: mean over stages of the share of the step in which computation waits for a message, bubble included.
  `exposed_beyond_bubble`: step minus compute minus the formula's bubble, as a share of the step.
- `contention`: a stage's own step minus its compute minus its waits, mean over stages, as a share of the step.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from collectives.watch.trace import RankTrace, hidden_share, write_trace
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.percentile import percentile
from netlayer.store.meeting import meeting_place
from netlayer.workload.schedule import Phase, Schedule, bubble_fraction, interleaved, one_forward_one_backward
from netlayer.workload.schedule_simulation import Costs, simulate

Row = dict[str, Any]
Backend = Literal["gloo", "nccl"]
System = Literal["decoupled", "coupled"]
SYSTEMS: tuple[System, ...] = ("decoupled", "coupled")
PHASES: tuple[Phase, ...] = ("warm-up", "steady", "cool-down")


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Args:
        tokens, hidden: shape of a message: one micro-batch of activations.
        layers: layers per stage, each x + W (4 hidden x hidden) gelu(W x); must be a multiple of the number of chunks.
        micro_batches: m; interleaved schedules need a multiple of the stages.
        chunks: one interleaved schedule for each number above 1; 1 is 1F1B, plain and eager.
        dtype: of everything.
        steps: timed steps of each system, over all rounds.
        warmup: untimed steps before them, in each round.
        rounds: turns of each system.
        max_ctas: limits of thread blocks per communicator (`PipelineLinks`); None: NCCL's choice, 0: through peer
            memory if possible. All schedules run with the first limit, the last schedule with the others too.
        tolerance: largest relative error of gradients against a single process.
        seed: seed of weights and data.
    """

    tokens: int = 4096
    hidden: int = 4096
    layers: int = 2
    micro_batches: int = 16
    chunks: tuple[int, ...] = (1, 2)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    steps: int = 4
    warmup: int = 1
    rounds: int = 2
    max_ctas: tuple[int | None, ...] = (0, 4, None)
    tolerance: float = 0.02
    seed: int = 0


TINY = Settings(tokens=64, hidden=32, layers=2, micro_batches=8, dtype="float32", max_ctas=(None,), tolerance=1e-4)
"""For CPUs: shows that it works, not how fast it is."""


@dataclass(frozen=True)
class Timed:
    """One system on one schedule, as one rank saw it; seconds.

    Args:
        steps: (start, end) of each timed step, on the clock that all ranks share.
        exposed_s: mean wait of a step.
        trace: one more step, recorded.
        memory_bytes: most that was allocated.
    """

    steps: list[tuple[float, float]]
    exposed_s: float
    trace: RankTrace
    memory_bytes: int


@dataclass(frozen=True)
class Measured:
    """One schedule, as one rank saw it.

    Args:
        schedule: what ran.
        max_ctas: of each communicator.
        by_peers: whether messages went through the memory of the peers.
        systems: by name.
        compute_s: steps with messages removed.
        forward_s, backward_s: one action of each chunk, there.
        transfer_s: one message alone.
        message_bytes: its size.
    """

    schedule: Schedule
    max_ctas: int | None
    by_peers: bool
    systems: Mapping[System, Timed]
    compute_s: list[float]
    forward_s: list[float]
    backward_s: list[float]
    transfer_s: float
    message_bytes: int


@dataclass(frozen=True)
class PipelineRow:
    """One system on one schedule: the figures that the module defines, times in ms, sends hidden by phase.

    Args:
        max_ctas: NCCL's limit for the communicators; None: its own choice.
        path: of messages: peer memory, or the group's send and recv.
        memory_gib: peak of the stage with the most.
        trace: its path.
    """

    schedule: str
    system: System
    stages: int
    chunks: int
    micro_batches: int
    layers: int
    tokens: int
    hidden: int
    dtype: str
    message_bytes: int
    max_ctas: int | None
    path: str
    step_ms: float
    step_p99_ms: float
    steps_ms: Sequence[float]
    compute_ms: float
    transfer_ms: float
    transfer_bw_gbs: float
    bubble: float
    bubble_formula: float
    formula_ms: float
    step_over_formula: float
    expected_ms: float
    step_over_expected: float
    speedup_over_coupled: float
    exposed_comm: float
    exposed_beyond_bubble: float
    contention: float
    sends_hidden: Mapping[Phase, float | None]
    memory_gib: float
    trace: str | None = None

    def to_row(self) -> Row:
        """Return the columns of a record: a column a phase, a trace only where there is one."""
        columns = dataclasses.asdict(self)
        hidden, memory_gib, trace = (columns.pop(name) for name in ("sends_hidden", "memory_gib", "trace"))
        columns |= {f"sends_hidden_{phase.replace('-', '_')}": share for phase, share in hidden.items()}
        return {**columns, "memory_gib": memory_gib, **({} if trace is None else {"trace": trace})}


def measure(
    *,
    ranks: int,
    backend: Backend,
    log_dir: Path,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
    settings: Settings | None = None,
) -> list[Row]:
    """Start `ranks` stages on this machine and measure; one row a schedule and system.

    Args:
        ranks: stages of the one pipeline.
        backend: nccl (a GPU each) or gloo.
        log_dir: for the ranks' logs, and a trace `pipeline_SCHEDULE_SYSTEM.json` of each row for ui.perfetto.dev.
        seed: of weights and data.
        on_progress: called with progress as text.
        settings: None: the defaults on nccl, `TINY` on gloo, with the next number of micro-batches that fits the ranks.

    Raises:
        CheckFailed: gradients differ from those of one process, or between the systems.
        HardwareMissing: there are fewer GPUs than ranks.
        ValueError: settings that fit no schedule.
    """
    chosen = settings or default_settings(backend, ranks)
    chosen = dataclasses.replace(chosen, seed=seed)
    make_runs(chosen, ranks)  # before any rank is started
    with meeting_place() as place:
        stages = launch(
            run_rank,
            ranks,
            args=(chosen, place.init_method("pipeline"), backend),
            log_dir=log_dir,
            on_message=lambda _rank, message: on_progress(str(message)) if on_progress else None,
        )
    rows = []
    for by_stage in zip(*stages, strict=True):
        for system in SYSTEMS:
            path = log_dir / f"pipeline_{_title(by_stage[0])}_{system}.json"
            write_trace(path, [one.systems[system].trace for one in by_stage], {"clocks": "same host: one clock"})
            rows.append(dataclasses.replace(make_row(chosen, system, by_stage), trace=str(path)).to_row())
    return rows


def run_rank(context: RankContext, settings: Settings, url: str, backend: Backend) -> list[Measured]:
    """Measure one stage; torch is imported here, so that the launching process need not."""
    from bench.overlap.pipeline_ranks import measure_stage

    return measure_stage(context, settings, url, backend)


def default_settings(backend: Backend, ranks: int) -> Settings:
    """Return the defaults, with micro-batches rounded up to a multiple of the stages."""
    settings = Settings() if backend == "nccl" else TINY
    return dataclasses.replace(settings, micro_batches=-(-settings.micro_batches // ranks) * ranks)


def make_runs(settings: Settings, num_stages: int) -> list[tuple[Schedule, int | None]]:
    """List the runs in order: the schedule, and its communicators' limit; raises ValueError as `make_schedules`."""
    schedules = make_schedules(settings, num_stages)
    first, *others = settings.max_ctas
    return [(schedule, first) for schedule in schedules] + [(schedules[-1], limit) for limit in others]


def make_schedules(settings: Settings, num_stages: int) -> list[Schedule]:
    """List the schedules in the order in which they run.

    Raises:
        ValueError: the micro-batches or the layers cannot be divided by the stages or chunks.
    """
    schedules: list[Schedule] = []
    for num_chunks in settings.chunks:
        if settings.layers % num_chunks:
            raise ValueError(f"layers = {settings.layers}: must be a multiple of chunks = {num_chunks}; change either")
        if num_chunks == 1:
            schedules += [
                one_forward_one_backward(num_stages, settings.micro_batches, eager=eager) for eager in (False, True)
            ]
        else:
            schedules.append(interleaved(num_stages, settings.micro_batches, num_chunks))
    return schedules


def make_row(settings: Settings, system: System, stages: Sequence[Measured]) -> PipelineRow:
    """The figures of one system on one schedule; `stages` in order."""
    schedule = stages[0].schedule
    p, v, m = schedule.num_stages, schedule.num_chunks, schedule.num_micro_batches
    step_s = step_times([stage.systems[system].steps for stage in stages])
    step = statistics.median(step_s)
    compute = max(statistics.median(stage.compute_s) for stage in stages)
    transfer = max(stage.transfer_s for stage in stages)
    costs = Costs([one.forward_s for one in stages], [one.backward_s for one in stages], [transfer] * p)
    expected = simulate(schedule, costs, coupled=system == "coupled").step_s
    formula = bubble_fraction(p, m, v)
    by_formula = compute * (1 + formula) + 2 * (p * v - 1) * transfer
    exposed = [stage.systems[system].exposed_s for stage in stages]
    # Until the stage's own end: what it idles then, while others go on, is bubble.
    own = [statistics.median(end - start for start, end in stage.systems[system].steps) for stage in stages]
    contention = [
        whole - statistics.median(stage.compute_s) - wait
        for whole, stage, wait in zip(own, stages, exposed, strict=True)
    ]
    return PipelineRow(
        schedule=schedule.name,
        system=system,
        stages=p,
        chunks=v,
        micro_batches=m,
        layers=settings.layers,
        tokens=settings.tokens,
        hidden=settings.hidden,
        dtype=settings.dtype,
        message_bytes=stages[0].message_bytes,
        max_ctas=stages[0].max_ctas,
        path="peer" if stages[0].by_peers else "group",
        step_ms=step * 1e3,
        step_p99_ms=percentile(step_s, 99) * 1e3,
        steps_ms=[seconds * 1e3 for seconds in step_s],
        compute_ms=compute * 1e3,
        transfer_ms=transfer * 1e3,
        transfer_bw_gbs=stages[0].message_bytes / transfer / 1e9,
        bubble=step / compute - 1,
        bubble_formula=formula,
        formula_ms=by_formula * 1e3,
        step_over_formula=step / by_formula,
        expected_ms=expected * 1e3,
        step_over_expected=step / expected,
        speedup_over_coupled=statistics.median(step_times([one.systems["coupled"].steps for one in stages])) / step,
        exposed_comm=statistics.mean(exposed) / step,
        exposed_beyond_bubble=(step - compute * (1 + formula)) / step,
        contention=statistics.mean(contention) / step,
        sends_hidden={phase: _hidden(stages, system, phase) for phase in PHASES},
        memory_gib=max(stage.systems[system].memory_bytes for stage in stages) / 2**30,
    )


def step_times(stages: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each step, from the first stage that began it to the last that ended it."""
    return [
        max(end for _, end in one_step) - min(start for start, _ in one_step) for one_step in zip(*stages, strict=True)
    ]


def _hidden(stages: Sequence[Measured], system: System, phase: Phase) -> float | None:
    """Mean over the stages that send anything in this phase."""
    shares = [hidden_share(stage.systems[system].trace.spans, "send", phase=phase) for stage in stages]
    known = [share for share in shares if share is not None]
    return statistics.mean(known) if known else None


def _title(measured: Measured) -> str:
    schedule = measured.schedule
    name = schedule.name if schedule.num_chunks == 1 else f"{schedule.name}_{schedule.num_chunks}"
    if measured.by_peers:
        return f"{name}_peers"
    return f"{name}_{measured.max_ctas}ctas" if measured.max_ctas else name
