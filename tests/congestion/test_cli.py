import json

import pandas as pd
import pytest
from click.testing import CliRunner

from congestion.commands.simulate import Pace, simulate
from congestion.simulation.simulate import Progress
from netlayer.errors import CheckFailed, ConfigError
from tests.congestion.test_golden import GOLDEN

FILES = ["--topo", str(GOLDEN / "g1_single" / "topo.txt"), "--flows", str(GOLDEN / "g1_single" / "flow.txt")]


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(simulate, [*FILES, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_one_law_gives_flows_counters_and_engine(tmp_path):
    out = tmp_path / "result.json"
    result = CliRunner().invoke(simulate, [*FILES, "--cc", "none", "--truncate-ns", "--json", str(out)])
    assert result.exit_code == 0, result.output
    tree = json.loads(out.read_text())
    assert tree["flows"] == [{"src": 0, "dst": 1, "bytes": 10_000_000, "start_ns": 2e9, "fct_ns": 407_002}]
    assert tree["counters"]["max_queue_bytes"] == 4_144
    assert [(row["switch"], row["port"], row["tx_bytes"]) for row in tree["counters"]["by_port"]] == [
        (2, 1, 146_520),
        (2, 2, 10_117_216),
    ]
    assert tree["engine"]["link_hops"] == 4 * 2_442
    assert set(tree["engine"]) == {"link_hops", "wall_s", "cpu_s", "compile_s", "threads", "backend"}


def test_several_laws_give_runs(tmp_path):
    out = tmp_path / "result.json"
    result = CliRunner().invoke(simulate, [*FILES, "--cc", "none,dcqcn", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [run["cc"] for run in json.loads(out.read_text())["runs"]] == ["none", "dcqcn"]


def test_flows_that_do_not_end_are_said_once_the_result_is_written(tmp_path):
    out = tmp_path / "result.json"
    lost = ["--set", "congestion.loss_rate=0.9", "--cc", "none", "--json", str(out)]
    result = CliRunner().invoke(simulate, [*FILES, *lost])
    assert isinstance(result.exception, CheckFailed)
    assert "none: 1 of 1 flows did not end" in str(result.exception)
    assert json.loads(out.read_text())["flows"][0]["fct_ns"] is None


@pytest.mark.parametrize("option", ["--until-us", "--warmup-us", "--sample-us"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "1e-300", "0", "-1", "x"])
def test_a_time_that_no_clock_shows_is_bad_usage(option: str, value: str) -> None:
    result = CliRunner().invoke(simulate, [*FILES, option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_remaining_time_counts_all_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 109.0])
    monkeypatch.setattr("congestion.commands.simulate.time.monotonic", lambda: next(clock))
    pace = Pace(until_ps=40)

    def at(time_ps: int, packets: int) -> float | None:
        return pace.left_s(Progress(time_ps, packets, 1_000, 0, wall_s=0.001))

    assert at(10, 500) is None  # kernels, or what a file held: from here on it is measured
    assert at(20, 525) == 3.0 * 2  # by simulated time; packets alone would take 57 s
    assert at(25, 950) == 9.0 * 50 / 450


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cc", "swiftly"), "--cc = swiftly: is unknown"),
        (("--preset", "ns4"), "--preset = ns4: is unknown"),
        (("--set", "congestion.mtu=9000"), "sets nothing that is known"),
        (("--set", "congestion.mtu_bytes=big"), "congestion.mtu_bytes = big"),
        (("--set", "congestion.kmin_bytes=9000000"), "is above congestion.kmax_bytes"),
        (("--set", "congestion.buffer_bytes=1000"), "headroom and reserves take"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert message in _refused(*arguments)


def test_json_of_files_goes_to_stdout_and_the_table_to_stderr():
    result = CliRunner().invoke(simulate, [*FILES, "--cc", "none"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cc"] == "none"
    assert "FCT median" in result.stderr


def test_a_scenario_prints_a_table_and_keeps_flows_ports_and_record(tmp_path):
    out = tmp_path / "out"
    small = ["--set", "scenario.senders=3", "--set", "scenario.num_bytes=100kB", "--set", "fabric.bps=100G"]
    result = CliRunner().invoke(simulate, ["incast", *small, "--cc", "none,dcqcn", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [line.split()[:3] for line in result.stdout.splitlines()[2:4]] == [["none", "3", "3"], ["dcqcn", "3", "3"]]
    flows, ports = (pd.read_parquet(out / f"{name}.parquet") for name in ("flows", "ports"))
    assert flows["cc"].tolist() == ["none"] * 3 + ["dcqcn"] * 3
    assert (flows["bytes"] == 100_000).all()
    assert set(ports["rate_bps"]) == {100e9}
    pd.testing.assert_frame_equal(pd.read_csv(out / "flows.csv"), flows)
    [record] = (json.loads(path.read_text()) for path in (out / "records").iterdir())
    assert (record["name"], record["source"]) == ("congestion.simulate", "simulated")
    assert record["config"]["scenario"]["senders"] == 3
    assert record["config"]["fabric"]["name"] == "star"
    assert [row["cc"] for row in record["rows"]] == ["none", "dcqcn"]


def test_threads_change_nothing(tmp_path):
    runs = []
    for threads in ("1", "2"):
        path = tmp_path / f"{threads}.json"
        few = ["--set", "scenario.ranks=8", "--threads", threads, "--json", str(path)]
        assert CliRunner().invoke(simulate, ["all_to_all", *few]).exit_code == 0
        runs.append(json.loads(path.read_text()))
    assert runs[0]["flows"] == runs[1]["flows"]
    assert [run["engine"]["threads"] for run in runs] == [1, 2]


def test_a_cm_runs_on_htsims_fat_tree(tmp_path):
    """One flow over six links as htsim's RoCE has it: 176.216 us (golden/htsim)."""
    path = tmp_path / "one16.cm"
    path.write_text("Nodes 16\nConnections 1\n0->13 id 1 start 0 size 2000000\n")
    sizes = {"mtu_bytes": 4_000, "header_bytes": 64, "ack_bytes": 64}
    wire = [f"--set=congestion.{name}={value}" for name, value in sizes.items()]
    result = CliRunner().invoke(simulate, ["--cm", str(path), "--cc", "none", *wire])
    assert result.exit_code == 0, result.output
    [flow] = json.loads(result.stdout)["flows"]
    assert round(flow["fct_ns"]) == 176_216


def test_a_scenario_runs_on_the_fabric_of_a_file():
    topo = str(GOLDEN / "g2_incast16_none" / "topo.txt")
    few = ["--set", "scenario.ranks=4", "--set", "scenario.num_bytes=9", "--cc", "none", "--json", "-"]
    result = CliRunner().invoke(simulate, ["permutation", "--topo", topo, *few])
    assert result.exit_code == 0, result.output
    assert sorted(flow["dst"] for flow in json.loads(result.stdout)["flows"]) == [0, 1, 2, 3]


def test_the_list_names_what_can_be_set():
    result = CliRunner().invoke(simulate, ["--list"])
    assert result.exit_code == 0
    for word in ("scenario.senders", "fabric.spines", "job-phases"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "SCENARIO: is missing, and so are --flows and --cm; name"),
        (("incast", "--flows", "x"), "--flows = x: says what flows there are, and so does SCENARIO = incast"),
        (("incast", "--flow-bytes", "1MB"), "has no effect on a scenario; set scenario.num_bytes"),
        ((*FILES, "--flow-bytes", "0"), "--flow-bytes = 0: is not within"),
        (("incast", "--topo", "/nowhere"), "--topo = /nowhere: is no file"),
        (("incast", "--topo", FILES[3]), "--topo"),
        (("--flows", FILES[3]), "--topo: is missing"),
        (("incast", "--topo", FILES[1], "--fabric", "star"), "has no effect where --topo"),
        ((*FILES, "--config", "x.toml"), "has no effect on flows of a file"),
        ((*FILES, "--set", "fabric.bps=1G"), "has no effect on a fabric from a file"),
        ((*FILES, "--set", "scenario.senders=1"), "sets nothing here"),
        (("incast", "--set", "congestion.mtu=1"), "sets nothing that is known"),
    ],
)
def test_sources_that_do_not_go_together_are_one_line(arguments, message):
    result = CliRunner().invoke(simulate, list(arguments))
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("congestion.commands.simulate.say_progress", interrupted)
    out = tmp_path / "result.json"
    result = CliRunner().invoke(simulate, ["incast", "--cc", "none,dcqcn", "--json", str(out)])
    assert isinstance(result.exception, CheckFailed)
    assert "none: 16 of 16 flows did not end: interrupted" in str(result.exception)
    tree = json.loads(out.read_text())
    [run] = tree["runs"]  # two laws were asked for, dcqcn was not begun
    assert run["cc"] == "none"
    assert run["counters"]["max_queue_bytes"] > 0


INCAST = ["incast", "--set", "scenario.senders=4", "--set", "scenario.num_bytes=400000"]


def test_a_run_that_is_stopped_is_kept_and_gone_on_with(tmp_path):
    whole, part, rest = (tmp_path / f"{name}.json" for name in ("whole", "part", "rest"))
    kept = str(tmp_path / "kept.npz")
    for out, more in ((whole, []), (part, ["--until-us", "20", "--checkpoint", kept]), (rest, ["--resume", kept])):
        result = CliRunner().invoke(simulate, [*INCAST, "--cc", "hybrid", "--json", str(out), *more])
        assert result.exit_code == 0, result.output
    assert all(flow["fct_ns"] is None for flow in json.loads(part.read_text())["flows"])
    assert json.loads(rest.read_text())["flows"] == json.loads(whole.read_text())["flows"]


def test_samples_show_a_run_over_time(tmp_path):
    out = tmp_path / "run"
    result = CliRunner().invoke(simulate, [*INCAST, "--cc", "none", "--sample-us", "10", "--out", str(out)])
    assert result.exit_code == 0, result.output
    samples = pd.read_csv(out / "samples.csv")
    assert samples["time_us"].tolist() == [10.0 * (row + 1) for row in range(len(samples))]
    acked = (samples["rate_bps"] * 10e-6 / 8).sum()
    assert acked == pytest.approx(4 * 400_000, rel=0.2)
    assert samples["queue_bytes"].max() > 100_000


def _json(*arguments: str) -> dict:
    result = CliRunner().invoke(simulate, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return {**json.loads(result.stdout), "stderr": result.stderr}


def test_times_count_from_the_first_start(tmp_path):
    """The file's flow begins at 2 s and takes 409 us."""
    kept = str(tmp_path / "kept.npz")
    sampled = ["--sample-us", "100", "--out", str(tmp_path / "out")]
    half = _json(*FILES, "--cc", "none", "--until-us", "200", "--checkpoint", kept, *sampled)
    assert half["flows"][0]["fct_ns"] is None
    assert 4e6 < half["counters"]["by_port"][1]["tx_bytes"] < 6e6
    assert pd.read_csv(tmp_path / "out" / "samples.csv")["time_us"].tolist() == [2_000_100, 2_000_200]
    later = _json(*FILES, "--cc", "none", "--until-us", "300", "--checkpoint", kept, "--resume", kept)
    assert later["flows"][0]["fct_ns"] is None
    assert later["counters"]["by_port"][1]["tx_bytes"] > half["counters"]["by_port"][1]["tx_bytes"]
    assert _json(*FILES, "--cc", "none", "--resume", kept)["flows"][0]["fct_ns"] == pytest.approx(408_859.2)


POISSON = ["poisson", "--set", "scenario.packets=400", "--set", "scenario.load=0.9", "--cc", "none"]


@pytest.mark.parametrize(("until", "ended"), [("200", 200), ("50%", 200), ("99.9%", 400)])
def test_a_run_stops_when_enough_flows_have_ended(until, ended):
    runs = [_json(*POISSON, "--until-flows", until, "--threads", threads) for threads in ("1", "2")]
    assert runs[0]["flows"] == runs[1]["flows"]
    done = sum(flow["fct_ns"] is not None for flow in runs[0]["flows"])
    assert ended <= done < ended + 20  # of those that end within a microsecond
    assert _json(*POISSON)["flows"][:100] == runs[0]["flows"][:100]


def test_a_warm_up_is_left_out(tmp_path):
    kept = str(tmp_path / "kept.npz")
    whole, warm = _json(*POISSON), _json(*POISSON, "--warmup-us", "30")
    assert (whole["warmup_us"], warm["warmup_us"]) == (0, 30)
    assert warm["flows"] == whole["flows"]
    before = _json(*POISSON, "--until-us", "30", "--checkpoint", kept)["counters"]["by_port"]
    for row, sooner, later in zip(whole["counters"]["by_port"], before, warm["counters"]["by_port"], strict=True):
        assert row["tx_bytes"] == sooner["tx_bytes"] + later["tx_bytes"]
        assert row["max_queue_bytes"] == later["max_queue_bytes"]
    assert "measured" in warm["stderr"]
    assert _json(*POISSON, "--warmup-us", "30", "--resume", kept)["counters"] == warm["counters"]
    _json(*POISSON, "--warmup-us", "20", "--until-us", "30", "--checkpoint", kept)
    result = CliRunner().invoke(simulate, [*POISSON, "--warmup-us", "25", "--resume", kept])
    assert "was kept after another warm-up" in str(result.exception)


def test_losses_of_links_and_classes_of_flows_in_files_are_heeded_or_said(tmp_path):
    """Drops are counted where packets would have arrived, retransmissions where they leave."""
    lines = (GOLDEN / "g1_single" / "topo.txt").read_text().split("\n")
    lossy = [f"{line.rsplit(' ', 1)[0]} 0.01" if number == 2 else line for number, line in enumerate(lines)]
    (tmp_path / "topo.txt").write_text("\n".join(lossy))
    (tmp_path / "flow.txt").write_text("2\n0 1 3 100 4000000 2\n1 0 0 100 4000000 2\n")
    files = ["--topo", str(tmp_path / "topo.txt"), "--flows", str(tmp_path / "flow.txt"), "--cc", "none"]
    run = _json(*files, "--set", "congestion.timeout_us=100")
    assert "note: links that lose packets by --topo: 1" in run["stderr"]
    assert "note: flows are of classes 0, 3, without effect" in run["stderr"]
    rows = run["counters"]["by_port"]
    for name in ("drops", "retransmissions"):
        assert run["counters"][name] == sum(row[name] for row in rows) > 0
    assert {row["host"] for row in rows if "host" in row and row["retransmissions"]} == {0, 1}
    clean = _json(*files, "--set", "congestion.timeout_us=100", "--set", "congestion.loss_rates.switch2,host0=0")
    assert clean["counters"]["drops"] == 0
    (tmp_path / "topo.txt").write_text("\n".join(lossy).replace("0.01", "1.5"))
    result = CliRunner().invoke(simulate, files)
    assert "line 3: 1.5 is no error rate" in str(result.exception)


def test_bad_input_is_all_that_is_said():
    result = CliRunner().invoke(simulate, [*FILES, "--set", "congestion.buffer_bytes=1000"])
    assert isinstance(result.exception, ConfigError)
    assert result.output == ""


def test_a_fabric_that_is_no_fabric_names_the_option(tmp_path):
    lines = (GOLDEN / "g1_single" / "topo.txt").read_text().split("\n")
    first = f"{lines[0].rsplit(' ', 1)[0]} 3"
    (tmp_path / "topo.txt").write_text("\n".join([first, *lines[1:4], lines[3]]))
    for file, message in (
        (tmp_path / "topo.txt", "to `netlayer topology import`, and give the fabric.graphml"),
        (GOLDEN / "README.md", "has no format that is known; give HPCC's topo.txt"),
    ):
        result = CliRunner().invoke(simulate, ["incast", "--topo", str(file)])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith("--topo = ")
        assert message in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--until-flows", "5"), "--until-flows = 5: is neither a number of 1..4 flows nor a share"),
        (("--until-flows", "0%"), "is neither a number"),
        (("--until-us", "5", "--warmup-us", "5"), "--warmup-us = 5.0: is not below --until-us = 5"),
        (("--cc", "none", "--warmup-us", "1e6"), "is not below what was run"),
        (("--sample-us", "5"), "has no effect without --out"),
        (("--cc", "none,swift", "--checkpoint", "kept.npz"), "is of one law, --cc names 2"),
        (("--cc", "none", "--resume", "/nowhere.npz"), "is no kept run"),
        (("--cc", "none", "--checkpoint", "/nowhere/kept.npz"), "is in no folder that exists"),
    ],
)
def test_what_cannot_be_kept_or_sampled_is_refused(arguments, message):
    result = CliRunner().invoke(simulate, [*INCAST, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
