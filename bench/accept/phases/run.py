"""Phases of an acceptance run: each measures, judges, and excludes ranks that failed.

Device speeds, pairs and NICs have their own modules (`speeds`, `pairing`, `verbs`), as has the preflight, which needs
no ranks.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from bench.accept.evidence.log import Figure
from bench.accept.judge.expectations import load
from bench.accept.judge.logs import judge_expectations
from bench.accept.phases.confirm import LEAST_CONTROLS, confirm, inconclusive, open_of, state_of
from bench.accept.phases.matrix import judge_logs
from bench.accept.phases.speeds import measure_speeds
from bench.accept.phases.trial import Say, Trial
from netlayer.verdict import NO_EXPECTATION, Finding, Verdict

Phase = Callable[[Trial, Say], None]
_AGAIN = 3
_GROUP = "run the pairs of {}: if one is slow, its node or link is bad; if none is, the switch that they share"
_NODE = "if GEMM and copy of {} are as fast as the others', its NIC or cable is slow; else its GPU or host"
_NVLS = "run it with NCCL_NVLS_ENABLE=0 as well: the known figures are with NVLS off, and NCCL does not tell its state"
_JITTER = 50.0
"""Ratio of p99 to p50 latency above which there is a warning."""


def gemm(trial: Trial, say: Say) -> None:
    measure_speeds(trial, "gemm", say)


def copy(trial: Trial, say: Say) -> None:
    measure_speeds(trial, "copy", say)


def all_to_all(trial: Trial, say: Say) -> None:
    """Run all-to-all inside each node with several ranks."""
    groups = [group for group in _ranks_by_node(trial) if len(group) > 1]
    if not groups:
        trial.findings.append(_skipped(trial, "all_to_all", "every node has one rank"))
        return
    _compare(trial, "all_to_all", "all_to_all", groups, say)


def neighbours(trial: Trial, say: Say, tor_nodes: int = 0) -> None:
    """Run all-reduce among the nodes under each ToR, or among a few neighbouring nodes if that is not known.

    Args:
        trial: state of the run.
        say: progress callback.
        tor_nodes: nodes under one ToR; 0 if not known.
    """
    nodes = _ranks_by_node(trial)
    if len(nodes) < 2:
        trial.findings.append(_skipped(trial, "neighbours", "one node has none"))
        return
    size = tor_nodes or max(2, len(nodes) // 8)
    groups = [tuple(rank for node in nodes[at : at + size] for rank in node) for at in range(0, len(nodes), size)]
    if len(nodes) > size and len(nodes) % size == 1:  # a single node forms no group
        last = groups.pop()
        groups[-1] = groups[-1] + last
    _compare(trial, "neighbours", "all_reduce", [group for group in groups if len(group) > 1], say)


def all_reduce(trial: Trial, say: Say) -> None:
    """Run all-reduce on all ranks and compare with the expectation for the hardware."""
    rows = trial.together("all_reduce", "all_reduce", trial.work.all_reduce, [trial.alive], turns=False)
    say(1, 1, "")
    if not rows:
        return
    row = rows[0]
    facts = {"quantity": "bus_bw_gbs", "collective": "all_reduce", "device": row["device"], "ranks": len(row["group"])}
    facts |= {key: row[key] for key in ("nccl", "graph", "nvls") if row.get(key) is not None}
    # A host split into virtual nodes counts as several, so that no expectation matches.
    facts["hosts"] = len(_ranks_by_node(trial))
    figure = Figure(
        "all_reduce bus bandwidth", f"{row['size_bytes']} bytes", f"{len(row['group'])} ranks", row["bus_bw_gbs"],
        "GB/s", 0, facts={**facts, "bytes": row["size_bytes"]},
    )  # fmt: skip
    for finding in judge_expectations("all_reduce", [figure], load(), {}):
        if finding.verdict is None and finding.next_step:  # the missing fact is the NVLS state
            finding = replace(finding, next_step=_NVLS)
        trial.flag("all_reduce", "group", row["group"], finding, label=finding.subject)
    trial.findings.append(_data_passed("all_reduce", len(row["group"])))


def rails(trial: Trial, say: Say) -> None:
    """Run all-reduce among the equal local ranks of all nodes, which share a rail."""
    by_local: dict[int, list[int]] = defaultdict(list)
    for rank in trial.alive:
        by_local[trial.members[rank].local].append(rank)
    if len(_ranks_by_node(trial)) < 2:
        trial.findings.append(_skipped(trial, "rails", "they join nodes, and there is one"))
        return
    if len(by_local) < 2 or any(len(group) < 2 for group in by_local.values()):
        trial.findings.append(_skipped(trial, "rails", "one rank a node: there is one rail"))
        return
    _compare(trial, "rails", "all_reduce", [tuple(group) for group in by_local.values()], say)


def latency(trial: Trial, say: Say) -> None:
    """Measure latency and jitter of small all-reduces on all ranks."""
    rows = trial.together("latency", "all_reduce", trial.work.latency, [trial.alive], turns=False)
    say(1, 1, "")
    if not rows:
        return
    row = max(rows, key=lambda row: row["p99_us"])
    jitter = row["p99_us"] / row["p50_us"]
    figure = f"p50 {row['p50_us']:.1f} us, p99 {row['p99_us']:.1f} us ({jitter:.1f} times)"
    subject = f"{len(row['group'])} ranks"
    if trial.work.shared:
        finding = Finding(None, subject, "latency and jitter", figure, "ranks share cores: not judged", "", "latency")
    else:
        step = "look for what runs beside the ranks (nvidia-smi, top), and whether cores are pinned"
        verdict: Verdict = "PASS" if jitter <= _JITTER else "WARN"
        expected = f"p99 within {_JITTER:g} times p50"
        finding = Finding(
            verdict, subject, "latency and jitter", figure, expected, step if jitter > _JITTER else "", "latency"
        )
    trial.flag("latency", "group", row["group"], finding, label=subject)


def train(trial: Trial, say: Say) -> None:
    """Run data-parallel training steps, whose weights must equal those of one rank with the whole batch."""
    rows = trial.together("train", "train", trial.work.train, [trial.alive], turns=False)
    say(1, 1, "")
    if not rows:
        return
    first, last = (statistics.fmean(row[key] for row in rows) for key in ("first_loss", "last_loss"))
    figure = f"loss {first:.4f} -> {last:.4f}, step {statistics.median(row['p50_us'] for row in rows) / 1e3:.2f} ms"
    good = math.isfinite(last) and last < first
    step = "" if good else "run it again; where the loss does not fall, see the ranks' logs"
    expected = "falls, and weights as one rank alone computes them"
    subject = f"{len(rows)} ranks"
    finding = Finding("PASS" if good else "FAIL", subject, "training step", figure, expected, step, "train")
    trial.flag("train", "group", rows[0]["group"], finding, label=subject)


PHASES: Mapping[str, Phase] = {
    "gemm": gemm,
    "copy": copy,
    "all_to_all": all_to_all,
    "neighbours": neighbours,
    "all_reduce": all_reduce,
    "rails": rails,
    "latency": latency,
    "train": train,
}


def _compare(trial: Trial, phase: str, name: str, groups: Sequence[tuple[int, ...]], say: Say) -> None:
    """Run a collective in disjoint groups and compare them; a slow group is measured again, then bisected."""
    work = trial.work
    args = {"all_to_all": work.all_to_all, "all_reduce": work.all_reduce}[name]
    times: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for batch in range(_AGAIN):
        say(batch, _AGAIN, "" if batch == 0 else "again: some stand out")
        rows = trial.together(phase, name, args, groups, turns=work.shared)
        for group in {tuple(row["group"]) for row in rows}:
            times[group].append(max(work.time_us(row) for row in rows if tuple(row["group"]) == group))
        groups = [group for group in groups if set(group) <= set(trial.alive)]
        slow = _slow(trial, times)
        if not slow and batch:
            break
    slow, undecided = _slow(trial, times), list[tuple[int, ...]]()
    if slow and work.shared:
        slow, undecided = _confirmed(trial, phase, name, args, slow, times)
    for group in slow:
        _search_slow(trial, phase, name, args, group, times)
    measured = [group for group in times if set(group) <= set(trial.alive)]
    if undecided:
        trial.findings.append(inconclusive(trial.alive, phase, f"{phase}: {name}", [*map(trial.label, undecided)]))
    elif measured and not slow:
        trial.findings.append(_similar_finding(trial, phase, name, measured, times))


def _slow(trial: Trial, times: Mapping[tuple[int, ...], list[float]]) -> list[tuple[int, ...]]:
    """Return outliers among groups of equal size; on shared cores, where all scatter, by the ratio only."""
    work = trial.work
    slow_groups = []
    for size in {len(group) for group in times}:
        peers = {group: trial.work.combined(each) for group, each in times.items() if len(group) == size}
        if len(peers) < work.least_peers:
            continue
        middle = statistics.median(peers.values())
        if work.shared:
            slow_groups += [group for group, time_us in peers.items() if time_us > work.least_ratio * middle]
            continue
        scores = judge_logs({group: math.log(middle / time_us) for group, time_us in peers.items()}, work.least_ratio)
        slow_groups += [group for group, score in scores.items() if score.verdict != "PASS"]
    return slow_groups


def _confirmed(
    trial: Trial, phase: str, name: str, args: Mapping[str, object], suspects: Sequence[tuple[int, ...]],
    times: Mapping[tuple[int, ...], list[float]],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:  # fmt: skip
    """Confirm outliers on shared cores in turns with other groups of their size; return slow and undecided groups."""
    work = trial.work

    def measure(order: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dict[str, float]]:
        # Groups that lost a rank are not comparable.
        whole = [group for group in order if trial.of_alive(group) == group]
        times_us: dict[tuple[int, ...], float] = defaultdict(float)
        for row in trial.together(phase, name, args, whole, turns=True):
            times_us[tuple(row["group"])] = max(times_us[tuple(row["group"])], work.time_us(row))
        return {group: {name: time_us} for group, time_us in times_us.items()}

    slow: list[tuple[int, ...]] = []
    undecided: list[tuple[int, ...]] = []
    for size in sorted({len(group) for group in suspects}):
        peers = [group for group in suspects if len(group) == size]
        controls = [group for group in times if len(group) == size and group not in suspects]
        controls.sort(key=lambda group: work.combined(times[group]))
        evidence = confirm(peers, controls, measure, work.least_ratio, work.turn_s)
        slow += [group for group in peers if state_of(evidence, group) == "slow"]
        undecided += open_of(evidence) if len(controls) >= LEAST_CONTROLS else peers
    return slow, undecided


def _search_slow(
    trial: Trial, phase: str, name: str, args: Mapping[str, object], group: tuple[int, ...],
    times: Mapping[tuple[int, ...], list[float]],
) -> None:  # fmt: skip
    """Bisect a slow group, comparing each part with a healthy group of equal size, to find the slow rank or link."""
    from bench.accept.phases.bisect import find_culprits

    healthy = [rank for other in times if other != group for rank in other if rank in trial.alive and rank not in group]
    middle = statistics.median(trial.work.combined(each) for each in times.values())
    ratio = trial.work.combined(times[group]) / middle
    min_slowdown = max(1.05, 1 + (ratio - 1) / 2)

    def is_slow(members: tuple[int, ...]) -> bool:
        control = tuple(rank for rank in healthy if rank not in members)[: len(members)]
        each: dict[tuple[int, ...], list[float]] = defaultdict(list)
        turns = []
        for turn in range(_AGAIN):
            order = [members, control] if turn % 2 else [control, members]
            now: dict[tuple[int, ...], list[float]] = defaultdict(list)
            for row in trial.together(phase, name, args, order, turns=True):
                now[tuple(row["group"])].append(trial.work.time_us(row))
            for one, times_us in now.items():
                each[one] += times_us
            turns.append(bool(now[members] and now[control]) and max(now[members]) > max(now[control]))
        if not each[members] or not each[control]:
            return False
        slower = trial.work.combined(each[members]) > min_slowdown * trial.work.combined(each[control])
        return slower and (all(turns) or not trial.work.shared)

    culprits = find_culprits(group, is_slow, healthy)
    figure = f"{ratio:.1f} times the time of its peers in {name} of {trial.label(group)}"
    ranks, kind = (culprits.members, "node") if culprits.members else (culprits.link, "link")
    if len(ranks) > 2 or not ranks or not is_slow(tuple(group)):
        finding = Finding("WARN", trial.label(group), f"{phase}: {name}", figure, "like the other groups",
                          _GROUP.format(trial.label(group)), phase)  # fmt: skip
        trial.flag(phase, "group", group, finding)
        return
    label = trial.label(ranks)
    step = trial.link_step(ranks) if kind == "link" else _NODE.format(label)
    finding = Finding("FAIL", label, f"{phase}: {name}, bisected", figure, "like the other groups", step, phase)
    trial.flag(phase, kind, ranks, finding)


def _similar_finding(
    trial: Trial, phase: str, name: str, groups: Sequence[tuple[int, ...]],
    times: Mapping[tuple[int, ...], list[float]],
) -> Finding:  # fmt: skip
    """Return the finding for groups without an outlier."""
    each = [trial.work.combined(times[group]) / 1e3 for group in groups]
    figure = f"{min(each):.3f} to {max(each):.3f} ms, 0 wrong"
    subject = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])}"
    if len(groups) < trial.work.least_peers:
        expected = f"{NO_EXPECTATION}; {trial.work.least_peers} groups are peers"
        return Finding(None, subject, f"{phase}: {name}", figure, expected, "", phase)
    return Finding("PASS", subject, f"{phase}: {name}", figure, "like each other", "", phase)


def _ranks_by_node(trial: Trial) -> list[tuple[int, ...]]:
    by_node: dict[int, list[int]] = defaultdict(list)
    for rank in trial.alive:
        by_node[trial.members[rank].node].append(rank)
    return [tuple(ranks) for _, ranks in sorted(by_node.items())]


def _skipped(trial: Trial, phase: str, reason: str) -> Finding:
    return Finding(None, f"{len(trial.alive)} ranks", phase, "not run", reason, "", phase)


def _data_passed(phase: str, ranks: int) -> Finding:
    return Finding("PASS", f"{ranks} ranks", f"{phase} data", "0 wrong elements", "0 wrong", "", phase)


def names() -> Iterator[str]:
    """Yield the names of all phases, in order."""
    yield from ("preflight", "verbs")
    yield from ("gemm", "copy", "all_to_all", "neighbours", "all_reduce", "pairs", "rails", "latency", "train")
