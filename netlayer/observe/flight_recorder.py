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
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from netlayer.layout import describe_ranks
from netlayer.observe.evidence import TOGETHER, Evidence, Group, Launch, RankLog, family

_T = TypeVar("_T")
_Family = tuple[Path, str, str]
_GroupKey = tuple[str, str, tuple[int, ...]]
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

    @functools.cached_property
    def first_ns(self) -> int:
        """Time of the first launch that it holds, by the host's clock; 0: of none it is known."""
        return min((entry.launch.created_ns for entry in self.entries if entry.launch.created_ns), default=0)

    @functools.cached_property
    def last_ns(self) -> int:
        """Time of its last launch, likewise."""
        return max((entry.launch.created_ns for entry in self.entries), default=0)

    @functools.cached_property
    def by_group(self) -> Mapping[_GroupKey, Sequence[_Entry]]:
        """Entries by name, description and members of their group."""
        by_name: dict[tuple[str, str], list[_Entry]] = defaultdict(list)
        for entry in self.entries:
            by_name[entry.group].append(entry)
        return {(*name, self.members.get(name[0], ("", ()))[1]): entries for name, entries in by_name.items()}

    @property
    def family(self) -> _Family:
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
    if _RANK.search(path.name) is None:
        raise ValueError("is a Flight Recorder dump whose file name ends in no rank (name it <prefix>_<rank>)")
    rank = _rank_of(path)
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


class Selection(NamedTuple):
    """Dumps of one run, one a rank."""

    dumps: list[Dump]
    skipped: list[tuple[Path, str]]
    """Path and reason of each dump that is not used."""
    doubt: str
    """Reason why the run in question may be another one; empty if nothing speaks for it."""


def select(dumps: Sequence[Dump]) -> Selection:
    """Select the dumps of one run.

    Not of one run are dumps that launched minutes apart what all launch together, two dumps of one rank, and dumps that
    differ in the members of a group: the ones that agree with most others are used, and nothing is said of the rest.

    Raises:
        ValueError: neither run has more than half of the dumps.
    """
    chosen, skipped, doubt = _of_one_time(dumps)
    chosen, rivals = _one_a_rank(chosen)
    skipped += rivals
    # First drop dumps that a majority contradicts: they may be the only ones to contradict a dump of a small group.
    for margin in (1, 0):
        votes = _votes(chosen)
        reasons = {dump.rank: _contradiction(dump, votes, margin) for dump in chosen}
        skipped += [(Path(dump.source), reasons[dump.rank]) for dump in chosen if reasons[dump.rank]]
        chosen = [dump for dump in chosen if not reasons[dump.rank]]
    if not chosen:
        raise ValueError(f"{skipped[-1][0]} {skipped[-1][1]}")
    return Selection(sorted(chosen, key=lambda dump: dump.rank), skipped, doubt)


def _votes(dumps: Iterable[Dump]) -> dict[str, Counter[tuple[int, ...]]]:
    """Count the dumps that name each list of members, for each group."""
    votes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for dump in dumps:
        for name, (_, ranks) in dump.members.items():
            votes[name][ranks] += 1
    return votes


class _Reach:
    """Progress of dumps in one group: what tells whether others can be of the same run."""

    def __init__(self) -> None:
        self.least = _MAX_INT  # lowest of the last numbers of each dump
        self.ended = 0  # highest number of a collective that ended, and so was launched by all
        self.passed: set[int] = set()  # numbers after which a dump launched another
        self.from_start = False  # a dump holds all its launches, from the first

    def add(self, dump: Dump, launched: Sequence[_Entry]) -> None:
        """Count in the launches of one dump in the group."""
        self.from_start |= dump.whole
        if not (numbers := {entry.seq for entry in launched if not entry.is_p2p}):
            return
        ended = [entry.seq for entry in launched if entry.launch.done and family(entry.launch.kind) in TOGETHER]
        self.least, self.ended = min(self.least, max(numbers)), max([self.ended, *ended])
        self.passed |= numbers - {max(numbers)}


class _Part:
    """Dumps of one span of time that launched something in a common group, directly or over others."""

    def __init__(self, dumps: list[Dump], groups: set[_GroupKey]) -> None:
        self.dumps, self.groups = dumps, groups

    @functools.cached_property
    def reach(self) -> Mapping[_GroupKey, _Reach]:
        """Progress by group."""
        reach: dict[_GroupKey, _Reach] = defaultdict(_Reach)
        for dump in self.dumps:
            for key, launched in dump.by_group.items():
                reach[key].add(dump, launched)
        return reach

    def excludes(self, later: _Part) -> bool:
        """Return True if this part, which ends minutes before the later one begins, is not of the same moment.

        Ranks that launch nothing together may pause for minutes while others run: replicas, or those that make samples
        for a training. And a rank that hangs ends before what the others' buffers still hold.
        """
        if not {dump.rank for dump in self.dumps}.isdisjoint(dump.rank for dump in later.dumps):
            return True
        for key in self.groups & later.groups:
            one, other = self.reach[key], later.reach[key]
            if other.from_start or one.ended > other.least or other.ended > one.least or one.passed & other.passed:
                return True
        return False


