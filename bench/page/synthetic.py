"""A synthetic run of any size as its collector would leave it: every row of every rank, with faults planted.

`python -m bench.page.synthetic OUT --tp 8 --pp 8 --dp 192 --steps 100` writes parquet. Times are simulated, by a plain
model: a rank's forward and backward passes take their means with 0.2% of noise; tensor-parallel peers wait for the
slowest of them inside each pass; a stage begins a micro-batch when the stage before has sent it (all forward passes,
then all backward passes); data-parallel peers reduce together; the optimizer follows. A rank that falls silent never
ends its forward pass, and what depends on it never ends either, so that nothing of that is recorded. Readings of power
go on for a while after that, as they do in a run that hangs.

Not covered: schedules of real pipelines, and clocks that differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from netlayer.layout import Dimension, ParallelLayout
from netlayer.observe.events import Event, Mark, Origin, arrow_schema, format_ranks, to_batch

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]

_BEGIN_S = 1_700_000_000.0
_LANES = {"compute": 0, "comm": 1, "host": 2}
_FORWARD_S, _BACKWARD_S, _TRANSFER_S, _REDUCE_S, _OPTIMIZER_S, _DATA_S = 0.12, 0.24, 0.004, 0.03, 0.02, 0.002
_NOISE = 0.002
_LEAST_WAIT_S = 0.002
_NIC_EVERY_S = 0.01
_IDLE_W = 110.0
_NIC_HOSTS = 4
_HANG_S = 90.0
_LATE_S = (5.0, 10.0, 20.0, 40.0, 80.0)
_FLOPS_SHARE = 0.55
_PEAK = 312e12


@dataclass(frozen=True)
class Faults:
    """Faults of a synthetic run.

    Args:
        straggler, slowdown: rank whose passes take 1 + slowdown times as long; None: none.
        silent, silent_step: rank that falls silent in the forward pass of that step; None: none.
        restart_step: step after which the first start is killed; 0: it is not.
        text: a line that a program might log, shown with the failure.
    """

    straggler: int | None = None
    slowdown: float = 0.4
    silent: int | None = None
    silent_step: int = 0
    restart_step: int = 0
    text: str = "NCCL WARN Cuda failure 'an illegal memory access was encountered'"


@dataclass
class _Clock:
    """Time at which each rank is ready, s; infinity: never."""

    ready_s: Floats


def write_run(
    out: Path, layout: ParallelLayout, steps: int, faults: Faults, *, micro_batches: int = 1, seed: int = 0
) -> int:
    """Write OUT/events/part-*.parquet, a file of some steps each; return the number of rows.

    Args:
        steps: of the whole run; steps that are taken again come on top.
        micro_batches: of each step and rank.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = out / "events"
    folder.mkdir(parents=True, exist_ok=True)
    num_rows = number = 0

    def save(tables: list[pa.Table]) -> None:
        nonlocal num_rows, number
        if tables:
            table = pa.concat_tables(tables).unify_dictionaries()
            pq.write_table(table, folder / f"part-{number:06d}.parquet", compression="zstd")
            num_rows += table.num_rows
            number += 1

    batch: list[pa.Table] = []
    size = 0
    for table in _tables(layout, steps, faults, micro_batches, np.random.default_rng(seed)):
        batch.append(table)
        size += table.num_rows
        if size > 1_500_000:
            save(batch)
            batch, size = [], 0
    save(batch)
    return num_rows


