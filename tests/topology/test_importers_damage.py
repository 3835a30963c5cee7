"""Whatever stands in a file: a fabric, or one printable line."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster
from tests.topology.graphs import write
from tests.topology.reports import write_lldp, write_sonic
from topology.fabric.addressing import cables_csv
from topology.fabric.cable_plan import CablePlan
from topology.fabric.export import hpcc_text, htsim_text, write_graphml
from topology.fabric.graph import Graph
from topology.importers import FORMATS, Format, read_fabric

_JUNK = [
    "",
    "0",
    "-1",
    "9" * 500,
    "1e999",
    "nan",
    "null",
    "[]",
    "{}",
    '"',
    "\x00",
    "\x1b[2J",
    "=1+1",
    "é",
    " ",
    "Tier 0",
]
_WORD = re.compile(r"[\w.:-]+|[^\w\s]")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A sound file of every format."""
    folder = tmp_path_factory.mktemp("good")
    small = cluster(servers=4, servers_per_tor_set=2, core_switches_per_plane=1, nic_bps="200G", switch_port_bps="400G")
    cable_plan = CablePlan.build(small)
    graph = cable_plan.graph()
    found = {"cables": cables_csv(graph), "hpcc": hpcc_text(graph), "htsim": htsim_text(cable_plan.fabric)}
    write_graphml(graph, folder / "f.graphml")
    found["graphml"] = (folder / "f.graphml").read_text()
    for name, write_all in (("sonic", write_sonic), ("lldp", write_lldp)):
        (folder / name).mkdir()
        write_all(graph, folder / name)
        found[name] = sorted((folder / name).iterdir())[-1].read_text()
    return found


@settings(deadline=None, max_examples=300)
@given(data=st.data(), kind=st.sampled_from(FORMATS))
def test_a_damaged_file_is_a_fabric_or_one_line(
    good: dict[str, str], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: Format
) -> None:
    text = good[kind]
    for _ in range(data.draw(st.integers(1, 3))):
        words = list(_WORD.finditer(text))
        if not words:
            break
        word = words[data.draw(st.integers(0, len(words) - 1))]
        text = text[: word.start()] + data.draw(st.sampled_from(_JUNK)) + text[word.end() :]
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]
    path = write(tmp_path_factory.getbasetemp() / "device.file", text)
    for wanted in (kind, None):
        _read(path, wanted)


def _read(path: Path, kind: Format | None) -> None:
    line = ""
    try:
        assert isinstance(read_fabric([path], kind, parallel=True, default_bps=1e9), Graph)
    except ConfigError as error:
        line = str(error)
    assert not line or line.isprintable()
