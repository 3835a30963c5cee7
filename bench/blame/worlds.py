"""Random jobs with one planted fault, and the Flight Recorder dumps that they would leave: the truth for `bench.blame`.

A job has tensor-, data- and pipeline-parallel groups, and a schedule of collectives, sends and receives that all ranks
follow in one order. Each host runs some launches ahead of its device; a collective is complete when all its ranks have
launched the same and everything before it in the group is complete. It runs until nothing moves. Dumps are as torch
2.13 writes them (format 2.10), with buffers that may have dropped the oldest entries, and with or without start times.

A fault counts as decidable where at least two other ranks have launched what the planted one should have: no reader
of dumps can tell two ranks apart that differ from each other alone. Not covered: coalesced operations.
"""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from netlayer.layout import ParallelLayout

FaultKind = Literal["hang", "dead", "size", "dtype", "op", "order"]
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
_KINDS = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast")
_DTYPES = ("Float", "BFloat16", "Half", "Int")
_MOST_TRIES = 1_000


NamedGroup = tuple[str, str, tuple[int, ...]]
"""Name, description, ranks."""


@dataclass(frozen=True)
class Op:
    """One collective, send or receive of a rank's program; `pair`: who sends to whom, by their numbers in the group."""

    group: int
    kind: str
    num_elements: int
    dtype: str
    pair: tuple[int, int] | None = None


@dataclass(frozen=True)
class Fault:
    """Injected fault: its kind, the rank, and the position in that rank's program."""

    kind: FaultKind
    rank: int
    position: int


@dataclass
class Launched:
    """An operation on a rank: its numbers, and how far it came."""

    op: Op
    seq: int
    order: int
    created_ns: int
    done: bool = False


@dataclass
class World:
    """A job that ran until nothing moved."""

    groups: Sequence[NamedGroup]
    programs: Sequence[Sequence[Op]]
    fault: Fault | None
    launched: list[list[Launched]] = field(default_factory=list)
    stopped: bool = False


def random_world(seed: int, fault: FaultKind | None) -> World:
    """A job of 2 to 32 ranks with this kind of fault on one of them; None: a healthy one."""
    draw = random.Random(f"{seed} {fault}")
    for _ in range(_MOST_TRIES):
        shape = [draw.choice((1, 1, 2, 2, 3, 4)) for _ in range(3)]
        if not 2 <= math.prod(shape) <= 32:
            continue
        layout = ParallelLayout(tp=shape[0], dp=shape[1], pp=shape[2])
        groups = list(_groups(layout))
        programs = _Programs(layout, groups, draw).of_rank
        world = World(groups, programs, None)
        if fault is not None and not _plant(world, fault, draw):
            continue
        _run(world, draw)
        if fault is None or (world.stopped and _decidable(world, programs)):
            return world
    raise AssertionError(f"no world with {fault} in {_MOST_TRIES} tries")


def write_dumps(world: World, folder: Path, seed: int, form: Literal["pickle", "json"] = "pickle") -> list[Path]:
    """Write the dump of every rank that is alive; returns the files."""
    draw = random.Random(seed)
    num_kept = draw.choice((2_000, 2_000, 40, 24))
    timing = draw.random() < 0.5
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in range(len(world.programs)):
        if world.fault is not None and world.fault.kind == "dead" and world.fault.rank == rank:
            continue
        dump = _dump(world, rank, num_kept, timing)
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2) if form == "pickle" else json.dumps(dump).encode())
        written.append(path)
    return written


def _groups(layout: ParallelLayout) -> Iterator[NamedGroup]:
    """All groups of more than one rank; names count up as torch's do."""
    yield "0", "default_pg", tuple(range(layout.world_size))
    number = 1
    for dimension in ("tp", "dp", "pp"):
        for ranks in layout.groups(dimension):
            if len(ranks) > 1:
                yield str(number), dimension, tuple(ranks)
            number += 1