def _of_one_time(dumps: Sequence[Dump]) -> tuple[list[Dump], list[tuple[Path, str]], str]:
    """Return the dumps of one time, path and reason of each other one, and the doubt if some of these are later.

    A rank that died and left no dump has that of the run before in its place; and clocks of hosts may differ.

    Raises:
        ValueError: no more than half of the dumps are of one time.
    """
    spans = sorted(_spans(dumps), key=len, reverse=True)
    reasons: dict[int, str] = {}  # by the dump's id
    later: set[int] = set()
    rule = ""
    for larger, smaller in combinations(spans, 2):
        early, late = sorted((larger, smaller), key=lambda span: span[0].first_ns)
        minutes = f"{(late[0].first_ns - max(dump.last_ns for dump in early)) / 60e9:.0f} min"
        sides = [(smaller, larger), (larger, smaller)][: 2 if len(larger) == len(smaller) else 1]
        excluded = [
            (one, span is late, other)
            for span, other in sides
            for one in _excluded(span, [dump for dump in other if id(dump) not in reasons], is_later=span is late)
        ]
        for one, is_later, other in excluded:
            count = f"{len(other)} other{'s' * (len(other) > 1)}"
            where = f"ends {minutes} before the dumps of {count} begin: of an earlier run"
            if is_later:
                where = f"begins {minutes} after the dumps of {count} end: of a later run"
                later.add(one.rank)
            reasons.setdefault(id(one), f"{where}, or of a host with another clock")
        if excluded and not rule:
            ranks = [describe_ranks(sorted({dump.rank for dump in span})) for span in (early, late)]
            rule = f"the dumps of {ranks[0]} end {minutes} before those of {ranks[1]} begin: they are of two runs"
    num_timed = sum(map(len, spans))
    if reasons and (2 * len(reasons) >= num_timed or (later and 2 * (num_timed - len(reasons)) <= len(dumps))):
        raise ValueError(f"{rule}, or clocks differ")
    doubt = f"unless the later dumps of {describe_ranks(sorted(later))} are of the run in question" if later else ""
    skipped = [(Path(dump.source), reasons[id(dump)]) for dump in dumps if id(dump) in reasons]
    return [dump for dump in dumps if id(dump) not in reasons], skipped, doubt


def _spans(dumps: Iterable[Dump]) -> list[list[Dump]]:
    """Return the dumps with times, split where none launched anything for minutes; in order of their first launches."""
    spans: list[list[Dump]] = []
    end_ns = -math.inf
    for dump in sorted((dump for dump in dumps if dump.last_ns), key=lambda dump: dump.first_ns):
        if dump.first_ns > end_ns + _RUNS_APART_NS:
            spans.append([])
        spans[-1].append(dump)
        end_ns = max(end_ns, dump.last_ns)
    return spans


def _excluded(span: Iterable[Dump], other: Iterable[Dump], *, is_later: bool) -> list[Dump]:
    """Return the dumps of one span of time that cannot be of the same moment as those of another one."""
    others = _parts(other)
    return [
        dump
        for part in _parts(span)
        if any(one.excludes(part) if is_later else part.excludes(one) for one in others)
        for dump in part.dumps
    ]


def _parts(dumps: Iterable[Dump]) -> list[_Part]:
    """Split dumps into parts that launched nothing together."""
    parts: list[tuple[list[Dump], set[_GroupKey]]] = []
    for dump in dumps:
        joined, groups = [dump], set(dump.by_group)
        apart = []
        for part in parts:
            if part[1].isdisjoint(groups):
                apart.append(part)
            else:
                joined, groups = [*part[0], *joined], part[1] | groups
        parts = [*apart, (joined, groups)]
    return [_Part(*part) for part in parts]


