"""Backends that give nodes: what each must do, process groups of this machine, and hosts over ssh.

A backend starts executors and ends nodes; all else goes over the run's Redis. The driver may be another process than
the one that launched a node, so a backend finds what it ends by what the node tells (`Heartbeat.pid`), or by its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from netlayer.remote.connection import ssh_command
from netlayer.results import write_text
from trainer.resilience.folder import RunFolder

MODULE = "trainer.resilience.executor"


class Backend(Protocol):
    """Nodes of a run; none of its calls waits for a machine that does not answer."""

    comes_s: float
    """Longest time from the launch of a node to its first heartbeat, seconds."""

    def name(self, number: int) -> str:
        """Name of the node with this number; empty: there is none any more."""
        ...

    def launch(self, node: str) -> None:
        """Start the executor of a new node."""
        ...

    def ensure(self, node: str) -> None:
        """Start the executor of a node that was launched before, if it is not there any more."""
        ...

    def remove(self, node: str, pid: int) -> None:
        """End a node and all that runs on it, however it is; `pid` is its executor's, 0 where that never told."""
        ...

    def has_died(self, node: str) -> bool:
        """Whether the executor is known to have ended; False where nobody knows."""
        ...

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:
        """Keep later nodes off the machine of an evicted one; `was_heard`: its executor has once told of itself."""
        ...

    def close(self) -> None:
        """End what the backend itself runs, once what was asked for is done, or after a bounded wait."""
        ...


def kill_line(node: str, pid: int) -> str:
    """Line of shell that ends a node's executor, only where the process is still that one: ids are used again."""
    pattern = shlex.quote(f"{MODULE} .* {node} ")
    return f"tr '\\0' ' ' </proc/{pid}/cmdline | grep -q -- {pattern} && kill -KILL {pid}"


class FixedNodes:
    """Base of backends whose nodes are given: a name that was evicted is not asked for again."""

    comes_s = 120.0

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:
        """Do nothing: no other node comes to the same place (ssh), or all are in one (local)."""

    def close(self) -> None:
        """Do nothing: nodes outlive the driver."""


class GpuShares:
    """Equal shares of a machine's GPUs, one a local node: ranks and self-checks of a node see its own and no others.

    A node keeps its share (the file `gpus` in its folder, for later drivers). That of an evicted node is given again
    when none is left that nobody had.

    Args:
        folder: of the run.
        gpus: as CUDA_VISIBLE_DEVICES takes them.
        per_node: size of a share.
    """

    def __init__(self, folder: RunFolder, gpus: Sequence[str], per_node: int) -> None:
        self._folder = folder
        starts = range(0, len(gpus) - per_node + 1, per_node)
        self._shares = [",".join(gpus[start : start + per_node]) for start in starts]

    def of(self, node: str) -> str:
        """Return a node's share, taken now where it has none yet."""
        file = self._folder.node(node) / "gpus"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, self._free()[0] + "\n")
        return file.read_text(encoding="utf-8").strip()

    def release(self, node: str) -> None:
        """Let others have an evicted node's share."""
        with contextlib.suppress(OSError):
            (self._folder.node(node) / "gpus.released").touch()

    @property
    def num_free(self) -> int:
        return len(self._free())

    def _free(self) -> list[str]:
        """Shares that no node of the run has, those that were used least first."""
        files = list((self._folder.run / "nodes").glob("*/gpus"))
        used = [file.read_text(encoding="utf-8").strip() for file in files]
        in_use = {share for share, file in zip(used, files, strict=True) if not file.with_suffix(".released").exists()}
        return sorted((share for share in self._shares if share not in in_use), key=used.count)


