"""Speed of each rank's device relative to its peers: GEMM and copies, repeated until outliers are significant.

Absolute speed is not judged here; expectations do that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench.accept.phases.confirm import confirm, inconclusive, open_of, state_of
from bench.accept.phases.gpu_speeds import STEPS, measure_gpu_speeds
from bench.accept.phases.matrix import Score, judge_logs
from bench.accept.phases.trial import Say, Trial
from netlayer.verdict import MIN_PEERS, NO_EXPECTATION, Finding

_TURNS = 3
_PULSED_RATIO, _SUSPECT_RATIO = 2.0, 1.5
"""Ratio to the peers' mean time from which a rank is reported, and from which it is measured again."""
_MOST_PULSED = 4
_LONG_TURN = {"repeats": 1000, "budget_s": 0.1}
_PULSES = "see what stops or throttles the process of {} (top, cpu.stat: nr_throttled, its state in ps), and its clocks"
_STABLE_BATCHES = 3
_QUIET_MAD = 0.01
"""MAD of the scores above which ranks are measured again, since the scatter could hide a slow one."""
Times = dict[str, dict[int, float]]
"""Times in microseconds, by series (the direction of a copy) and rank."""
Scores = dict[str, dict[int, Score]]


def measure_speeds(trial: Trial, name: str, say: Say) -> None:
    """Measure every rank; findings and suspects go to the trial."""
    work = trial.work
    if not work.shared:
        measure_gpu_speeds(trial, name, say)
        return
    args = {"gemm": work.gemm, "copy": work.copy}[name]
    each: dict[tuple[str, int], list[float]] = defaultdict(list)
    means: dict[int, list[float]] = defaultdict(list)
    before: list[Times] = []
    # Copies scatter so much that more batches than this change little.
    max_batches = work.most_batches if name == "gemm" else max(work.least_batches, work.most_batches // 3)
    for batch in range(max_batches):
        say(batch, max_batches, "again: some stand out, or all scatter" if batch >= work.least_batches else "")
        for _ in range(_TURNS):
            for row in trial.alone(name, name, args, trial.alive, turns=True):
                each[row.get("direction", "").replace("_", " "), row["rank"]].append(work.time_us(row))
                means[row["rank"]].append(statistics.fmean(row["iterations_us"]))
        times = _times(trial, each)
        scores = _scores(trial, times)
        if batch + 1 >= work.least_batches and _is_settled(times, scores, before):
            break
        before.append(times)
    _conclude(trial, name, times, scores)
    if name == "gemm":
        _find_pulsed(trial, args, means)


def _times(trial: Trial, each: Mapping[tuple[str, int], Sequence[float]]) -> Times:
    times: Times = defaultdict(dict)
    for (series, rank), times_us in each.items():
        if rank in trial.alive:
            times[series][rank] = trial.work.combined(times_us)
    return dict(times)


def _scores(trial: Trial, times: Times) -> Scores:
    """Score the ranks against each other; series with too few ranks are omitted."""
    scores: Scores = {}
    for series, by_rank in times.items():
        if len(by_rank) >= MIN_PEERS:
            middle = statistics.median(by_rank.values())
            logs = {rank: math.log(middle / max(time_us, 1e-3)) for rank, time_us in by_rank.items()}
            scores[series] = judge_logs(logs, trial.work.least_speed_ratio)
    return scores


def _is_settled(times: Times, scores: Scores, before: Sequence[Times]) -> bool:
    """Return True if there is no outlier and little scatter, or clear outliers that more batches would not change."""
    all_scores = [score for by_rank in scores.values() for score in by_rank.values()]
    verdicts = {score.verdict for score in all_scores}
    if verdicts <= {"PASS"}:
        return all(score.peers.mad <= _QUIET_MAD for score in all_scores)
    return "WARN" not in verdicts and _is_stable(times, before)


def _is_stable(times: Times, before: Sequence[Times]) -> bool:
    """Return True if the last batches changed no rank's time noticeably."""
    if len(before) < _STABLE_BATCHES:
        return False
    earlier = before[-_STABLE_BATCHES]
    return all(
        abs(time_us - earlier.get(series, {}).get(rank, time_us)) <= _QUIET_MAD * time_us
        for series, by_rank in times.items()
        for rank, time_us in by_rank.items()
    )


def _conclude(trial: Trial, name: str, times: Times, scores: Scores) -> None:
    for series, by_rank in times.items():
        check = f"{name} {series}".strip()
        if series not in scores:
            slowest = max(by_rank, key=lambda rank: by_rank[rank])
            expectation = f"{NO_EXPECTATION}; {MIN_PEERS} peers are needed to tell the odd one"
            figure = f"worst {_rate(trial, name, by_rank[slowest])}, {trial.label([slowest])}"
            trial.findings.append(Finding(None, f"{len(by_rank)} ranks", check, figure, expectation, "", name))
            continue
        middle = _rate(trial, name, statistics.median(by_rank.values()))
        for rank, score in scores[series].items():
            if score.verdict == "PASS":
                continue
            who = trial.label([rank])
            figure = f"{_rate(trial, name, by_rank[rank])}, {score.share:.3f} of its peers"
            expected = f"peers: median {middle} of {score.peers.num_peers}, MAD {score.peers.mad:.3f}"
            finding = Finding(score.verdict, who, check, figure, expected, STEPS[name].format(who), name)
            trial.flag(name, "node", [rank], finding)
        trial.findings += _passed(trial, name, check, by_rank, scores[series], middle)


def _passed(
    trial: Trial, name: str, check: str, by_rank: Mapping[int, float], scores: Mapping[int, Score], middle: str
) -> list[Finding]:
    """Return one finding for all ranks that passed."""
    good = {rank: score for rank, score in scores.items() if score.verdict == "PASS"}
    if not good:
        return []
    worst = min(good, key=lambda rank: good[rank].share)
    figure = f"worst {_rate(trial, name, by_rank[worst])}, {trial.label([worst])}"
    expected = f"peers: median {middle} of {len(scores)}, MAD {good[worst].peers.mad:.3f}"
    return [Finding("PASS", f"{len(good)} ranks", check, figure, expected, "", name)]


def _find_pulsed(trial: Trial, args: Mapping[str, Any], means: Mapping[int, Sequence[float]]) -> None:
    """Find ranks that are fast at times and pause in between, by their mean times, confirmed by repeated turns.

    A turn is so long that it contains several pauses of some ten milliseconds, so every turn of such a rank is slow.
    Other work on the machine affects all ranks alike (`confirm`).
    """
    suspect_ranks = {rank for one in trial.suspects for rank in one.ranks}
    middle = {rank: statistics.median(each) for rank, each in means.items() if rank in trial.alive}
    if len(middle) < MIN_PEERS:
        return
    limit_us = _SUSPECT_RATIO * statistics.median(middle.values())
    order = sorted(set(middle) - suspect_ranks, key=lambda rank: middle[rank])
    suspects = [rank for rank in reversed(order) if middle[rank] > limit_us][:_MOST_PULSED]
    controls = [rank for rank in order if rank not in suspects]
    if not suspects:
        return

    def measure(ranks: Sequence[int]) -> dict[int, dict[str, float]]:
        rows = trial.alone("gemm", "gemm", {**args, **_LONG_TURN}, ranks, turns=True)
        return {row["rank"]: {"mean": statistics.fmean(row["iterations_us"])} for row in rows}

    proof = confirm(suspects, controls, measure, _PULSED_RATIO, trial.work.turn_s)
    for rank in suspects:
        if state_of(proof, rank) != "slow":
            continue
        evidence, who = proof[rank, "mean"], trial.label([rank])
        text = f"{evidence.ratio:.1f} times the mean time of its peers, though now and then as fast"
        text += f"; {evidence.description}"
        finding = Finding("FAIL", who, "gemm, steadily", text, "means like its peers'", _PULSES.format(who), "gemm")
        trial.flag("gemm", "node", [rank], finding)
    if undecided := open_of(proof):
        trial.findings.append(
            inconclusive(trial.alive, "gemm", "gemm, steadily", [trial.label([one]) for one in undecided])
        )


def _rate(trial: Trial, name: str, time_us: float) -> str:
    if name == "gemm":
        return f"{2 * trial.work.gemm['size'] ** 3 / time_us / 1e6:.4g} TFLOP/s"
    return f"{trial.work.copy['bytes'] / time_us / 1e3:.4g} GB/s"
