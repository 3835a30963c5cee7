import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from congestion.arena import run as arena_run
from congestion.arena.output import frame_of, not_run_words, page_of, print_table, record_of
from congestion.arena.protocol import SUITE, Case, Condition, Workload
from congestion.arena.run import Contender, published, run_one
from congestion.arena.runner import BUFFERS, ROWS, Plan, Results, compile_first, plan_of, run_arena
from congestion.arena.verdict import METRICS, check, is_whole
from congestion.commands.arena import _kept, arena
from netlayer.errors import ConfigError
from netlayer.progress import Stages
from netlayer.results import load_record
from tests.congestion.arena_small import SMALL

LAWS = [published(law) for law in ("none", "dcqcn", "swift", "nscc", "hybrid")]
CASES = {case.name: case for case in SMALL.test.cases}
MIB = 2**20


def _run(out: Path, plan: Plan, processes: int = 1) -> Results:
    out.mkdir(exist_ok=True)
    with Stages() as stages:
        return run_arena(plan, out, stages, processes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    out = tmp_path_factory.mktemp("arena")
    return out, _run(out, plan_of(LAWS, suite=SMALL))


def test_every_case_runs_with_every_seed_under_every_law(whole):
    frame = frame_of(whole[1])
    assert len(frame) == 5 * 6 * 2
    check(frame)
    assert is_whole(frame, SMALL)
    assert frame[list(METRICS)].drop(columns="victim_slowdown").notna().all(axis=None)
    assert (frame["victim_slowdown"].notna() == (frame["scenario"] == "victim")).all()


def test_metrics_are_those_of_the_run():
    row = run_one(published("none"), CASES["incast 6:1/200G-ecmp"], 1, 64 * MIB, keep_flows=True, suite=SMALL)
    bytes_on_wire = 6 * (262_144 + 64 * 48)
    assert row["completion_us"] > bytes_on_wire * 8 / 200e3
    assert row["completion_us"] < bytes_on_wire * 8 / 200e3 + 50 + 20  # and the starts
    assert row["goodput_bps"] == pytest.approx(6 * 262_144 * 8e6 / row["completion_us"])
    assert row["fct_us_max"] == pytest.approx(max(row["fct_us"]), abs=1e-3)
    assert len(row["fct_us"]) == 6
    assert row["pause_share"] == row["unfinished"] == 0


def test_pauses_count_where_ports_wait():
    row = run_one(published("none"), CASES["incast 6:1/200G-ecmp"], 1, 3 * MIB, suite=SMALL)
    tiers = row["pause_share_by_tier"]
    assert set(tiers) == {"host", "leaf", "spine"}
    assert 0 < tiers["host"] < 1
    assert 0 < row["pause_share"] < tiers["host"]


def test_a_run_that_does_not_end_counts_as_the_limit():
    short = replace(SMALL, rules=replace(SMALL.rules, limit_ms=1))
    slow = Contender(
        "slow",
        "dcqcn",
        overrides=(
            "congestion.kmin_bytes=0",
            "congestion.kmax_bytes=0",
            "congestion.dcqcn.min_rate_bps=1000",
            "congestion.dcqcn.rai_bps=1",
        ),
    )
    workload = replace(CASES["incast 6:1/200G-ecmp"].workload, parameters={"senders": 6, "num_bytes": 8 * MIB})
    case = replace(CASES["incast 6:1/200G-ecmp"], workload=workload)
    row = run_one(slow, case, 1, 64 * MIB, keep_flows=True, suite=short)
    assert row["completion_us"] == row["fct_us_max"] == 1_000
    assert row["unfinished"] == row["fct_us"].count(1_000.0) > 0
    assert math.isfinite(row["goodput_bps"])


def test_a_tight_buffer_is_the_first_that_published_dcqcn_pauses_with(whole):
    buffers = {row["workload"]: row for row in whole[1].buffers}
    assert {row["condition"] for row in whole[1].buffers} == {"200G-ecmp"}
    for row in whole[1].rows:
        wanted = buffers[row["workload"]]["buffer_bytes"] if row["condition"] == "200G-ecmp" else 4 * MIB
        assert row["buffer_bytes"] == wanted
    for name, row in buffers.items():
        paused = row["pause_share"] >= SMALL.rules.pause_share
        assert paused or row["buffer_bytes"] == SMALL.rules.buffers_bytes[-1], name


def test_a_second_start_runs_what_lacks_and_gives_the_same(whole, tmp_path, monkeypatch):
    out, found = whole
    lines = (out / ROWS).read_text().splitlines(keepends=True)
    (tmp_path / BUFFERS).write_text((out / BUFFERS).read_text())
    (tmp_path / ROWS).write_text("".join(lines[:-7]) + lines[-7][:40])  # it was killed while it wrote
    again = _run(tmp_path, found.plan)
    assert again.rows == found.rows
    assert len((tmp_path / ROWS).read_text().splitlines()) == len(lines)
    monkeypatch.setattr("congestion.arena.runner.run_one", None)
    assert _run(tmp_path, found.plan).rows == found.rows  # nothing is left to run


def test_processes_change_nothing(whole, tmp_path):
    plan = plan_of(LAWS[:2], only=["incast"], num_seeds=1, suite=SMALL)
    of_two = {"none", "dcqcn"}
    expected = [
        row for row in whole[1].rows if row["law"] in of_two and row["workload"] == "incast 6:1" and row["seed"] == 1
    ]
    assert _run(tmp_path, plan, processes=2).rows == expected


def test_rows_of_another_suite_or_other_settings_are_refused(whole, tmp_path):
    (tmp_path / ROWS).write_text((whole[0] / ROWS).read_text())
    (tmp_path / BUFFERS).write_text((whole[0] / BUFFERS).read_text())
    other = replace(SMALL, version=SMALL.version + 1)
    with pytest.raises(ConfigError, match="holds rows of the suite"):
        _run(tmp_path, plan_of(LAWS, suite=other))
    changed = replace(LAWS[2], overrides=("congestion.swift.beta=0.7",))
    with pytest.raises(ConfigError, match="swift ran there with other settings or by another version"):
        _run(tmp_path, plan_of([changed], suite=SMALL))


def test_what_the_engine_lacks_is_said_and_not_counted(monkeypatch):
    monkeypatch.setattr(arena_run, "_ROUTINGS", ("ecmp",))
    spray = Condition("200G-spray", routing="spray")
    suite = replace(SMALL, test=replace(SMALL.test, conditions=(*SMALL.test.conditions, spray)))
    plan = plan_of(LAWS, suite=suite)
    assert len(plan.cases) == 6
    assert not_run_words(plan) == "not run: 3 cases, for the engine lacks spray routing"
    with pytest.raises(ConfigError, match="needs spray routing, which the engine lacks"):
        plan_of(LAWS, only=["200G-spray"], suite=suite)


@pytest.mark.parametrize("routing", [pytest.param("spray", marks=pytest.mark.slow), "flowlet"])  # a compilation each
def test_packets_may_take_several_paths(routing):
    workload = Workload("permutation 16", "permutation", {"ranks": 16, "num_bytes": MIB})
    times = []
    for condition in (Condition("ecmp"), Condition(routing, routing=routing)):
        row = run_one(published("swift"), Case(workload, condition), 1, 64 * MIB, suite=SMALL)
        assert row["unfinished"] == 0
        times.append(row["completion_us"])
    assert times[1] < times[0]  # paths that collide under ECMP


@pytest.mark.parametrize("routing", ["ecmp", "spray", "flowlet"])
def test_a_victim_is_set_against_the_idle_fabric(routing):
    case = Case(CASES["victim 6:1/200G-deep"].workload, Condition("x", routing=routing))
    calm, stopped = (run_one(published("none"), case, 1, size * MIB, suite=SMALL) for size in (64, 3))
    assert 1 <= calm["victim_slowdown"] < 2
    assert calm["victim_slowdown"] <= stopped["victim_slowdown"]


def test_nccls_window_bounds_the_queue():
    paused = {}
    for window in (False, True):
        case = Case(CASES["incast 6:1/200G-ecmp"].workload, Condition("x", window=window))
        suite = replace(SMALL, fabric=replace(SMALL.fabric, window_bytes=16_384))
        paused[window] = run_one(published("none"), case, 1, 3 * MIB, suite=suite)["pause_share"]
    assert paused[True] < paused[False]


def test_quick_is_a_part():
    plan = plan_of(LAWS, quick=True)
    assert {case.condition.name for case in plan.cases} == {"200G-ecmp"}
    assert len(plan.seeds) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [({"only": ["incats"]}, "--only = incats: is in the name of no case"), ({"num_seeds": 33}, "--seeds = 33")],
)
def test_a_part_that_is_none(given, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(LAWS, **given)


def test_the_page_says_whose_settings_differ_and_what_did_not_end(whole, tmp_path):
    _, found = whole
    tuned = replace(found.plan, contenders=(*LAWS[:4], replace(LAWS[4], overrides=("congestion.hybrid.gain=0.5",))))
    rows = [{**row, "unfinished": int(row["law"] == "nscc" and row["seed"] == 2)} for row in found.rows]
    html = page_of(replace(found, plan=tuned, rows=rows), "hybrid", "netlayer arena").html()
    assert "hybrid.gain=0.5" in html
    assert "nothing: as published" in html
    assert "Runs that had not ended at the limit" in html
    assert "Flow completion times" in html
    assert "Where it pauses" in html


def test_the_record_has_the_suite_and_is_simulated(whole, tmp_path):
    record = load_record(record_of(whole[1], "2026-01-01T00:00:00+00:00", {}).save(tmp_path))
    assert record.source == "simulated"
    assert record.arguments["suite"] == SMALL.digest
    assert record.config["dcqcn"]["dcqcn"]["alpha_us"] == 50
    assert len(record.rows) == 60
    assert "fct_us" not in record.rows[0]


def test_the_table_has_a_row_a_law(whole, capsys):
    print_table(whole[1])
    said = capsys.readouterr().out
    assert said.startswith("simulated: 6 cases, 2 seeds\n")
    assert [line.split()[0] for line in said.splitlines()[2:7]] == frame_of(whole[1]).pipe(_standing)


def _standing(frame):
    from congestion.arena.verdict import standing

    return standing(frame)["law"].tolist()


BROKEN = {
    "missing.py": "x = 1",
    "syntax.py": "def start(:",
    "swift.py": "x = 1",
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.py", "has no record type PARAMETERS"),
        ("syntax.py", "does not run (SyntaxError"),
        ("swift.py", "has the name of a law of ours"),
        ("absent.py", "cannot be read"),
    ],
)
def test_a_bad_law_is_one_line(name, message, tmp_path):
    if name in BROKEN:
        (tmp_path / name).write_text(BROKEN[name])
    ran = _netlayer("arena", str(tmp_path / name))
    assert ran.returncode == 2
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.slow  # it compiles the engine around another law, as test_entered does
def test_the_template_is_a_law(tmp_path):
    template = CliRunner().invoke(arena, ["--template"])
    assert template.exit_code == 0
    law = tmp_path / "mine.py"
    law.write_text(template.output)
    out = tmp_path / "out"
    ran = _netlayer(
        "arena",
        str(law),
        "--laws",
        "dcqcn",
        "--only",
        "incast 8:1/200G-deep",
        "--seeds",
        "2",
        "--processes",
        "2",  # a worker runs dcqcn first, which loads the engine
        "--out",
        str(out),
    )
    assert ran.returncode == 0, ran.stderr
    assert "no page:" in ran.stderr  # two rivals and a seed are missing
    rows = [json.loads(line) for line in (out / ROWS).read_text().splitlines()]
    assert sorted(row["law"] for row in rows) == ["dcqcn", "dcqcn", "mine", "mine"]
    us = {(row["law"], row["seed"]): row["completion_us"] for row in rows if not row["unfinished"]}
    assert len(us) == 4
    first = SUITE.test.seeds[0]
    assert us["mine", first] < us["dcqcn", first]


