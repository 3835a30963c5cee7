"""Measurement of every pair of GPUs, in series with new communicators: finds slow or unsteady nodes and links.

Each series is compared with a known value for such a pair, or with its peers if at least eight nodes were measured
(`series`). Pairs inside a node and pairs between nodes are not peers of each other. Ranks that share cores or GPUs are
measured by `pairing` instead.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.accept.phases.matrix import find_ends, split_matrix
from bench.accept.phases.series import (
    KNOWN_SPREAD,
    LEAST_PEERS,
    Reference,
    Score,
    combine,
    peers_reference,
    score,
    spread_of,
    unsteady,
    worst_of,
)
from bench.accept.phases.trial import Say, Trial, inconclusive_step, reference_for
from netlayer.verdict import NO_EXPECTATION, Finding, Verdict

PHASE = "pairs"
BANDWIDTHS = ("one way", "both ways")
_NODE = "run the pairs of {} over another port or NIC: where they stay slow, drain it; GEMM and copy tell of its GPU"
_INSIDE = "read nvidia-smi nvlink -s and -e, and nvidia-smi -q (PCIe width) of {}; its GEMM and copy tell of itself"
_SHARED = (
    "look at what they have in common: NCCL_* settings, driver and Fabric Manager, clocks and power limit of the host"
)
_UNSTEADY = (
    "read clocks and throttle reasons of {} over time (nvidia-smi dmon), and what else runs on them (nvidia-smi)"
)
Pair = tuple[int, int]
Subject = tuple[int, ...]
Blocks = dict[str, dict[Pair, list[float]]]
"""Speed of each block, by series and (source, destination): GB/s; for latency, 1/microseconds."""
Facts = Mapping[Pair, Mapping[str, Any]]
"""Device and NCCL version of each pair, lower rank first. A pair is missing if its times include host launch time."""


def measure_gpu_pairs(
    trial: Trial, say: Say, flag_corrupt: Callable[[Sequence[Mapping[str, Any]]], bool]
) -> Mapping[Pair, float]:
    """Measure all pairs of ranks alive; return the bandwidth from each to each in GB/s, for the heat map.

    Args:
        trial: state of the run; gets findings and suspects.
        say: progress callback.
        flag_corrupt: flags ranks that send wrong data, given the rows; returns True if there are any.
    """
    work, series = trial.work, list[Blocks]()
    sizes: list[int | None] = [work.pairs["bytes"]]
    facts: dict[Pair, dict[str, Any]] = {}
    for number in range(work.most_batches):
        say(number, work.most_batches, "again: some stand out" if number >= work.least_batches else "")
        args = {**work.pairs, "bytes": sizes[number % len(sizes)]}
        rows = trial.together(PHASE, "pairs", args, [trial.alive], turns=False)
        flag_corrupt(rows)
        large = [row for row in rows if row["direction"] != "latency"]
        if not large:
            break
        facts |= {(row["rank"], row["peer"]): _facts(row) for row in large if "messages" in row}
        sizes = sizes if number else _two_sizes(large[0]["size_bytes"])
        series.append(_blocks(rows))
        if not number:
            _report_launch_time(trial, large)
        verdicts = _verdicts(_scores(trial, series, facts))
        if number + 1 >= work.least_batches and "NO VERDICT" not in verdicts.values():
            break  # else measure another series: a single bad one is not enough
    if series:
        _conclude(trial, series, facts)
    return {pair: _mean(blocks) for pair, blocks in (series[0]["one way"] if series else {}).items()}


def places(direction: str, low: int, high: int) -> list[tuple[str, Pair]]:
    """Return the (series, (source, destination)) that a row of a pair belongs to."""
    match direction:
        case "low_to_high":
            return [("one way", (low, high))]
        case "high_to_low":
            return [("one way", (high, low))]
        case "latency":
            return [("latency", (low, high)), ("latency", (high, low))]
        case _:
            return [("both ways", (low, high)), ("both ways", (high, low))]


def _report_launch_time(trial: Trial, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add a finding on the hosts' launch time, which no other figure includes."""
    launches = [(row["host_us"], row["messages"] * row["p50_us"]) for row in rows if "host_us" in row]
    if launches:
        longest, duration = max(launches)
        figure = f"{longest:.0f} us for a launch at most, {100 * longest / duration:.1f}% of the time that it runs"
        expected = "in no figure of a GPU"
        trial.findings.append(
            Finding(None, f"{len(trial.alive)} ranks", "pairs, the host", figure, expected, "", PHASE)
        )


