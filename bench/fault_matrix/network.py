"""Hosts of a run that are network namespaces of this machine, each behind a link that the harness can cut.

    this namespace: nl-bridge 10.77.0.1, with the run's Redis and the driver
        nl-0 --- eth0 of namespace nl-host-0, 10.77.0.10
        nl-1 --- eth0 of namespace nl-host-1, 10.77.0.11 ...

All of it lies in a mount and a network namespace of the harness itself (`enter`), so nothing of the machine's network
changes, and all of it goes with the last process in there. It needs root. Links lose nothing and have no delay: what is
tried is that a host is gone, and that it comes back, and not how fast a network is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from netlayer.errors import HardwareMissing
from netlayer.store.redis_server import find_redis_binary

_ENTERED = "NETLAYER_FAULT_NETWORK"
_PORT = 6379


def enter() -> None:
    """Run this very command again in namespaces of its own; in there, do nothing.

    Raises:
        HardwareMissing: this user may not make namespaces.
    """
    if os.environ.get(_ENTERED):
        return
    spaces = ["unshare", "--mount", "--net"]
    try:
        probe = subprocess.run([*spaces, "ip", "netns", "list"], capture_output=True, text=True, check=False)
    except FileNotFoundError as exc:
        raise HardwareMissing("--network needs unshare and ip (util-linux, iproute2)") from exc
    if probe.returncode or os.geteuid():
        raise HardwareMissing(f"--network needs root, to make namespaces ({probe.stderr.strip()})")
    # A place for names of namespaces that is ours alone.
    line = 'mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip link set lo up && exec "$0" "$@"'
    command = [*spaces, "sh", "-c", line, sys.executable, "-m", "bench.fault_matrix", *sys.argv[1:]]
    os.execvpe("unshare", command, {**os.environ, _ENTERED: "1"})


class Network:
    """Hosts, their links, and a Redis that all of them reach.

    Args:
        folder: for the program that stands for ssh, and the Redis's log.
        num_hosts: how many.
    """

    def __init__(self, folder: Path, num_hosts: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts = [f"10.77.0.{10 + number}" for number in range(num_hosts)]
        lines = ["link add nl-bridge type bridge", "link set nl-bridge up", "addr add 10.77.0.1/24 dev nl-bridge"]
        for number, host in enumerate(self.hosts):
            space = f"nl-host-{number}"
            _ip("netns", "add", space)
            lines += [
                f"link add nl-{number} type veth peer name eth0 netns {space}",
                f"link set nl-{number} master nl-bridge up",
            ]
            _batch(lines)
            lines = []
            _batch([f"addr add {host}/24 dev eth0", "link set eth0 up", "link set lo up"], space)
        self.ssh = folder / "ssh"
        self.ssh.write_text('#!/bin/sh\nexec ip netns exec "nl-host-$((${1##*.} - 10))" sh -c "$2"\n')
        self.ssh.chmod(0o755)
        self.url = f"redis://10.77.0.1:{_PORT}"
        binary = find_redis_binary()
        assert binary is not None
        options = ["--bind", "10.77.0.1", "--port", str(_PORT), "--save", "", "--protected-mode", "no"]
        with (folder / "redis.log").open("wb") as log:
            self._redis = subprocess.Popen([binary, *options], stdout=log, stderr=log, cwd=folder)
        try:
            time.sleep(0.5)
        except BaseException:  # Ctrl-C: nobody could close what was never returned
            self._redis.kill()
            raise
        if self._redis.poll() is not None:
            raise HardwareMissing(f"the Redis has ended: {folder}/redis.log says why")

    def cut(self, number: int) -> None:
        """Take a host's link down."""
        _ip("link", "set", f"nl-{number}", "down")

    def restore(self, number: int) -> None:
        """Bring a host's link up."""
        _ip("link", "set", f"nl-{number}", "up")

    def restore_all(self) -> None:
        """Bring every host's link up."""
        for number in range(len(self.hosts)):
            self.restore(number)

    def flap(self, number: int, *, times: int = 4, down_s: float = 0.6, up_s: float = 2.0) -> None:
        """Take a host's link down and up, several times."""
        for _ in range(times):
            self.cut(number)
            time.sleep(down_s)
            self.restore(number)
            time.sleep(up_s)

    def close(self) -> None:
        """End the Redis, and remove hosts and links."""
        self._redis.kill()
        self._redis.wait()
        for number in range(len(self.hosts)):
            _ip("link", "del", f"nl-{number}")
            _ip("netns", "del", f"nl-host-{number}")
        _ip("link", "del", "nl-bridge")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _batch(lines: list[str], space: str = "") -> None:
    where = ["-n", space] if space else []
    subprocess.run(["ip", *where, "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)
