"""How fast each rank's own device is, beside its peers: GEMM and copies, repeated until nobody stands out by chance.

Left out: whether the device is fast at all; expectations say that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench.accept.matrix import Score, judge_logs
from bench.accept.trial import Say, Trial
from netlayer.verdict import MIN_PEERS, NO_EXPECTATION, Finding

_TURNS = 3
_STABLE_BATCHES = 3
_QUIET_MAD = 0.01
"""Of the scores, above which ranks are measured again: a slow one could hide in the scatter."""
_STEPS = {
    "gemm": "read clocks, throttle reasons, power limit and temperature of {} (nvidia-smi -q) while it works",
    "copy": "read PCIe width and speed (nvidia-smi -q, lspci -vv) and memory errors of {}",
}
Times = dict[str, dict[int, float]]
"""By series (the direction of a copy) and rank: microseconds."""
Scores = dict[str, dict[int, Score]]


def measure_speeds(trial: Trial, name: str, say: Say) -> None:
    """One probe of every rank; findings and accused go to the trial."""
    work = trial.work
    args = {"gemm": work.gemm, "copy": work.copy}[name]
    each: dict[tuple[str, int], list[float]] = defaultdict(list)
    before: list[Times] = []
    # Copies scatter more: there, more batches than this change little.
    most = work.most_batches if name == "gemm" else max(work.least_batches, work.most_batches // 3)
    for batch in range(most):
        say(batch, most, "again: some stand out, or all scatter" if batch >= work.least_batches else "")
        for _ in range(_TURNS if work.shared else 1):
            for row in trial.alone(name, name, args, trial.alive, turns=work.shared):
                each[row.get("direction", "").replace("_", " "), row["rank"]].append(work.time_us(row))
        times = _times(trial, each)
        scores = _scores(trial, times)
        if batch + 1 >= work.least_batches and _is_settled(times, scores, before):
            break
        before.append(times)
    _conclude(trial, name, times, scores)


def _times(trial: Trial, each: Mapping[tuple[str, int], Sequence[float]]) -> Times:
    found: Times = defaultdict(dict)
    for (series, rank), times_us in each.items():
        if rank in trial.alive:
            found[series][rank] = trial.work.combined(times_us)
    return dict(found)


def _scores(trial: Trial, times: Times) -> Scores:
    """How ranks stand among each other; empty where they are too few."""
    found: Scores = {}
    for series, by_rank in times.items():
        if len(by_rank) >= MIN_PEERS:
            middle = statistics.median(by_rank.values())
            logs = {rank: math.log(middle / max(time_us, 1e-3)) for rank, time_us in by_rank.items()}
            found[series] = judge_logs(logs, trial.work.least_speed_ratio)
    return found


def _is_settled(times: Times, scores: Scores, before: Sequence[Times]) -> bool:
    """Nobody stands out and the scatter hides nobody; or somebody clearly does, and more batches change nothing."""
    all_scores = [score for by_rank in scores.values() for score in by_rank.values()]
    verdicts = {score.verdict for score in all_scores}
    if verdicts <= {"PASS"}:
        return all(score.peers.mad <= _QUIET_MAD for score in all_scores)
    return "WARN" not in verdicts and _is_stable(times, before)


def _is_stable(times: Times, before: Sequence[Times]) -> bool:
    """Whether the last batches have changed nobody's time: then more of them would not either."""
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
            words = f"{NO_EXPECTATION}; {MIN_PEERS} peers are needed to tell the odd one"
            figure = f"worst {_rate(trial, name, by_rank[slowest])}, {trial.label([slowest])}"
            trial.findings.append(Finding(None, f"{len(by_rank)} ranks", check, figure, words, "", name))
            continue
        middle = _rate(trial, name, statistics.median(by_rank.values()))
        for rank, score in scores[series].items():
            if score.verdict == "PASS":
                continue
            who = trial.label([rank])
            figure = f"{_rate(trial, name, by_rank[rank])}, {score.share:.3f} of its peers"
            expected = f"peers: median {middle} of {score.peers.num_peers}, MAD {score.peers.mad:.3f}"
            finding = Finding(score.verdict, who, check, figure, expected, _STEPS[name].format(who), name)
            trial.accuse(name, "node", [rank], finding)
        trial.findings += _passed(trial, name, check, by_rank, scores[series], middle)


def _passed(
    trial: Trial, name: str, check: str, by_rank: Mapping[int, float], scores: Mapping[int, Score], middle: str
) -> list[Finding]:
    """One finding for all that passed."""
    good = {rank: score for rank, score in scores.items() if score.verdict == "PASS"}
    if not good:
        return []
    worst = min(good, key=lambda rank: good[rank].share)
    figure = f"worst {_rate(trial, name, by_rank[worst])}, {trial.label([worst])}"
    expected = f"peers: median {middle} of {len(scores)}, MAD {good[worst].peers.mad:.3f}"
    return [Finding("PASS", f"{len(good)} ranks", check, figure, expected, "", name)]


def _rate(trial: Trial, name: str, time_us: float) -> str:
    if name == "gemm":
        return f"{2 * trial.work.gemm['size'] ** 3 / time_us / 1e6:.4g} TFLOP/s"
    return f"{trial.work.copy['bytes'] / time_us / 1e3:.4g} GB/s"
