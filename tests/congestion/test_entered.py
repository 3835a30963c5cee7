"""A law from a file, in a process of its own: it is entered before the engine is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from congestion.control.entered import enter
from netlayer.errors import ConfigError

LAW = """
import numpy as np
from pydantic import BaseModel

PARAMETERS = np.dtype([("share", "f8")])
STATE = np.dtype([("acks", "i8")])

class Section(BaseModel):
    share: float = 0.5

def parameters(section, host_bps, settings):
    return np.array([(section.share,)], dtype=PARAMETERS)

def start(p, own, flow):
    flow.rate_bps = int(flow.line_rate_bps * p.share)

def advance(p, own, flow, now):
    pass

def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):
    own.acks += 1

def on_loss(p, own, flow, now):
    pass
"""

RUN = """
import json, sys
from pathlib import Path
from congestion.control.entered import enter
name = enter(Path(sys.argv[1]))
from congestion.files import read_flows
from congestion.settings import settings_of
from congestion.simulate import simulate
from topology.importers import read_fabric
folder = Path(sys.argv[2])
fabric = read_fabric([folder / "topo.txt"])
flows = read_flows(folder / "flow.txt", fabric)
outcome = simulate(fabric, flows, settings_of("ns3", tuple(sys.argv[3:])), name)
fct = (outcome.finish_ps - outcome.start_ps).tolist()
print(json.dumps({"name": name, "fct_ps": fct, "acks": outcome.state.entered_flow["acks"].tolist()}))
"""
GOLDEN = Path(__file__).parent / "golden" / "g1_single"


def test_it_paces_and_is_told_of_acknowledgements(tmp_path):
    (tmp_path / "half.py").write_text(LAW)
    found = []
    for overrides in ((), ("congestion.entered.share=0.25",)):
        command = [sys.executable, "-c", RUN, str(tmp_path / "half.py"), str(GOLDEN), *overrides]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout))
    assert [one["name"] for one in found] == ["half", "half"]
    assert found[0]["acks"] == [2_441]  # the last one ends the flow
    for one, share in zip(found, (0.5, 0.25), strict=True):
        assert one["fct_ps"][0] == pytest.approx(2_442 * 4_144 * 40 / share, rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("STATE = ", "STATES = ", "has no record type STATE"),
        ("def on_loss(p, own, flow, now)", "def on_loss(p, own, flow)", "has no on_loss of 4 arguments"),
        ("def advance", "def progress", "has no advance of 4 arguments"),
        ("import numpy as np", "import numpyy as np", "does not run (ModuleNotFoundError"),
    ],
)
def test_a_file_that_is_no_law_is_refused(tmp_path, old, new, message, monkeypatch):
    monkeypatch.delitem(sys.modules, "congestion.engine.run", raising=False)
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