def _tables(
    layout: ParallelLayout, steps: int, faults: Faults, micro_batches: int, rng: np.random.Generator
) -> Iterator[pa.Table]:
    """Yield the rows of the run: its start, each step, a restart, its end, and the readings."""
    import pyarrow as pa

    schema = arrow_schema()
    clock = _Clock(np.full(layout.world_size, _BEGIN_S + 30))
    end_s = _BEGIN_S + 30
    trained: list[tuple[float, float]] = []
    attempt, first = 0, 1
    yield pa.Table.from_batches([to_batch(_run_starts(layout, 0, _BEGIN_S, steps))], schema)
    step = 1
    while step <= steps:
        end_s = begin_s = float(clock.ready_s.max())
        yield _Step(layout, faults, micro_batches, rng, attempt, step).table(clock)
        if np.isfinite(clock.ready_s).any():
            trained.append((begin_s, float(clock.ready_s[np.isfinite(clock.ready_s)].min())))
        if step == faults.silent_step and faults.silent is not None:
            break
        if faults.restart_step and step == faults.restart_step and attempt == 0:
            end_s = float(clock.ready_s.max())
            yield pa.Table.from_batches([to_batch(_restart(layout, end_s, step, faults, steps))], schema)
            attempt, first = 1, max(1, step - step % 10 - 9)
            clock.ready_s[:] = end_s + 75
            step = first
            continue
        step += 1
    if faults.silent is not None and steps >= faults.silent_step > 0:
        # As the monitor marks a step that is late; the silent rank's process is gone.
        late = [
            Mark(_origin(layout, rank, attempt), "late", _ns(end_s + age_s), step=faults.silent_step, value=age_s)
            for age_s in _LATE_S
            for rank in range(layout.world_size)
            if rank != faults.silent
        ]
        yield pa.Table.from_batches([to_batch(late)], schema)
        end_s += _HANG_S
    else:
        end_s = float(clock.ready_s.max())
        ends = [Mark(_origin(layout, rank, attempt), "run_end", _ns(end_s)) for rank in range(layout.world_size)]
        yield pa.Table.from_batches([to_batch(ends)], schema)
    yield _counters(layout, end_s, faults, rng, trained)


def _run_starts(layout: ParallelLayout, attempt: int, at_s: float, steps: int) -> list[Event]:
    world = layout.world_size
    facts = {
        "job": "synthetic",
        "world_size": world,
        "layout": {name: getattr(layout, name) for name in ("tp", "pp", "dp", "vpp", "cp", "dp_replicate")},
        "device": "simulated",
        "flops_per_step_full": _FLOPS_SHARE * (_FORWARD_S + _BACKWARD_S) * _PEAK * world,
        "peak_flops": _PEAK,
        "steps": steps,
    }
    return [
        Mark(_origin(layout, rank, attempt), "run_start", _ns(at_s), attributes=facts if rank == 0 else None)
        for rank in range(world)
    ]


def _restart(layout: ParallelLayout, at_s: float, step: int, faults: Faults, steps: int) -> list[Event]:
    """Marks of a node that fails, of its eviction, and of the next start."""
    rank = layout.world_size // 3
    driver = Origin(source="driver", run="synthetic", attempt=0, host="driver")
    evidence = {"node": _host(rank), "kind": "hardware", "state": "diagnose", "xid": 79}
    return [
        Mark(_origin(layout, rank, 0), "failure", _ns(at_s), step=step, text=faults.text),
        Mark(driver, "failure", _ns(at_s + 1), step=step, text="kernel log: Xid 79: GPU has fallen off the bus",
             attributes=evidence),
        Mark(driver, "eviction", _ns(at_s + 12), step=step, text=f"{_host(rank)}: Xid 79 is a hardware fault",
             attributes=evidence),
        Mark(driver, "restart", _ns(at_s + 14), step=step, text="a standby takes its place", attributes={"count": 1}),
        *_run_starts(layout, 1, at_s + 40, steps),
    ]  # fmt: skip


def _origin(layout: ParallelLayout, rank: int, attempt: int) -> Origin:
    at = layout.coordinates(rank)
    return Origin("monitor", "synthetic", attempt, _host(rank), rank, at.tp, at.pp, layout.data_rank(at), at.cp)


