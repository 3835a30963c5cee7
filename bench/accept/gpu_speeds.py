"""How fast each rank's own GPU is: GEMM and copies in series of two sizes, against what is known of it or its peers.

A block of a series lasts long enough that pauses of milliseconds lie within it and slow it; what comes and goes more
slowly, as heat does, shows between blocks. The host's process is looked at first: what stops it is not the GPU's.
Left out: ranks that share cores or GPUs (`speeds`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench.accept.series import (
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

STEPS = {
    "gemm": "read clocks, throttle reasons, power limit and temperature of {} (nvidia-smi -q) while it works",
    "copy": "read PCIe width and speed (nvidia-smi -q, lspci -vv) and memory errors of {}",
}
_COMMON = "look at what they have in common: clocks, power limit and cooling of the host (nvidia-smi -q), the driver"
_STOPPED_SHARE = 0.2
_PAUSES = 2  # times that a host's pauses are looked for
_HOST = "see what else runs on the cores of {} (top), and whether a quota throttles it (cpu.stat: nr_throttled)"
_UNJUDGED = ("host_to_device", "device_to_host")  # the host's memory decides them, and its kind is not known
Blocks = dict[str, dict[int, list[float]]]
"""By name of the figure, and by rank: speed of each block; TFLOP/s or GB/s."""
Devices = Mapping[int, str]
"""Of each rank, as its vendor calls it: only the same are peers."""
Scores = Mapping[tuple[str, int], Sequence[Score]]
"""By figure and rank: one of each series."""


def find_stopped_hosts(trial: Trial, say: Say) -> None:
    """Warn of ranks whose process is kept from its core for much of the time; they are noted in the trial."""
    shares: dict[int, list[float]] = defaultdict(list)
    for number in range(_PAUSES):
        say(number, _PAUSES, "hosts")
        for row in trial.alone("gemm", "host", trial.work.host, trial.alive, turns=False):
            shares[row["rank"]].append(row["stopped_share"])
    for rank, each in shares.items():
        if len(each) == _PAUSES and min(each) > _STOPPED_SHARE:
            trial.stopped_hosts.add(rank)
            who = trial.label([rank])
            words = f"its process stands still for {100 * min(each):.0f}% of the time and more"
            expected = f"less than {100 * _STOPPED_SHARE:.0f}%"
            finding = Finding("WARN", who, "host of the rank", words, expected, _HOST.format(who), "gemm")
            trial.accuse("gemm", "host", [rank], finding)


def measure_gpu_speeds(trial: Trial, name: str, say: Say) -> None:
    """One probe of every rank, `gemm` or `copy`; findings and accused go to the trial."""
    work, series, devices = trial.work, list[Blocks](), dict[int, str]()
    if name == "gemm":
        find_stopped_hosts(trial, say)
    sizes = _sizes(work.gemm if name == "gemm" else work.copy, name)
    for number in range(work.most_batches):
        say(number, work.most_batches, "again: some stand out" if number >= work.least_batches else "")
        rows = trial.alone(name, name, sizes[number % len(sizes)], trial.alive, turns=False)
        if not rows:
            break
        devices |= {row["rank"]: row["device"] for row in rows}
        series.append(_blocks(name, rows))
        verdicts = _verdicts(_scores(trial, series, devices))
        if number + 1 >= work.least_batches and "NO VERDICT" not in verdicts.values():
            break
    if series:
        _conclude(trial, name, series, devices)


def _sizes(args: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The work as it is, and of another size: GEMM of half the rows, copies of half the bytes."""
    key = "size" if name == "gemm" else "bytes"
    other = {key: args[key] // 2}
    return [args, {**args, **other}]


def _blocks(name: str, rows: Sequence[Mapping[str, Any]]) -> Blocks:
    found: Blocks = defaultdict(dict)
    for row in rows:
        times_us = row.get("blocks_us") or row["iterations_us"]
        if name == "gemm":
            size = round((row["size_bytes"] / 2) ** 0.5)  # of bfloat16
            found[f"gemm {size}"][row["rank"]] = [2 * size**3 / max(time_us, 1e-3) / 1e6 for time_us in times_us]
        else:
            speeds = [row["size_bytes"] / max(time_us, 1e-3) / 1e3 for time_us in times_us]
            found[row["direction"]][row["rank"]] = speeds
    return found


def _scores(trial: Trial, series: Sequence[Blocks], devices: Devices) -> Scores:
    found: dict[tuple[str, int], list[Score]] = defaultdict(list)
    for blocks in series:
        for figure, by_rank in blocks.items():
            means = {rank: statistics.harmonic_mean(each) for rank, each in by_rank.items() if rank in trial.alive}
            for rank, mean in means.items():
                alike = [other for one, other in means.items() if devices[one] == devices[rank]]
                reference = _reference(figure, devices[rank], alike)
                if reference is not None:
                    one = score(figure, mean / reference.value, spread_of(by_rank[rank]), reference, mean)
                    found[figure.partition(" ")[0], rank].append(one)
    return found


def _reference(figure: str, device: str, values: Sequence[float]) -> Reference | None:
    """The peers, where they are enough; else what is known."""
    quantity = "gemm_tflops" if figure.startswith("gemm") else "copy_bw_gbs"
    case = figure.removeprefix("gemm ")
    return peers_reference(values) or reference_for({"quantity": quantity, "case": case, "device": device})


def _verdicts(scores: Scores) -> dict[tuple[str, int], Verdict]:
    return {key: combine(each) for key, each in scores.items()}


def _conclude(trial: Trial, name: str, series: Sequence[Blocks], devices: Devices) -> None:
    scores = _scores(trial, series, devices)
    for (_, rank), each in scores.items():
        for number, one in enumerate(each):
            trial.scores.append({"phase": name, "subject": trial.label([rank]), "number": number, **one.to_row()})
    verdicts = _verdicts(scores)
    steady = _name_unsteady(trial, name, series, verdicts)
    for figure in dict.fromkeys(figure.partition(" ")[0] for blocks in series for figure in blocks):
        ranks = [rank for one, rank in scores if one == figure]
        bad = [rank for rank in ranks if verdicts[figure, rank] != "PASS"]
        check = name if figure == name else f"{name} {figure.replace('_', ' ')}"
        trial.findings += _unjudged(trial, name, check, figure, series, ranks, devices)
        if 2 * sum(verdicts[figure, rank] in ("FAIL", "WARN") for rank in bad) > len(ranks) > 1:
            _blame_all(trial, name, check, [worst_of(scores[figure, rank]) for rank in bad], ranks)
        else:
            for rank in bad:
                _accuse(trial, name, check, rank, verdicts[figure, rank], worst_of(scores[figure, rank]))
            good = [worst_of(scores[figure, rank]) for rank in ranks if rank not in bad and rank in steady]
            trial.findings += _passed(name, check, good)


def _name_unsteady(
    trial: Trial, name: str, series: Sequence[Blocks], verdicts: Mapping[tuple[str, int], Verdict]
) -> set[int]:
    """Warn of ranks that are now fast and now slow, unless they are accused already. Returns the others."""
    steady = set(trial.alive)
    for rank in trial.alive:
        judged = [by_rank for one in series for figure, by_rank in one.items() if figure not in _UNJUDGED]
        blocks = [by_rank[rank] for by_rank in judged if rank in by_rank]
        share = unsteady(blocks)
        if share is None:
            continue
        steady.discard(rank)
        if {verdict for (_, one), verdict in verdicts.items() if one == rank} & {"FAIL", "WARN"}:
            continue
        who = trial.label([rank])
        words = f"its slowest block has {share:.2f} of the speed of its fastest"
        finding = Finding("WARN", who, f"{name} steadiness", words, "alike blocks", STEPS[name].format(who), name)
        trial.accuse(name, "node", [rank], finding)
    return steady


def _accuse(trial: Trial, name: str, check: str, rank: int, verdict: Verdict, worst: Score) -> None:
    who = trial.label([rank])
    words = (
        f"{worst.value:.4g} {_unit(name)}, {worst.share:.3f} of what it should reach, {worst.below:.0f} spreads below"
    )
    step = STEPS[name].format(who)
    if rank in trial.stopped_hosts:
        verdict, step = "NO VERDICT", f"the host of {who} stops its process: cure that first"
    elif verdict == "NO VERDICT":
        words, step = f"{words}; in one series alone", inconclusive_step(who)
    trial.accuse(name, "node", [rank], Finding(verdict, who, check, words, worst.source, step, name))


def _blame_all(trial: Trial, name: str, check: str, bad: Sequence[Score], ranks: Sequence[int]) -> None:
    """Where most are slow, it is no one GPU's fault."""
    worst, who = worst_of(bad), f"{len(ranks)} ranks"
    words = f"{len(bad)} of {who} too slow, at worst {worst.value:.4g} {_unit(name)}, {worst.share:.3f}"
    finding = Finding("WARN", who, check, words, worst.source, _COMMON, name)
    trial.accuse(name, "group", ranks, finding, label=who)


def _passed(name: str, check: str, good: Sequence[Score]) -> list[Finding]:
    if not good:
        return []
    least = min(good, key=lambda one: one.from_fail)
    words = f"worst {least.value:.4g} {_unit(name)} ({least.series}), {least.share:.3f}"
    words += f", {least.from_fail:.0f} spreads above FAIL"
    return [Finding("PASS", f"{len(good)} ranks", check, words, least.source, "", name)]


def _unjudged(
    trial: Trial, name: str, check: str, figure: str, series: Sequence[Blocks], judged: Sequence[int], devices: Devices
) -> list[Finding]:
    """Ranks that nothing is known to hold against: one finding, and what would decide it."""
    full, blocks = next((key, one[key]) for one in series for key in one if key.partition(" ")[0] == figure)
    alive = [rank for rank in blocks if rank in trial.alive and rank not in judged]
    if not alive:
        return []
    means = {rank: statistics.harmonic_mean(blocks[rank]) for rank in alive}
    slowest = min(means, key=lambda rank: means[rank])
    words = f"worst {means[slowest]:.4g} {_unit(name)} ({trial.label([slowest])})"
    expected = f"{NO_EXPECTATION} of {full.replace('_', ' ')}; fewer than {LEAST_PEERS} peers"
    if figure in _UNJUDGED:
        return [Finding(None, f"{len(means)} ranks", check, words, expected, "", name)]
    step = f"to decide it: run this on {LEAST_PEERS} or more {devices[slowest]}, or beside one that is known to be good"
    return [Finding("NO VERDICT", f"{len(means)} ranks", check, words, expected, step, name)]


def _unit(name: str) -> str:
    return "TFLOP/s" if name == "gemm" else "GB/s"
