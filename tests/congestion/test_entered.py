"""A law from a file, in a process of its own: it is entered before the engine is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from congestion.control import plugin
from congestion.control.plugin import enter
from netlayer.errors import ConfigError

# `fault` makes it do what no law may, each in a way that its source does not give away.
LAW = """
import numpy as np
from pydantic import BaseModel

PARAMETERS = np.dtype([("share", "f8"), ("fault", "i8")])
STATE = np.dtype([("acks", "i8")])

class Section(BaseModel):
    share: float = 0.5
    fault: int = 0

def parameters(section, host_bps, settings):
    return np.array([(section.share, section.fault)], dtype=PARAMETERS)

if True:
    from congestion.kernels.jit import kernel

    @kernel
    def end_at_once(flow):
        flow.unacked = flow.num_packets

def start(p, own, flow):
    flow.rate_bps = int(flow.line_rate_bps * p.share)

def advance(p, own, flow, now):
    if p.fault == 3:
        flow.window_bytes = 2**60

def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):
    own.acks += 1
    if p.fault == 1:
        flow.rate_bps = 0
    elif p.fault == 2:
        end_at_once(flow)

def on_loss(p, own, flow, now):
    pass
"""

RUN = """
import json, sys
from pathlib import Path
from congestion.control.plugin import enter
name = enter(Path(sys.argv[1]))
from congestion.simulation.files import read_flows
from congestion.simulation.settings import settings_of
from congestion.simulation.simulate import simulate
from netlayer.errors import NetlayerError
from topology.importers import read_fabric
folder = Path(sys.argv[2])
fabric = read_fabric([folder / "topo.txt"])
flows = read_flows(folder / "flow.txt", fabric)
for overrides in json.loads(sys.argv[3]):
    told = {"name": name}
    try:
        outcome = simulate(fabric, flows, settings_of("ns3", tuple(overrides)), name)
        told["fct_ps"] = (outcome.finish_ps - outcome.start_ps).tolist()
        told["acks"] = outcome.state.plugin_flow["acks"].tolist()
    except NetlayerError as exc:
        told["error"] = str(exc)
    print(json.dumps(told))
"""
# As the engine calls a law, without the engine: its own kernels take a minute to compile around one.
CALLS = """
import json, sys
from pathlib import Path
from congestion.commands.simulate import read_law
read_law("none")
name = read_law(sys.argv[1])
from congestion.control import laws
from congestion.engine.build import build
from congestion.kernels.jit import entry
from congestion.simulation.files import read_flows
from congestion.simulation.run_checks import law_fault
from congestion.simulation.settings import settings_of
from netlayer.errors import ConfigError
from topology.importers import read_fabric

@entry
def call_the_law(s):
    laws.start(s, 0)
    laws.advance(s, 0, 10)
    laws.on_ack(s, 0, 20, False, 4_000_000, 1_000)

folder = Path(sys.argv[2])
fabric = read_fabric([folder / "topo.txt"])
flows = read_flows(folder / "flow.txt", fabric)
for overrides in json.loads(sys.argv[3]):
    try:
        state = build(fabric, flows, settings_of("ns3", tuple(overrides)), name, seed=0)
    except ConfigError as exc:
        print(json.dumps({"error": str(exc)}))
        continue
    call_the_law(state)
    fault = str(law_fault(state))
    values = {key: int(state.flow[0][key]) for key in ("rate_bps", "line_rate_bps", "window_bytes", "unacked")}
    print(json.dumps({"name": name, "acks": int(state.plugin_flow["acks"][0]), "error": fault, **values}))