def _host(rank: int) -> str:
    return f"host-{rank // 8:04d}"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Step:
    """Rows of one step of all ranks."""

    def __init__(
        self,
        layout: ParallelLayout,
        faults: Faults,
        micro_batches: int,
        rng: np.random.Generator,
        attempt: int,
        step: int,
    ) -> None:
        self._layout, self._faults, self._num = layout, faults, micro_batches
        self._rng, self._attempt, self._step = rng, attempt, step
        self._ranks = np.arange(layout.world_size, dtype=np.int32)
        # The order of ranks: tensor innermost, then all that share gradients (context, data, replicas), then pipeline.
        self._grid = (layout.pp, layout.gradient_ranks, layout.tp)
        self._parts: list[dict[str, Any]] = []

    def table(self, clock: _Clock) -> pa.Table:
        """Take the step; `clock` goes on to its end."""
        import pyarrow as pa

        begin_s = clock.ready_s.copy()
        ready = begin_s + _DATA_S
        self._add("data", "data", "host", begin_s, ready)
        sent = np.full((self._num, *self._grid), np.nan)
        order = range(self._layout.pp)
        for name, mean_s, stages in (("forward", _FORWARD_S, order), ("backward", _BACKWARD_S, order[::-1])):
            grid = ready.reshape(self._grid)
            for micro in range(self._num):
                for stage in stages:
                    self._pass(name, mean_s / self._num, micro, stage, grid, sent)
        ready = self._reduce(ready)
        end_s = ready + _OPTIMIZER_S
        self._add("optimizer", "optimizer", "compute", ready, end_s)
        self._add("step", "step", "compute", begin_s, end_s)
        clock.ready_s[:] = end_s
        return pa.concat_tables([self._rows(part) for part in self._parts]).unify_dictionaries()

    def _pass(self, name: str, mean_s: float, micro: int, stage: int, ready: Floats, sent: Floats) -> None:
        """Take one pass of a micro-batch on a stage: receive, compute, wait for tensor-parallel peers, send."""
        direction = "pipeline forward" if name == "forward" else "pipeline backward"
        before, after = (stage - 1, stage + 1) if name == "forward" else (stage + 1, stage - 1)
        own, begin = self._slice(stage), ready[stage].copy()
        if 0 <= before < self._layout.pp:
            begin = np.maximum(begin, sent[micro, before])
            self._message("recv", direction, micro, stage, before, ready[stage], begin)
            with np.errstate(invalid="ignore"):
                idle = (begin - ready[stage] > 0).ravel()
            self._add("wait", "recv", "compute", ready[stage].ravel(), begin.ravel(), ranks=own, mask=idle)
        compute = mean_s * self._rng.normal(1, _NOISE, begin.shape)
        compute *= self._factors(own)
        done = begin + compute
        if name == "forward" and self._faults.silent is not None and self._step == self._faults.silent_step:
            done = np.where((own == self._faults.silent).reshape(done.shape), np.inf, done)
        end = np.broadcast_to(done.max(axis=1, keepdims=True), done.shape)
        with np.errstate(invalid="ignore"):
            waits = (end - done > _LEAST_WAIT_S).ravel()
        self._add("wait", "all_reduce", "compute", done.ravel(), end.ravel(), ranks=own, mask=waits)
        self._add(name, name, "compute", begin.ravel(), end.ravel(), ranks=own, micro_batch=micro)
        ready[stage] = end
        if 0 <= after < self._layout.pp:
            sent[micro, stage] = end + _TRANSFER_S
            self._message("send", direction, micro, stage, after, end, sent[micro, stage])

    def _slice(self, stage: int) -> NDArray[np.int32]:
        return np.asarray(self._ranks.reshape(self._grid)[stage].ravel())

    def _factors(self, ranks: NDArray[np.int32]) -> Floats:
        slow = 1.0 + self._faults.slowdown * (
            ranks == (-1 if self._faults.straggler is None else self._faults.straggler)
        )
        return np.asarray(slow.reshape(self._grid[1:]))

    def _message(
        self, name: str, direction: str, micro: int, stage: int, peer: int, start: Floats, end: Floats
    ) -> None:
        ranks = self._slice(stage)
        distance = self._layout.tp * self._layout.gradient_ranks
        peers = ranks + (peer - stage) * distance
        first, last = (ranks, peers) if name == "send" else (peers, ranks)
        flows = [f"{direction}/{one}>{other}/{micro}" for one, other in zip(first.tolist(), last.tolist(), strict=True)]
        self._add(
            "collective", name, "comm", start.ravel(), np.broadcast_to(end, start.shape).ravel(), ranks=ranks,
            micro_batch=micro, group=direction, peer=peers, flow=flows, bytes=1 << 25,
        )  # fmt: skip

    def _reduce(self, ready: Floats) -> Floats:
        """Reduce-scatter and all-gather of every data-parallel group; computation waits for what precedes the second.

        Between them replicas add up what they have.
        """
        layout = self._layout
        grid = ready.reshape(layout.pp, layout.dp_replicate, layout.dp_cp, layout.tp)
        reduced = grid.max(axis=2, keepdims=True) + _REDUCE_S
        done = np.broadcast_to(reduced, grid.shape).ravel()
        more: dict[str, Any] = {"group_ranks": self._groups("dp"), "bytes": 1 << 30}
        self._add("collective", "reduce_scatter", "comm", ready, done, group="reduce", seq=self._step, **more)
        self._add("wait", "reduce_scatter", "compute", ready, done, group="reduce")
        if layout.dp_replicate > 1:
            added = np.broadcast_to(reduced.max(axis=1, keepdims=True) + _REDUCE_S, grid.shape).ravel()
            between: dict[str, Any] = {"group_ranks": self._groups("dp_replicate"), "bytes": 1 << 28}
            self._add("collective", "all_reduce", "comm", done, added, group="replicas", seq=self._step, **between)
            self._add("wait", "all_reduce", "compute", done, added, group="replicas")
            done = added
        gathered = done + _REDUCE_S
        self._add("collective", "all_gather", "comm", done, gathered, group="gather", seq=self._step, **more)
        return done

    def _groups(self, dimension: Dimension) -> NDArray[Any]:
        """Group of each rank along a dimension, as text."""
        groups = np.empty(self._layout.world_size, object)
        for group in self._layout.groups(dimension):
            groups[list(group)] = format_ranks(group)
        return groups

    def _add(
        self,
        segment: str,
        name: str,
        lane: str,
        start_s: Floats,
        end_s: Floats,
        *,
        ranks: NDArray[np.int32] | None = None,
        mask: NDArray[np.bool_] | None = None,
        **columns: Any,
    ) -> None:
        """Keep the rows that end; the others are still under way when the record ends."""
        ranks = self._ranks if ranks is None else ranks
        kept = np.isfinite(start_s) & np.isfinite(end_s)
        kept = kept if mask is None else kept & mask
        if kept.any():
            part = {"segment": segment, "name": name, "lane": lane, "rank": ranks[kept]}
            part |= {"start_ns": _whole_ns(start_s[kept]), "end_ns": _whole_ns(end_s[kept])}
            for key, values in columns.items():
                is_list = isinstance(values, list | np.ndarray)
                part[key] = (
                    np.asarray(values, object if isinstance(values, list) else None)[kept] if is_list else values
                )
            self._parts.append(part)

    def _rows(self, part: Mapping[str, Any]) -> pa.Table:
        ranks = part["rank"]
        stage, rest = np.divmod(ranks, self._layout.tp * self._layout.gradient_ranks)
        rest, tp = np.divmod(rest, self._layout.tp)
        data, cp = np.divmod(rest, self._layout.cp)
        columns = {"kind": "segment", "step": self._step, "attempt": self._attempt, "timing": "device"}
        columns |= {"source": "monitor", "run": "synthetic", "clock_offset_ns": 0, "clock_error_ns": 0}
        columns |= {"tp": tp, "pp": stage, "dp": data, "cp": cp, "host": _hosts(ranks), **part}
        return table_of(columns, len(ranks))


