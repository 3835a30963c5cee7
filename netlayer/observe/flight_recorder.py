"""Reader of PyTorch Flight Recorder dumps: one pickle or JSON file a rank, as torch 2.4 to 2.13 write it (format 2.x).

A dump has the last launches of its rank (`entries`) and, with NCCL, the members of every group (`pg_config`). gloo
does not record members; there the ranks that launched anything in a group count as its members. The rank is given by
the file name only: `nccl_trace_rank_3`. Source: the docstrings of torch.distributed.flight_recorder, and dumps of
torch 2.13. Not read: device times.

[Note: gloo] gloo does not record sends and receives, it only counts them: `op_id` runs ahead of `collective_seq_id`.
Of a collective it records only the end, as `retired`, and sometimes later than that of the next one.

[Note: coalesced] Several collectives, sends or receives that run as one operation have the same number, and a last
entry (`nccl:coalesced`, `nccl:ALLGATHER_coalesced`), which alone has their state.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from netlayer.layout import describe_ranks
from netlayer.observe.evidence import Evidence, Group, Launch, RankLog

_T = TypeVar("_T")
_RANK = re.compile(r"(\d{1,7})(?:\.[A-Za-z]+)*$")
_PAIR = re.compile(r"(?:send (?P<src>\d+)->(?P<dst>\d+)|recv (?P<to>\d+)<-(?P<of>\d+))$")
_RANK_LIST = re.compile(r"\[(?:\d{1,7}(?:, ?\d{1,7})*)?\]")
_LIBRARIES = ("/torch/", "site-packages", "/lib/python", "<string>", "<frozen")
_MOST_RANKS = 1 << 20
# Far above any real dump. Needed since a small pickle can refer to one object many times.
_MAX_ENTRIES = 500_000
_MAX_SHAPES = 2_000_000
_MAX_FRAMES = 500
_MAX_TEXT = 8 << 20
_MAX_NAME = 4096
_MAX_DIMENSIONS = 64
_MAX_INT = 1 << 63
_MAX_GROUPS = 100_000
_MAX_MEMBERS = 4_000_000
# Clocks of hosts, and ranks that come to the first collective, are less apart.
_RUNS_APART_NS = 300 * 10**9


@dataclass(frozen=True)
class _Entry:
    """One entry of a dump, after type checks."""

    group: tuple[str, str]
    seq: int
    kind: str
    is_p2p: bool
    launch: Launch
    backend: str
    num_unrecorded: int
    """Number of earlier sends and receives that the backend counts but does not record."""


@dataclass(frozen=True)
class Dump:
    """Flight Recorder dump of one rank."""

    rank: int
    source: str
    whole: bool
    """True if it reaches back to the start: no older entries were overwritten."""
    members: Mapping[str, tuple[str, tuple[int, ...]]]
    """Description and ranks of each group, by its name; empty under gloo."""
    entries: Sequence[_Entry]

    @property
    def first_ns(self) -> int:
        """Time of the first launch that it holds, by the host's clock; 0: of none it is known."""
        return min((entry.launch.created_ns for entry in self.entries if entry.launch.created_ns), default=0)

    @property
    def last_ns(self) -> int:
        """Time of its last launch, likewise."""
        return max((entry.launch.created_ns for entry in self.entries), default=0)

    @property
    def family(self) -> tuple[Path, str, str]:
        """Folder, and file name before and after the rank: equal for all dumps of one run."""
        return _split_name(Path(self.source)) or (Path(), "", "")


def is_dump(tree: Any) -> bool:
    """Return True if the data of a pickle or JSON file is a Flight Recorder dump."""
    return isinstance(tree, dict) and "version" in tree and ("entries" in tree or "pg_config" in tree)


def parse(tree: Mapping[str, Any], path: Path) -> Dump:
    """Parse the dump of one rank.

    Raises:
        ValueError: it is damaged; a phrase that continues the file's name ("has Flight Recorder format ...").
    """
    match = _RANK.search(path.name)
    if match is None:
        raise ValueError("is a Flight Recorder dump whose file name ends in no rank (name it <prefix>_<rank>)")
    rank = int(match[1])
    if rank >= _MOST_RANKS:
        raise ValueError(f"has rank {rank} by its name, which no job has (name it <prefix>_<rank>)")
    version = tree["version"]
    if not isinstance(version, str) or not version.startswith("2."):
        found_version = repr(version[:20]) if isinstance(version, str) else f"of a {type(version).__name__}"
        raise ValueError(f"has Flight Recorder format {found_version}, known is 2.x")
    try:
        return _parse(tree, rank, str(path))
    except ValueError as exc:
        raise ValueError(f"is a damaged Flight Recorder dump ({exc})") from exc


