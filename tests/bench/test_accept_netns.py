"""`netlayer accept --hosts` over network namespaces of its own: one link of them is shaped by the kernel, and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.accept.cli import accept

NODES, SLOW = 5, (1, 3)
PREFIX = f"nla{os.getpid() % 100000}"
HUB = f"{PREFIX}hub"
# The host is an address here: its last number is that of the namespace.
FAKE_SSH = f"""#!/bin/sh
exec ip netns exec {PREFIX}n"${{1##*.}}" sh -c "$2"
"""


def ip(*words: object, namespace: str = "") -> None:
    command = ["ip", *(["-n", namespace] if namespace else []), *map(str, words)]
    subprocess.run(command, check=True, capture_output=True)


def can_shape() -> str:
    """What is missing; empty where nothing is."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    try:
        ip("netns", "add", HUB)
        ip("link", "add", "name", "v0", "type", "veth", "peer", "name", "v1", namespace=HUB)
        ip("link", "add", "hub", "type", "bridge", namespace=HUB)
        shape(HUB, "v0")
    except subprocess.CalledProcessError as exc:
        return f"the kernel refuses: {exc.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", HUB], check=False, capture_output=True)
    return ""


def shape(namespace: str, device: str) -> None:
    rate = ("tbf", "rate", "200mbit", "burst", "32k", "latency", "500ms")
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *rate]
    subprocess.run(command, check=True, capture_output=True)


def address(node: int) -> str:
    return f"10.77.0.{node}"


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Namespaces on one bridge; two of them send to each other over a wire of their own that is slow."""
    if missing := can_shape():
        pytest.skip(missing)
    names = [f"{PREFIX}n{node}" for node in range(1, NODES + 1)]
    try:
        for name in (HUB, *names):
            ip("netns", "add", name)
        ip("link", "add", "hub", "type", "bridge", namespace=HUB)
        ip("link", "set", "hub", "up", namespace=HUB)
        for node, name in enumerate(names, 1):
            ip("link", "add", f"p{node}", "type", "veth", "peer", "name", "net0", "netns", name, namespace=HUB)
            ip("link", "set", f"p{node}", "up", "master", "hub", namespace=HUB)
            ip("addr", "add", f"{address(node)}/24", "dev", "net0", namespace=name)
            for device in ("lo", "net0"):
                ip("link", "set", device, "up", namespace=name)
        low, high = (names[node - 1] for node in SLOW)
        ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", high, namespace=low)
        for name, own, other in ((low, *SLOW), (high, *SLOW[::-1])):
            ip("link", "set", "wire", "up", namespace=name)
            ip("route", "add", f"{address(other)}/32", "dev", "wire", "src", address(own), namespace=name)
            shape(name, "wire")
        yield [address(node) for node in range(1, NODES + 1)]
    finally:
        for name in (HUB, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_link_that_the_kernel_shapes_is_named(
    nodes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("\n".join(nodes) + "\n")
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net0")
    words = ["--hosts", tmp_path / "hosts", "--ssh-command", tmp_path / "ssh", "--backend", "gloo", "--json", "-"]
    found = CliRunner().invoke(accept, [*map(str, words), "--only", "all_reduce", "--only", "pairs"])
    assert found.exit_code == 1, found.output
    rows = json.loads(found.stdout)["rows"]
    accused = {tuple(row["label"].split(" - ")) for row in rows if row["table"] == "accused"}
    assert accused == {tuple(address(node) for node in SLOW)}