def _hosts(ranks: NDArray[np.int32]) -> pa.Array:
    """Names of the ranks' hosts, as a dictionary of few texts."""
    import pyarrow as pa

    numbers, indices = np.unique(ranks // 8, return_inverse=True)
    return pa.DictionaryArray.from_arrays(
        pa.array(indices.astype(np.int32)), pa.array([f"host-{number:04d}" for number in numbers.tolist()])
    )


def _whole_ns(seconds: Floats) -> NDArray[np.int64]:
    base = int(_BEGIN_S)
    return np.rint((seconds - base) * 1e9).astype(np.int64) + base * 1_000_000_000


def table_of(columns: Mapping[str, Any], num_rows: int) -> pa.Table:
    """A table of events from columns: a value for all rows, or an array; columns that are not there are null."""
    import pyarrow as pa

    arrays = []
    for want in arrow_schema():
        value = columns.get(want.name)
        if value is None:
            arrays.append(pa.nulls(num_rows, want.type))
        elif isinstance(value, pa.Array):
            arrays.append(value.cast(want.type))
        elif isinstance(value, np.ndarray):
            plain = pa.array(value.tolist() if value.dtype == object else value)
            is_text = pa.types.is_dictionary(want.type)
            arrays.append(plain.dictionary_encode().cast(want.type) if is_text else plain.cast(want.type))
        elif pa.types.is_dictionary(want.type):
            indices = pa.array(np.zeros(num_rows, np.int32))
            arrays.append(pa.DictionaryArray.from_arrays(indices, pa.array([value], pa.string())))
        else:
            arrays.append(pa.array(np.full(num_rows, value)).cast(want.type))
    return pa.Table.from_arrays(arrays, schema=arrow_schema())


def _covered(times_s: Floats, spans: Sequence[tuple[float, float]]) -> NDArray[np.bool_]:
    """Whether each time is inside one of some spans, which follow each other."""
    begins, ends = np.array(spans or [(0.0, 0.0)]).T
    at = np.searchsorted(begins, times_s, "right") - 1
    return np.asarray((at >= 0) & (times_s < ends[np.maximum(at, 0)]))


def _counters(
    layout: ParallelLayout,
    end_s: float,
    faults: Faults,
    rng: np.random.Generator,
    trained: Sequence[tuple[float, float]],
) -> pa.Table:
    """Power of each rank's GPU, once a second, and bytes of a port of the first hosts, every 10 ms, by what goes on.

    Args:
        trained: begin and end of each step on its fastest rank.
    """
    import pyarrow as pa

    ranks = np.arange(layout.world_size, dtype=np.int32)
    seconds = np.arange(_BEGIN_S, end_s, max(1.0, (end_s - _BEGIN_S) / 120))
    at = np.repeat(seconds, len(ranks))
    watts_at = np.where(_covered(seconds, trained), 620.0, _IDLE_W)
    if faults.silent is not None:  # kernels of NCCL spin while they wait
        watts_at[seconds > end_s - _HANG_S] = 540.0
    power = np.repeat(watts_at, len(ranks)) + rng.normal(0, 8, len(at))
    every = np.tile(ranks, len(seconds))
    if faults.silent is not None:  # its host is gone, and with it the readings
        kept = (every != faults.silent) | (at < end_s - _HANG_S)
        at, power, every = at[kept], power[kept], every[kept]
    common = {"kind": "counter", "source": "monitor", "run": "synthetic", "attempt": 0}
    common |= {"clock_offset_ns": 0, "clock_error_ns": 50_000}
    watts = {**common, "name": "gpu.power", "rank": every, "host": _hosts(every), "unit": "W"}
    watts |= {"start_ns": _whole_ns(at), "end_ns": _whole_ns(at), "value": power}
    tables = [table_of(watts, len(at))]
    hosts = sorted({_host(int(rank)) for rank in ranks[: 8 * _NIC_HOSTS]})
    ticks = np.arange(_BEGIN_S + 30, min(end_s, _BEGIN_S + 60), _NIC_EVERY_S)
    reducing = _covered(
        ticks, [(done_s - 2 * _REDUCE_S - _OPTIMIZER_S, done_s - _OPTIMIZER_S) for _, done_s in trained]
    )
    for host in hosts:
        busy = reducing * 450e6
        moved = np.maximum(0, busy + rng.normal(0, 4e6, len(ticks)))
        row = {**common, "name": "nic.xmit_bytes", "host": host, "unit": "bytes", "value": moved,
               "attributes": json.dumps({"port": "mlx5_0"}), "start_ns": _whole_ns(ticks),
               "end_ns": _whole_ns(ticks + _NIC_EVERY_S)}  # fmt: skip
        tables.append(table_of(row, len(ticks)))
    return pa.concat_tables(tables)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--tp", type=click.IntRange(1), default=8, show_default=True)
@click.option("--pp", type=click.IntRange(1), default=8, show_default=True)
@click.option("--dp", type=click.IntRange(1), default=192, show_default=True)
@click.option("--cp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--dp-replicate", type=click.IntRange(1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(2), default=100, show_default=True)
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--straggler", type=click.IntRange(0), help="Rank that is slow.")
@click.option("--slowdown", type=click.FloatRange(0), default=0.4, show_default=True)
@click.option("--silent", type=click.IntRange(0), help="Rank that falls silent in the last step.")
@click.option("--restart-step", type=click.IntRange(0), default=0, help="Step after which the first start is killed.")
@click.option("--text", default=Faults.text, show_default=True, help="Line that a rank logs with its failure.")
@click.option("--seed", type=int, default=0, show_default=True)
def command(
    out: Path,
    tp: int,
    pp: int,
    dp: int,
    cp: int,
    dp_replicate: int,
    steps: int,
    micro_batches: int,
    straggler: int | None,
    slowdown: float,
    silent: int | None,
    restart_step: int,
    text: str,
    seed: int,
) -> None:
    """Write a synthetic run into OUT, for `netlayer observe serve` and its measurement.

    \b
    Example:
      python -m bench.page.synthetic runs/synthetic --straggler 3001 --silent 7043 --restart-step 40
    """
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp, dp_replicate=dp_replicate)
    faults = Faults(straggler, slowdown, silent, steps if silent is not None else 0, restart_step, text)
    rows = write_run(out, layout, steps, faults, micro_batches=micro_batches, seed=seed)
    click.echo(f"{layout.world_size:,} ranks, {steps} steps: {rows:,} rows in {out}")


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.page.synthetic")
