"""Make the made-up files of examples/ again: a fabric with its flows, dumps of a job that hangs, a capture, logs.

python -m tests.make_examples FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from bench.blame.worlds import random_world, write_dumps
from netlayer.config.tree import ClusterConfig
from tests.congestion.nic_packets.talk import Talk
from tests.topology.reports import write_sonic
from topology.fabric.cable_plan import Plant

_TESTS = Path(__file__).parent


def main(folder: Path) -> None:
    """Write all of them into a folder that is there."""
    _write_fabric(folder)
    for name in ("topo.txt", "flow.txt"):
        shutil.copy(_TESTS / "congestion/golden/g2_incast16_none" / name, folder / name)
    (folder / "logs").mkdir()
    for log in sorted((_TESTS / "bench/logs").glob("nccl_node*.txt")):
        shutil.copy(log, folder / "logs")
    for name in ("before.json", "after.json"):
        shutil.copy(_TESTS.parent / "reports/quickstart_cpu_202611.bench.all_reduce.json", folder / name)
    write_dumps(random_world(2, "hang"), folder / "traces", 2)
    talk = Talk()
    talk.write(1, 0)
    talk.answer(1, 9)
    talk.save(folder / "capture.pcapng")


def _write_fabric(folder: Path) -> None:
    """Write sixteen servers in four ToR sets, and a flow a NIC to the server across."""
    graph = Plant.build(ClusterConfig(servers=16, servers_per_tor_set=4, tiers=2)).graph()
    (folder / "configs").mkdir()
    write_sonic(graph, folder / "configs")
    hosts = [name for name, is_switch in zip(graph.names, graph.is_switch.tolist(), strict=True) if not is_switch]
    pairs = zip(hosts, hosts[len(hosts) // 2 :] + hosts[: len(hosts) // 2], strict=True)
    rows = [f"{source},{target},1e6" for source, target in pairs]
    (folder / "flows.csv").write_text("\n".join(["src,dst,bytes", *rows, ""]), encoding="utf-8")
    ports = {f"Ethernet{8 * number}": {"speed": "400000", "mtu": "9100"} for number in range(4)}
    switch = {"DEVICE_METADATA": {"localhost": {"hostname": "tor0", "type": "ToRRouter"}}, "PORT": ports}
    (folder / "config_db.json").write_text(json.dumps(switch), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