def _facts(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("device", "nccl") if key in row}


def _two_sizes(size: int) -> list[int | None]:
    """Return the size at which bandwidth stops rising, and twice that size for further series."""
    return [size, 2 * size]


def _blocks(rows: Sequence[Mapping[str, Any]]) -> Blocks:
    blocks: Blocks = defaultdict(dict)
    for row in rows:
        amount = 1.0 if row["direction"] == "latency" else row["size_bytes"] / 1e3
        speeds = [amount / max(time_us, 1e-3) for time_us in row["iterations_us"]]
        for series, pair in places(row["direction"], row["rank"], row["peer"]):
            blocks[series][pair] = speeds
    return blocks


def _mean(speeds: Sequence[float]) -> float:
    """Return the mean speed over time: slow blocks weigh as much as they took longer."""
    return len(speeds) / math.fsum(1 / speed for speed in speeds)  # `statistics.harmonic_mean` sums fractions


def _scores(trial: Trial, series: Sequence[Blocks], facts: Facts) -> dict[Subject, list[list[Score]]]:
    """Return, for every node and link, its scores in each kind of bandwidth, by series.

    Peers are pairs of the same device type, all inside a node or all between nodes.
    """
    scores: dict[Subject, list[list[Score]]] = defaultdict(list)
    for blocks in series:
        scores_of_series: dict[Subject, list[Score]] = defaultdict(list)
        for kind in BANDWIDTHS:
            groups: dict[tuple[bool, str], dict[Pair, list[float]]] = defaultdict(dict)
            for (src, dst), each in blocks[kind].items():
                pair = (min(src, dst), max(src, dst))
                if pair in facts and {src, dst} <= set(trial.alive):
                    inside = trial.members[src].node == trial.members[dst].node
                    groups[inside, facts[pair].get("device", "")][src, dst] = each
            for (inside, _), group in groups.items():
                src, dst = next(iter(group))
                about = {**facts[min(src, dst), max(src, dst)], "quantity": "pair_bw_gbs", "case": kind}
                for subject, subject_score in _score_group(kind, group, reference_for(about) if inside else None):
                    scores_of_series[subject].append(subject_score)
        for subject, kinds in scores_of_series.items():
            scores[subject].append(kinds)
    return scores


def _score_group(
    kind: str, blocks: Mapping[Pair, Sequence[float]], known: Reference | None
) -> Iterable[tuple[Subject, Score]]:
    """Score nodes and links of one group of peers in one series; yields nothing without a reference."""
    nodes = {rank for pair in blocks for rank in pair}
    means = {pair: _mean(each) for pair, each in blocks.items()}
    spreads: dict[Subject, list[float]] = defaultdict(list)
    for (src, dst), each in blocks.items():
        own_spread = spread_of(each)
        for subject in ((src,), (dst,), (min(src, dst), max(src, dst))):
            spreads[subject].append(own_spread)
    reference = (peers_reference([*means.values()]) if len(nodes) >= LEAST_PEERS else None) or known
    if reference is None:
        return
    by_peers = reference is not known
    of_nodes, links = split_matrix({pair: math.log(mean / reference.value) for pair, mean in means.items()})
    for log_ratios in (of_nodes, links):
        middle, peer_spread = (
            (statistics.median(log_ratios.values()), 0.0) if by_peers and log_ratios else (0.0, KNOWN_SPREAD)
        )
        if by_peers and log_ratios:
            peer_spread = 1.4826 * statistics.median(abs(log_ratio - middle) for log_ratio in log_ratios.values())
        for key, log_ratio in log_ratios.items():
            subject = (key,) if isinstance(key, int) else (min(key), max(key))
            own = statistics.median(spreads[subject])
            value = means[key] if isinstance(key, tuple) else 0.0
            yield subject, score(kind, math.exp(log_ratio - middle), own, reference._replace(spread=peer_spread), value)


