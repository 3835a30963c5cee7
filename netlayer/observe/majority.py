"""Majority votes: the ranks that launched a different collective than the others, or two of them in another order."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from netlayer.layout import describe_ranks
from netlayer.observe.evidence import Evidence, Group, Launch, Signature

_NEVER = 1 << 62

Aligned = Mapping[int, Mapping[int, Launch]]
"""Launches by rank and number, as `blame.align` returns them."""


@dataclass(frozen=True)
class Mismatch:
    """First sequence number at which the ranks of a group launched different collectives.

    Args:
        number: the sequence number.
        launches: the launch of each rank.
        culprits: ranks that differ from the majority; if `certain` is False, all ranks that differ from each other.
        certain: True if there is a majority.
    """

    number: int
    launches: Mapping[int, Launch]
    culprits: tuple[int, ...]
    certain: bool

    def line(self, group: Group) -> str:
        """Return a sentence that says which ranks launched what."""
        versions: dict[str, list[int]] = defaultdict(list)
        for rank, launch in self.launches.items():
            if rank in self.culprits:
                place = f" at {launch.place}" if launch.place else ""
                versions[f"{launch}{place}"].append(rank)
        launched = ", ".join(f"{describe_ranks(ranks)} launched {what}" for what, ranks in versions.items())
        if not self.certain:
            return f"in {group} {launched}: they differ, and nothing tells which is wrong"
        right = [rank for rank in self.launches if rank not in self.culprits]
        first = self.launches[right[0]] if right else None
        if first is None:  # the group's other ranks did not reach this number; ranks of other groups did
            return f"in {group} {launched}: groups of the same role launched something else"
        difference = first.signature.difference(self.launches[self.culprits[0]].signature)
        return f"{launched} in {group}, where {describe_ranks(right)} launched {first}: another {difference}"


def find_mismatch(aligned: Aligned, siblings: Iterable[Aligned]) -> Mismatch | None:
    """Find the first difference among launches that are not complete on all ranks; None if there is none.

    Args:
        aligned: launches of a group.
        siblings: launches of the groups of the same role, which decide a tie within the group.
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
    cycle: Iterable[int],
    waiting_launches: Mapping[int, Sequence[tuple[Group, Launch]]],
    own_launches: Mapping[int, tuple[Group, Launch]],
) -> tuple[list[int], str]:
    """Find the ranks of a wait cycle that launched two collectives in the reverse order of most ranks.

    Args:
        evidence: recorded launches of the job.
        cycle: ranks that wait for each other.
        waiting_launches: for each rank, the launches of other ranks that wait for it.
        own_launches: for each rank, its own launch in which it waits.

    Returns:
        The ranks, and the launch that they should have made first, as text; no ranks if there is no majority.
    """
    orders = {rank: _order_by_role(evidence, rank) for rank in evidence.ranks}
    roles = {rank: {group.role for group in evidence.groups.values() if rank in group.ranks} for rank in orders}
    culprits: dict[int, str] = {}
    for rank in cycle:
        group, launch = own_launches[rank]
        early = (group.role, launch.seq)
        for other_group, other in waiting_launches[rank]:
            late = (other_group.role, other.seq)
            voters = [peer for peer in orders if peer != rank and {early[0], late[0]} <= roles[peer]]
            votes = [_comes_first(orders[peer], early, late) for peer in voters]
            if votes.count(False) > 1 + votes.count(True):  # its own vote counts
                culprits[rank] = f"{other} of {other_group}"
    return sorted(culprits), next(iter(culprits.values()), "")


@dataclass(frozen=True)
class Crossed:
    """Deadlock of collectives of several groups that ranks launched in different orders.

    Args:
        keys: the groups' keys.
        culprits: ranks whose order differs from the majority; if `certain` is False, the ranks of all orders.
        certain: True if there is a majority, and earlier rounds had the same order.
        line: description in one sentence.
    """

    keys: tuple[str, ...]
    culprits: tuple[int, ...]
    certain: bool
    line: str


def crossed_launches(evidence: Evidence, aligned: Mapping[str, Aligned], heads: Mapping[str, int]) -> Crossed | None:
    """Find the shortest deadlock cycle among the first incomplete collectives: each is queued after the next one.

    Two collectives that both run on a rank's device already, and sends and receives of one batch, are not compared:
    there the launch order blocks neither.

    Args:
        aligned: launches of each group.
        heads: for each group that stands still, its first number that is not complete on some rank.
    """
    # Ranks that launched the head of one group before that of another, by the pair of keys.
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
    cycle = _shortest_cycle(before)
    if cycle is None:
        return None
    steps = list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    ranks_of = [tuple(before[one][other]) for one, other in steps]
    parts = []
    for (one, other), ranks in zip(steps, ranks_of, strict=True):
        pair = [(aligned[key][ranks[0]][heads[key]], key) for key in (one, other)]
        names = [f"{launch.kind} #{launch.seq} of {evidence.groups[key]}" for launch, key in pair]
        parts.append(f"{describe_ranks(ranks)} launched {names[0]} before {names[1]}")
    sides, everyone = ranks_of, sorted({rank for ranks in ranks_of for rank in ranks})
    culprits, certain, why = everyone, False, ""
    if len(cycle) == 2:
        culprits, certain, why = _minority(evidence, steps[0], heads, sides)
    joined = ", but ".join(parts) if len(parts) == 2 else ", ".join(parts)
    order = "another order than most" if certain else "different orders"
    line = f"{describe_ranks(culprits)} launched {len(cycle)} groups in {order}: {joined}; "
    line += f"each holds up the {'other' if len(parts) == 2 else 'next'}{why}"
    return Crossed(tuple(cycle), tuple(culprits), certain, line)


