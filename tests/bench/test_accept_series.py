"""Judgement of GPUs by series, against a known value or peers; times are made up, devices have an expectation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from bench.accept.agents.faults import InjectedFault, parse_faults
from bench.accept.agents.fleet import Fleet, Outcome
from bench.accept.phases.counters import Counters, read_nvlink
from bench.accept.phases.gpu_speeds import measure_gpu_speeds
from bench.accept.phases.pairing import measure_pairs
from bench.accept.phases.series import KNOWN_SPREAD, Reference, combine, peers_reference, score, spread_of, unsteady
from bench.accept.phases.speeds import measure_speeds
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import Result, members_of
from bench.accept.run_output import drain_lists, judgement_of, tickets
from netlayer.errors import ConfigError

GIB = 1 << 30
ONE_WAY, BOTH, GEMM, COPY = 372.1, 365.4, 663.0, 2074.0  # of an H200, as the registry has them
Speed = Callable[[str, tuple[int, ...], int, int], float]
"""Share of the known speed, by probe, ranks, series and block."""


def silent(_done: int, _total: int, _words: str) -> None:
    """Discard progress."""


class KnownFleet:
    """Fake `Fleet`: simulated H200s of one host with the speed given by `speed`, and 0.2% of noise."""

    def __init__(self, speed: Speed, device: str = "NVIDIA H200", stopped: Mapping[int, float] | None = None) -> None:
        self.speed, self.device, self.stopped = speed, device, stopped or {}
        self.series: dict[str, int] = {"gemm": -1, "copy": -1, "pairs": -1}
        self.draw = random.Random(0)

    def run(
        self, name: str, args: Mapping[str, Any], groups: Iterable[Sequence[int]], _limit_s: float
    ) -> list[Outcome]:
        if name in self.series:
            self.series[name] += 1
        return [Outcome(tuple(group), self.rows(name, args, tuple(group))) for group in groups]

    def rows(self, name: str, args: Mapping[str, Any], group: tuple[int, ...]) -> list[dict[str, Any]]:
        common = {"check": name, "rank": 0, "device": self.device, "wrong": 0, "ok": True, "nccl": 22809}
        if name == "host":
            return [{**common, "stopped_share": self.stopped.get(group[0], 0.0)}]
        if name == "gemm":
            size = args["size"]
            times_us = self.times(name, group, 2 * size**3 / GEMM / 1e6, 15)
            return [{**common, "size_bytes": 2 * size**2, "blocks_us": times_us, "iterations_us": times_us}]
        if name == "copy":
            times_us = self.times(name, group, args["bytes"] / COPY / 1e3, 6)
            return [{**common, "direction": "device_to_device", "size_bytes": args["bytes"], "blocks_us": times_us}]
        return [row for pair in itertools.combinations(group, 2) for row in self.pair(common, args, group, pair)]

    def pair(
        self, common: Mapping[str, Any], args: Mapping[str, Any], group: tuple[int, ...], pair: tuple[int, int]
    ) -> Iterable[dict[str, Any]]:
        size = args["bytes"] or GIB
        ends = {"rank": group.index(pair[0]), "peer": group.index(pair[1]), "round": 0}
        for direction, gbs in (("latency", 0.0), ("low_to_high", ONE_WAY), ("high_to_low", ONE_WAY), ("both", BOTH)):
            base_us = size / gbs / 1e3 if gbs else 20.0
            times_us = self.times("pairs", pair, base_us, 6)
            row = {
                **common,
                **ends,
                "direction": direction,
                "size_bytes": size if gbs else 8,
                "iterations_us": times_us,
            }
            yield row | ({"host_us": 90.0, "messages": 14, "p50_us": times_us[0]} if gbs else {})

    def times(self, name: str, ranks: tuple[int, ...], base_us: float, num: int) -> list[float]:
        shares = [self.speed(name, ranks, self.series[name], block) for block in range(num)]
        return [base_us / share * self.draw.gauss(1, 0.002) for share in shares]


def trial_of(num: int, speed: Speed, **fleet: Any) -> Trial:
    known = KnownFleet(speed, **fleet)
    trial = Trial(cast(Fleet, known), members_of([("vm", num)]), work_for("nccl", None), list(range(num)))
    measure_gpu_speeds(trial, "gemm", silent)
    measure_gpu_speeds(trial, "copy", silent)
    measure_pairs(trial, silent)
    return trial


def suspect_verdicts(trial: Trial) -> dict[tuple[int, ...], str]:
    return {one.ranks: one.verdict for one in trial.suspects}


def only(name: str, ranks: tuple[int, ...], share: float, series: Sequence[int] = (0, 1, 2)) -> Speed:
    """Return speeds that are normal except for one GPU, or one pair, in some series."""

    def speed(probe: str, who: tuple[int, ...], number: int, _block: int) -> float:
        is_it = probe == name and set(ranks) <= set(who) and number in series
        return share if is_it else 1.0

    return speed


@pytest.mark.parametrize("num", [2, 4])
def test_healthy_gpus_pass_far_from_fail(num: int) -> None:
    trial = trial_of(num, lambda *_: 1.0)
    assert not trial.suspects
    assert judgement_of(Result(trial)).verdict == "PASS"
    assert min(one["spreads_from_fail"] for one in trial.scores) > 6
    assert {one["number"] for one in trial.scores} == {0, 1}


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize(("share", "verdict"), [(0.5, "FAIL"), (0.8, "FAIL"), (0.9, "WARN"), (0.96, None)])
def test_a_slow_pair_is_named_by_its_grade_and_nobody_else(num: int, share: float, verdict: str | None) -> None:
    trial = trial_of(num, only("pairs", (0, 1), share))
    assert suspect_verdicts(trial) == ({(0, 1): verdict} if verdict else {})
    assert all(one.kind == "link" for one in trial.suspects)


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize(("share", "verdict"), [(0.5, "FAIL"), (0.8, "FAIL"), (0.9, "WARN"), (0.96, None)])
def test_a_slow_gpu_is_named_by_its_grade_and_nobody_else(num: int, share: float, verdict: str | None) -> None:
    trial = trial_of(num, only("gemm", (1,), share))
    assert suspect_verdicts(trial) == ({(1,): verdict} if verdict else {})


def test_a_gpu_whose_pairs_are_all_slow_is_named_itself() -> None:
    trial = trial_of(4, only("pairs", (2,), 0.7))
    assert suspect_verdicts(trial) == {(2,): "FAIL"}
    assert [one.kind for one in trial.suspects] == ["node"]


@pytest.mark.parametrize("name", ["pairs", "gemm"])
def test_an_outlier_of_a_single_series_is_measured_again_and_not_flagged(name: str) -> None:
    trial = trial_of(4, only(name, (0, 1) if name == "pairs" else (1,), 0.5, series=[1]))
    assert not trial.suspects
    [finding] = [one_finding for one_finding in trial.findings if one_finding.verdict == "NO VERDICT"]
    assert "in one series alone" in finding.figure
    assert finding.next_step.startswith("run it again")
    assert {one["number"] for one in trial.scores if one["phase"] == name} == {0, 1, 2}


@pytest.mark.parametrize("name", ["pairs", "gemm", "copy"])
def test_if_all_are_slow_the_cause_is_common(name: str) -> None:
    trial = trial_of(4, lambda probe, *_: 0.7 if probe == name else 1.0)
    assert suspect_verdicts(trial) == {(0, 1, 2, 3): "WARN"}
    assert not drain_lists(trial)
    assert "in common" in next(one.next_step for one in trial.findings if one.verdict == "WARN")


@pytest.mark.parametrize("name", ["pairs", "gemm"])
def test_an_unsteady_subject_gets_a_warning(name: str) -> None:
    ranks = (0, 1) if name == "pairs" else (1,)

    def speed(probe: str, who: tuple[int, ...], _series: int, block: int) -> float:
        return 0.6 if probe == name and set(ranks) <= set(who) and block == 3 else 1.0

    trial = trial_of(4, speed)
    assert suspect_verdicts(trial) == {ranks: "WARN"}
    assert "slowest block" in next(one.figure for one in trial.findings if one.verdict == "WARN")


def test_a_stopped_host_is_not_blamed_on_its_gpu() -> None:
    trial = trial_of(4, only("gemm", (1,), 0.5), stopped={1: 0.9})
    assert [(one.ranks, one.verdict, one.kind) for one in trial.suspects] == [((1,), "WARN", "host")]
    assert not drain_lists(trial)
    [gpu] = [finding for finding in trial.findings if finding.check == "gemm" and finding.verdict != "PASS"]
    assert (gpu.verdict, gpu.subject) == ("NO VERDICT", "vm/gpu1")


def test_an_unknown_device_is_not_judged_and_the_step_tells_what_would_help() -> None:
    trial = trial_of(4, only("pairs", (0, 1), 0.5), device="NVIDIA Unheard")
    assert not trial.suspects
    assert not trial.scores
    assert judgement_of(Result(trial)).verdict == "NO VERDICT"
    steps = [one.next_step for one in trial.findings if one.verdict == "NO VERDICT"]
    assert len(steps) == 3
    assert all(step.startswith("to decide it: run this on 8 or more NVIDIA Unheard") for step in steps)


def test_gpus_of_another_kind_are_no_peers_and_pairs_between_few_nodes_are_not_judged() -> None:
    """Judge two hosts of two GPUs: a known value applies inside each host, none between them; one GPU copies slowly."""

    class Mixed(KnownFleet):
        def rows(self, name: str, args: Mapping[str, Any], group: tuple[int, ...]) -> list[dict[str, Any]]:
            rows = super().rows(name, args, group)
            return [{**row, "device": "NVIDIA Unheard"} if group == (3,) else row for row in rows]

    fleet = Mixed(only("copy", (3,), 0.5))
    members = members_of([("left", 2), ("right", 2)])
    trial = Trial(cast(Fleet, fleet), members, work_for("nccl", None), [0, 1, 2, 3])
    measure_gpu_speeds(trial, "copy", silent)
    measure_pairs(trial, silent)
    assert not trial.suspects
    judged_subjects = {(one.verdict, one.subject, one.check) for one in trial.findings if one.verdict}
    assert judged_subjects == {
        ("PASS", "3 ranks", "copy device to device"),
        ("NO VERDICT", "1 ranks", "copy device to device"),
        ("PASS", "2 pairs of 4", "pairs"),
        ("NO VERDICT", "4 pairs", "pairs"),
    }


def test_times_with_host_overhead_judge_no_link() -> None:
    """Measure without NCCL's library: each message is launched by the host."""

    class Eager(KnownFleet):
        def pair(self, *arguments: Any) -> Iterable[dict[str, Any]]:
            for row in super().pair(*arguments):
                yield {key: value for key, value in row.items() if key not in ("messages", "host_us")}

    fleet = Eager(only("pairs", (0, 1), 0.5))
    trial = Trial(cast(Fleet, fleet), members_of([("vm", 8)]), work_for("nccl", None), list(range(8)))
    measure_pairs(trial, silent)
    assert not trial.suspects
    [finding] = [one_finding for one_finding in trial.findings if one_finding.verdict == "NO VERDICT"]
    assert "libnccl.so.2" in finding.next_step