class _Programs:
    """Programs of all ranks, in order: forward and backward through the stages, then gradients, then all ranks."""

    def __init__(self, layout: ParallelLayout, groups: Sequence[NamedGroup], draw: random.Random) -> None:
        self._layout, self._groups, self._draw = layout, groups, draw
        self.of_rank: list[list[Op]] = [[] for _ in range(layout.world_size)]
        num_layers = draw.randint(1, 3)
        for _ in range(draw.randint(2, 4)):
            self._step(num_layers)

    def _step(self, num_layers: int) -> None:
        draw, stages = self._draw, self._layout.pp
        # One draw for all stages: groups of one role do the same work, in whichever stage they are.
        layers = [self._draw_collective("tp") for _ in range(num_layers)]
        for stage in (*range(stages), *reversed(range(stages))):
            for layer in layers:
                self._collective("tp", layer, stage)
        for src in range(stages - 1):
            self._message(src, src + 1)
        for src in range(stages - 1, 0, -1):
            self._message(src, src - 1)
        for _ in range(draw.randint(1, 3)):
            self._collective("dp", self._draw_collective("dp"))
        if draw.random() < 0.6 or len(self._groups) == 1:
            self._collective("default_pg", self._draw_collective("default_pg"))

    def _draw_collective(self, role: str) -> Op:
        draw = self._draw
        kind = "all_to_all" if role == "dp" and draw.random() < 0.2 else draw.choice(_KINDS)
        return Op(0, kind, 4 * draw.randint(1, 999), draw.choice(_DTYPES))

    def _collective(self, role: str, op: Op, stage: int | None = None) -> None:
        for index, (_, description, ranks) in enumerate(self._groups):
            if description != role or (stage is not None and self._layout.coordinates(ranks[0]).pp != stage):
                continue
            for rank in ranks:  # the parts of an all-to-all may differ
                more = 4 * self._draw.randint(0, 3) if op.kind == "all_to_all" else 0
                self.of_rank[rank].append(replace(op, group=index, num_elements=op.num_elements + more))

    def _message(self, src: int, dst: int) -> None:
        op = Op(0, "send", 4 * self._draw.randint(1, 999), self._draw.choice(_DTYPES), (src, dst))
        for index, (_, description, ranks) in enumerate(self._groups):
            if description == "pp":
                self.of_rank[ranks[src]].append(replace(op, group=index))
                self.of_rank[ranks[dst]].append(replace(op, group=index, kind="recv"))


def _plant(world: World, kind: FaultKind, draw: random.Random) -> bool:
    """Change the program of one rank; False where the drawn place cannot have this fault."""
    rank = draw.randrange(len(world.programs))
    program = list(world.programs[rank])
    position = draw.randrange(len(program))
    op = program[position]
    if kind == "size":
        if op.kind == "all_to_all":
            return False
        program[position] = replace(op, num_elements=op.num_elements + 4)
    elif kind == "dtype":
        program[position] = replace(op, dtype=draw.choice([name for name in _DTYPES if name != op.dtype]))
    elif kind == "op":
        if op.pair is not None:
            return False
        program[position] = replace(op, kind=draw.choice([name for name in _KINDS if name != op.kind]))
    elif kind == "order":
        if position + 1 == len(program) or not _tell_apart(op, program[position + 1]):
            return False
        program[position : position + 2] = [program[position + 1], op]
    world.programs = [*world.programs[:rank], program, *world.programs[rank + 1 :]]
    world.fault = Fault(kind, rank, position)
    return True


def _tell_apart(one: Op, other: Op) -> bool:
    """Whether a dump shows it when a rank launches these two the other way round."""
    if one.group != other.group:
        return True
    return one.pair == other.pair and not _agree(one, other)


def _run(world: World, draw: random.Random) -> None:
    """Launch and complete until nothing moves."""
    num_ranks = len(world.programs)
    ahead = [draw.choice((1, 1, 2, 4)) for _ in range(num_ranks)]
    world.launched = [[] for _ in range(num_ranks)]
    numbers: list[dict[Any, int]] = [defaultdict(int) for _ in range(num_ranks)]
    instances: dict[Any, dict[int, Launched]] = defaultdict(dict)
    clock_ns, moved = 1_795_318_132_000_000_000, True
    while moved:
        moved = False
        for rank in draw.sample(range(num_ranks), num_ranks):
            launched, program = world.launched[rank], world.programs[rank]
            fault = world.fault
            ends = fault is not None and fault.rank == rank and fault.kind in ("hang", "dead")
            limit = fault.position if fault is not None and ends else len(program)
            if len(launched) < limit and sum(not one.done for one in launched) < ahead[rank]:
                op = program[len(launched)]
                key = (op.group, op.pair)
                numbers[rank][key] += 1
                clock_ns += draw.randint(1_000, 100_000)
                one = Launched(op, numbers[rank][key], len(launched), clock_ns)
                launched.append(one)
                instances[*key, one.seq][rank] = one
                moved = True
        for (group, pair, seq), launches in instances.items():
            ranks = world.groups[group][2]
            needed = ranks if pair is None else tuple(ranks[index] for index in pair)
            if len(launches) < len(needed) or next(iter(launches.values())).done:
                continue
            before = instances.get((group, pair, seq - 1), {})
            first, *rest = launches.values()
            if all(one.done for one in before.values()) and all(_agree(first.op, one.op) for one in rest):
                for one in launches.values():
                    one.done = True
                moved = True
    world.stopped = any(not one.done for launched in world.launched for one in launched)


