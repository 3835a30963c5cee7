"""Every pair of GPUs, in series with new communicators: nodes and links that are slow, or now fast and now slow.

Each series is held against what is known of such a pair, or against the others where at least eight nodes were
measured (`series`); pairs inside a node and between nodes are no peers of each other. Left out: ranks that share cores
or GPUs (`pairing`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.accept.matrix import find_ends, split_matrix
from bench.accept.series import (
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
from bench.accept.trial import Say, Trial, inconclusive_step, reference_for
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
"""By series, and by who sends to whom: GB/s of each block; of latency, one over microseconds."""
Facts = Mapping[Pair, Mapping[str, Any]]
"""Of each pair, the lower rank first: devices, and the NCCL; none where times hold what the host takes to launch."""


def measure_gpu_pairs(
    trial: Trial, say: Say, name_wrong: Callable[[Sequence[Mapping[str, Any]]], bool]
) -> Mapping[Pair, float]:
    """All pairs of those alive. Returns the bandwidth from each to each, GB/s, for the heat map.

    Args:
        name_wrong: accuses whoever sends wrong data, by the rows; whether anybody does.
    """
    work, series = trial.work, list[Blocks]()
    sizes: list[int | None] = [work.pairs["bytes"]]
    facts: dict[Pair, dict[str, Any]] = {}
    for number in range(work.most_batches):
        say(number, work.most_batches, "again: some stand out" if number >= work.least_batches else "")
        args = {**work.pairs, "bytes": sizes[number % len(sizes)]}
        rows = trial.together(PHASE, "pairs", args, [trial.alive], turns=False)
        name_wrong(rows)
        large = [row for row in rows if row["direction"] != "latency"]
        if not large:
            break
        facts |= {(row["rank"], row["peer"]): _facts(row) for row in large if "messages" in row}
        sizes = sizes if number else _two_sizes(large[0]["size_bytes"])
        series.append(_blocks(rows))
        if not number:
            _show_host(trial, large)
        verdicts = _verdicts(_scores(trial, series, facts))
        if number + 1 >= work.least_batches and "NO VERDICT" not in verdicts.values():
            break  # else what stood out in one series is tried in another one
    if series:
        _conclude(trial, series, facts)
    return {pair: _mean(blocks) for pair, blocks in (series[0]["one way"] if series else {}).items()}


def places(direction: str, low: int, high: int) -> list[tuple[str, Pair]]:
    """Where a row of a pair stands: by series, and who sends to whom."""
    match direction:
        case "low_to_high":
            return [("one way", (low, high))]
        case "high_to_low":
            return [("one way", (high, low))]
        case "latency":
            return [("latency", (low, high)), ("latency", (high, low))]
        case _:
            return [("both ways", (low, high)), ("both ways", (high, low))]


def _show_host(trial: Trial, rows: Sequence[Mapping[str, Any]]) -> None:
    """What hosts take to launch: a figure of its own, and in no other."""
    launches = [(row["host_us"], row["messages"] * row["p50_us"]) for row in rows if "host_us" in row]
    if launches:
        longest, beside = max(launches)
        words = f"{longest:.0f} us for a launch at most, {100 * longest / beside:.1f}% of the time that it runs"
        expected = "in no figure of a GPU"
        trial.findings.append(Finding(None, f"{len(trial.alive)} ranks", "pairs, the host", words, expected, "", PHASE))


def _facts(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("device", "nccl") if key in row}


def _two_sizes(size: int) -> list[int | None]:
    """The size from which bandwidth rises no more, and twice that: another size makes another series."""
    return [size, 2 * size]


def _blocks(rows: Sequence[Mapping[str, Any]]) -> Blocks:
    found: Blocks = defaultdict(dict)
    for row in rows:
        amount = 1.0 if row["direction"] == "latency" else row["size_bytes"] / 1e3
        speeds = [amount / max(time_us, 1e-3) for time_us in row["iterations_us"]]
        for series, pair in places(row["direction"], row["rank"], row["peer"]):
            found[series][pair] = speeds
    return found


def _mean(speeds: Sequence[float]) -> float:
    """Over the time that went by: slow blocks count for as long as they took."""
    return len(speeds) / math.fsum(1 / speed for speed in speeds)  # `statistics.harmonic_mean` sums fractions


def _scores(trial: Trial, series: Sequence[Blocks], facts: Facts) -> dict[Subject, list[list[Score]]]:
    """Of every node and link, by series: its scores in each kind of bandwidth.

    Alike are pairs of the same devices, all inside a node or all between nodes.
    """
    found: dict[Subject, list[list[Score]]] = defaultdict(list)
    for blocks in series:
        once: dict[Subject, list[Score]] = defaultdict(list)
        for kind in BANDWIDTHS:
            alike: dict[tuple[bool, str], dict[Pair, list[float]]] = defaultdict(dict)
            for (src, dst), each in blocks[kind].items():
                pair = (min(src, dst), max(src, dst))
                if pair in facts and {src, dst} <= set(trial.alive):
                    inside = trial.members[src].node == trial.members[dst].node
                    alike[inside, facts[pair].get("device", "")][src, dst] = each
            for (inside, _), group in alike.items():
                src, dst = next(iter(group))
                about = {**facts[min(src, dst), max(src, dst)], "quantity": "pair_bw_gbs", "case": kind}
                for subject, one in _judge(kind, group, reference_for(about) if inside else None):
                    once[subject].append(one)
        for subject, scores in once.items():
            found[subject].append(scores)
    return found


def _judge(
    kind: str, blocks: Mapping[Pair, Sequence[float]], known: Reference | None
) -> Iterable[tuple[Subject, Score]]:
    """Nodes and links of one kind of pairs in one series; nothing where there is no reference."""
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
    of_nodes, rest = split_matrix({pair: math.log(mean / reference.value) for pair, mean in means.items()})
    for logs in (of_nodes, rest):
        middle, among = (statistics.median(logs.values()), 0.0) if by_peers and logs else (0.0, KNOWN_SPREAD)
        if by_peers and logs:
            among = 1.4826 * statistics.median(abs(log - middle) for log in logs.values())
        for key, log in logs.items():
            subject = (key,) if isinstance(key, int) else (min(key), max(key))
            own = statistics.median(spreads[subject])
            value = means[key] if isinstance(key, tuple) else 0.0
            yield subject, score(kind, math.exp(log - middle), own, reference._replace(spread=among), value)


def _verdicts(scores: Mapping[Subject, Sequence[Sequence[Score]]]) -> dict[Subject, Verdict]:
    """Of each subject, all series together; in one series, its worst kind counts."""
    return {subject: combine([worst_of(each) for each in by_series]) for subject, by_series in scores.items()}


def _conclude(trial: Trial, series: Sequence[Blocks], facts: Facts) -> None:
    scores = _scores(trial, series, facts)
    for subject, by_series in scores.items():
        for number, each in enumerate(by_series):
            rows = [{"phase": PHASE, "subject": trial.label(subject), "number": number, **one.to_row()} for one in each]
            trial.scores += rows
    verdicts = _verdicts(scores)
    named = _name_slow(trial, scores, verdicts)
    named |= _name_unsteady(trial, series, named)
    trial.findings += _of_the_rest(trial, series, scores, named, facts)


def _name_slow(
    trial: Trial, scores: Mapping[Subject, Sequence[Sequence[Score]]], verdicts: Mapping[Subject, Verdict]
) -> set[Subject]:
    """Nodes first, then links between others. Where most nodes are slow, it is what they share."""
    nodes = [subject for subject in verdicts if len(subject) == 1]
    bad = [subject for subject in nodes if verdicts[subject] in ("FAIL", "WARN")]
    if 2 * len(bad) > len(nodes) > 1:
        least = min((one for subject in bad for each in scores[subject] for one in each), key=lambda one: one.share)
        words = f"{len(bad)} of {len(nodes)} nodes at {least.share:.2f} and more of {least.source}"
        ranks = tuple(rank for subject in nodes for rank in subject)
        who = f"{len(ranks)} ranks"
        finding = Finding("WARN", who, f"pairs {least.series}", words, least.source, _SHARED, PHASE)
        trial.accuse(PHASE, "group", ranks, finding, label=who)
        return {*nodes, *(subject for subject in verdicts if len(subject) == 2)}
    named: set[Subject] = set()
    for subject, verdict in sorted(verdicts.items(), key=lambda item: (len(item[0]), item[0])):
        if verdict == "PASS" or any((rank,) in named for rank in subject):
            continue
        named.add(subject)
        worst = worst_of([one for each in scores[subject] for one in each])
        words = f"{worst.share:.3f} of what it should reach, {worst.below:.0f} spreads below"
        words += f"; {len(scores[subject])} series"
        _accuse(trial, subject, verdict, f"pairs {worst.series}", words, worst.source, "")
    return named


def _name_unsteady(trial: Trial, series: Sequence[Blocks], named: set[Subject]) -> set[Subject]:
    """A warning for the end, or the two ends, of pairs that are now fast and now slow."""
    shares: dict[Pair, float] = {}
    pairs = {pair for blocks in series for pair in blocks["one way"] if set(pair) <= set(trial.alive)}
    for low, high in {(min(pair), max(pair)) for pair in pairs}:
        if {(low,), (high,), (low, high)} & named:
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
    found: set[Subject] = set()
    for ends, explained in find_ends(shares):
        found.add(ends)
        words = f"its slowest block has {min(shares[pair] for pair in explained):.2f} of the speed of its fastest"
        _accuse(trial, ends, "WARN", "pairs steadiness", words, "alike blocks", _UNSTEADY)
    return found


def _accuse(trial: Trial, ranks: Subject, verdict: Verdict, check: str, words: str, expected: str, step: str) -> None:
    who, kind = trial.label(ranks), "link" if len(ranks) == 2 else "node"
    inside = len({member.node for member in trial.members}) == 1
    if not step:
        step = trial.link_step(ranks) if kind == "link" else (_INSIDE if inside else _NODE)
    if stopped := [rank for rank in ranks if rank in trial.stopped_hosts]:
        verdict, step = "NO VERDICT", f"the host of {trial.label(stopped)} stops its process: cure that first"
    elif verdict == "NO VERDICT":
        words, step = f"{words}; in one series alone", inconclusive_step(who)
    finding = Finding(verdict, who, check, words, expected, step.format(who), PHASE)
    trial.accuse(PHASE, kind, ranks, finding)


def _of_the_rest(
    trial: Trial, series: Sequence[Blocks], scores: Mapping[Subject, Sequence[Sequence[Score]]], named: set[Subject],
    facts: Facts,
) -> list[Finding]:  # fmt: skip
    """One finding for all that passed, where nobody was named; what would decide it for those that nothing judged."""
    alive = {pair: each for pair, each in series[0]["one way"].items() if set(pair) <= set(trial.alive)}
    latencies = [1 / _mean(each) for pair, each in series[0]["latency"].items() if pair in alive]
    found = []
    if latencies:
        words = f"{min(latencies):.2f} to {max(latencies):.2f} us"
        found.append(Finding(None, f"{len(alive) // 2} pairs", "pairs latency", words, "shown, not judged", "", PHASE))
    judged = [one for subject, by in scores.items() if subject not in named for each in by for one in each]
    unjudged = {pair: each for pair, each in alive.items() if (min(pair), max(pair)) not in scores}
    if judged and not named:
        least = min(judged, key=lambda one: one.from_fail)
        words = f"worst {least.share:.3f} ({least.series}), {least.from_fail:.0f} spreads above FAIL"
        who = f"{(len(alive) - len(unjudged)) // 2} pairs of {len({rank for pair in alive for rank in pair})}"
        found.append(Finding("PASS", who, "pairs", words, least.source, "", PHASE))
    if unjudged:
        middle = statistics.median(_mean(each) for each in unjudged.values())
        pair = min(unjudged, key=lambda pair: _mean(unjudged[pair]))
        words = f"{middle:.4g} GB/s one way; worst {_mean(unjudged[pair]) / middle:.3f} of that ({trial.label(pair)})"
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
        found.append(Finding("NO VERDICT", f"{len(unjudged) // 2} pairs", "pairs", words, expected, step, PHASE))
    return found
