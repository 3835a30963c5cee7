"""Separation of slow nodes from slow links in a matrix of pair measurements.

Values are logarithms relative to the median of all, so that a link may be slow by any factor. A node's score is the
median over its links in its worse direction; a link's score is the residual without its two nodes. Needs four nodes.
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
"""Value for each (source, destination); higher is better."""


_LEAST_LINKS = 2


class Score(NamedTuple):
    """Score of a node or link; `share` is its value divided by its peers'."""

    verdict: Verdict
    share: float
    peers: Peers


class MatrixScores(NamedTuple):
    nodes: dict[int, Score]
    links: dict[tuple[int, int], Score]


def judge_matrix(values: Directed, least_ratio: float = 1.0) -> MatrixScores | None:
    """Score every node and every directed link; None if there are too few nodes.

    Args:
        values: value from each node to each other.
        least_ratio: minimum slowdown relative to the peers for a verdict other than PASS, whatever the scatter.
    """
    names = {end for pair in values for end in pair}
    known = {pair: value for pair, value in values.items() if value > 0}
    if len(names) < MIN_PEERS or not known:
        return None
    middle = statistics.median(known.values())
    of_nodes, rest = split_matrix({pair: math.log(value / middle) for pair, value in known.items()})
    return MatrixScores(judge_logs(of_nodes, least_ratio), judge_logs(rest, least_ratio))


def split_matrix(logs: Directed) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """Split logarithms of link values in a score for each node and a residual for each link.

    A node's score is the median of its links, in its worse direction. With two links it is the better one, since a slow
    node makes all its links slow; with one link it is 0.
    """
    names = sorted({end for pair in logs for end in pair})
    send_score = {name: _node_score([log for (src, _), log in logs.items() if src == name]) for name in names}
    receive_score = {name: _node_score([log for (_, dst), log in logs.items() if dst == name]) for name in names}
    of_nodes = {name: min(send_score[name], receive_score[name]) for name in names}
    return of_nodes, {(src, dst): log - min(send_score[src], receive_score[dst]) for (src, dst), log in logs.items()}


def judge_logs(logs: Mapping[Key, float], least_ratio: float = 1.0) -> dict[Key, Score]:
    """Judge each logarithm relative to all of them."""
    # Shifted by 1, so that a share of the median is approximately a share of the value.
    peers = peers_of(1 + log for log in logs.values())
    scores = {}
    for key, log in logs.items():
        share = math.exp(log - (peers.median - 1))
        scores[key] = Score("PASS" if share * least_ratio > 1 else peers.judge(1 + log), share, peers)
    return scores


def find_ends(pairs: Collection[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Explain failed pairs by few culprits: the node in most of them if it failed with several others, else the link.

    Yields:
        One node, or the two ends of a link, with the directed pairs that they explain.
    """
    remaining = set(pairs)
    while remaining:
        others: dict[int, set[int]] = defaultdict(set)
        for src, dst in remaining:
            others[src].add(dst)
            others[dst].add(src)
        worst = max(sorted(others), key=lambda end: len(others[end]))
        link = {worst, *others[worst]}
        explained = {pair for pair in remaining if worst in pair}
        yield (worst,) if len(link) > 2 else tuple(sorted(link)), sorted(explained)
        remaining -= explained


def _node_score(logs: list[float]) -> float:
    """Return the score of a node from its links in one direction."""
    if len(logs) < _LEAST_LINKS:
        return 0.0
    return statistics.median(logs) if len(logs) > _LEAST_LINKS else max(logs)