class LocalBackend(FixedNodes):
    """Nodes that are sessions of processes on this machine.

    Args:
        folder: of the run.
        gpus: of this machine, for the run's ranks, as CUDA_VISIBLE_DEVICES takes them; empty: they use none.
    """

    def __init__(self, folder: RunFolder, gpus: Sequence[str] = ()) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._shares = GpuShares(folder, gpus, folder.spec().ranks_per_node) if gpus else None

    def name(self, number: int) -> str:
        node = f"node-{number}"
        if self._shares is None or self._folder.node(node).exists():
            return node
        num_launched = sum(1 for _ in (self._folder.run / "nodes").iterdir())
        return node if number - num_launched < self._shares.num_free else ""

    def launch(self, node: str) -> None:
        own = self._folder.node(node)
        own.mkdir(parents=True, exist_ok=True)
        own_gpus = {"CUDA_VISIBLE_DEVICES": self._shares.of(node)} if self._shares else {}
        command = [sys.executable, "-m", MODULE, str(self._folder.out), node]
        with (own / "executor.log").open("ab") as output:
            # A session of its own: the node outlives this driver, and Ctrl-C at the terminal is for the driver alone.
            self._processes[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **own_gpus},
            )

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:  # noqa: ARG002 - the protocol's
        if self._shares is not None:
            self._shares.release(node)

    def ensure(self, node: str) -> None:
        try:
            owner = json.loads((self._folder.node(node) / "executor.lock").read_bytes())["pid"]
        except (OSError, ValueError, LookupError, TypeError):
            owner = 0
        if not owner or not self._is_executor(owner, node):
            self.launch(node)

    def remove(self, node: str, pid: int) -> None:
        process = self._processes.pop(node, None)
        # The keeper of its training processes ends these when the executor is gone.
        for number in {pid, process.pid if process else 0} - {0}:
            if process is not None and number == process.pid and process.poll() is not None:
                continue
            if self._is_executor(number, node):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)

    def has_died(self, node: str) -> bool:
        process = self._processes.get(node)
        return process is not None and process.poll() is not None

    def _is_executor(self, pid: int, node: str) -> bool:
        """Whether a process id is that node's executor, and not another process by now."""
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return (
            MODULE.encode() in arguments and str(self._folder.out).encode() in arguments and node.encode() in arguments
        )


class SshBackend(FixedNodes):
    """Nodes that are hosts: the first ones train, the others stand by. The run's folder is one that all of them see.

    Args:
        folder: of the run.
        hosts: names as ssh knows them, in order.
        ssh: the command, as `--ssh-command`.
    """

    def __init__(self, folder: RunFolder, hosts: Sequence[str], ssh: str = "ssh") -> None:
        self._folder, self._ssh = folder, ssh
        self._hosts = {f"node-{number}": host for number, host in enumerate(hosts)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def name(self, number: int) -> str:
        return f"node-{number}" if number < len(self._hosts) else ""

    def launch(self, node: str) -> None:
        own, host = self._folder.node(node), self._hosts[node]
        arguments = [sys.executable, "-m", MODULE, str(self._folder.out.resolve()), node, host.rpartition("@")[2]]
        output = shlex.quote(str(own.resolve() / "executor.log"))
        # Out of ssh's hands at once: a connection that breaks takes no executor with it.
        start = f"setsid nohup {shlex.join(arguments)} >>{output} 2>&1 </dev/null"
        line = f"cd {shlex.quote(str(Path.cwd()))} && {{ {start} & }}"
        self._run(node, line)

    def ensure(self, node: str) -> None:
        self.launch(node)  # a second executor of a node ends at once

    def remove(self, node: str, pid: int) -> None:
        if not pid or node not in self._hosts:
            return
        self._run(node, kill_line(node, pid))

    def has_died(self, node: str) -> bool:  # noqa: ARG002 - the protocol's
        return False  # over ssh only its heartbeats tell

    def _run(self, node: str, line: str) -> None:
        """Run a line of shell on a node's host, without waiting: a host that is gone holds up nobody."""
        own = self._folder.node(node)
        own.mkdir(parents=True, exist_ok=True)
        with (own / "ssh.log").open("ab") as output:
            process = subprocess.Popen(
                ssh_command(self._ssh, self._hosts[node], line, batch=self._ssh.split()[:1] == ["ssh"]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes = [each for each in self._processes if each.poll() is None]
        self._processes.append(process)
