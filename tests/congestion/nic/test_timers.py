"""The solver's answers against the published behaviour, its table, and the command."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from congestion.nic.commands.timers import timers
from congestion.nic.profile.timers import BEHAVIOURS, solve, trade_off
from congestion.retransmit.timers import nominal_s
from netlayer.errors import ConfigError


@pytest.mark.parametrize(("flap_s", "timeout", "lower_s", "error_s"), [(5, 18, 7.516, 14.67), (10, 19, 15.03, 29.70)])
def test_a_flap_gives_the_least_timeout_and_both_bounds(flap_s, timeout, lower_s, error_s):
    advice = solve(flap_s, "2.30.7").advice
    assert advice.timeout == timeout
    assert advice.lower_s == pytest.approx(lower_s, rel=1e-3)
    assert advice.error_s == pytest.approx(error_s, rel=1e-3)


@given(flap_s=st.floats(1e-4, 1000), margin=st.floats(0, 1), retry_cnt=st.integers(1, 7))
def test_the_timeout_outlasts_the_flap_and_one_less_does_not(flap_s, margin, retry_cnt):
    timeout = solve(flap_s, "2.30.7", retry_cnt=retry_cnt, margin=margin).advice.timeout
    assert retry_cnt * nominal_s(timeout) >= flap_s * (1 + margin)
    assert timeout == 1 or retry_cnt * nominal_s(timeout - 1) < flap_s * (1 + margin)


@pytest.mark.parametrize(
    ("nccl", "preset", "survives"), [("2.13.4", 14, False), ("2.21.5", 18, True), ("2.30.7", 20, True)]
)
def test_the_preset_of_the_release_is_judged(nccl, preset, survives):
    solution = solve(5.0, nccl)
    assert (solution.preset, solution.preset_survives) == (preset, survives)


def test_the_trade_off_shows_every_behaviour_around_the_answer():
    rows = trade_off(solve(5.0, "2.13.4"))
    assert {row["timeout"] for row in rows} == {14, 16, 17, 18, 19, 20}
    assert {row["behaviour"] for row in rows} == {behaviour.name for behaviour in BEHAVIOURS}
    chosen = {row["behaviour"]: row for row in rows if row["chosen"]}
    assert {row["timeout"] for row in chosen.values()} == {18}
    assert chosen["rxe"]["error_s"] is None  # with seven retries it never gives up
    assert chosen["connectx-6, not adaptive"]["error_s"] > chosen["connectx-6"]["error_s"]
    dead = next(row for row in rows if row["timeout"] == 16 and row["behaviour"] == "connectx-6")
    assert (dead["survives"], dead["recovery_s"]) == (False, None)


def test_the_command_prints_exports_and_the_bounds():
    result = CliRunner().invoke(timers, ["--flap", "10", "--nccl", "2.21.5"])
    assert result.exit_code == 0, result.output
    assert "export NCCL_IB_TIMEOUT=19\nexport NCCL_IB_RETRY_CNT=7\n" in result.stdout
    assert "outlives 15.03 s on any NIC" in result.stdout
    assert "T = 18, which is not enough on every NIC with that margin" in result.stdout


def test_json_on_stdout_is_a_predicted_record():
    result = CliRunner().invoke(timers, ["--flap", "300ms", "--retry-cnt", "4", "--json", "-"])
    record = json.loads(result.stdout)
    assert record["source"] == "predicted"
    solution = record["rows"][0]
    assert (solution["flap_s"], solution["retry_cnt"], solution["timeout"]) == (0.3, 4, 15)


@pytest.mark.slow
def test_the_page_is_about_that_flap(tmp_path):
    result = CliRunner().invoke(timers, ["--flap", "5s", "--nccl", "2.30.7", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "outlives it on any NIC, with a fifth to spare, is 18" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--flap", "10000", "--retry-cnt", "1", "--margin", "10"], "no timeout outlives it"),
        (["--nccl", "1.3.4"], "is no release of NCCL 2"),
        (["--nccl", "new"], "is no release of NCCL 2"),
    ],
)
def test_what_has_no_answer_is_refused(asked, said):
    result = CliRunner().invoke(timers, asked)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