def _verdicts(scores: Mapping[Subject, Sequence[Sequence[Score]]]) -> dict[Subject, Verdict]:
    """Return the verdict on each subject from all its series; in each series its worst score counts."""
    return {subject: combine([worst_of(each) for each in by_series]) for subject, by_series in scores.items()}


def _conclude(trial: Trial, series: Sequence[Blocks], facts: Facts) -> None:
    scores = _scores(trial, series, facts)
    for subject, by_series in scores.items():
        for number, each in enumerate(by_series):
            rows = [{"phase": PHASE, "subject": trial.label(subject), "number": number, **one.to_row()} for one in each]
            trial.scores += rows
    verdicts = _verdicts(scores)
    flagged = _flag_slow(trial, scores, verdicts)
    flagged |= _flag_unsteady(trial, series, flagged)
    trial.findings += _remaining_findings(trial, series, scores, flagged, facts)


def _flag_slow(
    trial: Trial, scores: Mapping[Subject, Sequence[Sequence[Score]]], verdicts: Mapping[Subject, Verdict]
) -> set[Subject]:
    """Flag slow nodes, then slow links between other nodes; if most nodes are slow, a common cause instead."""
    nodes = [subject for subject in verdicts if len(subject) == 1]
    bad = [subject for subject in nodes if verdicts[subject] in ("FAIL", "WARN")]
    if 2 * len(bad) > len(nodes) > 1:
        lowest = min((one for subject in bad for each in scores[subject] for one in each), key=lambda one: one.share)
        figure = f"{len(bad)} of {len(nodes)} nodes at {lowest.share:.2f} and more of {lowest.source}"
        ranks = tuple(rank for subject in nodes for rank in subject)
        label = f"{len(ranks)} ranks"
        finding = Finding("WARN", label, f"pairs {lowest.series}", figure, lowest.source, _SHARED, PHASE)
        trial.flag(PHASE, "group", ranks, finding, label=label)
        return {*nodes, *(subject for subject in verdicts if len(subject) == 2)}
    flagged: set[Subject] = set()
    for subject, verdict in sorted(verdicts.items(), key=lambda item: (len(item[0]), item[0])):
        if verdict == "PASS" or any((rank,) in flagged for rank in subject):
            continue
        flagged.add(subject)
        worst = worst_of([one for each in scores[subject] for one in each])
        figure = f"{worst.share:.3f} of what it should reach, {worst.below:.0f} spreads below"
        figure += f"; {len(scores[subject])} series"
        _flag(trial, subject, verdict, f"pairs {worst.series}", figure, worst.source, "")
    return flagged


def _flag_unsteady(trial: Trial, series: Sequence[Blocks], known_bad: set[Subject]) -> set[Subject]:
    """Warn of the end, or the two ends, of pairs whose speed varies over time."""
    shares: dict[Pair, float] = {}
    pairs = {pair for blocks in series for pair in blocks["one way"] if set(pair) <= set(trial.alive)}
    for low, high in {(min(pair), max(pair)) for pair in pairs}:
        if {(low,), (high,), (low, high)} & known_bad:
            continue
        ways = [(kind, pair) for kind in BANDWIDTHS for pair in ((low, high), (high, low))]
        each = [
            min(
                (blocks[kind].get(pair, []) for kind, pair in ways), key=lambda one: min(one) / max(one) if one else 1.0
            )
            for blocks in series
        ]
        if (share := unsteady(each)) is not None:
            shares[low, high] = share
    flagged: set[Subject] = set()
    for ends, explained in find_ends(shares):
        flagged.add(ends)
        figure = f"its slowest block has {min(shares[pair] for pair in explained):.2f} of the speed of its fastest"
        _flag(trial, ends, "WARN", "pairs steadiness", figure, "alike blocks", _UNSTEADY)
    return flagged


