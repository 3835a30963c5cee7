"""One rank of an acceptance run: it takes tasks from its agent, one after the other, and answers with rows.

Each task names its group, which is formed anew where it differs from the one before. A worker never gives up by itself:
whoever hangs is killed by the agent, and a fresh one is forked. Left out: deciding anything.
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

from bench.accept.plant import PERIOD_MS, Plant
from bench.accept.probes import run_probe
from bench.accept.watch import Watch, warm_up
from bench.accept.wire import Message, Reader, write
from congestion.nic.env import exports, for_ranks
from netlayer.config import NcclConfig
from netlayer.rank import reason_of

# Stops and continues its parent, the process named by its first argument, for as long as that lives.
_PULSES = """
import os, signal, sys, time
pid, stopped_s, running_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(running_s)
except ProcessLookupError:
    pass
"""
# The run ends a task long before: a rank must not leave a collective on its own and seem to be the culprit.
_PATIENCE = timedelta(hours=1)


class Worker:
    """One rank.

    Args:
        rank: of this run.
        config: as the agent was given: `device`, `environ` of this rank, `plants`, `nccl`.
        slots, slot: shared memory of the counts, and this rank's place.
    """

    def __init__(self, rank: int, config: Message, slots: mmap.mmap, slot: int) -> None:
        self._rank, self._slots, self._slot = rank, slots, slot
        os.environ.update(config["environ"])
        self._plants = _plants(config["plants"])
        self._device = torch.device(config["device"])
        if self._device.type == "cuda":
            os.environ.update(exports(for_ranks("nccl", NcclConfig(**config["nccl"]))))
            torch.cuda.set_device(self._device)
            warm_up()
        else:
            torch.set_num_threads(1)
        self._group = ""
        for plant in self._plants:
            if plant.kind == "pulse" and rank in plant.ranks:
                _stop_in_pulses(plant.amount)

    def serve(self, requests: int, replies: int) -> None:
        """Answer until nobody asks any more."""
        reader = Reader(requests)
        while (tasks := reader.read()) is not None:
            for task in tasks:
                write(replies, {"task": task["task"], **self._answer(task, replies)})

    def _answer(self, task: Message, replies: int) -> dict[str, Any]:
        members, args = task["members"], task["args"]
        if "plants" in args:  # from this task on, in place of those from the start
            self._plants = _plants(args["plants"])
        try:
            self._form(task)
            write(replies, {"task": task["task"], "formed": True})
            watch = Watch(self._slots, self._slot, self._plants, members, self._rank)
            # Nothing of a rank that measures alone is counted; without a fault planted it runs bare.
            with watch if len(members) > 1 or self._plants else contextlib.nullcontext():
                rows = run_probe(task["name"], self._device, {**args, "members": members}, watch)
            if len(members) == 1:  # whatever group was formed before
                rows = [{**row, "rank": 0} for row in rows]
            first = self._rank == members[0]
            return {"rows": rows if first else []}
        except Exception as exc:  # noqa: BLE001 - whatever it is, the run must hear of it
            traceback.print_exc()
            return {"error": f"{type(exc).__name__}: {reason_of(exc).splitlines()[0]}"[:500]}

    def _form(self, task: Message) -> None:
        """Join the group; what the device and the library do once in a process, or once in a group, is done then."""
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
            world._get_backend(self._device).abort()  # the others leave when they get other work: wait for nobody
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


def _plants(told: Sequence[Mapping[str, Any]]) -> list[Plant]:
    return [Plant(one["kind"], tuple(one["ranks"]), one["amount"]) for one in told]


def _stop_in_pulses(stopped_ms: float) -> None:
    """A planted fault: another process stops this one for so long in every period, for as long as it lives."""
    seconds = [str(ms / 1e3) for ms in (stopped_ms, PERIOD_MS - stopped_ms)]
    command = [sys.executable, "-S", "-E", "-c", _PULSES, str(os.getpid()), *seconds]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
