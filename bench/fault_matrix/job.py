"""One run with faults: its folder, its driver, and what the harness does to its processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from bench.fault_matrix.network import Network
from bench.fault_matrix.rank import VARIABLE
from netlayer.config.file import to_toml
from netlayer.config.tree import Config, build_config
from trainer.checkpoint.names import checkpoints_in
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.journal import entries, last_entry
from trainer.resilience.machine import TERMINAL, State
from trainer.resilience.processes import PRELOADED
from trainer.resilience.store_host import directory_of

Row = dict[str, Any]

_POLL_S = 0.05
# Lines of kernels in public reports, each of a part that cannot be used as it is.
HARDWARE_LINES = (
    "NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    # https://github.com/NVIDIA/nvidia-docker/issues/1553
    "NVRM: Xid (PCI:0000:09:00): 79, pid=0, GPU has fallen off the bus.",
    # https://github.com/NVIDIA/NVSentinel/issues/155
    "NVRM: fallen off the bus and is not responding to commands.",
    "NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT, Fatal, XC0 i0 Link 02 (0x00000000 0x00000000)",
    "NVRM: Xid (PCI:0000:4e:00): 48, pid=1, An uncorrectable double bit error (DBE) has been detected on GPU",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1 offset:0x0)",
)
_DISK_MIB = 300  # of a run's own file system, so that filling it hurts nobody else
_MODELS: dict[str, Row] = {
    "gloo": {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "vocab_size": 512, "seq_len": 32},
    # Steps of about a tenth of a second on a GPU, so that one that is a tenth slower can be told.
    "nccl": {"layers": 12, "hidden": 1024, "heads": 16, "ffn_hidden": 4096, "vocab_size": 512, "seq_len": 1024},
}


class Lost(Exception):
    """The run did not come back from a fault in time."""


def config_of(nodes: int, steps: int, text: Path, backend: str = "gloo", **resilience: Any) -> Config:
    """A small job on so many nodes of one rank."""
    return build_config(
        {
            "cluster": {"servers": nodes, "gpus_per_server": 1},
            "job": {
                "name": "fault-matrix",
                "model": _MODELS[backend],
                "parallel": {"dp": nodes, "distributed_timeout_s": 120.0},
                "batch": {"global_batch_size": 2 * nodes, "micro_batch_size": 2},
                "data": {"folder": str(text), "pattern": "*.txt"},
                "optimizer": {"steps": steps, "warmup_steps": 5, "lr": 1e-3},
                "evaluation": {"every_steps": steps, "global_batches": 1},
                "checkpoint": {"every_steps": 20, "keep": 3},
                "watch": {"compare_replicas_every": 10},
                "launch": {"backend": backend},
                "resilience": {"checks": "host", "heartbeat_s": 1.0, "backoff_s": 0.2, **resilience},
            },
        }
    )


class FaultyJob:
    """A run whose processes the harness can hurt.

    Args:
        out: its folder: new, or of a run that this harness has stopped, with which it goes on.
        config: of `config_of`.
        seed: of the training.
        network: whose hosts the nodes are; None: process groups of this machine.
        own_disk: whether its folder is a file system of its own, in memory (needs root), which can be filled.
    """

    def __init__(
        self, out: Path, config: Config, seed: int = 0, network: Network | None = None, *, own_disk: bool = False
    ) -> None:
        self.folder, self.config = RunFolder(out), config
        self._driver: subprocess.Popen[bytes] | None = None
        self._faults: list[Row] = []
        self._facts: Row = {}
        self._seen_bytes = 0
        nodes = config.cluster.servers
        self._network, self._is_mounted = network, own_disk
        self._is_stopped = self.folder.job.exists()
        if self._is_stopped:
            with contextlib.suppress(FileNotFoundError):
                self._faults = json.loads((out / "faults.json").read_text(encoding="utf-8"))
            return
        out.mkdir(parents=True, exist_ok=True)
        if own_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(out)], check=True)
        command = ("train", str(self.folder.job), "--resume", "auto", "--out", str(out), "--seed", str(seed))
        settings = config.job.resilience.model_copy(update={"kernel_log": str(out / "kernel-{node}.log")})
        spec = Spec(
            run=secrets.token_hex(8),
            name=config.job.name,
            command=("bench.fault_matrix.rank", *command),
            nodes=nodes,
            ranks_per_node=1,
            threads=1,
            heartbeat_s=settings.interval_s,
            environ={
                VARIABLE: str(out / "faults.json"),
                "NETLAYER_RUN_BACKEND": config.job.launch.backend,
                **({"GLOO_SOCKET_IFNAME": "eth0"} if network else {}),
            },
            preload=PRELOADED if settings.warm else (),
            resilience=settings,
        )
        self.folder.create(spec, to_toml(config))
        if network is not None:
            self.folder.set_store_url(network.url)

    # ---- what the run shows ----

    @property
    def facts(self) -> Row:
        """Facts of the journal's last entry; empty before the first."""
        try:
            size = self.folder.journal.stat().st_size
        except FileNotFoundError:
            return {}
        if size != self._seen_bytes:  # a journal is polled twenty times a second, and long
            self._facts, self._seen_bytes = dict(last_entry(self.folder.journal).get("facts", {})), size
        return self._facts

    def incidents(self) -> dict[int, Row]:
        """All incidents that were decided, by number; facts hold the newest hundred only."""
        rows = [each for entry in entries(self.folder.journal) for each in entry["facts"]["incidents"][-1:]]
        return {each["number"]: each for each in rows}

    @property
    def step(self) -> int:
        """The last step whose row is written."""
        with contextlib.suppress(OSError, ValueError):
            with (self.folder.out / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                rows = file.read().split(b"\n")[:-1]
            return int(json.loads(rows[-1])["step"]) if rows else 0
        return 0

    @property
    def typical_s(self) -> float:
        """Median step of the last rows, seconds; of many, for a busy machine is fast for some steps at a time."""
        lines = (self.folder.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-150:]
        times_ms = [float(json.loads(line)["step_ms"]) for line in lines]
        return statistics.median(times_ms) / 1e3

    def losses(self) -> dict[int, float]:
        file = self.folder.out / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []  # none: no step was taken
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}

    def executor(self, node: str) -> psutil.Process:
        return psutil.Process(json.loads((self.folder.node(node) / "executor.lock").read_bytes())["pid"])

    def ranks(self, node: str) -> list[psutil.Process]:
        """Training processes of a node, children of its executor."""
        processes = []
        for child in self.executor(node).children():
            with contextlib.suppress(psutil.Error):
                # A fork has the command line of what it was forked from, and a name of its own.
                if child.name().startswith("rank ") or "bench.fault_matrix.rank" in child.cmdline():
                    processes.append(child)
        return processes

    def wait(self, until: Callable[[Row], bool], limit_s: float, what: str, *, poll_s: float = _POLL_S) -> None:
        """Wait until the run's facts are so; a driver that was killed is started again, as a service manager does.

        Raises:
            Lost: they are not in time, or the run has been given up.
        """
        end_s = time.monotonic() + limit_s
        while not until(facts := self.facts):
            if self._driver is not None and self._driver.poll() not in (None, 0, 1):
                self.start()
            if facts.get("state") == "failed":
                raise Lost(f"{what}: given up: {facts['reason']}")
            if time.monotonic() > end_s:
                raise Lost(f"{what}: not within {limit_s:g} s; in state {facts.get('state')}")
            time.sleep(poll_s)

    # ---- start and end ----

    def seconds(self) -> float:
        """Time for which the run has had a driver: from its first entry to its last, without what is between stops."""
        total, before, state = 0.0, math.nan, State.STOPPED
        for entry in entries(self.folder.journal):
            at_s = datetime.fromisoformat(entry["at"]).timestamp()
            total += 0.0 if state in TERMINAL else at_s - before
            before, state = at_s, State(entry["to"])
        return total

    def start(self) -> None:
        """Start the run's driver, and with it, where it is none yet or was stopped, the run."""
        out, job = str(self.folder.out), str(self.folder.job)
        command = ["run", "resume", out] if self._is_stopped else ["run", "start", job, "--out", out]
        self._is_stopped = False
        with (self.folder.out / "driver.log").open("ab") as output:
            self._driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "netlayer", *command),
                    *(("--hosts", ",".join(self._network.hosts)) if self._network else ()),
                    *(("--ssh-command", str(self._network.ssh)) if self._network else ()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def end(self, limit_s: float) -> int:
        """Wait for the driver's end and return its exit code; what is left after the limit is killed."""
        assert self._driver is not None
        try:
            return self._driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return -1

    def kill_all(self) -> None:
        """End the driver, and with it by and by all of the run."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        marks = (str(self.folder.out),)
        for process in psutil.process_iter(["cmdline"]):
            arguments = process.info["cmdline"] or []
            if (
                any(argument == mark or argument.startswith(f"{mark} ") for argument in arguments for mark in marks)
                and process.pid != os.getpid()
            ):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.folder.ended.touch()
        shutil.rmtree(directory_of(self.folder), ignore_errors=True)

    def close(self, kept: Path) -> None:
        """Keep the logs of a run whose file system goes."""
        if self._is_mounted:
            shutil.copytree(self.folder.run, kept, ignore=shutil.ignore_patterns("*.sock"), dirs_exist_ok=True)
            shutil.copy(self.folder.out / "driver.log", kept / "driver.log")
            subprocess.run(["umount", "--lazy", str(self.folder.out)], check=True)
            self._is_mounted = False

    # ---- faults ----

    def cut_network(self, node: str) -> None:
        assert self._network is not None
        self._network.cut(int(node.rpartition("-")[2]))

    def flap_link(self, node: str) -> None:
        assert self._network is not None
        self._network.flap(int(node.rpartition("-")[2]))

    def fill_disk(self, seconds: float) -> None:
        """Fill the run's file system to the last byte, for so long."""
        file = self.folder.out / "filler"
        block = bytes(1 << 20)
        end_s = time.monotonic() + seconds
        with file.open("wb", buffering=0) as stream:
            while time.monotonic() < end_s:  # what others free meanwhile is filled again
                try:
                    while stream.write(block):
                        pass
                except OSError:
                    time.sleep(0.05)
        file.unlink()

    def kill_ranks(self, *nodes: str) -> None:
        """Kill the ranks of all these nodes at once: who looks for the second's meanwhile comes after the driver."""
        for rank in [rank for node in nodes for rank in self.ranks(node)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL)

    def stop_rank(self, node: str) -> None:
        for rank in self.ranks(node):
            rank.send_signal(signal.SIGSTOP)

    def kill_executor(self, node: str) -> None:
        self.executor(node).send_signal(signal.SIGKILL)

    def freeze_node(self, node: str) -> None:
        ranks = self.ranks(node)
        self.executor(node).send_signal(signal.SIGSTOP)
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)

    def hardware_line(self, node: str, line: str) -> None:
        with (self.folder.out / f"kernel-{node}.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def fault_inside(self, node: str, kind: str, **more: Any) -> None:
        """Have a rank of the node fail by itself at its next step."""
        self._faults.append({"id": secrets.token_hex(4), "node": node, "kind": kind, "step": 0, **more})
        file = self.folder.out / "faults.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(self._faults), encoding="utf-8")
        part.replace(file)

    def damage_checkpoint(self) -> None:
        """Flip bytes in the middle of the newest good checkpoint's largest file."""
        newest = checkpoints_in(self.folder.out / "checkpoints")[-1]
        largest = max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        size = largest.stat().st_size
        with largest.open("r+b") as file:
            file.seek(size // 2)
            block = file.read(64)
            file.seek(size // 2)
            file.write(bytes(each ^ 0xFF for each in block))

    def kill_driver(self) -> None:
        assert self._driver is not None
        self._driver.send_signal(signal.SIGKILL)
        self._driver.wait()

    def kill_store(self) -> None:
        """Kill the Redis server and the process that keeps it."""
        for process in psutil.process_iter(["cmdline"]):
            arguments = process.info["cmdline"] or []
            if "trainer.resilience.store_host" in arguments and str(self.folder.out) in arguments:
                for each in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.Error):
                        each.kill()
