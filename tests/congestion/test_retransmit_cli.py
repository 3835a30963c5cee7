"""The command and its page: files, sources, what it refuses, and that a browser draws it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from congestion.commands.retransmit import parse_duration, retransmit
from netlayer.errors import ConfigError
from tests.browser import browse, drawn_plots, needs_chromium

SHORT = ["--qp-timeout", "14", "--qp-timeout", "18", "--retry-cnt", "7", "--no-floor", "--flap", "1ms", "--flap", "5s"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retransmit")
    result = CliRunner().invoke(retransmit, [*SHORT, "--out", str(folder), "--json", str(folder / "all.json")])
    assert result.exit_code == 0, result.output
    assert "QP error" in result.stdout
    return folder


def test_tables_hold_every_setting_and_flap(out):
    rows = pd.read_csv(out / "recoveries.csv")
    assert len(rows) == 2 * 3 * 2
    assert set(rows["adaptive"]) == {"on", "off", "no floor"}
    dead = rows[~rows["survives"]]
    assert set(zip(dead["timeout"], dead["adaptive"], strict=True)) == {(14, "on"), (14, "off"), (14, "no floor")}
    assert dead["recovery_s"].isna().all()
    on = rows[(rows["timeout"] == 18) & (rows["adaptive"] == "on")]
    assert on["recovery_s"].tolist() == pytest.approx([0.0125, 6.08], rel=1e-3)
    pd.testing.assert_frame_equal(rows, pd.read_parquet(out / "recoveries.parquet"), check_dtype=False)


def test_predicted_and_simulated_rows_are_records_apart(out):
    records = [json.loads(path.read_text()) for path in (out / "records").glob("*.json")]
    tables = {record["source"]: {row["table"] for row in record["rows"]} for record in records}
    assert tables == {"predicted": {"recoveries", "advices"}, "simulated": {"ring"}}
    whole = json.loads((out / "all.json").read_text())
    assert len(whole["rows"]) == sum(len(record["rows"]) for record in records)
    assert whole["arguments"]["command"] == (
        "netlayer retransmit --qp-timeout 14 --qp-timeout 18 --retry-cnt 7 --no-floor --flap 0.001 --flap 5.0"
    )


def test_the_page_says_what_the_rows_say(out):
    text = (out / "report.html").read_text()
    assert "flap of 5 s is back after 8.225 s" in text
    assert "3 of 12 pairs of setting and flap end in a QP error; 3 of 6 settings outlive 5 s" in text
    assert "never ends" in text
    assert "firmware 20.43" in text


@needs_chromium
def test_a_browser_draws_the_page(out, tmp_path):
    document, console = browse(out / "report.html", tmp_path)
    assert not console
    drawn = drawn_plots(document)
    assert set(drawn) == {"recovery", "modes", "longest", "trade_off"}
    assert all(drawn.values())


def test_json_on_stdout_is_alone_there(tmp_path):
    asked = [
        "--nic",
        "rxe",
        "--nic",
        "connectx-5",
        "--retry-cnt",
        "7",
        "--no-ring",
        "--out",
        str(tmp_path),
        "--json",
        "-",
    ]
    result = CliRunner().invoke(retransmit, asked)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["source"] for row in rows} == {"predicted"}
    endless = [row for row in rows if row["table"] == "recoveries" and row["nic"] == "rxe"]
    assert len(endless) == 5 * 10  # a NIC without adaptive phase comes once
    assert all(row["survives"] and row["error_s"] is None for row in endless)


def test_older_nccl_loses_its_queue_pairs(tmp_path):
    result = CliRunner().invoke(retransmit, ["--nccl", "2.13.4", "--no-ring", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report.html").read_text()
    assert "(timeout 14, 7 retries) on connectx-6 a flap of 5 s ends the queue pair" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--retry-cnt", "0"), "10 of 10 pairs of setting and flap end in a QP error"),
        (("--retry-cnt", "7", "--flap", "5s"), "1 of 1 pairs of setting and flap end in a QP error"),
        (("--retry-cnt", "7", "--flap", "0.1"), "0 of 1 pairs of setting and flap end in a QP error"),
    ],
)
def test_a_single_setting_makes_a_page(asked, said, tmp_path):
    one = ["--nic", "infiniband", "--qp-timeout", "14", *asked, "--no-ring", "--out", str(tmp_path)]
    result = CliRunner().invoke(retransmit, one)
    assert result.exit_code == 0, result.output
    assert said in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("option", [("--adaptive", "off"), ("--no-floor",)])
def test_an_option_that_changes_nothing_is_refused(option, tmp_path):
    error = CliRunner().invoke(retransmit, ["--nic", "rxe", *option, "--out", str(tmp_path)]).exception
    assert isinstance(error, ConfigError)
    assert f"{option[0]}: has no effect on rxe" in str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10us", 1e-5), ("1.5ms", 1.5e-3), ("3s", 3.0), ("0.3", 0.3), ("1e-5", 1e-5), (" 20 ms ", 0.02)],
)
def test_times_are_read_with_their_unit(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--flap", "soon"), "'soon' is no time"),
        (("--flap", "0s"), "'0s' is no time"),
        (("--flap", "-1s"), "is no time"),
        (("--longest-flap", "1 year"), "'1 year' is no time"),
        (("--qp-timeout", "32"), "1<=x<=31"),
        (("--qp-timeout", "0"), "1<=x<=31"),
        (("--retry-cnt", "13"), "0<=x<=7"),
        (("--nic", "connectx-9"), "connectx-9"),
    ],
)
def test_bad_options_are_usage_errors(arguments, message, tmp_path):
    result = CliRunner().invoke(retransmit, [*arguments, "--out", str(tmp_path / "new")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_release_that_is_none_is_refused():
    error = CliRunner().invoke(retransmit, ["--nccl", "latest"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "--nccl = latest: is no release; give one such as 2.30.7"
