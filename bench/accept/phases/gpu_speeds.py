"""Speed of each rank's GPU: GEMM and copies in series of two sizes, against a known value or its peers.

A block of a series is long enough to contain pauses of milliseconds; slower changes, such as throttling by heat, show
between blocks. The host's process is checked first: if it is stopped, the GPU is not to blame. Ranks that share cores
or GPUs are measured by `speeds` instead.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench.accept.phases.series import (
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

STEPS = {
    "gemm": "read clocks, throttle reasons, power limit and temperature of {} (nvidia-smi -q) while it works",
    "copy": "read PCIe width and speed (nvidia-smi -q, lspci -vv) and memory errors of {}",
}
_COMMON = "look at what they have in common: clocks, power limit and cooling of the host (nvidia-smi -q), the driver"
_STOPPED_SHARE = 0.2
_PAUSES = 2  # repeats of the check for a stopped host process
_HOST = "see what else runs on the cores of {} (top), and whether a quota throttles it (cpu.stat: nr_throttled)"
_UNJUDGED = ("host_to_device", "device_to_host")  # limited by the host's memory, whose type is not known
Blocks = dict[str, dict[int, list[float]]]
"""Speed of each block in TFLOP/s or GB/s, by name of the figure and rank."""
Devices = Mapping[int, str]
"""Device name of each rank; only equal devices are peers."""
Scores = Mapping[tuple[str, int], Sequence[Score]]
"""Scores of all series, by figure and rank."""


def find_stopped_hosts(trial: Trial, say: Say) -> None:
    """Warn of ranks whose process is denied its core for much of the time, and add them to `trial.stopped_hosts`."""
    shares: dict[int, list[float]] = defaultdict(list)
    for number in range(_PAUSES):
        say(number, _PAUSES, "hosts")
        for row in trial.alone("gemm", "host", trial.work.host, trial.alive, turns=False):
            shares[row["rank"]].append(row["stopped_share"])
    for rank, each in shares.items():
        if len(each) == _PAUSES and min(each) > _STOPPED_SHARE:
            trial.stopped_hosts.add(rank)
            label = trial.label([rank])
            figure = f"its process stands still for {100 * min(each):.0f}% of the time and more"
            expected = f"less than {100 * _STOPPED_SHARE:.0f}%"
            finding = Finding("WARN", label, "host of the rank", figure, expected, _HOST.format(label), "gemm")
            trial.flag("gemm", "host", [rank], finding)


def measure_gpu_speeds(trial: Trial, name: str, say: Say) -> None:
    """Measure `gemm` or `copy` on every rank; findings and suspects go to the trial."""
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
        series.append(_speeds_by_series(name, rows))
        verdicts = _verdicts(_scores(trial, series, devices))
        if number + 1 >= work.least_batches and "NO VERDICT" not in verdicts.values():
            break
    if series:
        _conclude(trial, name, series, devices)


def _sizes(args: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the work at full size and at half: GEMM of half the matrix size, copies of half the bytes."""
    key = "size" if name == "gemm" else "bytes"
    other = {key: args[key] // 2}
    return [args, {**args, **other}]


def _speeds_by_series(name: str, rows: Sequence[Mapping[str, Any]]) -> Blocks:
    """Return the speeds of each rank, by series: TFLOP/s by size of the GEMM, GB/s by direction of the copy."""
    blocks: Blocks = defaultdict(dict)
    for row in rows:
        times_us = row.get("blocks_us") or row["iterations_us"]
        if name == "gemm":
            size = round((row["size_bytes"] / 2) ** 0.5)  # of bfloat16
            blocks[f"gemm {size}"][row["rank"]] = [2 * size**3 / max(time_us, 1e-3) / 1e6 for time_us in times_us]
        else:
            speeds = [row["size_bytes"] / max(time_us, 1e-3) / 1e3 for time_us in times_us]
            blocks[row["direction"]][row["rank"]] = speeds
    return blocks


def _scores(trial: Trial, series: Sequence[Blocks], devices: Devices) -> Scores:
    scores: dict[tuple[str, int], list[Score]] = defaultdict(list)
    for blocks in series:
        for figure, by_rank in blocks.items():
            means = {rank: statistics.harmonic_mean(each) for rank, each in by_rank.items() if rank in trial.alive}
            for rank, mean in means.items():
                peers = [other for one, other in means.items() if devices[one] == devices[rank]]
                reference = _reference(figure, devices[rank], peers)
                if reference is not None:
                    one = score(figure, mean / reference.value, spread_of(by_rank[rank]), reference, mean)
                    scores[figure.partition(" ")[0], rank].append(one)
    return scores


def _reference(figure: str, device: str, values: Sequence[float]) -> Reference | None:
    """Return the reference from the peers if there are enough; else the known value, or None."""
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
    steady = _flag_unsteady(trial, name, series, verdicts)
    for figure in dict.fromkeys(figure.partition(" ")[0] for blocks in series for figure in blocks):
        ranks = [rank for one, rank in scores if one == figure]
        bad = [rank for rank in ranks if verdicts[figure, rank] != "PASS"]
        check = name if figure == name else f"{name} {figure.replace('_', ' ')}"
        trial.findings += _unjudged(trial, name, check, figure, series, ranks, devices)
        if 2 * sum(verdicts[figure, rank] in ("FAIL", "WARN") for rank in bad) > len(ranks) > 1:
            _flag_group(trial, name, check, [worst_of(scores[figure, rank]) for rank in bad], ranks)
        else:
            for rank in bad:
                _flag_rank(trial, name, check, rank, verdicts[figure, rank], worst_of(scores[figure, rank]))
            good = [worst_of(scores[figure, rank]) for rank in ranks if rank not in bad and rank in steady]
            trial.findings += _passed(name, check, good)


def _flag_unsteady(
    trial: Trial, name: str, series: Sequence[Blocks], verdicts: Mapping[tuple[str, int], Verdict]
) -> set[int]:
    """Warn of ranks whose speed varies over time, unless they are flagged already; return the steady ranks."""
    steady = set(trial.alive)
    for rank in trial.alive:
        judged_series = [by_rank for one in series for figure, by_rank in one.items() if figure not in _UNJUDGED]
        blocks = [by_rank[rank] for by_rank in judged_series if rank in by_rank]
        share = unsteady(blocks)
        if share is None:
            continue
        steady.discard(rank)
        if {verdict for (_, one), verdict in verdicts.items() if one == rank} & {"FAIL", "WARN"}:
            continue
        label = trial.label([rank])
        figure_text = f"its slowest block has {share:.2f} of the speed of its fastest"
        finding = Finding(
            "WARN", label, f"{name} steadiness", figure_text, "alike blocks", STEPS[name].format(label), name
        )
        trial.flag(name, "node", [rank], finding)
    return steady


def _flag_rank(trial: Trial, name: str, check: str, rank: int, verdict: Verdict, worst: Score) -> None:
    label = trial.label([rank])
    figure = (
        f"{worst.value:.4g} {_unit(name)}, {worst.share:.3f} of what it should reach, {worst.below:.0f} spreads below"
    )
    step = STEPS[name].format(label)
    if rank in trial.stopped_hosts:
        verdict, step = "NO VERDICT", f"the host of {label} stops its process: fix that first"
    elif verdict == "NO VERDICT":
        figure, step = f"{figure}; in one series alone", inconclusive_step(label)
    trial.flag(name, "node", [rank], Finding(verdict, label, check, figure, worst.source, step, name))


def _flag_group(trial: Trial, name: str, check: str, bad: Sequence[Score], ranks: Sequence[int]) -> None:
    """Flag all ranks together: if most are slow, the cause is common to them."""
    worst, label = worst_of(bad), f"{len(ranks)} ranks"
    figure = f"{len(bad)} of {label} too slow, at worst {worst.value:.4g} {_unit(name)}, {worst.share:.3f}"
    finding = Finding("WARN", label, check, figure, worst.source, _COMMON, name)
    trial.flag(name, "group", ranks, finding, label=label)


def _passed(name: str, check: str, good: Sequence[Score]) -> list[Finding]:
    if not good:
        return []
    nearest = min(good, key=lambda one: one.from_fail)
    figure = f"worst {nearest.value:.4g} {_unit(name)} ({nearest.series}), {nearest.share:.3f}"
    figure += f", {nearest.from_fail:.0f} spreads above FAIL"
    return [Finding("PASS", f"{len(good)} ranks", check, figure, nearest.source, "", name)]


def _unjudged(
    trial: Trial, name: str, check: str, figure: str, series: Sequence[Blocks], judged: Sequence[int], devices: Devices
) -> list[Finding]:
    """Return one finding for ranks without a reference, with what would allow a verdict."""
    full, blocks = next((key, one[key]) for one in series for key in one if key.partition(" ")[0] == figure)
    alive = [rank for rank in blocks if rank in trial.alive and rank not in judged]
    if not alive:
        return []
    means = {rank: statistics.harmonic_mean(blocks[rank]) for rank in alive}
    slowest = min(means, key=lambda rank: means[rank])
    figure_text = f"worst {means[slowest]:.4g} {_unit(name)} ({trial.label([slowest])})"
    expected = f"{NO_EXPECTATION} of {full.replace('_', ' ')}; fewer than {LEAST_PEERS} peers"
    if figure in _UNJUDGED:
        return [Finding(None, f"{len(means)} ranks", check, figure_text, expected, "", name)]
    step = f"to decide it: run this on {LEAST_PEERS} or more {devices[slowest]}, or beside one that is known to be good"
    return [Finding("NO VERDICT", f"{len(means)} ranks", check, figure_text, expected, step, name)]


def _unit(name: str) -> str:
    return "TFLOP/s" if name == "gemm" else "GB/s"