def test_a_failed_link_inside_a_host_drains_it_and_a_warning_writes_a_ticket_alone() -> None:
    failed = trial_of(4, only("pairs", (0, 1), 0.5))
    assert [line for line in drain_lists(failed)["Slurm"] if "nodename=vm " in line]
    warned = trial_of(4, only("pairs", (0, 1), 0.9))
    assert not drain_lists(warned)
    [text] = tickets(Result(warned)).values()
    assert text.startswith("vm/gpu0 - vm/gpu1: to be looked at, not drained: in pairs")


def test_a_score_needs_the_share_and_the_spreads() -> None:
    known = Reference(100.0, KNOWN_SPREAD, "known")
    assert [score("x", share, 0.0, known).verdict for share in (0.8, 0.88, 0.95)] == ["FAIL", "WARN", "PASS"]
    assert score("x", 0.8, 0.05, known).verdict == "PASS"  # its own repeats differ by more than that tells
    assert score("x", 0.8, 0.03, known).verdict == "FAIL"
    assert score("x", 0.95, 0.0, known).from_fail == pytest.approx(10)


def test_a_bad_verdict_needs_two_series() -> None:
    known = Reference(100.0, KNOWN_SPREAD, "known")
    good, warn, fail = (score("x", share, 0.0, known) for share in (1.0, 0.9, 0.5))
    assert combine([good, good]) == "PASS"
    assert combine([fail]) == combine([fail, good]) == combine([good, warn, good]) == "NO VERDICT"
    assert combine([fail, fail]) == combine([fail, good, fail]) == "FAIL"
    assert combine([fail, warn]) == combine([warn, warn, good]) == "WARN"


