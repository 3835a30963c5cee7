"""Ranks of which one misbehaves, and what the others have to say: processes of their own, for some of them die."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives import ColumnParallelLinear, open_exchange
from collectives.transport.communicator import Communicator
from collectives.watch.hang import HangLimits
from collectives.watch.watchdog import Watch
from netlayer.errors import CollectiveFailed
from netlayer.launch.rank import RankContext
from netlayer.layout import ParallelLayout
from netlayer.store.meeting import register_schemes
from tests.collectives.ranks import run_ranks
from tests.collectives.settings import shard


@dataclass(frozen=True)
class Told:
    """What one rank has to tell."""

    error: CollectiveFailed | None
    cause: str
    after_s: float
    logged: list[str]
    store_ops: dict[str, int]


@dataclass(frozen=True)
class Scene:
    """What a rank is given: its place, its watch, and who misbehaves."""

    rank: int
    world_size: int
    culprit: int
    timeout_s: float
    watch: Watch
    store: Counting


Play = Callable[[Scene], None]


class Counting(dist.Store):
    """Passes everything on, and counts it by name."""

    def __init__(self, store: Any, counts: Counter[str] | None = None) -> None:
        super().__init__()
        self._inner, self.counts = store, Counter[str]() if counts is None else counts

    def clone(self) -> Counting:
        return Counting(self._inner.clone(), self.counts)

    def set(self, key: str, value: str) -> None:
        self.counts["set"] += 1
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self._inner.get(key)

    def check(self, keys: list[str]) -> bool:
        self.counts["check"] += 1
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.counts["wait"] += 1
        self._inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        self.counts["delete_key"] += 1
        return self._inner.delete_key(key)


def perform(
    play: Play,
    world_size: int,
    init_method: str,
    *,
    culprit: int = -1,
    mute: Collection[int] | None = None,
    timeout_s: float = 2.0,
    layout: ParallelLayout | None = None,
    hang: HangLimits | None = None,
) -> list[Told]:
    """Play a scene with so many gloo ranks; what each of them tells, in rank order; the culprit is mute by default."""
    args = (init_method, play, culprit, timeout_s, layout, hang)
    return run_ranks(_act, world_size, args, mute=(culprit,) if mute is None else mute)


def _act(
    rank: int,
    world_size: int,
    init_method: str,
    play: Play,
    culprit: int,
    timeout_s: float,
    layout: ParallelLayout | None,
    hang: HangLimits | None,
) -> Told:
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    register_schemes(init_method)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    store = Counting(dist.distributed_c10d._get_default_store())
    watched_store = store if hang is None else None  # which counts, but cannot do all that is then asked for
    watch = Watch(watched_store, timeout=timedelta(seconds=timeout_s), layout=layout, hang=hang)
    dist.barrier()
    begin_s = time.monotonic()
    try:
        play(Scene(rank, world_size, culprit, timeout_s, watch, store))
    except CollectiveFailed as exc:
        return Told(exc, repr(exc.__cause__), time.monotonic() - begin_s, logged, dict(store.counts))
    return Told(None, "", time.monotonic() - begin_s, logged, dict(store.counts))


def _group(scene: Scene, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=scene.timeout_s))
    return group


def _comm(scene: Scene, name: str = "gather", ranks: Sequence[int] | None = None) -> Communicator:
    return Communicator(name, _group(scene, ranks), torch.device("cpu"), watch=scene.watch)


def _gather(comm: Communicator, num: int = 1) -> None:
    unsharded_N = torch.zeros(256 * comm.world_size)
    for _ in range(num):
        comm.all_gather(unsharded_N).wait()


def good_run(scene: Scene) -> None:
    """Many collectives, none of them slow."""
    comm = _comm(scene)
    for step in range(20):
        scene.watch.begin_step(step)
        _gather(comm, 5)


def random_delays(scene: Scene) -> None:
    """Every rank is late now and then, once almost by the timeout."""
    comm, chance = _comm(scene), random.Random(scene.rank)
    for step in range(10):
        time.sleep(chance.choice([0, 0.01, 0.1]) + (0.6 * scene.timeout_s if (step, scene.rank) == (5, 1) else 0))
        _gather(comm)


def away(scene: Scene) -> None:
    """The culprit does not come to step 3."""
    comm = _comm(scene)
    for step in range(4):
        scene.watch.begin_step(step)
        if step == 3 and scene.rank == scene.culprit:
            sleep_long(scene)
        _gather(comm, 2)


def skips_a_training_step(scene: Scene) -> None:
    """The culprit does not come to step 2 of a sharded model."""
    timeout = timedelta(seconds=scene.timeout_s)
    sharded = shard(torch.nn.Linear(8, 8), watch=scene.watch, timeout=timeout)
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(1, 3):
        scene.watch.begin_step(step)
        if step == 2 and scene.rank == scene.culprit:
            sleep_long(scene)
        sharded(torch.ones(1, 8)).sum().backward()
        optimizer.step()


def skips_a_product(scene: Scene) -> None:
    """The culprit does not come to the second pass of a tensor-parallel layer."""
    exchange = open_exchange(_group(scene), torch.device("cpu"), chunks=1, watch=scene.watch)
    layer = ColumnParallelLinear(4, 4 * scene.world_size, exchange=exchange)
    for step in range(1, 3):
        scene.watch.begin_step(step)
        if step == 2 and scene.rank == scene.culprit:
            sleep_long(scene)
        layer(torch.ones(1, 4))


def comes_too_late(scene: Scene) -> None:
    """The culprit comes when the others have given up."""
    comm = _comm(scene)
    _gather(comm)
    if scene.rank == scene.culprit:
        time.sleep(1.5 * scene.timeout_s)
    _gather(comm)


def sleep_long(scene: Scene) -> None:
    time.sleep(5 * scene.timeout_s)


def dies(scene: Scene) -> None:
    """The culprit ends; in a ring, only its neighbours see a connection close."""
    comm = _comm(scene)
    _gather(comm, 2)
    if scene.rank == scene.culprit:
        time.sleep(0.2)
        os._exit(9)
    scene.watch.begin_step(7)
    _gather(comm)


def freezes(scene: Scene) -> None:
    """The culprit is stopped with all its threads."""
    comm = _comm(scene)
    _gather(comm, 2)
    if scene.rank == scene.culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    _gather(comm)


def goes_astray(scene: Scene) -> None:
    """The culprit skips an all-reduce, so that everything after it is out of step."""
    comm = _comm(scene)
    _gather(comm, 2)
    if scene.rank != scene.culprit:
        comm.all_reduce(torch.zeros(4096))
    _gather(comm)


def waits_elsewhere(scene: Scene) -> None:
    """Ranks of one tensor-parallel pair wait for each other's data-parallel groups: the culprit never comes there."""
    layout = scene.watch._layout
    assert layout is not None
    comms = {}
    for dimension in ("tp", "dp"):
        for ranks in layout.groups(dimension):
            group = _group(scene, list(ranks))
            if scene.rank in ranks:
                comms[dimension] = Communicator(dimension, group, torch.device("cpu"), watch=scene.watch)
    scene.watch.begin_step(41)
    if scene.rank == scene.culprit:
        sleep_long(scene)
    for comm in comms.values():
        _gather(comm)