def select(dumps: Sequence[Dump]) -> tuple[list[Dump], list[tuple[Path, str]]]:
    """Select the dumps of one run; return them, and path and reason of each one that is not used.

    Two dumps of one rank, dumps that differ in the members of a group, and dumps that end minutes before others begin
    are of two runs: the ones that agree with most others are used.

    Raises:
        ValueError: neither run has more dumps than the other, or the earlier one has.
    """
    skipped: list[tuple[Path, str]] = []
    by_rank: dict[int, Dump] = {}
    other_runs: dict[tuple[Path, str, str], str] = {}
    sizes = Counter(dump.family for dump in dumps)
    for dump in sorted(dumps, key=lambda dump: sizes[dump.family], reverse=True):
        other = by_rank.setdefault(dump.rank, dump)
        if other is dump:
            continue
        if sizes[other.family] == sizes[dump.family] and other.entries != dump.entries:
            raise ValueError(f"{dump.source} and {other.source} are both of rank {dump.rank}")
        skipped.append((Path(dump.source), f"is of rank {dump.rank}, as {other.source} is"))
        if other.entries != dump.entries and other.family != dump.family:
            other_runs[dump.family] = f"is of the run of {dump.source}, which is of rank {dump.rank} as {other.source}"
    # What else lies beside a dump that is of another run is of that one, though its rank is there once.
    skipped += [(Path(dump.source), why) for dump in by_rank.values() if (why := other_runs.get(dump.family))]
    chosen = [dump for dump in by_rank.values() if dump.family not in other_runs]
    chosen, earlier = _without_earlier_runs(chosen)
    skipped += earlier
    # First drop dumps that a majority contradicts: they may be the only ones to contradict a dump of a small group.
    for margin in (1, 0):
        votes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
        for dump in chosen:
            for name, (_, ranks) in dump.members.items():
                votes[name][ranks] += 1
        reasons = {dump.rank: _contradiction(dump, votes, margin) for dump in chosen}
        skipped += [(Path(dump.source), reasons[dump.rank]) for dump in chosen if reasons[dump.rank]]
        chosen = [dump for dump in chosen if not reasons[dump.rank]]
    if not chosen:
        raise ValueError(f"{skipped[-1][0]} {skipped[-1][1]}")
    return sorted(chosen, key=lambda dump: dump.rank), skipped


def _without_earlier_runs(dumps: Sequence[Dump]) -> tuple[list[Dump], list[tuple[Path, str]]]:
    """Return the dumps of the last run, of dumps of one a rank, and path and reason of those of an earlier one.

    The ranks of a job start and stop together, so each launches something while any other does, but for clocks that
    differ and a rank that is late at the start: one that ends minutes before others begin is of another run. A rank
    that died and left no dump has then one of the run before in its place.

    Raises:
        ValueError: the earlier run has as many dumps as the last one, or more.
    """
    timed = sorted((dump for dump in dumps if dump.last_ns), key=lambda dump: dump.last_ns)
    begun_ns = math.inf  # the first launch of all later ones
    for position in range(len(timed) - 1, 0, -1):
        begun_ns = min(begun_ns, timed[position].first_ns)
        gap_ns = begun_ns - timed[position - 1].last_ns
        if gap_ns <= _RUNS_APART_NS:
            continue
        earlier, later = timed[:position], timed[position:]
        minutes = f"{gap_ns / 60e9:.0f} min"
        if 2 * len(earlier) >= len(timed):
            ranks = [describe_ranks(sorted(dump.rank for dump in part)) for part in (earlier, later)]
            rule = f"the dumps of {ranks[0]} end {minutes} before those of {ranks[1]} begin: they are of two runs"
            raise ValueError(f"{rule}, or clocks differ")
        count = f"{len(later)} other{'s' * (len(later) > 1)}"
        reason = f"ends {minutes} before the dumps of {count} begin: of an earlier run, or of a host with another clock"
        left = {dump.rank for dump in earlier}  # one dump a rank
        return [dump for dump in dumps if dump.rank not in left], [(Path(dump.source), reason) for dump in earlier]
    return list(dumps), []


