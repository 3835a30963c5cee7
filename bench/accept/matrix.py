"""Which node or which link of a matrix of pairs is slow: what is common to a node's pairs is the node's.

Each value is held against the median of all, as a logarithm, so that one link may be slow by any factor; a node's score
is the median over its links in the worse direction, a link's what remains of it without its nodes. From four nodes on.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeVar

from netlayer.verdict import MIN_PEERS, Peers, Verdict, peers_of

Key = TypeVar("Key")
Directed = Mapping[tuple[int, int], float]
"""From one node to another: a value that should be high."""


_LEAST_LINKS = 2


class Score(NamedTuple):
    """How a node or link stands: `share` of what its peers reach."""

    verdict: Verdict
    share: float
    peers: Peers


class MatrixScores(NamedTuple):
    nodes: dict[int, Score]
    links: dict[tuple[int, int], Score]


def judge_matrix(values: Directed, least_ratio: float = 1.0) -> MatrixScores | None:
    """Scores of every node and every directed link; None where there are too few nodes.

    Args:
        values: from each node to each other.
        least_ratio: times slower than its peers that one must be to be accused, whatever they scatter.
    """
    names = {end for pair in values for end in pair}
    known = {pair: value for pair, value in values.items() if value > 0}
    if len(names) < MIN_PEERS or not known:
        return None
    middle = statistics.median(known.values())
    of_nodes, rest = split_matrix({pair: math.log(value / middle) for pair, value in known.items()})
    return MatrixScores(judge_logs(of_nodes, least_ratio), judge_logs(rest, least_ratio))


def split_matrix(logs: Directed) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """What is each node's, and what is left of each link without its two nodes; values are logarithms.

    A node's is the middle one of its links, in the worse direction. Of two links it is the better one, for slow is a
    node whose links all are; of one, nothing is the node's.
    """
    names = sorted({end for pair in logs for end in pair})
    sent = {name: _middle([log for (src, _), log in logs.items() if src == name]) for name in names}
    received = {name: _middle([log for (_, dst), log in logs.items() if dst == name]) for name in names}
    of_nodes = {name: min(sent[name], received[name]) for name in names}
    return of_nodes, {(src, dst): log - min(sent[src], received[dst]) for (src, dst), log in logs.items()}


def judge_logs(logs: Mapping[Key, float], least_ratio: float = 1.0) -> dict[Key, Score]:
    """Each logarithm held against all of them."""
    # Around one, where a share of the median is a share of the value.
    peers = peers_of(1 + log for log in logs.values())
    found = {}
    for key, log in logs.items():
        share = math.exp(log - (peers.median - 1))
        found[key] = Score("PASS" if share * least_ratio > 1 else peers.judge(1 + log), share, peers)
    return found


def find_ends(pairs: Collection[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Who is to blame where pairs failed: the end of most of them that failed with several others; else both ends.

    Returns:
        one node, or the two of a link, with the directed pairs that they explain.
    """
    left = set(pairs)
    while left:
        others: dict[int, set[int]] = defaultdict(set)
        for src, dst in left:
            others[src].add(dst)
            others[dst].add(src)
        worst = max(sorted(others), key=lambda end: len(others[end]))
        link = {worst, *others[worst]}
        explained = {pair for pair in left if worst in pair}
        yield (worst,) if len(link) > 2 else tuple(sorted(link)), sorted(explained)
        left -= explained


def _middle(logs: list[float]) -> float:
    """Of the links of a node in one direction."""
    if len(logs) < _LEAST_LINKS:
        return 0.0
    return statistics.median(logs) if len(logs) > _LEAST_LINKS else max(logs)