def test_fewer_than_eight_are_no_peers() -> None:
    assert peers_reference([100.0] * 7) is None
    reference = peers_reference([100.0, 101, 99, 100, 102, 98, 100, 50])
    assert reference is not None
    assert (reference.value, reference.spread) == (100.0, pytest.approx(1.4826 * 0.01))


def test_the_spread_of_a_mean_falls_with_its_blocks() -> None:
    assert spread_of([7.0]) == 0.0
    assert spread_of([90.0, 110.0] * 8) < spread_of([90.0, 110.0] * 2)
    assert unsteady([[1.0, 0.5], [1.0, 0.6], [1.0, 0.99]]) == 0.6
    assert unsteady([[1.0, 0.5], [1.0, 0.99], []]) is None


class Pulsed:
    """Simulated CPU ranks with the same fastest time; one of them pauses between its iterations."""

    def __init__(self, rank: int | None, factor: float) -> None:
        self.rank, self.factor, self.draw = rank, factor, random.Random(1)

    def run(self, _name: str, _args: Any, groups: Iterable[Sequence[int]], _limit_s: float) -> list[Outcome]:
        return [Outcome(tuple(group), [self.row(group[0])]) for group in groups]

    def row(self, rank: int) -> dict[str, Any]:
        times_us = [1000 * self.draw.uniform(1.0, 1.3) for _ in range(8)]
        times_us[0] = 1000.0
        if rank == self.rank:
            times_us[1:] = [time_us * self.factor for time_us in times_us[1:]]
        common = {"check": "gemm", "rank": 0, "device": "made up", "size_bytes": 4, "wrong": 0, "p50_us": times_us[4]}
        return {**common, "min_us": min(times_us), "iterations_us": times_us}