def _contradiction(dump: Dump, votes: Mapping[str, Counter[tuple[int, ...]]], margin: int) -> str:
    """Return why a dump cannot be of the same run as the others; empty if it can.

    Args:
        votes: for each group, the number of dumps that name each list of members.
        margin: by how many dumps another list of members must exceed this dump's own list.
    """
    for name, (_, ranks) in dump.members.items():
        for other, count in votes[name].items():
            if other != ranks and count >= votes[name][ranks] + margin and not set(other).isdisjoint(ranks):
                return f"names other members of group {name} than {count} other dump{'s' * (count > 1)}: of another run"
        if dump.rank not in ranks and any(entry.group[0] == name for entry in dump.entries):
            return f"says rank {dump.rank} by its name, which is not in its group {name}"
    for entry in dump.entries:
        pair = _PAIR.search(entry.kind)
        ranks = dump.members[entry.group[0]][1] if entry.group[0] in dump.members else ()
        if pair and ranks:
            ends = [int(number) for number in pair.groups() if number is not None]
            if max(ends) >= len(ranks) or dump.rank not in (ranks[ends[0]], ranks[ends[1]]):
                return f"has {entry.kind} in group {entry.group[0]} of {len(ranks)} ranks, as rank {dump.rank}"
    return ""


def damaged_ranks(dumps: Sequence[Dump], skipped: Iterable[tuple[Path, str]]) -> dict[int, str]:
    """Return the ranks whose file is unusable, with the reason; only files named like the good dumps count."""
    families = {dump.family for dump in dumps}
    ranks = {dump.rank for dump in dumps}
    known = {rank for dump in dumps for _, members in dump.members.values() for rank in members}
    damaged: dict[int, str] = {}
    for path, reason in skipped:
        match = _RANK.search(path.name)
        if match is None or _split_name(path) not in families:
            continue
        rank = int(match[1])
        if rank not in ranks and (not known or rank in known):
            damaged[rank] = f"{path} {reason}"
    return damaged


