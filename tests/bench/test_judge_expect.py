"""Registry of expectations, user thresholds, explanation of verdicts, and publication of results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.accept.cli import accept
from bench.accept.evidence.log import Figure, Log
from bench.accept.judge.expectations import FOLDER, Expectation, Published, Source, load, load_user, threshold_of
from bench.accept.judge.explain import explain
from bench.accept.judge.logs import Run, judge_expectations, judge_runs
from bench.accept.judge.publish import publish
from netlayer.errors import ConfigError, NetlayerError
from netlayer.verdict import Finding, Verdict

LOGS = Path(__file__).parent / "logs"
H100 = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30
SOURCE = Source("https://example.org", "2026-01-01", "somebody")


def figure(value: float, size: int = 8 * GIB, **facts: Any) -> Figure:
    known = {"quantity": "bus_bw_gbs", "collective": "all_reduce", "device": H100, "ranks": 8, "hosts": 1}
    facts = known | facts | {"bytes": size}
    return Figure("all_reduce float sum, 8 ranks", "8 GiB", "node7", value, "GB/s bus", 1, facts=facts)


def judge_with(figures: list[Figure], entries: tuple[Expectation, ...] = (), **said: Any) -> Finding:
    [finding] = judge_expectations("log", figures, (*entries, *load()), said)
    return finding


def command(name: str, *arguments: object) -> Result:
    return CliRunner().invoke(accept, [name, *map(str, arguments)])


def published(*values: float, minimums: tuple[float, ...] = ()) -> list[Published]:
    figures = [Published(f"s{at}", value, False, SOURCE) for at, value in enumerate(values)]
    return figures + [Published(f"m{at}", value, True, SOURCE) for at, value in enumerate(minimums)]


def test_the_registry_holds_many_machine_types_each_with_address_and_date() -> None:
    files = list(FOLDER.glob("*.toml"))
    entries = load()
    assert len(files) >= 12
    assert {entry.origin for entry in entries} == {file.name for file in files}
    devices = {str(entry.keys.get("device")) for entry in entries}
    for name in (
        "H100 80GB HBM3",
        "H200",
        "A100-SXM4-80GB",
        "A100-SXM4-40GB",
        "B200",
        "GB200",
        "A100 80GB PCIe",
        "H100 NVL",
    ):
        assert any(name in device for device in devices), name
    for entry in entries:
        for one in entry.published:
            assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", one.source.date)
            # Only this project's own measurements have no page: their record is in the reports.
            assert one.source.address.startswith("https://") or one.name == "own", entry.origin


def test_one_published_figure_is_no_threshold() -> None:
    assert threshold_of(published(100)) == pytest.approx((95, 80))
    assert threshold_of(published(110, 100)) == pytest.approx((95, 90))
    # An operator who accepts less has seen healthy machines that reach less.
    assert threshold_of(published(110, 100, minimums=(70,))) == pytest.approx((95, 70))
    assert threshold_of(published(100, minimums=(99,))) == pytest.approx((95, 80))
    assert threshold_of(published(minimums=(100,))) == pytest.approx((100, 90))
    assert threshold_of(published(minimums=(100, 80))) == pytest.approx((100, 80))
    assert threshold_of(published(100), (0.95, 0)) == pytest.approx((95, 0))


@pytest.mark.parametrize(
    ("value", "nvls", "verdict"),
    [
        (478, True, "PASS"),
        (440, True, "WARN"),
        (365, True, "FAIL"),
        (365, False, "PASS"),
        (200, False, "FAIL"),
        # A log that does not say: the verdict that both states have.
        (478, None, "PASS"),
        (365, None, None),
        (200, None, "FAIL"),
    ],
)
def test_eight_h100_are_judged_with_nvls_without_it_and_unknown(
    value: float, nvls: bool | None, verdict: Verdict | None
) -> None:
    facts = {} if nvls is None else {"nvls": nvls}
    assert judge_with([figure(value, **facts)]).verdict == verdict
    assert judge_with([figure(value)], **facts).verdict == verdict


def test_cards_on_pcie_never_fail() -> None:
    facts = {"device": "NVIDIA GeForce RTX 5090"}
    assert [judge_with([figure(value, **facts)]).verdict for value in (28, 5)] == ["PASS", "WARN"]


def test_several_hosts_need_to_be_told_their_nics() -> None:
    facts = {"ranks": 16, "hosts": 2}
    assert judge_with([figure(360, **facts)]).verdict is None
    assert judge_with([figure(360, **facts)], nics="8x400").verdict == "PASS"
    assert judge_with([figure(360, **facts)], nics="4x100").verdict is None


def user(tmp_path: Path, text: str) -> tuple[Expectation, ...]:
    (tmp_path / "mine.toml").write_text(text)
    return load_user(tmp_path / "mine.toml")


def test_thresholds_of_the_user_go_first(tmp_path: Path) -> None:
    user_entries = user(tmp_path, '[[expect]]\ncollective = "all_reduce"\nbytes = "8G"\npass = 490\nfail = 485\n')
    for value, verdict in ((495, "PASS"), (487, "WARN"), (478, "FAIL")):
        finding = judge_with([figure(value, nvls=True)], user_entries)
        assert (finding.verdict, "mine.toml" in finding.expected) == (verdict, True)
    # Where they do not fit, the registry is asked.
    assert judge_with([figure(440, 16 * GIB, nvls=True)], user_entries).verdict == "WARN"


def test_a_threshold_without_a_size_is_of_the_largest_message(tmp_path: Path) -> None:
    user_entries = user(tmp_path, "[[expect]]\npass = 400\n")
    finding = judge_with([figure(12, 1024), figure(410, 8 * GIB)], user_entries)
    assert (finding.verdict, finding.figure) == ("PASS", "410 GB/s bus at 8 GiB")
    assert judge_with([figure(410, 1024), figure(399, 8 * GIB)], user_entries).verdict == "FAIL"


def test_a_latency_of_another_tool_has_a_threshold_that_it_must_not_pass(tmp_path: Path) -> None:
    user_entries = user(tmp_path, '[[expect]]\nseries = "RDMA_Write Latency"\nat_most = true\npass = 2\nfail = 3\n')
    for value, verdict in ((1.9, "PASS"), (2.5, "WARN"), (3.5, "FAIL")):
        one = Figure("RDMA_Write Latency", "2 B", "mlx5_0", value, "us", 1, higher_is_better=False)
        assert judge_with([one], user_entries).verdict == verdict


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[expect]]\npas = 1\n", "did you mean 'pass'"),
        ("[[expect]]\ncollective = 'all_reduce'\n", "needs pass, fail, or both"),
        ("[[expect]]\npass = 'fast'\n", "pass = 'fast': must be a number above 0"),
        ("[[expect]]\npass = -1\n", "must be a number above 0"),
        ("[[expect]]\npass = nan\n", "must be a number above 0"),
        ("[[expect]]\npass = 1\nfail = 2\n", "fail = 2 lies above pass = 1"),
        ("[[expect]]\npass = 2\nfail = 1\nat_most = true\n", "fail = 1 lies below pass = 2"),
        ("[[expect]]\npass = 1\nbytes = '8 apples'\n", "is not a size"),
        ("[[expect]]\npass = 1\nranks = 'eight'\n", "must be a whole number"),
        ("[[expect]]\npass = 1\nnvls = 'on'\n", "must be true or false"),
        ("[[expect]]\npass = 1\nbytes = ['1G']\n", "a range has two ends"),
        ("[[expect]]\npass = 1\n[[expect]]\nfail = true\n", "[[expect]] 2: fail = True"),
        ("expect = 1\n", "holds no [[expect]] table"),
        ("[[expects]]\npass = 1\n", "unknown key 'expects'"),
        ("", "holds no [[expect]] table"),
        ("[[expect]\n", "is no TOML"),
    ],
)
def test_thresholds_that_cannot_be_used_are_one_line_and_exit_2(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        user(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        command("judge", LOGS / "nccl_node0.txt", "--expect", tmp_path / "mine.toml").exception and load_user(
            tmp_path / "mine.toml"
        )
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_missing_thresholds_are_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_user(tmp_path / "none.toml")
    result = command("judge", LOGS / "nccl_node0.txt", "--nics", "eight")
    assert isinstance(result.exception, ConfigError)


def explained(figures: list[Figure], **said: Any) -> str:
    runs = [Run("log.txt", Log("nccl-tests", figures=tuple(figures)))]
    return "\n".join(explain(judge_runs(runs, said, load()), load(), said))


def test_the_nearest_entries_are_listed_with_the_keys_that_differ() -> None:
    text = explained([figure(478, ranks=4)])
    assert "h100_sxm_8_nvls.toml needs ranks 8 (here 4)" in text
    text = explained([figure(360, ranks=16, hosts=2)])
    assert "h100_sxm_400g_rails.toml needs nics 8x400 (the log does not say; --nics does)" in text
    text = explained([figure(300, 4096)])
    assert "bytes" in text
    assert "(here 4 KiB)" in text


def test_matching_entries_are_listed_with_sources_peers_and_bounds() -> None:
    text = explained([figure(478)])
    assert "if NVLS was on" in text
    assert "if NVLS was off" in text
    assert "https://github.com/NVIDIA/nccl-tests/issues/212" in text
    assert "no peers; 4 alike are needed" in text
    assert "NVLink 4 carries 450 GB/s" in text
    assert "no rates are known of a GPU of next year" in explained([figure(478, device="a GPU of next year")])


def test_explain_is_behind_the_table_and_the_verdict_stays_last() -> None:
    lines = command("judge", LOGS / "nccl_node0.txt", "--explain").stdout.splitlines()
    assert "why:" in lines
    assert lines[-1].startswith("NO VERDICT: ")


def test_a_published_record_has_no_names_and_is_an_entry_of_the_registry(tmp_path: Path) -> None:
    logs = [LOGS / f"nccl_node{at}.txt" for at in (0, 1, 2, 4)]
    result = command(
        "publish", *logs, "--nvls", "off", "--address", "https://example.org/us", "--out", tmp_path / "us.toml"
    )
    assert result.exit_code == 0
    text = (tmp_path / "us.toml").read_text()
    assert text == result.stdout
    # Of the logs: hosts, bus ids, process ids, files.
    for secret in ("node0", "node1", "nccl_node", "1b:00", "48213", str(LOGS)):
        assert secret not in text
    entries = load(tmp_path / "us.toml")
    assert {entry.keys["bytes"] for entry in entries} == {64 << 20, GIB}
    assert all(entry.keys["device"] == "NVIDIA H200" and entry.keys["nvls"] is False for entry in entries)
    lowest = min(entry.value for entry in entries if entry.keys["bytes"] == GIB)
    assert 355 < lowest < 360  # the slowest of them, which PASS must let through
    [finding] = judge_expectations(
        "log", [figure(360, GIB, device="NVIDIA H200", nvls=False, nccl=22809, graph=False)], entries, {}
    )
    assert finding.verdict == "PASS"


def measured(**facts: Any) -> Run:
    return Run("a.txt", Log("nccl-tests", figures=(figure(470, **facts),)))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([measured(size=1 << 20)], "hold no bus bandwidth of 64 MiB"),
        ([measured(), measured(device="NVIDIA H200")], "are of 2 machine types (device"),
        ([measured(device="host 10.0.0.1 GPU")], "hold no bus bandwidth"),
        ([measured(device="GPU-1b2c3d4e of rack 7")], "hold no bus bandwidth"),
        ([measured(device='H100"]\nsecret = 1')], "hold no bus bandwidth"),
        ([], "hold no bus bandwidth"),
    ],
)
def test_unpublishable_runs_are_refused(runs: list[Run], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        publish(judge_runs(runs, {}, load()), {})


def test_wrong_data_is_never_published() -> None:
    bad = Finding("FAIL", "node7", "all_reduce data", "3 wrong elements")
    with pytest.raises(NetlayerError, match="publish only complete runs"):
        publish(judge_runs([Run("a.txt", Log("nccl-tests", (bad,), (figure(470),)))], {}, load()), {})
