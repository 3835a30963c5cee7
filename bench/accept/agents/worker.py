"""Worker process of one rank of an acceptance run: it runs tasks from its agent in order and answers with rows.

Each task names its process group, which is created again if it differs from the previous one. A worker has no timeout
of its own: the agent kills a worker that hangs and forks a new one. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bench.accept.agents.faults import PERIOD_MS, InjectedFault
from bench.accept.agents.watch import Watch, warm_up
from bench.accept.agents.wire import Message, Reader, write
from bench.accept.phases.probes import run_probe
from netlayer.config.tree import NcclConfig
from netlayer.launch.rank import reason_of
from netlayer.nccl.environment import exports, for_ranks

# Program that stops and continues its parent (PID in the first argument) as long as that lives.
_PULSES = """
import os, signal, sys, time
pid, stopped_s, running_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    # Before other work on the machine: a pulse that comes late leaves the rank running, and the fault is a smaller one.
    os.setpriority(os.PRIO_PROCESS, 0, -20)
except PermissionError:
    pass
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(running_s)
except ProcessLookupError:
    pass
"""
# Longer than any task limit: a rank must not leave a collective by its own timeout and look like the culprit.
_PATIENCE = timedelta(hours=1)


class Worker:
    """Worker of one rank.

    Args:
        rank: rank in this run.
        config: from the agent: `device` and `environ` of this rank, `faults` (injected faults), `nccl`.
        slots, slot: shared memory with the launch counts, and this rank's index in it.
    """

    def __init__(self, rank: int, config: Message, slots: mmap.mmap, slot: int) -> None:
        self._rank, self._slots, self._slot = rank, slots, slot
        os.environ.update(config["environ"])
        self._faults = _faults(config["faults"])
        self._device = torch.device(config["device"])
        if self._device.type == "cuda":
            os.environ.update(exports(for_ranks("nccl", NcclConfig(**config["nccl"]))))
            torch.cuda.set_device(self._device)
            warm_up()
        else:
            torch.set_num_threads(1)
        self._group = ""
        for fault in self._faults:
            if fault.kind == "pulse" and rank in fault.ranks:
                _stop_in_pulses(fault.amount)

    def serve(self, requests: int, replies: int) -> None:
        """Run tasks until the request pipe is closed."""
        reader = Reader(requests)
        while (tasks := reader.read()) is not None:
            for task in tasks:
                write(replies, {"task": task["task"], **self._answer(task, replies)})

    def _answer(self, task: Message, replies: int) -> dict[str, Any]:
        members, args = task["members"], task["args"]
        if "faults" in args:  # replace the injected faults from this task on
            self._faults = _faults(args["faults"])
        try:
            self._form(task)
            write(replies, {"task": task["task"], "formed": True})
            watch = Watch(self._slots, self._slot, self._faults, members, self._rank)
            # A rank alone launches no collectives to count; without an injected fault it needs no watch.
            with watch if len(members) > 1 or self._faults else contextlib.nullcontext():
                rows = run_probe(task["name"], self._device, {**args, "members": members}, watch)
            if len(members) == 1:  # its rank in the previous group does not matter
                rows = [{**row, "rank": 0} for row in rows]
            first = self._rank == members[0]
            return {"rows": rows if first else []}
        except Exception as exc:  # noqa: BLE001 - the run must hear of any error
            traceback.print_exc()
            return {"error": f"{type(exc).__name__}: {reason_of(exc).splitlines()[0]}"[:500]}

    def _form(self, task: Message) -> None:
        """Join the group and run one all-reduce, so that one-time initialisation is not measured."""
        if len(task["members"]) < 2:
            torch.zeros(1, device=self._device).cpu()
        elif task["group"] != self._group:
            self._leave()
            self._join(task)
            everyone = torch.zeros(1, device=self._device)
            dist.all_reduce(everyone)
            float(everyone)

    def _leave(self) -> None:
        if not dist.is_initialized():
            return
        if self._device.type == "cuda":
            world = dist.group.WORLD
            assert world is not None
            world._get_backend(self._device).abort()  # no waiting: the other ranks leave when they get their next task
        dist.destroy_process_group()
        self._group = ""

    def _join(self, task: Message) -> None:
        host, _, port = task["store"].rpartition(":")
        server = TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(task["group"], server),
            rank=task["members"].index(self._rank),
            world_size=len(task["members"]),
            timeout=_PATIENCE,
        )
        self._group = task["group"]


def _faults(faults: Sequence[Mapping[str, Any]]) -> list[InjectedFault]:
    return [InjectedFault(fault["kind"], tuple(fault["ranks"]), fault["amount"]) for fault in faults]


def _stop_in_pulses(stopped_ms: float) -> None:
    """Inject a fault: a child process stops this one for `stopped_ms` milliseconds in every period."""
    seconds = [str(ms / 1e3) for ms in (stopped_ms, PERIOD_MS - stopped_ms)]
    command = [sys.executable, "-S", "-E", "-c", _PULSES, str(os.getpid()), *seconds]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