def _one_a_rank(dumps: Sequence[Dump]) -> tuple[list[Dump], list[tuple[Path, str]]]:
    """Return one dump a rank, and path and reason of each one that is not used.

    Raises:
        ValueError: of two dumps of one rank nothing tells which to use: see `_settle`.
    """
    sizes = Counter(dump.family for dump in dumps)
    by_rank: dict[int, Dump] = {}
    unused: list[tuple[Dump, str]] = []
    rivals: dict[tuple[_Family, _Family], list[tuple[Dump, Dump]]] = defaultdict(list)
    for dump in sorted(dumps, key=lambda dump: sizes[dump.family], reverse=True):
        other = by_rank.setdefault(dump.rank, dump)
        if other is dump:
            continue
        unused.append((dump, f"is of rank {dump.rank}, as {other.source} is"))
        if other.entries != dump.entries:
            rivals[other.family, dump.family].append((other, dump))
    for (larger, smaller), pairs in rivals.items():
        votes = _votes(dump for dump in dumps if dump.family != smaller)
        alone = [dump for dump in by_rank.values() if dump.family == smaller]
        unused += _settle(pairs, alone, votes, sizes[larger], sizes[smaller])
    reasons = {id(dump): (Path(dump.source), why) for dump, why in unused}
    return [dump for dump in by_rank.values() if id(dump) not in reasons], [*reasons.values()]


def _settle(
    pairs: Sequence[tuple[Dump, Dump]],
    alone: Sequence[Dump],
    votes: Mapping[str, Counter[tuple[int, ...]]],
    num_larger: int,
    num_smaller: int,
) -> list[tuple[Dump, str]]:
    """Return the dumps of two families that are not used, where they have two for a rank that differ.

    That of the larger family is used if the other family is shown to be of another run, or of another moment of this
    one. Else neither is.

    Args:
        pairs: dump of the larger and of the smaller family, by rank.
        alone: dumps of the smaller family whose rank is there once.
        votes: members of the groups by all other dumps.
        num_larger, num_smaller: number of dumps of the families.

    Raises:
        ValueError: both families have as many dumps, or they differ in half of the ranks.
    """
    other, dump = pairs[0]
    is_other_run = bool(alone) and all(_is_foreign(one) or _contradiction(one, votes, 1) for one in alone)
    is_moment = any(not _launches(one).isdisjoint(_launches(another)) for one, another in pairs)
    is_mostly_pairs = 2 * len(pairs) >= num_smaller
    is_settled = is_other_run or (is_moment and is_mostly_pairs)
    if num_larger == num_smaller or (not is_settled and 2 * len(pairs) >= num_larger):
        raise ValueError(f"{dump.source} and {other.source} are both of rank {dump.rank}")
    left = []
    for pair in () if is_settled else pairs:
        for one, another in (pair, pair[::-1]):
            why = f"differs from {another.source}, and nothing tells which is rank {one.rank}'s in this run"
            left.append((one, why))
    # Folders of hosts may hold one strange dump each; another name in the same folder is another run's.
    if is_other_run or is_mostly_pairs or dump.family[0] == other.family[0]:
        why = f"is of the run of {dump.source}, which is of rank {dump.rank} as {other.source}"
        left += [(one, why) for one in alone]
    return left


def _launches(dump: Dump) -> set[tuple[Any, ...]]:
    """Return what is equal in two dumps of one run and rank, and in no others: launches with their times."""
    timed = [entry for entry in dump.entries if entry.launch.created_ns]
    return {(entry.group, entry.is_p2p, entry.seq, entry.launch.created_ns) for entry in timed}


def _is_foreign(dump: Dump) -> bool:
    """Return True if the rank of the file's name is in no group of the dump."""
    return bool(dump.members) and all(dump.rank not in ranks for _, ranks in dump.members.values())


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


def damaged_ranks(
    dumps: Sequence[Dump], unreadable: Iterable[tuple[Path, str]], unused: Iterable[tuple[Path, str]] = ()
) -> dict[int, str]:
    """Return the ranks whose file cannot be used, with the reason: nobody knows whether they are well.

    Args:
        dumps: the dumps that are used.
        unreadable: path and reason of files that may be none; only those named like the dumps count.
        unused: path and reason of dumps that `select` left aside.
    """
    names = {dump.family[1:] for dump in dumps}
    ranks = {dump.rank for dump in dumps}
    known = {rank for dump in dumps for _, members in dump.members.values() for rank in members}
    damaged: dict[int, str] = {}
    for path, reason in unreadable:
        parts = _split_name(path)
        rank = _rank_of(path)
        if parts is not None and parts[1:] in names and rank not in ranks and (not known or rank in known):
            damaged[rank] = f"{path} {reason}"
    for path, reason in unused:
        rank = _rank_of(path)
        # A rank above all others is one of another job.
        if rank not in ranks and (not known or rank <= max(known)):
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


def _rank_of(path: Path) -> int:
    """Return the rank in a file's name; -1 if it has none."""
    match = _RANK.search(path.name)
    return int(match[1]) if match else -1


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
