"""Findings of heartbeats: long steps, long phases and stages of unequal size accuse nobody; real faults are found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from netlayer.config.resilience import ResilienceConfig
from trainer.resilience.detect import Finding, View, find
from trainer.resilience.messages import Heartbeat, RankStatus

BEAT_S = 10.0
SETTINGS = ResilienceConfig()


class Nodes:
    """Heartbeats of nodes with one rank each, and what is found in them."""

    def __init__(self, num: int, settings: ResilienceConfig = SETTINGS) -> None:
        self.names = [f"n{index}" for index in range(num)]
        self.view, self.settings, self.typical_ms = View(BEAT_S), settings, 0.0
        self.view.begin(0.0)
        self._seq = 0

    def tell(self, now_s: float, ranks: Sequence[dict[str, object]], names: Iterable[str] = ()) -> list[Finding]:
        """Take a heartbeat of each node (or of these alone) with its rank's status, and look."""
        self._seq += 1
        for index, name in enumerate(self.names):
            if names and name not in names:
                continue
            rank = RankStatus.model_validate({"rank": index, "pid": 1, "state": "running", **ranks[index]})
            beat = Heartbeat(
                run="r", node=name, boot="0" * 16, seq=self._seq, at_ns=0, address="a", host="h", pid=1,
                incarnation=1, ranks=(rank,),
            )  # fmt: skip
            self.view.take(beat, now_s)
        return self.look(now_s)

    def look(self, now_s: float) -> list[Finding]:
        self.view.follow_steps(self.names, 1, now_s)
        return find(self.view, self.names, 1, self.settings, now_s, 0, self.typical_ms)


def causes(findings: Iterable[Finding]) -> list[str]:
    return [finding.kind for finding in findings if finding.weight == "cause"]


def step(number: int, step_ms: float, **more: object) -> dict[str, object]:
    return {"step": number, "step_ms": step_ms, **more}


def test_a_job_of_long_steps_is_not_hung_before_its_typical_step_is_known() -> None:
    nodes = Nodes(2)
    for now_s in range(10, 500, 10):  # steps of 50 s
        done = now_s // 50
        told = step(done, 50e3) if done else step(0, 0.0, phase="")
        assert causes(nodes.tell(float(now_s), [told] * 2)) == [], now_s
    nodes = Nodes(2)
    for now_s in range(10, 2000, 10):  # one step, and no more
        found = causes(nodes.tell(float(now_s), [step(1, 50e3)] * 2))
    assert found == ["hung"]


@pytest.mark.parametrize("offset_s", range(0, 10, 2))
def test_the_time_of_a_phase_is_no_silence_once_it_is_over(offset_s: int) -> None:
    nodes = Nodes(2)
    for now_s in range(offset_s, 400, 10):  # steps of 6 s; rank 1 waits 75 s for its data after step 20, at 120 s
        done = min(now_s // 6, 20) if now_s < 200 else 20 + (now_s - 195) // 6
        waits = 120 <= now_s < 195
        rows = [step(done, 6e3), step(done, 6e3, phase="waits for its batches" if waits else "")]
        assert causes(nodes.tell(float(now_s), rows)) == [], now_s
    stalled = [step(nodes.view.step, 6e3)] * 2
    assert any(causes(nodes.tell(float(now_s), stalled)) == ["hung"] for now_s in range(400, 500, 10))


SLOW = ResilienceConfig(slow_floor_s=0.0, slow_steps=5)


def run_slow(normal: Sequence[float], slow: Sequence[float]) -> list[Finding]:
    """Findings of steps of 1.5 s, where 1 s is typical, by what each rank waited for others before and then."""
    nodes = Nodes(len(normal), SLOW)
    nodes.typical_ms = 1000.0
    number, findings = 0, list[Finding]()
    for now_s in range(10, 410, 10):
        is_slow = now_s > 200
        number += 7 if is_slow else 10
        exposed = slow if is_slow else normal
        rows = [step(number, 1500.0 if is_slow else 1000.0, exposed=each) for each in exposed]
        findings += nodes.tell(float(now_s), rows)
    return [finding for finding in findings if finding.kind == "slow"]


def test_a_stage_that_always_waits_least_is_not_blamed_for_slow_steps() -> None:
    unequal = [0.05, 0.30, 0.32]
    assert causes(run_slow(unequal, unequal)) == []
    blamed = [finding for finding in run_slow([0.30, 0.30, 0.32], unequal) if finding.weight == "cause"]
    assert {finding.node for finding in blamed} == {"n0"}


def test_a_slow_rank_is_not_blamed_where_nobody_knows_how_it_was_before() -> None:
    nodes = Nodes(3, SLOW)
    nodes.typical_ms = 1000.0
    for now_s in range(10, 410, 10):
        rows = [step(now_s, 1500.0, exposed=each) for each in (0.05, 0.5, 0.5)]
        assert causes(nodes.tell(float(now_s), rows)) == []


def test_a_stale_reading_is_no_further_look_at_a_slow_rank() -> None:
    nodes = Nodes(3, SLOW)
    nodes.typical_ms = 1000.0
    for now_s in range(10, 410, 10):  # n1 tells of steps, and n0's reading stays the first one
        rows = [step(now_s, 1500.0, exposed=each) for each in (0.05, 0.5, 0.5)]
        nodes.tell(float(now_s), rows, () if now_s == 10 else ("n1",))
    assert sum(map(len, nodes.view.slow.gaps.values())) <= 1


@pytest.mark.parametrize(
    ("phase", "num_blocked", "expected"),
    [("", 1, {"n0"}), ("", 2, {"n0", "n1"}), ("", 3, set()), ("", 4, set()), ("saves a checkpoint", 4, set())],
)
def test_who_waits_for_a_shared_file_system_is_not_blocked(phase: str, num_blocked: int, expected: set[str]) -> None:
    nodes = Nodes(4)
    blocked = step(9, 1e3, state="blocked", phase=phase)
    rows = [blocked if index < num_blocked else step(9, 1e3) for index in range(4)]
    nodes.tell(0.0, rows)
    found = nodes.tell(10.0, rows)
    assert {finding.node for finding in found if finding.kind == "stopped" and finding.weight == "cause"} == expected


def test_a_process_that_is_blocked_for_longer_than_a_phase_may_take_is_found() -> None:
    nodes = Nodes(4, ResilienceConfig(phase_s=60.0))
    rows = [step(9, 1e3, state="blocked", phase="saves a checkpoint"), *[step(9, 1e3)] * 3]
    assert [causes(nodes.tell(now_s, rows)) for now_s in (0.0, 50.0, 70.0)] == [[], [], ["stopped"]]