@pytest.mark.timeout(600)  # it may compile
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "netlayer", "arena", "--only", "200G-deep", "--out", str(out)]  # minutes
    with subprocess.Popen([*command, "--processes", "1"], stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 400
        while _rows(out) < 10 and running.poll() is None and time.monotonic() < until:  # every law has run
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert f"go on with --out {out}" in said
    text = (out / ROWS).read_text()
    assert 10 <= len(text.splitlines()) < 9 * 5 * 32
    assert all(json.loads(line)["unfinished"] == 0 for line in text.splitlines())


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemError("returned a result with an exception set")])
def test_whatever_breaks_a_run_off_it_says_where_to_go_on(raised, is_measured, tmp_path, capsys):
    """What a compiled kernel makes of a Ctrl-C is an error of another kind."""
    if is_measured:
        (tmp_path / ROWS).touch()
    with pytest.raises(type(raised)), _kept(tmp_path):
        raise raised
    assert ("go on with --out" in capsys.readouterr().err) == is_measured


def _rows(out: Path) -> int:
    return len((out / ROWS).read_bytes().splitlines()) if (out / ROWS).exists() else 0


def _netlayer(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "netlayer", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=dict(os.environ),
        check=False,
    )


def test_kernels_are_compiled_for_the_conditions_of_all_cases(monkeypatch):
    found = []
    monkeypatch.setattr("congestion.arena.runner.compile_variants", lambda settings, _stages: found.extend(settings))
    compile_first(LAWS, SMALL.test.cases, None)
    conditions = {case.condition for case in SMALL.test.cases}
    assert len(found) == len(LAWS) * len(conditions)
    assert {one.routing for one in found} == {one.routing for one in conditions}
