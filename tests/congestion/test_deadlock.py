"""A ring of switches whose flows go round deadlocks under PFC; the same ring with shorter ways does not."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from congestion.commands.simulate import simulate as command
from congestion.simulation.deadlock import deadlocked_ports
from congestion.simulation.files import FlowSet
from congestion.simulation.measures import flow_frame, port_frame, summary
from congestion.simulation.settings import ClassSettings, Settings
from congestion.simulation.simulate import Outcome, Simulation, simulate
from netlayer.errors import CheckFailed
from topology.fabric.graph import Graph

_SWITCHES, _HOSTS = 5, 2  # of each


def _ring() -> Graph:
    hosts = _SWITCHES * _HOSTS
    cables = [(host, hosts + host // _HOSTS) for host in range(hosts)]
    cables += [(hosts + each, hosts + (each + 1) % _SWITCHES) for each in range(_SWITCHES)]
    a, b = (np.array(ends, dtype=np.int64) for ends in zip(*cables, strict=True))
    names = (*(f"host{host}" for host in range(hosts)), *(f"switch{each}" for each in range(_SWITCHES)))
    without = ("",) * len(cables)
    many = len(cables)
    return Graph(
        names=names,
        is_switch=np.arange(len(names)) >= hosts,
        a=a,
        b=b,
        bps=np.full(many, 1e11),
        latency_ns=np.full(many, 1e3),
        a_port=without,
        b_port=without,
    )


def _round(links: int, pg: int = 0) -> FlowSet:
    """From every host to one so many switches on, all the same way round."""
    src = np.arange(_SWITCHES * _HOSTS, dtype=np.int64)
    dst = (src + links * _HOSTS) % len(src)
    return FlowSet(
        src,
        dst,
        np.full_like(src, 4_000_000),
        np.zeros_like(src),
        np.full_like(src, 100),
        pg=np.full_like(src, pg),
    )


_SMALL = Settings(buffer_bytes=900_000, header_bytes=48)
_CLASSES = _SMALL.model_copy(update={"buffer_bytes": 1_500_000, "classes": {0: ClassSettings(), 1: ClassSettings()}})


def _names(outcome: Outcome, fabric: Graph) -> list[str]:
    return outcome.to_json(fabric, _round(2))["counters"]["deadlock"]


@pytest.mark.parametrize(("chosen", "pg"), [(_SMALL, 0), (_CLASSES, 1)])
def test_flows_that_go_round_wait_for_each_other_for_good(chosen, pg):
    fabric, flows = _ring(), _round(2, pg)
    outcome = simulate(fabric, flows, chosen, "none")
    assert outcome.completed
    assert (outcome.finish_ps < 0).any()
    assert outcome.state.port["drops"].sum() == 0
    names = _names(outcome, fabric)
    assert len(names) == _SWITCHES
    for one, after in zip(names, names[1:] + names[:1], strict=True):
        assert one.split(" -> ")[1] == after.split(" -> ")[0]
    row = summary(flow_frame(fabric, flows, outcome), port_frame(fabric, outcome))
    assert row["deadlock"].split(", ") == names


@pytest.mark.parametrize(("chosen", "pg"), [(_SMALL, 0), (_CLASSES, 1)])
def test_one_link_of_the_ring_each_pauses_but_ends(chosen, pg):
    fabric, flows = _ring(), _round(1, pg)
    outcome = simulate(fabric, flows, chosen, "none")
    assert outcome.state.port["pauses"].sum() > 0
    assert (outcome.finish_ps > 0).all()
    assert _names(outcome, fabric) == []


def test_a_circle_is_told_of_while_others_still_run():
    """A run that is stopped in the middle: at once a circle may be chance, after many round trips it is none."""
    fabric = _ring()
    run = Simulation(fabric, _round(2), _SMALL, "none")
    whole = Simulation(fabric, _round(2), _SMALL, "none").run()
    stuck_ps = int(whole.state.port["paused_at"].max())
    run.advance(stuck_ps + 2_000_000)
    assert not len(deadlocked_ports(run.state, run.time_ps, completed=False))
    run.time_ps = stuck_ps + 10**9
    assert len(deadlocked_ports(run.state, run.time_ps, completed=False)) == _SWITCHES


def test_the_command_names_the_links_of_the_circle(tmp_path):
    hosts, ends = _SWITCHES * _HOSTS, _ring()
    cables = [f"{a} {b} 100Gbps 1000ns 0" for a, b in zip(ends.a.tolist(), ends.b.tolist(), strict=True)]
    switches = " ".join(str(hosts + each) for each in range(_SWITCHES))
    topo = [f"{hosts + _SWITCHES} {_SWITCHES} {len(cables)}", switches, *cables]
    flows = [f"{host} {(host + 2 * _HOSTS) % hosts} 3 100 4000000 0" for host in range(hosts)]
    (tmp_path / "topo.txt").write_text("\n".join(topo) + "\n")
    (tmp_path / "flow.txt").write_text("\n".join([str(hosts), *flows]) + "\n")
    given = ["--topo", str(tmp_path / "topo.txt"), "--flows", str(tmp_path / "flow.txt"), "--cc", "none"]
    out = tmp_path / "result.json"
    set_ = ["--set", "congestion.buffer_bytes=900000"]
    result = CliRunner().invoke(command, [*given, *set_, "--json", str(out)])
    assert isinstance(result.exception, CheckFailed)
    assert "PFC deadlock, each link waits for the next" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert len(json.loads(out.read_text())["counters"]["deadlock"]) == _SWITCHES


def test_the_command_flaps_a_cable(tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--set", "scenario.ranks=16", "--set", "scenario.num_bytes=2MB", "--set", "scenario.shift=8"]
    timer = ["--set", "congestion.timeout_us=200"]
    link = ["--set", "scenario.link=host0,leaf0"]
    result = CliRunner().invoke(command, ["flap", *sizes, *timer, *link, "--cc", "none", "--json", str(out)])
    assert result.exit_code == 0, result.output
    tree = json.loads(out.read_text())
    slow = {row["src"] for row in tree["flows"] if row["fct_ns"] > 180_000}
    assert 0 in slow
    assert tree["counters"]["drops"] > 0
    assert tree["counters"]["deadlock"] == []