def _agree(one: Op, other: Op) -> bool:
    """Whether two ranks mean the same collective, or the two ends of one message."""
    if one.dtype != other.dtype:
        return False
    if one.pair is not None or other.pair is not None:
        return one.pair == other.pair and one.num_elements == other.num_elements
    return one.kind == other.kind and (one.kind == "all_to_all" or one.num_elements == other.num_elements)


def _decidable(world: World, right: Sequence[Sequence[Op]]) -> bool:
    """Whether two other ranks show what the planted one should have launched; for a rank that stopped: always."""
    fault = world.fault
    assert fault is not None
    if fault.kind in ("hang", "dead"):
        return any(
            not one.done for rank, launches in enumerate(world.launched) if rank != fault.rank for one in launches
        )
    planted = world.launched[fault.rank]
    if len(planted) <= fault.position or planted[fault.position].done:
        return False
    ops = right[fault.rank][fault.position : fault.position + (2 if fault.kind == "order" else 1)]
    crossing = len({(op.group, op.pair) for op in ops}) > 1
    seqs = _numbers(right[fault.rank])
    roles = [_role(world, ops[index], seqs[fault.position + index]) for index in range(len(ops) if crossing else 1)]
    controls = 0
    for rank, launches in enumerate(world.launched):
        program = [_role(world, op, seq) for op, seq in zip(right[rank], _numbers(right[rank]), strict=True)]
        launched = {_role(world, one.op, one.seq) for one in launches}
        if rank != fault.rank and set(roles) <= set(program) and launched & set(roles):
            controls += 1
    return controls >= 2


def _numbers(program: Sequence[Op]) -> list[int]:
    """The number of each operation in its group, or in its pair and direction."""
    counts: dict[Any, int] = defaultdict(int)
    seqs = []
    for op in program:
        counts[op.group, op.pair] += 1
        seqs.append(counts[op.group, op.pair])
    return seqs


def _role(world: World, op: Op, seq: int) -> tuple[Any, ...]:
    return world.groups[op.group][1], op.pair, seq


def _dump(world: World, rank: int, num_kept: int, timing: bool) -> dict[str, Any]:
    """One rank's dump: format 2.10, torch 2.13."""
    entries: list[dict[str, Any]] = []
    collectives: dict[int, int] = defaultdict(int)
    messages: dict[int, int] = defaultdict(int)
    heads: set[Any] = set()
    for one in world.launched[rank]:
        op, (name, description, ranks) = one.op, world.groups[one.op.group]
        (messages if op.pair else collectives)[op.group] += 1
        key = (op.group, op.pair)
        state = "completed" if one.done else "started" if timing and key not in heads else "scheduled"
        if not one.done:
            heads.add(key)
        input_sizes, output_sizes = _shapes(op, len(ranks))
        entries.append(
            {
                "record_id": one.order,
                "pg_id": op.group,
                "process_group": (name, description),
                "collective_seq_id": collectives[op.group],
                "p2p_seq_id": messages[op.group],
                "op_id": collectives[op.group] + messages[op.group],
                "profiling_name": f"nccl:{_title(op)}",
                "time_created_ns": one.created_ns,
                "input_sizes": input_sizes,
                "input_dtypes": [op.dtype],
                "output_sizes": output_sizes,
                "output_dtypes": [op.dtype],
                "state": state,
                "time_discovered_started_ns": one.created_ns + 500 if state != "scheduled" else None,
                "time_discovered_completed_ns": one.created_ns + 900 if one.done else None,
                "retired": one.done,
                "timeout_ms": 600_000,
                "is_p2p": op.pair is not None,
                "thread_id": "140072991574912",
                "thread_name": "python",
                "frames": [{"name": "step", "filename": "/job/train.py", "line": 10 + op.group}],
            }
        )
    groups = [(name, description, ranks) for name, description, ranks in world.groups if rank in ranks]
    return {
        "version": "2.10",
        "comm_lib_version": "2.28.9",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(list(ranks))} for name, description, ranks in groups
        },
        "pg_status": {},
        "entries": entries[-num_kept:],
    }


def _title(op: Op) -> str:
    if op.pair is None:
        return op.kind
    src, dst = op.pair
    return f"send {src}->{dst}" if op.kind == "send" else f"recv {dst}<-{src}"


def _shapes(op: Op, num_ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    small, large = [[op.num_elements]], [[op.num_elements * num_ranks]]
    return {"_all_gather_base": (small, large), "_reduce_scatter_base": (large, small)}.get(op.kind, (small, small))