def join(dumps: Iterable[Dump], world_size: int | None, damaged: Mapping[int, str] | None = None) -> Evidence:
    """Combine the dumps of a job, one a rank and of one run (see `select`), as evidence.

    Args:
        world_size: ranks of the job, where it is known.
        damaged: ranks whose dump cannot be used, with the reason.

    Raises:
        ValueError: a rank is not below `world_size`.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    lists = {id(ranks): ranks for dump in by_rank.values() for _, ranks in dump.members.values()}
    known = {rank for ranks in lists.values() for rank in ranks} | set(by_rank) | set(damaged or ())
    if world_size is not None and max(known) >= world_size:
        raise ValueError(f"rank {max(known)} is there, but --world-size is {world_size}")
    world = range(world_size if world_size is not None else max(known) + 1)
    launched_by = defaultdict(set)
    for dump in by_rank.values():
        for entry in dump.entries:
            launched_by[entry.group].add(dump.rank)
    groups: dict[str, Group] = {}
    logs = {rank: RankLog(rank, dump.source, whole=dump.whole) for rank, dump in by_rank.items()}
    for rank, dump in by_rank.items():
        for entry in dump.entries:
            group = _group_of(entry, dump, launched_by, world)
            groups.setdefault(group.key, group)
            of_group = logs[rank].launches.setdefault(group.key, {})
            # torch numbers sends and receives over the whole group, we number them for each pair and direction.
            seq = len(of_group) + 1 if group.sender is not None else entry.seq
            of_group[seq] = replace(entry.launch, seq=seq)
    blind_spot = _unrecorded(by_rank.values())
    return Evidence(groups, dict(sorted(logs.items())), world, damaged or {}, blind_spot)


def _unrecorded(dumps: Iterable[Dump]) -> str:
    """Return what these dumps cannot show, as a sentence; empty unless all are of gloo. See [Note: gloo]."""
    entries = [entry for dump in dumps for entry in dump.entries]
    if not entries or any(entry.backend != "gloo" for entry in entries):
        return ""
    count = max(entry.num_unrecorded for entry in entries)
    at_least = f" (one rank has done at least {count})" if count else ""
    return f"gloo's dumps hold no send and no receive{at_least}: who waits in one is not seen"


def _group_of(
    entry: _Entry, dump: Dump, launched_by: Mapping[tuple[str, str], set[int]], world: Sequence[int]
) -> Group:
    name, description = entry.group
    if name in dump.members:
        description, ranks = dump.members[name]
    else:
        ranks = tuple(world) if description == "default_pg" else tuple(sorted(launched_by[entry.group]))
    nameless = description in ("", "undefined")
    display = name if nameless else f"{name}:{description}"
    role = f"{name if nameless else description}/{len(ranks)}"
    key = f"{name}@{ranks[0]}-{ranks[-1]}/{len(ranks)}"  # groups of one name have no rank in common
    pair = _PAIR.search(entry.kind)
    if pair is None:
        return Group(key, display, role, ranks)
    src, dst = (int(pair["src"] or pair["of"] or 0), int(pair["dst"] or pair["to"] or 0))
    if max(src, dst) >= len(ranks):  # the member list is incomplete: gloo, or a dump without pg_config
        return Group(key, display, role, ranks)
    ends = (ranks[src], ranks[dst])
    name = f"{display} {ends[0]}->{ends[1]}"
    return Group(f"{key}/{src}->{dst}", name, f"{role}/{src}->{dst}", tuple(sorted(ends)), ends[0])


def _merge(entries: Sequence[_Entry]) -> list[_Entry]:
    """Merge coalesced collectives to one entry, and copy the final state to sends and receives: [Note: coalesced]."""
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
        inputs=tuple(chain.from_iterable(launch.inputs for launch in launches)),
        outputs=tuple(chain.from_iterable(launch.outputs for launch in launches)),
        input_dtypes=tuple(chain.from_iterable(launch.input_dtypes for launch in launches)),
        output_dtypes=tuple(chain.from_iterable(launch.output_dtypes for launch in launches)),
    )
    return replace(parts[0], launch=joined)


def _parse(tree: Mapping[str, Any], rank: int, source: str) -> Dump:
    config = _typed(tree.get("pg_config", {}), dict, "pg_config")
    raw = _typed(tree.get("entries", []), list, "entries")
    if len(raw) > _MAX_ENTRIES or len(config) > _MAX_GROUPS:
        raise ValueError(f"{len(raw):,} entries and {len(config):,} groups: more than any dump")
    entries, num_shapes = [], 0
    for order, one in enumerate(raw):
        num_shapes += _num_shapes(one)
        if num_shapes > _MAX_SHAPES:
            raise ValueError("more tensors than any dump")
        entries.append(_entry(one, order))
    whole = not raw or raw[0].get("record_id", 0) == 0
    members: dict[str, tuple[str, tuple[int, ...]]] = {}
    num_members = 0
    for name, one in config.items():
        group = _members(name, one)
        num_members += len(group[1])
        if num_members > _MAX_MEMBERS:
            raise ValueError("more members of groups than any dump")
        if group[1]:
            members[name] = group
    return Dump(rank, source, whole, members, _merge(_retired(entries)))


def _num_shapes(raw: Any) -> int:
    """Count the dimensions of all shapes of an unchecked entry, to bound the work before parsing."""
    if not isinstance(raw, dict):
        return 0
    sides = [raw.get(key) for key in ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")]
    shapes = [side for side in sides if isinstance(side, list)]
    if (count := sum(map(len, shapes))) > _MAX_SHAPES:
        return count
    return sum(len(shape) if isinstance(shape, list) else 1 for side in shapes for shape in side)


def _retired(entries: Sequence[_Entry]) -> list[_Entry]:
    """Mark gloo collectives as complete if a later one of their group is: [Note: gloo]."""
    newest = {entry.group: entry.seq for entry in entries if entry.backend == "gloo" and entry.launch.done}
    return [
        replace(entry, launch=replace(entry.launch, done=True))
        if not entry.launch.done and entry.backend == "gloo" and entry.seq < newest.get(entry.group, 0)
        else entry
        for entry in entries
    ]


def _split_name(path: Path) -> tuple[Path, str, str] | None:
    """Split a path in folder, name before the rank and name after it; None if the name has no rank."""
    match = _RANK.search(path.name)
    return (path.parent, path.name[: match.start(1)], path.name[match.end(1) :]) if match else None


def _entry(raw: Any, order: int) -> _Entry:
    """Parse one entry of a flight recorder's dump.

    Args:
        order: its place among the entries.

    Raises:
        ValueError: it lacks a field, or one is of another type.
    """
    _typed(raw, dict, "an entry")
    backend, _, kind = _get(raw, "profiling_name", str).partition(":")
    pair = raw.get("process_group")
    good = isinstance(pair, tuple | list) and len(pair) == 2
    if not good or not all(isinstance(part, str) and len(part) <= _MAX_NAME for part in pair):
        raise ValueError(f"entry {order}: process_group is no pair of name and description")
    is_p2p = bool(raw.get("is_p2p", kind.startswith(("send", "recv"))))
    seq = _get(raw, "p2p_seq_id" if is_p2p else "collective_seq_id", int)
    state = _get(raw, "state", str)
    launch = Launch(
        seq=seq,
        kind=kind.partition(" ")[0],
        order=order,
        # gloo records only the end of a collective, as `retired`.
        done=state == "completed" or (backend == "gloo" and raw.get("retired") is True),
        inputs=_sizes(raw, "input_sizes"),
        outputs=_sizes(raw, "output_sizes"),
        input_dtypes=_texts(raw, "input_dtypes"),
        output_dtypes=_texts(raw, "output_dtypes"),
        created_ns=_typed(raw.get("time_created_ns") or 0, int, "time_created_ns"),
        place=_place(raw.get("frames")),
        recorded=seq,
        started=state == "started",
    )
    op_id = raw.get("op_id")
    blind_spot = op_id - seq if backend == "gloo" and type(op_id) is int and not is_p2p else 0
    return _Entry((pair[0], pair[1]), seq, kind, is_p2p, launch, backend, max(0, blind_spot))


def _members(name: Any, raw: Any) -> tuple[str, tuple[int, ...]]:
    """Return description and ranks of a group of pg_config, where ranks are written as the text of a list."""
    _typed(name, str, "a group's name")
    text = _get(_typed(raw, dict, "a group of pg_config"), "ranks", str)
    ranks = _ranks(text)
    if ranks is None:
        raise ValueError(f"pg_config: ranks of group {name!r} are no list of ranks")
    return _get(raw, "desc", str), ranks


@functools.lru_cache(maxsize=4096)
def _ranks(text: str) -> tuple[int, ...] | None:
    """Parse `[0, 1, 2]`; None if invalid. Cached, since every dump of a large job has the same long lists."""
    if len(text) > _MAX_TEXT or _RANK_LIST.fullmatch(text) is None:
        return None
    ranks = tuple(int(number) for number in re.findall(r"\d+", text))
    return ranks if len(set(ranks)) == len(ranks) and max(ranks, default=0) < _MOST_RANKS else None


def _place(frames: Any) -> str:
    """Return the innermost frame outside the standard library and packages: `train.py:88 in step`."""
    if not isinstance(frames, list):
        return ""
    for frame in frames[:_MAX_FRAMES]:
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
    if not all(isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS for shape in shapes):
        raise ValueError(f"{key} are no shapes")
    if not all(type(length) is int and 0 <= length < _MAX_INT for shape in shapes for length in shape):
        raise ValueError(f"{key} are no lists of lengths")
    return tuple(tuple(shape) for shape in shapes)


def _texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    texts = _typed(raw.get(key, []), list, key)
    if not all(isinstance(text, str) and len(text) <= _MAX_NAME for text in texts):
        raise ValueError(f"{key} are no names")
    return tuple(texts)


def _get(raw: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    if key not in raw:
        raise ValueError(f"{key} is missing")
    return _typed(raw[key], kind, key)


def _typed(value: Any, kind: type[_T], what: str) -> _T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    if isinstance(value, int) and not -_MAX_INT <= value < _MAX_INT:
        raise ValueError(f"{what} has more than 64 bits")
    if isinstance(value, str) and len(value) > (_MAX_TEXT if what == "ranks" else _MAX_NAME):
        raise ValueError(f"{what} has {len(value):,} letters")
    return value
