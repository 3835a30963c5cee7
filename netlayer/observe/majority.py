"""Which rank differs from the others: in what it launched under one number, or in the order of two launches."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from netlayer.layout import describe_ranks
from netlayer.observe.evidence import Evidence, Group, Launch, Signature

_NEVER = 1 << 62

Aligned = Mapping[int, Mapping[int, Launch]]
"""Launches by rank and number, as `blame.align` gives them."""


@dataclass(frozen=True)
class Mismatch:
    """The first number under which the ranks of a group launched different things.

    Args:
        number: of the launches.
        launches: by rank.
        culprits: ranks that differ from the majority; where `certain` is False, all that differ from each other.
        certain: whether there is a majority.
    """

    number: int
    launches: Mapping[int, Launch]
    culprits: tuple[int, ...]
    certain: bool

    def line(self, group: Group) -> str:
        """What happened, for a person."""
        versions: dict[str, list[int]] = defaultdict(list)
        for rank, launch in self.launches.items():
            if rank in self.culprits:
                place = f" at {launch.place}" if launch.place else ""
                versions[f"{launch}{place}"].append(rank)
        said = ", ".join(f"{describe_ranks(ranks)} launched {what}" for what, ranks in versions.items())
        if not self.certain:
            return f"in {group} {said}: they differ, and nothing tells which is wrong"
        right = [rank for rank in self.launches if rank not in self.culprits]
        first = self.launches[right[0]] if right else None
        if first is None:  # the only other ranks have not come to it; those of other groups have
            return f"in {group} {said}: groups of the same role launched something else"
        words = first.signature.difference(self.launches[self.culprits[0]].signature)
        return f"{said} in {group}, where {describe_ranks(right)} launched {first}: another {words}"


def find_mismatch(aligned: Aligned, siblings: Iterable[Aligned]) -> Mismatch | None:
    """The first difference among launches that are not complete on all ranks; None where there is none.

    Args:
        aligned: launches of a group.
        siblings: those of groups of the same role, which decide where the group itself is even.
    """
    open_numbers = {number for of_rank in aligned.values() for number, launch in of_rank.items() if not launch.done}
    for number in sorted(open_numbers):
        launches = {rank: of_rank[number] for rank, of_rank in aligned.items() if number in of_rank}
        votes = Counter(launch.signature for launch in launches.values())
        if len(votes) > 1:
            right = _winner(votes, siblings, {launch.counterpart for launch in launches.values()})
            culprits = tuple(rank for rank, launch in launches.items() if launch.signature != right)
            return Mismatch(number, launches, culprits, right is not None)
    return None


def out_of_order(
    evidence: Evidence,
    circle: Iterable[int],
    held: Mapping[int, Sequence[tuple[Group, Launch]]],
    waits: Mapping[int, tuple[Group, Launch]],
) -> tuple[list[int], str]:
    """Of ranks that wait for each other, those that launched two collectives the other way round than most ranks.

    Args:
        evidence: of the job.
        circle: the ranks.
        held: by rank, launches of others that wait for it.
        waits: by rank, the launch of its own in which it waits.

    Returns:
        The ranks, and in words what they should have launched first; no rank where there is no majority.
    """
    orders = {rank: _order_by_role(evidence, rank) for rank in evidence.ranks}
    roles = {rank: {group.role for group in evidence.groups.values() if rank in group.ranks} for rank in orders}
    found: dict[int, str] = {}
    for rank in circle:
        group, launch = waits[rank]
        early = (group.role, launch.seq)
        for other_group, other in held[rank]:
            late = (other_group.role, other.seq)
            voters = [peer for peer in orders if peer != rank and {early[0], late[0]} <= roles[peer]]
            votes = [_comes_first(orders[peer], early, late) for peer in voters]
            if votes.count(False) > 1 + votes.count(True):  # its own vote counts
                found[rank] = f"{other} of {other_group}"
    return sorted(found), next(iter(found.values()), "")


@dataclass(frozen=True)
class Crossed:
    """Collectives of several groups that ranks launched in orders which hold each other up.

    Args:
        keys: of the groups.
        culprits: ranks whose order is not that of most; where `certain` is False, those of either order.
        certain: whether there is a majority, and the same one as in the rounds before.
        line: what happened, for a person.
    """

    keys: tuple[str, ...]
    culprits: tuple[int, ...]
    certain: bool
    line: str


def crossed_launches(evidence: Evidence, aligned: Mapping[str, Aligned], heads: Mapping[str, int]) -> Crossed | None:
    """The shortest circle among the first open collectives: each stands behind the next one on some rank.

    Nothing is said of two that are both known to run on a rank, nor of sends and receives that run as one batch: there
    the order of launch holds up neither.

    Args:
        aligned: launches of each group.
        heads: by group that stands still: its first number that is not complete on some rank.
    """
    # Who launched the head of one group before that of another, by the pair of keys.
    before: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in evidence.ranks:
        opened = [
            (launches[rank][heads[key]], key)
            for key in heads
            if rank in (launches := aligned[key])
            and heads[key] in launches[rank]
            and not launches[rank][heads[key]].done
        ]
        opened.sort(key=lambda pair: pair[0].order)
        for position, (early, first) in enumerate(opened):
            for late, second in opened[position + 1 :]:
                as_one = early.recorded == late.recorded and {early.kind, late.kind} <= {"send", "recv"}
                if early.order < late.order and not as_one and not (early.started and late.started):
                    before[first][second].append(rank)
    circle = _shortest_circle(before)
    if circle is None:
        return None
    steps = list(zip(circle, (*circle[1:], circle[0]), strict=True))
    ranks_of = [tuple(before[one][other]) for one, other in steps]
    parts = []
    for (one, other), ranks in zip(steps, ranks_of, strict=True):
        pair = [(aligned[key][ranks[0]][heads[key]], key) for key in (one, other)]
        names = [f"{launch.kind} #{launch.seq} of {evidence.groups[key]}" for launch, key in pair]
        parts.append(f"{describe_ranks(ranks)} launched {names[0]} before {names[1]}")
    sides, everyone = ranks_of, sorted({rank for ranks in ranks_of for rank in ranks})
    culprits, certain, why = everyone, False, ""
    if len(circle) == 2:
        culprits, certain, why = _minority(evidence, steps[0], heads, sides)
    joined = ", but ".join(parts) if len(parts) == 2 else ", ".join(parts)
    order = "another order than most" if certain else "different orders"
    line = f"{describe_ranks(culprits)} launched {len(circle)} groups in {order}: {joined}; "
    line += f"each holds up the {'other' if len(parts) == 2 else 'next'}{why}"
    return Crossed(tuple(circle), tuple(culprits), certain, line)


def _minority(
    evidence: Evidence, pair: tuple[str, str], heads: Mapping[str, int], sides: Sequence[tuple[int, ...]]
) -> tuple[list[int], bool, str]:
    """Of two orders the one that fewer ranks have, with those that do the same work in other groups; and what is said.

    Where the rounds before were launched in the order of the fewer, the many may as well have changed theirs.
    """
    roles = [evidence.groups[key].role for key in pair]
    now = ((roles[0], heads[pair[0]]), (roles[1], heads[pair[1]]))
    votes: dict[bool, list[int]] = {True: [], False: []}
    history: Counter[bool] = Counter()
    for rank in evidence.ranks:
        order = _order_by_role(evidence, rank)
        if not all(place in order for place in now):
            continue
        votes[order[now[0]] < order[now[1]]].append(rank)
        for back in range(1, min(now[0][1], now[1][1])):
            earlier = [order.get((role, number - back)) for role, number in now]
            if None not in earlier:
                history[earlier[0] < earlier[1]] += 1  # type: ignore[operator]
    minority = len(votes[True]) < len(votes[False])
    few, many = votes[minority], votes[not minority]
    both = sorted({rank for ranks in sides for rank in ranks})
    why = ""
    if alike := sorted(set(many) - set(both)):
        why = f"; {describe_ranks(alike)} launched theirs as {describe_ranks(sides[minority])} did"
    if history[True] != history[False]:
        usual = history[True] > history[False]
        why += f"; in the rounds before all launched them as {describe_ranks(sides[not usual])} did"
    if len(many) < len(few) + 2 or history[minority] > history[not minority]:
        return both, False, why
    culprits = sorted(set(few) & set(both))
    return (culprits, True, why) if culprits else (both, False, why)


def _shortest_circle(before: Mapping[str, Mapping[str, Sequence[int]]]) -> list[str] | None:
    """Nodes of a shortest directed circle; None where there is none."""
    edges = {node: set(others) for node, others in before.items()}
    while True:  # whatever leads nowhere is in no circle
        ends = {other for others in edges.values() for other in others} - edges.keys()
        if not ends:
            break
        edges = {node: kept for node, others in edges.items() if (kept := others - ends)}
    circles: list[list[str]] = []
    for start in edges:
        paths, queue = {start: [start]}, deque([start])
        while queue and start not in edges[queue[0]]:
            node = queue.popleft()
            for other in sorted(edges[node] - paths.keys()):
                paths[other] = [*paths[node], other]
                queue.append(other)
        if queue:
            circles.append(paths[queue[0]])
            if len(circles[-1]) == 2:
                break
    return min(circles, key=len, default=None)


def _winner(votes: Counter[Signature], siblings: Iterable[Aligned], places: set[tuple[str, int]]) -> Signature | None:
    """The version that most ranks have; among equals, that which most ranks of the other groups have."""
    most = max(votes.values())
    best = [signature for signature, count in votes.items() if count == most]
    if len(best) == 1:
        return best[0]
    launches = (launch for one in siblings for of_rank in one.values() for launch in of_rank.values())
    elsewhere = Counter(launch.signature for launch in launches if launch.counterpart in places)
    counts = sorted(((elsewhere[signature], position) for position, signature in enumerate(best)), reverse=True)
    return best[counts[0][1]] if counts[0][0] > counts[1][0] else None


def _order_by_role(evidence: Evidence, rank: int) -> dict[tuple[str, int], int]:
    """When a rank launched what, by role of the group and number."""
    return {
        (evidence.groups[key].role, launch.seq): launch.order
        for key, launches in evidence.ranks[rank].launches.items()
        for launch in launches.values()
    }


def _comes_first(order: Mapping[tuple[str, int], int], one: tuple[str, int], other: tuple[str, int]) -> bool | None:
    """Whether a rank launched `one` before `other`; None where it launched neither, or nobody wrote down when."""
    when, then = order.get(one, _NEVER), order.get(other, _NEVER)
    return None if when == then else when < then
