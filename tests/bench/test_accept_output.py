"""Summary, tickets, drain lists and JUnit report of an acceptance run."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, cast

import pytest

from bench.accept import run_output
from bench.accept.agents.faults import InjectedFault
from bench.accept.agents.fleet import Fleet
from bench.accept.command import _write_folder
from bench.accept.judge.logs import Judgement
from bench.accept.judge.output import finding_cells, format_table
from bench.accept.phases import run as phases
from bench.accept.phases.confirm import NOT_QUIET, inconclusive
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import Result, members_of
from netlayer.verdict import Finding, Verdict
from tests.bench.simulated_fleet import SimulatedFleet, World


def trial_of(num_ranks: int = 4) -> Trial:
    fleet = cast(Fleet, SimulatedFleet(World("none", (), 1.0, 0.0), 0))
    return Trial(fleet, members_of([("h", num_ranks)]), work_for("nccl", None), list(range(num_ranks)))


def result_of(*verdicts: Verdict | None, stopped: str = "") -> Result:
    trial = trial_of()
    for verdict in verdicts:
        trial.flag("gemm", "node", [1], Finding(verdict, "h/gpu1", "gemm", "1 us", file="gemm"))
    return Result(trial, done=["gemm"], stopped=stopped)


@pytest.mark.parametrize(
    ("result", "verdict", "words"),
    [
        (result_of("PASS"), "PASS", "no outlier; 4 ranks, 1 phase"),
        (result_of(None), "NO VERDICT", "nothing could be judged; 4 ranks, 1 phase"),
        (result_of("WARN", "FAIL"), "FAIL", "faulty: h/gpu1 (gemm); 4 ranks, 1 phase"),
        (result_of("WARN"), "WARN", "to look at: h/gpu1 (gemm); 4 ranks, 1 phase"),
        (
            result_of("PASS", stopped="interrupted"),
            "WARN",
            "4 ranks, 1 phase; stopped early (interrupted): results are partial",
        ),
    ],
)
def test_the_last_line_agrees_with_the_verdict(result: Result, verdict: str, words: str) -> None:
    assert list(run_output.format_run(result))[-1] == f"{verdict}: {words}"


def test_an_injected_fault_that_nobody_is_accused_of_is_missed() -> None:
    result = result_of("FAIL")  # rank 1
    result.trial.flag("pairs", "link", [2, 3], Finding("FAIL", "link", "pairs", "1 us", file="pairs"))
    node, link = InjectedFault("slow", (1,), 0.2), InjectedFault("slowlink", (3, 2), 200.0)
    assert run_output.missed_faults(result, []) == run_output.missed_faults(result, [node, link]) == ""
    other = InjectedFault("slowlink", (0, 2), 10.0)
    assert run_output.missed_faults(result, [node, other]).startswith("slowlink:0-2:10; no phase of gemm shows it: ")
    result.trial.findings.append(inconclusive([0, 1], "pairs", "pairs", ["node0 - node2"]))
    assert f"slowlink:0-2:10; {NOT_QUIET}: " in run_output.missed_faults(result, [other])


def test_what_all_have_in_common_is_in_the_last_line() -> None:
    result = result_of("PASS")
    result.trial.findings.append(Finding("WARN", "4 ranks", "gemm drift", "1.4 times its time", file="soak"))
    assert run_output.sentence(result) == "to look at: 4 ranks (soak); 4 ranks, 1 phase"


def test_a_ticket_of_a_link_is_a_file_with_both_ends_in_its_name(tmp_path: Path) -> None:
    trial = trial_of()
    trial.flag("pairs", "link", [1, 2], Finding("FAIL", trial.label([1, 2]), "pairs", "1 us", file="pairs"))
    _write_folder(tmp_path, Result(trial))
    drains = ["drain-kubernetes.sh", "drain-slurm.sh"]  # both ends are of one host, which is what a scheduler drains
    assert sorted(file.name for file in tmp_path.iterdir()) == [*drains, "ticket-h-gpu1-h-gpu2.txt"]


def test_a_page_says_what_was_expected_beside_what_was_found() -> None:
    row = finding_cells(Finding("FAIL", "node3", "gemm", "80 TFLOP/s", "100 TFLOP/s", "read its clocks", "gemm"))
    assert (row["found"], row["next step"]) == ("gemm: 80 TFLOP/s; expected 100 TFLOP/s", "read its clocks")


def test_a_run_that_was_broken_off_is_an_error_of_junit_and_no_pass() -> None:
    for result in (result_of("PASS", stopped="interrupted"), Result(trial_of(), stopped="interrupted")):
        suite = ET.fromstring(run_output.junit(result))
        assert (suite.get("errors"), len(suite.findall(".//error"))) == ("1", 1)
        assert run_output.record(result, {}, {}, "", "").rows[0]["verdict"] == "WARN"
    assert ET.fromstring(run_output.junit(result_of("PASS"))).get("errors") == "0"


@pytest.mark.parametrize(("bus_bw", "verdict"), [(318.0, "PASS"), (250.0, "FAIL")])
def test_all_reduce_of_one_host_is_held_against_what_is_known(
    bus_bw: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"device": "NVIDIA H200", "size_bytes": 64 << 20, "nccl": 22809, "graph": False, "nvls": False}

    def found(trial: Trial, **less: Any) -> Finding:
        rows = [known | {"group": list(range(8)), "bus_bw_gbs": bus_bw} | less]
        monkeypatch.setattr(trial, "together", lambda *_, **__: rows)
        phases.all_reduce(trial, lambda *_: None)
        return trial.findings[0]

    assert found(trial_of(8)).verdict == verdict
    virtual = Trial(trial_of().fleet, members_of([("h", 8)], 1), work_for("nccl", None), list(range(8)))
    assert found(virtual).verdict is None
    unknown = found(trial_of(8), nvls=None)
    # Below what is known of either state it is a fault; else it depends on the state.
    assert unknown.verdict == ("FAIL" if verdict == "FAIL" else None)
    assert ("NCCL_NVLS_ENABLE=0" in unknown.next_step) == (verdict != "FAIL")


def test_training_that_does_not_learn_accuses_those_who_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of()
    rows = [{"first_loss": 1.0, "last_loss": 2.0, "p50_us": 1.0, "wrong": 0, "group": [0, 1, 2, 3]}]
    monkeypatch.setattr(trial, "together", lambda *_, **__: rows)
    phases.train(trial, lambda *_: None)
    [one] = trial.suspects
    assert (one.verdict, one.ranks, one.phase) == ("FAIL", (0, 1, 2, 3), "train")
    assert run_output.sentence(Result(trial)).startswith("faulty: 1 ranks (train); ")


def test_one_node_has_no_neighbours_and_no_rails() -> None:
    trial = trial_of()
    phases.neighbours(trial, lambda *_: None)
    phases.rails(trial, lambda *_: None)
    assert [(one.verdict, one.figure) for one in trial.findings] == [(None, "not run")] * 2
    phases.all_to_all(trial, lambda *_: None)
    assert {tuple(row["group"]) for row in trial.rows} == {(0, 1, 2, 3)}


def test_the_name_of_a_file_forges_no_line_of_the_table() -> None:
    name = "a\nPASS: all is well\tand good"
    finding = Finding("FAIL", name, "gemm", name, name, name, name)
    lines = list(format_table(Judgement((finding,), (), {name: "x"})))
    assert len(lines) == 5  # the row takes two
    assert not any("\n" in line or line.startswith("PASS") for line in lines)


def test_a_table_fits_a_terminal_and_holds_every_word() -> None:
    tools, reasons = ", ".join(f"tool {at}" for at in range(30)), "no such file; " * 20
    findings = (
        Finding(None, "localhost", "not read", tools, reasons, file="preflight"),
        Finding("FAIL", "node3", "gemm", "80 TFLOP/s", "100 TFLOP/s", "read its clocks " * 10, "gemm"),
    )
    lines = list(format_table(Judgement(findings, (), {}), where="phase"))
    assert max(map(len, lines)) <= 120
    assert sum(line.split().count("tool") for line in lines) == 30
    assert sum(line.count("such") for line in lines) == 20
    assert sum(line.count("clocks") for line in lines) == 10
    assert next(line for line in lines if "node3" in line).split() == [
        "FAIL", "node3", "gemm", "80", "TFLOP/s", "100", "TFLOP/s", "gemm",
    ]  # fmt: skip


def test_where_it_was_read_can_be_copied_whole() -> None:
    file = "/logs/" + "a" * 150
    findings = (Finding("FAIL", "node3", "data", "4096 wrong elements in 2 measurements " * 3, file=file, line=3),)
    lines = list(format_table(Judgement(findings, (), {})))
    assert f"         file: {file}:3" in lines


def test_the_matrix_of_pairs_begins_at_the_top_left() -> None:
    drawn: list[Any] = []

    class Page:
        def section(self, *_: Any, **__: Any) -> Page:
            return self

        def chart(self, chart: Any, **_: Any) -> None:
            drawn.append(chart.to_dict())

    ranks = range(4)
    known = {(src, dst): 1.0 + src for src in ranks for dst in ranks if src != dst and (src, dst) != (0, 1)}
    run_output._heat_map(Page(), Result(trial_of(), known), "run")
    names = [f"h/gpu{rank}" for rank in ranks]
    for layer in drawn[0]["layer"]:
        assert (layer["encoding"]["x"]["sort"], layer["encoding"]["y"]["sort"]) == (names, names)