"""
GOLDEN = Path(__file__).parent / "golden" / "g1_single"
_RUNS = (
    (),
    ("congestion.plugin.share=0.25",),
    ("congestion.plugin.fault=1",),
    ("congestion.plugin.fault=2",),
    ("congestion.plugin.fault=3", "congestion.plugin.share=1", "congestion.window_bytes=40960"),
    ("congestion.plugin.shar=0.25",),
)


def run_in_a_process(program, folder, runs):
    """What a program prints of each run: one process, for each of them compiles around the law."""
    (folder / "half.py").write_text(LAW)
    command = [sys.executable, "-c", program, str(folder / "half.py"), str(GOLDEN), json.dumps(runs)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600, text=True)
    return map(json.loads, done.stdout.splitlines())


def test_its_calls_set_rate_and_window_and_nothing_else(tmp_path):
    half, quarter, stopped, cheat, greedy, misspelt = run_in_a_process(CALLS, tmp_path, _RUNS)
    assert half["name"] == "half"
    for one, share in ((half, 0.5), (quarter, 0.25)):
        assert (one["acks"], one["error"]) == (1, "None")
        assert one["rate_bps"] == share * one["line_rate_bps"]
    assert "half.py, flow.rate_bps = 0: was set for flow 0: a rate is 1 bit/s or more" in stopped["error"]
    assert stopped["rate_bps"] == 0.5 * stopped["line_rate_bps"]
    assert "wrote a field of flow 0 that is the engine's; a law sets rate_bps and window_bytes alone" in cheat["error"]
    assert cheat["unacked"] == 0
    assert greedy["window_bytes"] == 40_960
    assert "congestion.plugin.shar = 0.25: sets nothing in" in misspelt["error"]


@pytest.mark.slow  # it compiles the engine around the law
def test_it_paces_is_told_of_acknowledgements_and_moves_no_packet_itself(tmp_path):
    half, quarter, stopped, cheat, greedy, misspelt = run_in_a_process(RUN, tmp_path, _RUNS)
    assert half["name"] == "half"
    assert half["acks"] == [2_441]  # the last one ends the flow
    for one, share in ((half, 0.5), (quarter, 0.25)):
        assert one["fct_ps"][0] == pytest.approx(2_442 * 4_144 * 40 / share, rel=0.01)
    assert "half.py, flow.rate_bps = 0: was set for flow 0: a rate is 1 bit/s or more" in stopped["error"]
    assert "wrote a field of flow 0 that is the engine's; a law sets rate_bps and window_bytes alone" in cheat["error"]
    # Ten packets a round trip, whatever window the law sets: NCCL's is no matter of the law.
    assert greedy["fct_ps"][0] > 2_442 / 10 * 4_000_000
    assert "congestion.plugin.shar = 0.25: sets nothing in" in misspelt["error"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("STATE = ", "STATES = ", "has no record type STATE"),
        ("def on_loss(p, own, flow, now)", "def on_loss(p, own, flow)", "has no on_loss of 4 arguments"),
        ("def advance", "def progress", "has no advance of 4 arguments"),
        ("import numpy as np", "import numpyy as np", "does not run (ModuleNotFoundError"),
        ("own.acks += 1", "own.ack += 1", "line 30 = own.ack: is no field of STATE; did you mean acks?"),
        ("p.share)", "p.shore)", "line 23 = p.shore: is no field of PARAMETERS; did you mean share?"),
        ("own.acks += 1", "flow.rate = 1", "= flow.rate: is no field of the flow; did you mean rate_bps?"),
        ("own.acks += 1", "flow.unacked = 5", "line 30 = flow.unacked: is written, and is the engine's: laws read it"),
        ("own.acks += 1", "flow.finish = now", "= flow.finish: is no field of the flow"),
        ("own.acks += 1", "mine = flow; mine.next += 1", "= mine.next: is written, and is the engine's"),
        (
            "    own.acks += 1",
            "    poke(flow)\n\ndef poke(its):\n    its.next = 3",
            "= its.next: is written, and is the",
        ),
    ],
)
def test_a_file_that_is_no_law_is_refused(tmp_path, old, new, message, monkeypatch):
    for module in plugin.BOUND:  # other tests may have loaded them
        monkeypatch.delitem(sys.modules, module, raising=False)
    path = tmp_path / "bad.py"
    path.write_text(LAW.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        enter(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_and_too_late(tmp_path):
    import congestion.engine.run  # noqa: F401

    with pytest.raises(ConfigError, match="cannot be read"):
        enter(tmp_path / "none.py")
    (tmp_path / "late.py").write_text(LAW)
    with pytest.raises(RuntimeError, match="before the engine"):
        enter(tmp_path / "late.py")