CHAIN_STEPS = 13


def _chain(scene: Scene, misbehave: Callable[[], None]) -> None:
    """Each rank exchanges with its neighbours alone, step by step; in step 7 the culprit, the last, misbehaves."""
    pairs = [(rank, rank + 1) for rank in range(scene.world_size - 1)]
    comms = [comm for pair in pairs if (comm := _pair_comm(scene, pair)) is not None]
    for step in range(1, CHAIN_STEPS):
        scene.watch.begin_step(step)
        time.sleep(0.1)
        if step == 7 and scene.rank == scene.culprit:
            misbehave()
        for comm in comms:
            _gather(comm)


def _pair_comm(scene: Scene, pair: tuple[int, int]) -> Communicator | None:
    group = _group(scene, list(pair))
    return Communicator("pair", group, torch.device("cpu"), watch=scene.watch) if scene.rank in pair else None


def chain_behind_one_that_was_stopped(scene: Scene) -> None:
    _chain(scene, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def chain_behind_one_that_sleeps(scene: Scene) -> None:
    _chain(scene, lambda: sleep_long(scene))


def chain_behind_one_that_fails(scene: Scene) -> None:
    """It says so, and is gone."""

    def fail() -> None:
        try:
            raise ArithmeticError("a broken sample")
        except ArithmeticError as exc:
            scene.watch.announce(exc)
        os._exit(1)

    _chain(scene, fail)


def chain_behind_one_that_dies(scene: Scene) -> None:
    _chain(scene, lambda: os.kill(os.getpid(), signal.SIGKILL))


def chain_behind_one_that_saves(scene: Scene) -> None:
    """It takes longer than the limit, in a phase that may; and another is stopped for less than that."""

    def save() -> None:
        with scene.watch.phase("saves a checkpoint"):
            time.sleep(3.0)

    if scene.rank == 0:
        pause = f"sleep 0.4; kill -STOP {os.getpid()}; sleep 0.3; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", pause]).returncode = 0  # or its object would warn that it still runs
    _chain(scene, save)


def plain_calls(scene: Scene) -> None:
    """No communicator: synchronous and asynchronous calls of torch.distributed; the culprit comes to no third one."""
    group = _group(scene)
    scene.watch.track("dp", group)
    x_N = torch.ones(1000)
    with scene.watch.collective("dp", "all_reduce", x_N.nbytes):
        dist.all_reduce(x_N, group=group)
    with scene.watch.collective("dp", "broadcast", x_N.nbytes, "weights") as operation:
        work = dist.broadcast(x_N, 0, group=group, async_op=True)
        operation.follow(work)
    with operation:
        work.wait()
    if scene.rank == scene.culprit:
        sleep_long(scene)
    with scene.watch.collective("dp", "all_reduce", x_N.nbytes, "loss"):
        dist.all_reduce(x_N, group=group)


def wait_for_a_peer_that_fails(context: RankContext, init_method: str) -> None:
    """A target of `launch`: rank 1 fails by itself, which breaks rank 0's collective."""
    register_schemes(init_method)
    dist.init_process_group("gloo", init_method=init_method, rank=context.env.rank, world_size=2)
    watch = Watch(timeout=timedelta(seconds=20))
    watch.track("world")
    for step in range(2):
        watch.begin_step(step)
        if context.env.rank == 1 and step == 1:
            time.sleep(0.5)
            raise ArithmeticError("the loss is not a number")
        with watch.collective("world", "all_reduce", 40):
            dist.all_reduce(torch.ones(10))