def _flag(trial: Trial, ranks: Subject, verdict: Verdict, check: str, figure: str, expected: str, step: str) -> None:
    label, kind = trial.label(ranks), "link" if len(ranks) == 2 else "node"
    inside = len({member.node for member in trial.members}) == 1
    if not step:
        step = trial.link_step(ranks) if kind == "link" else (_INSIDE if inside else _NODE)
    if stopped := [rank for rank in ranks if rank in trial.stopped_hosts]:
        verdict, step = "NO VERDICT", f"the host of {trial.label(stopped)} stops its process: fix that first"
    elif verdict == "NO VERDICT":
        figure, step = f"{figure}; in one series alone", inconclusive_step(label)
    finding = Finding(verdict, label, check, figure, expected, step.format(label), PHASE)
    trial.flag(PHASE, kind, ranks, finding)


def _remaining_findings(
    trial: Trial, series: Sequence[Blocks], scores: Mapping[Subject, Sequence[Sequence[Score]]], flagged: set[Subject],
    facts: Facts,
) -> list[Finding]:  # fmt: skip
    """Return findings on latency, on all pairs that passed, and on those that nothing could judge."""
    alive = {pair: each for pair, each in series[0]["one way"].items() if set(pair) <= set(trial.alive)}
    latencies = [1 / _mean(each) for pair, each in series[0]["latency"].items() if pair in alive]
    findings = []
    if latencies:
        figure = f"{min(latencies):.2f} to {max(latencies):.2f} us"
        findings.append(
            Finding(None, f"{len(alive) // 2} pairs", "pairs latency", figure, "shown, not judged", "", PHASE)
        )
    judged = [one for subject, by in scores.items() if subject not in flagged for each in by for one in each]
    unjudged = {pair: each for pair, each in alive.items() if (min(pair), max(pair)) not in scores}
    if judged and not flagged:
        nearest = min(judged, key=lambda one: one.from_fail)
        figure = f"worst {nearest.share:.3f} ({nearest.series}), {nearest.from_fail:.0f} spreads above FAIL"
        subjects = f"{(len(alive) - len(unjudged)) // 2} pairs of {len({rank for pair in alive for rank in pair})}"
        findings.append(Finding("PASS", subjects, "pairs", figure, nearest.source, "", PHASE))
    if unjudged:
        middle = statistics.median(_mean(each) for each in unjudged.values())
        pair = min(unjudged, key=lambda pair: _mean(unjudged[pair]))
        figure = f"{middle:.4g} GB/s one way; worst {_mean(unjudged[pair]) / middle:.3f} of that ({trial.label(pair)})"
        device = next((one["device"] for one in facts.values() if "device" in one), "such devices")
        step = (
            f"to decide it: run this on {LEAST_PEERS} or more {device}, or beside a pair that is known to be good"
            " (sendrecv_perf -g 2)"
        )
        expected = f"{NO_EXPECTATION}; fewer than {LEAST_PEERS} peers"
        if not facts:
            expected = (
                "times of the link alone: NCCL's library was not found, and each message was launched by the host"
            )
            step = "install nvidia-nccl-cu13, or set LD_LIBRARY_PATH to where libnccl.so.2 is"
        findings.append(Finding("NO VERDICT", f"{len(unjudged) // 2} pairs", "pairs", figure, expected, step, PHASE))
    return findings
