"""PyTorch's Flight Recorder: one dump a rank, a pickle or JSON, as torch 2.4 to 2.13 write it (format 2.x).

A dump holds the last launches of its rank (`entries`) and, from NCCL, the members of every group (`pg_config`); gloo
leaves members out, and they are those ranks then that have launched anything in the group. The rank itself stands in
the file's name alone: `nccl_trace_rank_3`. Source: the docstrings of torch.distributed.flight_recorder and dumps of
torch 2.13. Left out: device times.

[Note: coalesced] Several collectives, sends or receives that run as one have the same number, and an entry at the end
(`nccl:coalesced`, `nccl:ALLGATHER_coalesced`) that alone says how far they are.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from netlayer.observe.evidence import Evidence, Group, Launch, RankLog

_T = TypeVar("_T")
_RANK = re.compile(r"(\d{1,7})(?:\.[A-Za-z]+)*$")
_PAIR = re.compile(r"(?:send (?P<src>\d+)->(?P<dst>\d+)|recv (?P<to>\d+)<-(?P<of>\d+))$")
_LIBRARIES = ("/torch/", "site-packages", "/lib/python", "<string>", "<frozen")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class _Entry:
    """One entry, its types checked."""

    group: tuple[str, str]
    seq: int
    kind: str
    is_p2p: bool
    launch: Launch


@dataclass(frozen=True)
class Dump:
    """One rank's."""

    rank: int
    source: str
    whole: bool
    """Whether it reaches back to the start: older entries have not been overwritten."""
    members: Mapping[str, tuple[str, tuple[int, ...]]]
    """Description and ranks of a group by its name; empty under gloo."""
    entries: Sequence[_Entry]


def is_dump(tree: Any) -> bool:
    """Whether a pickle's or a JSON file's data is one."""
    return isinstance(tree, dict) and "version" in tree and ("entries" in tree or "pg_config" in tree)


def parse(tree: Mapping[str, Any], path: Path) -> Dump:
    """One rank's dump.

    Raises:
        ValueError: what is wrong with it, in words.
    """
    found = _RANK.search(path.name)
    if found is None:
        raise ValueError("a Flight Recorder dump whose file name ends in no rank (name it <prefix>_<rank>)")
    version = tree["version"]
    if not isinstance(version, str) or not version.startswith("2."):
        shown = repr(version[:20]) if isinstance(version, str) else f"of a {type(version).__name__}"
        raise ValueError(f"Flight Recorder format {shown}, known is 2.x")
    config = _typed(tree.get("pg_config", {}), dict, "pg_config")
    raw = _typed(tree.get("entries", []), list, "entries")
    entries = [_entry(one, order) for order, one in enumerate(raw)]
    whole = not raw or raw[0].get("record_id", 0) == 0
    members = {name: group for name, one in config.items() if (group := _members(name, one))[1]}
    rank = int(found[1])
    if rank >= _MOST_RANKS:
        raise ValueError(f"rank {rank} by its name, which no job has (name it <prefix>_<rank>)")
    return Dump(rank, str(path), whole, members, _merge(entries))


def join(dumps: Iterable[Dump], world_size: int | None) -> Evidence:
    """The dumps of a job as evidence.

    Raises:
        ValueError: two dumps are of one rank, or a rank is beyond the world.
    """
    by_rank: dict[int, Dump] = {}
    for dump in dumps:
        if dump.rank in by_rank:
            raise ValueError(f"{dump.source} and {by_rank[dump.rank].source} are both of rank {dump.rank}")
        by_rank[dump.rank] = dump
    named = {rank for dump in by_rank.values() for _, ranks in dump.members.values() for rank in ranks}
    known = named | set(by_rank)
    if world_size is not None and max(known) >= world_size:
        raise ValueError(f"rank {max(known)} is there, but --world-size is {world_size}")
    world = range(world_size if world_size is not None else max(known) + 1)
    seen = defaultdict(set)
    for dump in by_rank.values():
        for entry in dump.entries:
            seen[entry.group].add(dump.rank)
    groups: dict[str, Group] = {}
    logs = {rank: RankLog(rank, dump.source, whole=dump.whole) for rank, dump in by_rank.items()}
    for rank, dump in by_rank.items():
        for entry in dump.entries:
            group = _group_of(entry, dump, seen, world)
            groups.setdefault(group.key, group)
            of_group = logs[rank].launches.setdefault(group.key, {})
            # Sends and receives are numbered for the whole group there, and here for each pair and direction.
            seq = len(of_group) + 1 if group.sender is not None else entry.seq
            of_group[seq] = replace(entry.launch, seq=seq)
    return Evidence(groups, dict(sorted(logs.items())), world)


