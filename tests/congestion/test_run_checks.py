"""What a run says of itself: drops where none may be, a law's target that cannot be met, flows that did not end."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from congestion.commands.simulate import simulate as command
from congestion.control import plugin
from congestion.kernels.jit import kernel
from congestion.simulation.files import FlowSet
from congestion.simulation.page.verdict import verdict
from congestion.simulation.run_checks import check_bound, law_note, lossless_note, open_counts, open_flows, open_words
from congestion.simulation.settings import Settings
from congestion.simulation.simulate import Outcome, simulate
from netlayer.errors import CheckFailed
from tests.congestion.test_engine import _fabric

_SMALL = ("scenario.senders=3", "scenario.num_bytes=400000", "fabric.bps=100G")
_DROPS = ("congestion.xoff_bytes=20000", "congestion.headroom_bytes=8000", "congestion.timeout_us=500")


def _run(*more: str, sets: tuple[str, ...] = _SMALL) -> Result:
    words = [word for one in sets for word in ("--set", one)]
    return CliRunner().invoke(command, ["incast", *words, "--cc", "none", *more])


def test_a_lossless_fabric_that_drops_says_so_and_fails_where_that_is_asked(tmp_path):
    told = _run("--json", str(tmp_path / "a.json"), sets=(*_SMALL, *_DROPS))
    assert told.exit_code == 0, told.output
    run = json.loads((tmp_path / "a.json").read_text())
    many = run["counters"]["lossless_drops"]
    assert many > 0
    assert f"PFC is on and the fabric dropped {many:,} packets at " in run["warnings"][0]
    assert "headroom there is 8,000 B, until the sender stops " in run["warnings"][0]
    assert f"warning: none: {run['warnings'][0]}" in told.stderr
    strict = _run("--strict", sets=(*_SMALL, *_DROPS))
    assert isinstance(strict.exception, CheckFailed)
    assert "--strict: none: PFC is on and the fabric dropped" in str(strict.exception)
    assert "\n" not in str(strict.exception)


def _crowd(folder: Path) -> tuple[str, ...]:
    """HPCC's files: ten hosts of 100 Gb/s on two switches, one spine, 21 flows, most to hosts 0 and 7, 1 us a cable."""
    cables = [(host, 10 + host // 5) for host in range(10)] + [(10, 12), (11, 12)]
    lines = ["13 3 12", "10 11 12", *(f"{a} {b} 100Gbps 1000ns 0" for a, b in cables)]
    (folder / "topo.txt").write_text("\n".join(lines))
    sources = [4, 6, 5, 7, 4, 3, 6, 1, 2, 4, 4, 1, 5, 3, 9, 5, 6, 0, 6, 1, 8]
    targets = [7, 7, 7, 0, 0, 0, 0, 7, 6, 8, 7, 0, 3, 0, 0, 7, 7, 7, 7, 7, 2]
    flows = [f"{a} {b} 3 {100 + i} 300000 2.0" for i, (a, b) in enumerate(zip(sources, targets, strict=True))]
    (folder / "flow.txt").write_text("\n".join([str(len(flows)), *flows]))
    files = ("--topo", str(folder / "topo.txt"), "--flows", str(folder / "flow.txt"))
    return (*files, "--cc", "none", "--strict", "--json", str(folder / "run.json"))


def test_headroom_that_holds_the_data_in_flight_keeps_it_unless_acks_fill_it(tmp_path):
    """In flight at 100 Gb/s and 1 us: 2 x 12,500 B, two packets of 4,144 B, a pause of 43 B: 33,331 of 37,500 B.

    The rest holds 69 ACKs of 60 B; a host of one class sends more while it is paused long.
    """
    dropped = CliRunner().invoke(command, [*_crowd(tmp_path), "--set", "congestion.buffer_bytes=2MiB"])
    assert isinstance(dropped.exception, CheckFailed)
    message = str(dropped.exception)
    assert "headroom of 37,500 B, enough for data (33,331 B), ran full (with one class a pause does not stop" in message
    assert "congestion.classes.N.lossless=true" in message
    counters = json.loads((tmp_path / "run.json").read_text())["counters"]
    assert counters["lossless_drops"] == counters["drops"] > 0
    for more in ("congestion.buffer_bytes=16MiB", "congestion.classes.3.lossless=true"):
        words = ["--set", "congestion.buffer_bytes=2MiB", "--set", more]
        assert CliRunner().invoke(command, [*_crowd(tmp_path), *words]).exit_code == 0
        counters = json.loads((tmp_path / "run.json").read_text())["counters"]
        assert counters["drops"] == 0
        assert counters["pauses"] > 0 or "16MiB" in more


def test_the_pages_verdict_warns_of_drops_on_a_lossless_fabric():
    calm = {"cc": "none", "flows": 3, "ended": 3, "completion_us": 9.0, "completed": True, "deadlock": ""}
    calm |= {"pause_share": 0.0, "lossless_drops": 0}
    assert verdict([calm], None, 0)[0] == "PASS"
    word, text = verdict([calm | {"lossless_drops": 400}], None, 0)
    assert word == "WARN"
    assert "`none`: PFC is on and 400 packets were dropped." in text


def test_what_links_lose_is_no_drop_of_the_fabric(tmp_path):
    lossy = _run(
        "--strict",
        "--json",
        str(tmp_path / "a.json"),
        sets=(*_SMALL, "congestion.loss_rate=0.01", "congestion.timeout_us=500"),
    )
    assert lossy.exit_code == 0, lossy.output
    counters = json.loads((tmp_path / "a.json").read_text())["counters"]
    assert counters["drops"] > 0
    assert counters["lossless_drops"] == 0


def test_times_that_are_none_are_one_line():
    for option, value in (("--until-us", "nan"), ("--warmup-us", "inf"), ("--until-us", "1e300")):
        result = _run(option, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.output


def _one(fabric_delay_ns: int = 1_000, num_bytes: int = 100_000, law: str = "none", **more: object) -> Outcome:
    fabric = _fabric(1, 2, 1, [100], [fabric_delay_ns])
    flows = FlowSet(*(np.array([value]) for value in (0, 1, num_bytes, 0, 100)))
    until_ps = int(more.pop("until_ps", 2**62))  # type: ignore[call-overload]
    return simulate(fabric, flows, Settings.model_validate(more), law, until_ps=until_ps)


def test_swift_whose_target_lies_below_the_idle_round_trip_is_warned_of():
    short, long = (_one(delay, 4_096, "swift", until_ps=10_000_000).state for delay in (1_000, 20_000))
    assert law_note("swift", Settings(), short) == ""
    note = law_note("swift", Settings(), long)
    assert "target delay, 23.05 us" in note
    assert "lies below the idle round trip of 1 of 1 flows" in note
    named = float(note.rsplit(" ", 1)[1])
    fixed = Settings.model_validate({"swift": {"base_target_us": named * 1.01}})
    assert law_note("swift", fixed, long) == ""
    assert law_note("dcqcn", Settings(), long) == ""


def test_a_completion_below_what_the_path_needs_voids_the_run():
    outcome = _one()
    check_bound(outcome, "none")
    early = dataclasses.replace(outcome, finish_ps=outcome.finish_ps - 1)
    with pytest.raises(CheckFailed, match=r"law: flow 0 ended after .* us, below the .* us that its path needs"):
        check_bound(early, "law")


def _reason(outcome: Outcome) -> str:
    (reason,) = open_flows(outcome).values()
    assert open_counts({0: reason}) == {reason.partition(":")[0]: 1}
    assert open_words({0: reason}) == f"1 {reason}"
    return reason


def test_why_a_flow_is_open():
    assert open_flows(_one()) == {}
    assert _reason(_one(until_ps=5_000_000)) == "cut off: the run ended first, 2 of 25 packets acknowledged"
    assert _reason(_one(loss_rate=0.9)).startswith("lost: packets or ACKs of it were lost and no timer")
    assert _reason(_one(loss_rate=0.9, timeout_us=10.0, retries=1)) == "failed: its retries ran out"
    starved = _one(20_000, 4_000_000, "swift", until_ps=3_000_000_000)
    assert _reason(starved).startswith("starved: its law holds it to ")


def test_flows_that_wait_or_are_stopped_say_so():
    src, waits = np.array([0, 1, 0]), (np.array([0, 0, 1, 1]), np.array([0]))
    flows = FlowSet(
        src,
        np.array([1, 0, 1]),
        np.full(3, 100_000),
        np.array([0, 0, 9_000_000]),
        np.full(3, 100),
        waits_for=waits,
    )
    outcome = simulate(_fabric(1, 2, 1, [100], [1000]), flows, Settings(), "none", until_ps=5_000_000)
    assert [reason.partition(":")[0] for reason in open_flows(outcome).values()] == [
        "cut off",
        "waiting",
        "not started",
    ]
    assert open_words(open_flows(outcome)).startswith("1 cut off: the run ended first, ")


def test_a_flow_that_pfc_stops_as_the_run_ends_says_so():
    src, zeros = np.arange(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    flows = FlowSet(src, zeros + 3, zeros + 600_000, zeros, zeros + 100)
    chosen = Settings(xoff_bytes=20_000, buffer_bytes=900_000)
    fabric = _fabric(1, 4, 1, [100], [1000])
    outcome = simulate(fabric, flows, chosen, "none", until_ps=60_000_000)
    assert "paused" in open_counts(open_flows(outcome))
    assert lossless_note(fabric, outcome, chosen) == ""


def test_what_numba_says_of_a_laws_file_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "bad.py"
    path.write_text("def on_loss(p, own, flow, now):\n    own.acks = missing_name + 1\n")
    scope: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    own = np.zeros(1, dtype=[("acks", "i8")])
    with pytest.raises(Exception, match="missing_name") as caught:
        kernel(scope["on_loss"])(own[0], own[0], own[0], 1)
    monkeypatch.setattr(plugin, "path", path)
    told = str(plugin.not_compiled(caught.value))
    assert told.startswith(f"LAW {path}")
    assert "cannot be compiled (" in told
    assert "missing_name" in told
    assert "\n" not in told
