"""Every pair of ranks, in rounds of disjoint pairs: data that came out wrong, nodes and links that are slow.

Where ranks share cores, what stands out is measured again, pair by pair in turn with good ones (`confirm`), before
anybody is accused; GPUs have series instead (`gpu_pairs`). Left out: what pairs of a round share (switches, uplinks).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.accept.confirm import MOST_CONTROLS, Evidence, confirm, inconclusive, open_of, state_of
from bench.accept.gpu_pairs import PHASE, Pair, measure_gpu_pairs, places
from bench.accept.matrix import MatrixScores, Score, find_ends, judge_matrix
from bench.accept.trial import CORRUPT, Say, Trial
from netlayer.verdict import MIN_PEERS, Finding

_SERIES = ("latency", "one way", "both ways")
_BATCHES = 3
_MOST_AGAIN = 24
_LEAST_GOOD = 3
_NODE = "run the pairs of {} over another port or NIC: where they stay slow, drain it; GEMM and copy tell of its GPU"
_INSIDE = "read nvidia-smi nvlink -s and -e, and nvidia-smi -q (PCIe width) of {}; its GEMM and copy tell of itself"
Times = dict[str, dict[Pair, list[float]]]
"""By series, and by who sends to whom: microseconds."""
Proof = Mapping[tuple[Pair, str], Evidence]
"""Of pairs that were tried again: by pair, the lower rank first, and direction."""


def measure_pairs(trial: Trial, say: Say) -> Mapping[tuple[int, int], float]:
    """All pairs of those alive. Returns the bandwidth from each to each, GB/s, for the heat map."""
    work = trial.work
    if not work.shared:
        return measure_gpu_pairs(trial, say, partial(_name_wrong, trial))
    times: Times = {series: defaultdict(list) for series in _SERIES}
    for batch in range(_BATCHES):
        say(batch, 4, "")
        rows = trial.together(PHASE, "pairs", work.pairs, [trial.alive], turns=False)
        _take(rows, times, work.time_us)
        if _name_wrong(trial, rows):
            break
    say(3, 4, "again: what stands out")
    scores = _scores(trial, times)
    suspects = _suspects(trial, scores)
    proof: Proof = {}
    if suspects:
        proof = _confirm(trial, scores, suspects)
        scores = {series: _proven(series, matrix, proof) for series, matrix in scores.items()}
    _conclude(trial, scores, proof)
    return {pair: work.pairs["bytes"] / work.combined(each) / 1e3 for pair, each in times["one way"].items()}


def _confirm(trial: Trial, scores: Mapping[str, MatrixScores], suspects: Sequence[Pair]) -> Proof:
    """The suspects in turns with the pairs that stand best; of these a few, though there be no others."""
    best = _best(scores)
    good = [pair for pair in best if pair not in suspects][:MOST_CONTROLS]
    good = good if len(good) >= _LEAST_GOOD else best[:_LEAST_GOOD]
    suspects = [pair for pair in suspects if pair not in good]

    def measure(order: Sequence[Pair]) -> dict[Pair, dict[str, float]]:
        args = {**trial.work.pairs, "budget_s": 0.4 * len(order), "only": order}
        found: dict[Pair, dict[str, float]] = defaultdict(dict)
        for row in trial.together(PHASE, "pairs", args, [trial.alive], turns=False):
            found[row["rank"], row["peer"]][row["direction"]] = trial.work.time_us(row)
        return found

    return confirm(suspects, good, measure, trial.work.least_ratio, trial.work.turn_s)


def _best(scores: Mapping[str, MatrixScores]) -> list[tuple[int, int]]:
    """All pairs, those first that stand best in their worst series."""
    worst: dict[tuple[int, int], float] = {}
    for matrix in scores.values():
        for (src, dst), score in matrix.links.items():
            pair = (min(src, dst), max(src, dst))
            share = min(score.share, matrix.nodes[src].share, matrix.nodes[dst].share)
            worst[pair] = min(worst.get(pair, share), share)
    return sorted(worst, key=lambda pair: -worst[pair])


def _proven(series: str, matrix: MatrixScores, proof: Proof) -> MatrixScores:
    """Faulty is a link that was slow again, and a node that stood out and most of whose links were; else it was chance.

    Pairs are faster alone than among others that use the same cores: the share of a link is that of the turns.
    """
    shares = {
        ends: 1 / evidence.ratio
        for (pair, direction), evidence in proof.items()
        if evidence.state == "slow"
        for name, ends in places(direction, *pair)
        if name == series
    }
    slow = {pair for pair, _ in proof if state_of(proof, pair) == "slow"}
    links = {
        ends: score._replace(verdict="FAIL" if ends in shares else "PASS", share=shares.get(ends, score.share))
        for ends, score in matrix.links.items()
    }
    nodes = {}
    for node, score in matrix.nodes.items():
        again = score.verdict != "PASS" and 2 * sum(node in pair for pair in slow) > len(matrix.nodes) - 1
        nodes[node] = score._replace(verdict="FAIL" if again else "PASS")
    return MatrixScores(nodes, links)


def _take(rows: Sequence[Mapping[str, Any]], times: Times, time_us: Callable[[Mapping[str, Any]], float]) -> None:
    for row in rows:
        for series, pair in places(row["direction"], row["rank"], row["peer"]):
            times[series][pair].append(time_us(row))


def _name_wrong(trial: Trial, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Accuse who sends wrong data, or the link on which it happens; whether anybody was."""
    wrong: dict[tuple[int, int], int] = {}
    for row in rows:
        if row["wrong"] and row["direction"] in ("low_to_high", "high_to_low"):
            low, high = row["rank"], row["peer"]
            wrong[(low, high) if row["direction"] == "low_to_high" else (high, low)] = row["wrong"]
    for ranks, pairs in find_ends(wrong):
        words = f"{sum(wrong[pair] for pair in pairs)} wrong bytes in {len(pairs)} directions"
        who = trial.label(ranks)
        step = trial.link_step(ranks) if len(ranks) == 2 else CORRUPT.format(who)
        finding = Finding("FAIL", who, "pairs data", words, "0 wrong", step, PHASE)
        # Of a link one end goes, so that the rest can go on.
        trial.accuse(PHASE, "link" if len(ranks) == 2 else "node", ranks, finding, set_aside=ranks[:1])
    return bool(wrong)