@pytest.mark.parametrize(("rank", "factor"), [(None, 1.0), (3, 10.0), (3, 1.4)])
def test_a_rank_that_is_stopped_in_pulses_is_found_by_its_means(rank: int | None, factor: float) -> None:
    work = replace(work_for("gloo", None), turn_s=0.0)
    trial = Trial(cast(Fleet, Pulsed(rank, factor)), members_of([("localhost", 8)], 1), work, list(range(8)))
    measure_speeds(trial, "gemm", silent)
    assert suspect_verdicts(trial) == ({(3,): "FAIL"} if factor > 2 else {})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ctas:2-3:4", InjectedFault("ctas", (2, 3), 4)),
        ("ctas:0-1", InjectedFault("ctas", (0, 1), 2)),
        ("pulse:3", InjectedFault("pulse", (3,), 18)),
    ],
)
def test_the_faults_of_gpus_are_read(text: str, fault: InjectedFault) -> None:
    assert parse_faults([text], 4) == [fault]


@pytest.mark.parametrize("text", ["ctas:2", "ctas:2-3:1.5", "pulse:1-2", "pulse:1:20"])
def test_invalid_faults_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text.partition(":")[0]):
        parse_faults([text], 4)


class SmiFleet:
    """Fake nvidia-smi of a host with two GPUs and made-up values; the second reading comes later."""

    def __init__(self, errors: int) -> None:
        self.reading, self.errors = 0, errors

    def execute_all(self, command: Sequence[str], _limit_s: float) -> dict[str, dict[str, Any]]:
        return {"vm": self.answer(command), "bare": {"code": None, "text": "", "error": "cannot be run"}}

    def answer(self, command: Sequence[str]) -> dict[str, Any]:
        if command[1] != "nvlink":
            self.reading += 1
            row = "{}, GPU-{}, 1980, 2619, 0x0, 40, 130.0, 5, 16, 0, 0"
            return {"code": 0, "text": "\n".join(row.format(gpu, gpu) for gpu in range(2))}
        late = self.reading - 1
        lines = []
        for gpu in range(2):
            lines.append(f"GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu})")
            for link in range(2):
                if command[2] == "--getthroughput":
                    lines.append(f"\t Link {link}: Data Tx: {100 + 50 * late} KiB")
                else:
                    lines.append(f"\t Link {link}: Replay Errors: {7 + late * gpu * self.errors}")
                    lines.append(f"\t Link {link}: Symbol Errors: {late * 9}")
        return {"code": 0, "text": "\n".join(lines)}


@pytest.mark.parametrize("errors", [0, 3])
def test_link_errors_that_came_meanwhile_are_a_warning_and_counters_are_evidence(errors: int) -> None:
    fleet = cast(Fleet, SmiFleet(errors))
    trial = Trial(fleet, members_of([("vm", 2)]), work_for("nccl", None), [0, 1])
    counters = Counters(fleet)
    counters.before(trial)
    counters.after(trial)
    increases = [row for row in trial.evidence if row["when"] == "meanwhile"]
    assert [(row["gpu"], row["Data Tx"], row["Replay Errors"]) for row in increases] == [
        (0, 100, 0),
        (1, 100, 2 * errors),
    ]
    assert len([row for row in trial.evidence if row["when"] == "before"]) == 2
    assert suspect_verdicts(trial) == ({(1,): "WARN"} if errors else {})
    assert not drain_lists(trial)


def test_missing_counters_are_empty() -> None:
    assert read_nvlink(["NVML: Unable to retrieve NVLink information as all links are inActive"]) == {}
