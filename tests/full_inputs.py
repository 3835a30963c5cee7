"""Make the files that README's commands take for granted, in the current folder: for tests/full.py.

A fabric's configurations and flows, HPCC's files, dumps of a job that hangs, logs, a capture, text to train on.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from bench.blame.worlds import random_world, write_dumps
from netlayer.config.tree import ClusterConfig
from tests.congestion.nic_packets.talk import Talk
from tests.topology.reports import write_sonic
from topology.fabric.plant import Plant


def main() -> None:
    """Write all of them."""
    _fabric()
    _simulator()
    _logs()
    _text()
    write_dumps(random_world(2, "hang"), Path("traces"), 2)
    talk = Talk()
    talk.write(1, 0)
    talk.answer(1, 9)
    talk.save(Path("capture.pcapng"))
    shutil.copy("examples/laptop.toml", "job.toml")


def _fabric() -> None:
    """Of sixteen servers in four ToR sets; a flow a NIC to the server across."""
    graph = Plant.build(ClusterConfig(servers=16, servers_per_tor_set=4, tiers=2)).graph()
    Path("configs").mkdir()
    write_sonic(graph, Path("configs"))
    hosts = [name for name, is_switch in zip(graph.names, graph.is_switch.tolist(), strict=True) if not is_switch]
    pairs = zip(hosts, hosts[len(hosts) // 2 :] + hosts[: len(hosts) // 2], strict=True)
    rows = [f"{source},{target},1e6" for source, target in pairs]
    Path("flows.csv").write_text("\n".join(["src,dst,bytes", *rows, ""]), encoding="utf-8")
    ports = {f"Ethernet{8 * number}": {"speed": "400000", "mtu": "9100"} for number in range(4)}
    switch = {"DEVICE_METADATA": {"localhost": {"hostname": "tor0", "type": "ToRRouter"}}, "PORT": ports}
    Path("config_db.json").write_text(json.dumps(switch), encoding="utf-8")


def _simulator() -> None:
    for name in ("topo.txt", "flow.txt"):
        shutil.copy(Path("tests/congestion/golden/g2_incast16_none") / name, name)


def _logs() -> None:
    logs = sorted(Path("tests/bench/logs").glob("nccl_node*.txt"))
    Path("logs").mkdir()
    for log in logs:
        shutil.copy(log, Path("logs"))
    for number, log in enumerate(logs[:3]):
        shutil.copy(log, f"node{number}.log")
    for name in ("before.json", "after.json"):
        shutil.copy("bench/reports/quickstart_cpu_202611.bench.all_reduce.json", name)


def _text() -> None:
    """Python for C's sake: the command looks at names alone."""
    for path in Path("congestion").rglob("*.py"):
        shutil.copy(path, Path(os.environ["HOME"]) / "src" / f"{'_'.join(path.parts)}.c")
    Path("my-text").mkdir()
    for path in Path().rglob("*.md"):
        if "my-text" not in path.parts and ".venv" not in path.parts:
            shutil.copy(path, Path("my-text") / "_".join(path.parts))


if __name__ == "__main__":
    main()
