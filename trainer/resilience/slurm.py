"""Nodes that are the hosts of one Slurm allocation: an executor a host, as a job step of its own (`srun --overlap`).

The driver runs in the allocation's batch script. Hosts beyond those that train stand by; nothing new can be asked for.
A requeued job gets other hosts, and these are further nodes: OUT/run/slurm.json lists the hosts of every allocation
that the run has had, in order. Nodes of an earlier allocation have ended with it; a host whose node was evicted while
it was there is not used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from netlayer.errors import ConfigError, HardwareMissing
from netlayer.results import write_text
from trainer.resilience.backends import MODULE, FixedNodes, kill_line
from trainer.resilience.folder import RunFolder

_COMMAND_S = 30.0


def allocation(environ: Mapping[str, str] = os.environ) -> str:
    """Return what tells this allocation from others: the job's id, and how often it was requeued.

    Raises:
        ConfigError: this process is in none.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        remedy = "start the driver in a batch script (sbatch), or under salloc"
        raise ConfigError("job.resilience.backend", "slurm", "needs an allocation: SLURM_JOB_ID is not set", remedy)
    return f"{job}.{was_requeued(environ)}"


def was_requeued(environ: Mapping[str, str] = os.environ) -> int:
    """Number of times that this job was requeued."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def hosts_of_allocation() -> list[str]:
    """Names of this allocation's hosts, in Slurm's order.

    Raises:
        HardwareMissing: there is no scontrol.
        ConfigError: it does not answer.
    """
    return _scontrol("show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()


def requeue() -> None:
    """Put this job back into the queue; Slurm ends the allocation, and starts the batch script again.

    Raises:
        HardwareMissing, ConfigError: as `hosts_of_allocation`; or requeueing is not allowed (sbatch --requeue).
    """
    _scontrol("requeue", os.environ.get("SLURM_JOB_ID", ""))


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except FileNotFoundError as exc:
        raise HardwareMissing("job.resilience.backend = slurm: there is no scontrol on the PATH") from exc
    except subprocess.TimeoutExpired as exc:
        remedy = "see whether the controller is up (scontrol ping)"
        raise ConfigError("scontrol", arguments[0], f"does not answer within {_COMMAND_S:g} s", remedy) from exc
    if done.returncode:
        text = done.stderr.strip().rpartition("\n")[2][:300]
        raise ConfigError("scontrol", arguments[0], f"has failed: {text or done.returncode}", "see its manual page")
    return done.stdout


class SlurmBackend(FixedNodes):
    """Hosts of the allocation that this driver runs in. The run's folder is one that all of them see.

    Args:
        folder: of the run.

    Raises:
        HardwareMissing, ConfigError: as `allocation` and `hosts_of_allocation`; or the list of hosts is damaged.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._file = folder, folder.run / "slurm.json"
        self._own, self._job = allocation(), os.environ["SLURM_JOB_ID"]
        rows, self._blocked = _load(self._file)
        if not any(row[0] == self._own for row in rows):
            # Spare hosts that were never asked for leave their names to those that come.
            while rows and not folder.node(f"node-{len(rows) - 1}").exists():
                rows.pop()
            rows += [(self._own, host) for host in hosts_of_allocation() if host not in self._blocked]
        self._rows = {f"node-{number}": row for number, row in enumerate(rows)}
        self._save()
        self._steps: dict[str, subprocess.Popen[bytes]] = {}
        self._others: list[subprocess.Popen[bytes]] = []

    def name(self, number: int) -> str:
        return f"node-{number}" if number < len(self._rows) else ""

    def launch(self, node: str) -> None:
        if not self._is_here(node):
            return
        host = self._rows[node][1]
        arguments = [sys.executable, "-m", MODULE, str(self._folder.out.resolve()), node, host]
        self._steps[node] = self._srun(node, "executor.log", arguments)

    def ensure(self, node: str) -> None:
        if self._is_here(node):
            host = self._rows[node][1]
            arguments = [sys.executable, "-m", MODULE, str(self._folder.out.resolve()), node, host]
            # A second executor of a node ends at once; so this step's end says nothing about the node.
            self._others.append(self._srun(node, "executor.log", arguments))

    def remove(self, node: str, pid: int) -> None:
        if pid and self._is_here(node):
            self._others = [each for each in self._others if each.poll() is None]
            self._others.append(self._srun(node, "srun.log", ["sh", "-c", kill_line(node, pid)]))

    def has_died(self, node: str) -> bool:
        if node in self._rows and not self._is_here(node):
            return True  # with its allocation
        step = self._steps.get(node)
        return step is not None and step.poll() is not None

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:  # noqa: ARG002 - a host is tried once
        """Keep the run off an evicted node's host in later allocations; not for what ended with an earlier one."""
        if self._is_here(node):
            self._blocked[self._rows[node][1]] = reason
            with contextlib.suppress(OSError):  # a full disk ends no run
                self._save()

    def _save(self) -> None:
        tree = {"hosts": list(self._rows.values()), "blocked": self._blocked}
        write_text(self._file, json.dumps(tree, indent=1) + "\n")

    def _is_here(self, node: str) -> bool:
        return node in self._rows and self._rows[node][0] == self._own

    def _srun(self, node: str, log: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Run a command on a node's host, without waiting: a host that is gone holds up nobody."""
        cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
        options = [
            f"--jobid={self._job}", "--nodes=1", "--ntasks=1", f"--nodelist={self._rows[node][1]}",
            "--overlap",  # or it would wait for the steps that are there
            "--mem=0", "--cpu-bind=none", *([f"--cpus-per-task={cpus}"] if cpus.isdecimal() else []),
            "--no-kill", "--input=none", "--unbuffered", f"--job-name=netlayer-{node}",
        ]  # fmt: skip
        own = self._folder.node(node)
        own.mkdir(parents=True, exist_ok=True)
        with (own / log).open("ab") as output:
            return subprocess.Popen(
                ["srun", *options, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip


def _load(file: Path) -> tuple[list[tuple[str, str]], dict[str, str]]:
    try:
        tree = json.loads(file.read_bytes())
        blocked = {str(host): str(reason) for host, reason in tree["blocked"].items()}
        return [(str(own), str(host)) for own, host in tree["hosts"]], blocked
    except FileNotFoundError:
        return [], {}
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise ConfigError(str(file), None, f"cannot be read ({exc})", "restore it: node names depend on it") from exc