def _group_of(entry: _Entry, dump: Dump, seen: Mapping[tuple[str, str], set[int]], world: Sequence[int]) -> Group:
    name, description = entry.group
    if name in dump.members:
        description, ranks = dump.members[name]
    else:
        ranks = tuple(world) if description == "default_pg" else tuple(sorted(seen[entry.group]))
    nameless = description in ("", "undefined")
    shown = name if nameless else f"{name}:{description}"
    if dump.rank not in ranks:
        raise ValueError(f"{dump.source}: its name says rank {dump.rank}, which is not in its group {shown}")
    role = f"{name if nameless else description}/{len(ranks)}"
    key = f"{name}@{ranks[0]}-{ranks[-1]}/{len(ranks)}"  # groups of one name have no rank in common
    pair = _PAIR.search(entry.kind)
    if pair is None:
        return Group(key, shown, role, ranks)
    src, dst = (int(pair["src"] or pair["of"] or 0), int(pair["dst"] or pair["to"] or 0))
    if max(src, dst) >= len(ranks) or dump.rank not in (ranks[src], ranks[dst]):
        raise ValueError(f"{dump.source}: {entry.kind} in group {shown} of {len(ranks)} ranks, as rank {dump.rank}")
    ends = (ranks[src], ranks[dst])
    name = f"{shown} {ends[0]}->{ends[1]}"
    return Group(f"{key}/{src}->{dst}", name, f"{role}/{src}->{dst}", tuple(sorted(ends)), ends[0])


def _merge(entries: Sequence[_Entry]) -> list[_Entry]:
    """[Note: coalesced]: collectives that run as one become one; sends and receives get the state of their end."""
    together: dict[tuple[tuple[str, str], bool, int], list[_Entry]] = defaultdict(list)
    for entry in entries:
        together[entry.group, entry.is_p2p, entry.seq].append(entry)
    merged: list[_Entry] = []
    for (_, is_p2p, _), same in together.items():
        end = same[-1] if same[-1].kind.endswith("coalesced") else None
        parts = same[:-1] if end is not None and len(same) > 1 else same
        if end is not None and parts is not same:
            parts = [replace(one, launch=replace(one.launch, done=end.launch.done)) for one in parts]
        if is_p2p or len(parts) == 1:
            merged += [one for one in parts if one.kind != "coalesced"]
        else:
            merged.append(_as_one(parts))
    return sorted(merged, key=lambda entry: entry.launch.order)


def _as_one(parts: Sequence[_Entry]) -> _Entry:
    launches = [part.launch for part in parts]
    kinds = [launch.kind for launch in launches]
    joined = replace(
        launches[0],
        kind=f"{kinds[0]}" if len(set(kinds)) == 1 else "+".join(kinds),
        done=all(launch.done for launch in launches),
        inputs=sum((launch.inputs for launch in launches), ()),
        outputs=sum((launch.outputs for launch in launches), ()),
        input_dtypes=sum((launch.input_dtypes for launch in launches), ()),
        output_dtypes=sum((launch.output_dtypes for launch in launches), ()),
    )
    return replace(parts[0], launch=joined)


def _entry(raw: Any, order: int) -> _Entry:
    _typed(raw, dict, "an entry")
    backend, _, kind = _get(raw, "profiling_name", str).partition(":")
    pair = raw.get("process_group")
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ValueError(f"entry {order}: process_group is no pair of name and description")
    is_p2p = bool(raw.get("is_p2p", kind.startswith(("send", "recv"))))
    seq = _get(raw, "p2p_seq_id" if is_p2p else "collective_seq_id", int)
    state = _get(raw, "state", str)
    launch = Launch(
        seq=seq,
        kind=kind.partition(" ")[0],
        order=order,
        # Of gloo's work nothing but its end is noted, and that as `retired`.
        done=state == "completed" or (backend == "gloo" and raw.get("retired") is True),
        inputs=_sizes(raw, "input_sizes"),
        outputs=_sizes(raw, "output_sizes"),
        input_dtypes=_texts(raw, "input_dtypes"),
        output_dtypes=_texts(raw, "output_dtypes"),
        created_ns=_typed(raw.get("time_created_ns") or 0, int, "time_created_ns"),
        place=_place(raw.get("frames")),
        recorded=seq,
    )
    return _Entry((pair[0], pair[1]), seq, kind, is_p2p, launch)


def _members(name: Any, raw: Any) -> tuple[str, tuple[int, ...]]:
    """Description and ranks of a group; they are written as the text of a list."""
    _typed(name, str, "a group's name")
    text = _get(_typed(raw, dict, "a group of pg_config"), "ranks", str)
    try:
        ranks = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as exc:
        raise ValueError(f"pg_config: ranks of group {name!r} are no list") from exc
    good = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in ranks)
    if not good or len(set(ranks)) != len(ranks):
        raise ValueError(f"pg_config: ranks of group {name!r} are no list of ranks")
    return _get(raw, "desc", str), tuple(ranks)


def _place(frames: Any) -> str:
    """The innermost line that is neither Python's own nor a library's: `train.py:88 in step`."""
    if not isinstance(frames, list):
        return ""
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        if not (isinstance(file, str) and isinstance(line, int) and isinstance(name, str)):
            continue
        if not any(mark in file for mark in _LIBRARIES):
            return f"{file.rpartition('/')[2]}:{line} in {name}"
    return ""


def _sizes(raw: Mapping[str, Any], key: str) -> tuple[tuple[int, ...], ...]:
    shapes = _typed(raw.get(key, []), list, key)
    if not all(isinstance(shape, list) and all(type(length) is int for length in shape) for shape in shapes):
        raise ValueError(f"{key} are no lists of numbers")
    return tuple(tuple(shape) for shape in shapes)


def _texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    texts = _typed(raw.get(key, []), list, key)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{key} are no names")
    return tuple(texts)


def _get(raw: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    if key not in raw:
        raise ValueError(f"{key} is missing")
    return _typed(raw[key], kind, key)


def _typed(value: Any, kind: type[_T], what: str) -> _T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value