def _scores(trial: Trial, times: Times) -> dict[str, MatrixScores]:
    found = {}
    for series, by_pair in times.items():
        speeds = {
            pair: 1 / max(trial.work.combined(each), 1e-3)
            for pair, each in by_pair.items()
            if set(pair) <= set(trial.alive)
        }
        scores = judge_matrix(speeds, trial.work.least_ratio)
        if scores is not None:
            found[series] = scores
    return found


def _suspects(trial: Trial, scores: Mapping[str, MatrixScores]) -> list[tuple[int, int]]:
    """Pairs that stand out, and all of every node that does: those first that do so in most series."""
    found: Counter[tuple[int, int]] = Counter()
    for matrix in scores.values():
        for (src, dst), score in matrix.links.items():
            if score.verdict != "PASS":
                found[min(src, dst), max(src, dst)] += 1
        for node, score in matrix.nodes.items():
            if score.verdict != "PASS":
                others = [rank for rank in trial.alive if rank != node]
                found.update((min(node, other), max(node, other)) for other in others)
    return [pair for pair, _ in found.most_common(_MOST_AGAIN)]


def _conclude(trial: Trial, scores: Mapping[str, MatrixScores], proof: Proof) -> None:
    if not scores:
        if not any(row["phase"] == PHASE for row in trial.rows):  # why there are none is a finding already
            return
        words = f"{MIN_PEERS} nodes are needed to tell the odd one"
        trial.findings.append(Finding(None, trial.label(trial.alive), "pairs", "measured", words, "", PHASE))
        return
    named: set[tuple[int, ...]] = set()
    for series, matrix in scores.items():
        for node, score in sorted(matrix.nodes.items(), key=lambda item: item[1].share):
            if score.verdict != "PASS" and (node,) not in named:
                named.add((node,))
                _accuse(trial, series, "node", (node,), score, proof)
    for series, matrix in scores.items():
        for (src, dst), score in sorted(matrix.links.items(), key=lambda item: item[1].share):
            ends = (min(src, dst), max(src, dst))
            if score.verdict != "PASS" and ends not in named and not {(src,), (dst,)} & named:
                named.add(ends)
                _accuse(trial, series, "link", ends, score, proof)
    trial.findings += _of_the_rest(trial, scores, proof, named)


def _of_the_rest(
    trial: Trial, scores: Mapping[str, MatrixScores], proof: Proof, named: set[tuple[int, ...]]
) -> list[Finding]:  # fmt: skip
    """One finding where pairs stay open, or where nothing stands out."""
    unsure = [pair for pair in open_of(proof) if not {pair, pair[:1], pair[1:]} & named]
    if unsure:
        return [inconclusive(trial.alive, PHASE, "pairs", [*map(trial.label, unsure)], proof.values())]
    if named:
        return []
    series, matrix = next(iter(scores.items()))
    pair, least = min(matrix.links.items(), key=lambda item: item[1].share)
    words = f"worst {least.share:.2f} of the median ({trial.label(pair)}, {series})"
    expected = f"like the others: MAD {least.peers.mad:.3f}"
    who = f"{len(matrix.links) // 2} pairs of {len(matrix.nodes)}"
    return [Finding("PASS", who, "pairs", words, expected, "", PHASE)]


def _accuse(
    trial: Trial, series: str, kind: str, ranks: tuple[int, ...], score: Score, proof: Proof
) -> None:  # fmt: skip
    who = trial.label(ranks)
    inside = len({member.node for member in trial.members}) == 1
    step = trial.link_step(ranks) if kind == "link" else (_INSIDE if inside else _NODE).format(who)
    words = f"{score.share:.3f} of the speed of its peers ({1 / max(score.share, 1e-9):.1f} times their time)"
    again = [one for (pair, _), one in proof.items() if one.state == "slow" and set(ranks) <= set(pair)]
    expected = f"peers: {score.peers.num_peers}, MAD {score.peers.mad:.3f}"
    expected += f"; tried again: {max(again, key=lambda one: one.ratio).words}" if again else ""
    finding = Finding(score.verdict, who, f"pairs {series}", words, expected, step, PHASE)
    trial.accuse(PHASE, kind, ranks, finding)