def _minority(
    evidence: Evidence, pair: tuple[str, str], heads: Mapping[str, int], sides: Sequence[tuple[int, ...]]
) -> tuple[list[int], bool, str]:
    """Decide which of two launch orders is wrong: the minority's, counting ranks of the same role in other groups.

    If earlier rounds were launched in the minority's order, the majority may be the one that changed, so nothing is
    decided.

    Returns:
        The culprits, True if they are certain, and an explanation for the message.
    """
    roles = [evidence.groups[key].role for key in pair]
    pair_now = ((roles[0], heads[pair[0]]), (roles[1], heads[pair[1]]))
    votes: dict[bool, list[int]] = {True: [], False: []}
    history: Counter[bool] = Counter()
    for rank in evidence.ranks:
        order = _order_by_role(evidence, rank)
        if not all(place in order for place in pair_now):
            continue
        votes[order[pair_now[0]] < order[pair_now[1]]].append(rank)
        for back in range(1, min(pair_now[0][1], pair_now[1][1])):
            earlier = [order.get((role, number - back)) for role, number in pair_now]
            if None not in earlier:
                history[earlier[0] < earlier[1]] += 1  # type: ignore[operator]
    minority = len(votes[True]) < len(votes[False])
    fewer_ranks, more_ranks = votes[minority], votes[not minority]
    both = sorted({rank for ranks in sides for rank in ranks})
    explanation = ""
    if alike := sorted(set(more_ranks) - set(both)):
        explanation = f"; {describe_ranks(alike)} launched theirs as {describe_ranks(sides[minority])} did"
    if history[True] != history[False]:
        usual = history[True] > history[False]
        explanation += f"; in the rounds before all launched them as {describe_ranks(sides[not usual])} did"
    if len(more_ranks) < len(fewer_ranks) + 2 or history[minority] > history[not minority]:
        return both, False, explanation
    culprits = sorted(set(fewer_ranks) & set(both))
    return (culprits, True, explanation) if culprits else (both, False, explanation)


def _shortest_cycle(before: Mapping[str, Mapping[str, Sequence[int]]]) -> list[str] | None:
    """Return the nodes of a shortest directed cycle; None if the graph has none."""
    edges = {node: set(others) for node, others in before.items()}
    while True:  # a node without outgoing edges is in no cycle
        ends = {other for others in edges.values() for other in others} - edges.keys()
        if not ends:
            break
        edges = {node: remaining for node, others in edges.items() if (remaining := others - ends)}
    cycles: list[list[str]] = []
    for start in edges:
        paths, queue = {start: [start]}, deque([start])
        while queue and start not in edges[queue[0]]:
            node = queue.popleft()
            for other in sorted(edges[node] - paths.keys()):
                paths[other] = [*paths[node], other]
                queue.append(other)
        if queue:
            cycles.append(paths[queue[0]])
            if len(cycles[-1]) == 2:
                break
    return min(cycles, key=len, default=None)


def _winner(votes: Counter[Signature], siblings: Iterable[Aligned], places: set[tuple[str, int]]) -> Signature | None:
    """Return the signature of most ranks; a tie is decided by the sibling groups. None if it remains a tie."""
    max_votes = max(votes.values())
    best = [signature for signature, count in votes.items() if count == max_votes]
    if len(best) == 1:
        return best[0]
    launches = (launch for one in siblings for of_rank in one.values() for launch in of_rank.values())
    elsewhere = Counter(launch.signature for launch in launches if launch.counterpart in places)
    counts = sorted(((elsewhere[signature], position) for position, signature in enumerate(best)), reverse=True)
    return best[counts[0][1]] if counts[0][0] > counts[1][0] else None


def _order_by_role(evidence: Evidence, rank: int) -> dict[tuple[str, int], int]:
    """Return the launch order of a rank's collectives, by role of the group and number."""
    return {
        (evidence.groups[key].role, launch.seq): launch.order
        for key, launches in evidence.ranks[rank].launches.items()
        for launch in launches.values()
    }


def _comes_first(order: Mapping[tuple[str, int], int], one: tuple[str, int], other: tuple[str, int]) -> bool | None:
    """Return True if a rank launched `one` before `other`; None if it launched neither, or the order is unknown."""
    when, then = order.get(one, _NEVER), order.get(other, _NEVER)
    return None if when == then else when < then
