"""Ranks without a model, for tests of the loader: each takes its rows out of the ring, and writes down which."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import BatchConfig
from netlayer.launch.rank import RankContext
from trainer.data.loader import Loader, LoaderPlan
from trainer.data.ring import Ring, raise_failure
from trainer.data.sampler import BatchPlan, Rows, SamplerSpec, Source

from .token_sets import CountingDataset, counting

SEQ_LEN, GLOBAL_SIZE, NUM_SLOTS = 16, 12, 3


class Life(NamedTuple):
    """One life of a run: what `run_rank` does.

    Args:
        first_step: that it takes.
        folder: for what the ranks write, of this life alone.
        ring_folder: of a ring with a name; None: it has none.
    """

    seed: int
    first_step: int
    last_step: int
    folder: Path
    ring_folder: Path | None = None


class Told(NamedTuple):
    """What a rank reports after each step, and before the first."""

    step: int
    pid: int
    loader_pid: int | None


class Deadly:
    """A dataset whose every read kills the process."""

    name, vocab_size, fingerprint = "deadly", 2**31 - 1, ""
    num_tokens, num_documents = 10_000, 1

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def document_at(self, token: int) -> int:
        return 0

    def document_start(self, document: int) -> int:
        return document * self.num_tokens


class Slow(CountingDataset):
    """A dataset whose reads take a while."""

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        time.sleep(0.002)
        return super().read(start, count)


def deadly() -> Source:
    return Source(Deadly())


def slow() -> Source:
    return Source(Slow("slow", 5000))


def spec(seed: int = 0) -> SamplerSpec:
    return SamplerSpec((partial(counting, "a", 3000, 0.6), partial(counting, "b", 900, 0.4)), SEQ_LEN, seed)


def plan_of(seed: int, dp: int, first_step: int, last_step: int) -> LoaderPlan:
    batch = BatchConfig(global_batch_size=GLOBAL_SIZE, micro_batch_size=1)
    batches = BatchPlan(batch, dp, first_step, (first_step - 1) * GLOBAL_SIZE)
    return LoaderPlan(spec(seed), batches, range(dp), last_step)


def run_rank(context: RankContext, life: Life) -> int:
    """Take all steps of a life as one of its data-parallel ranks; returns the bytes that the loader has read."""
    rank, dp = context.env.rank, context.env.world_size
    plan = plan_of(life.seed, dp, life.first_step, life.last_step)
    shape = plan.shape(NUM_SLOTS, dp, has_segments=False, has_mask=False)
    context.report(Told(life.first_step - 1, os.getpid(), None))
    loader = None
    if rank == 0:
        ring = Ring.create(shape, life.ring_folder)
        _write(life.folder / "address", json.dumps([ring.address, ring.token.hex()]))
        wait_until(lambda: len(list(life.folder.glob("attached-*"))) == dp - 1)
        ring.unlink()
        loader = Loader(plan, ring)
    else:
        wait_until((life.folder / "address").exists)
        address, token = json.loads((life.folder / "address").read_text())
        ring = Ring.attach(address, shape, bytes.fromhex(token))
        _write(life.folder / f"attached-{rank}", "")

    def look_after() -> None:
        raise_failure(ring.error)
        if loader is not None:
            loader.check()

    with (life.folder / f"rank-{rank}").open("w") as file:
        for step in range(life.first_step, life.last_step + 1):
            ring.wait(step, look_after)
            tokens: list[NDArray[np.int32]] = []
            ring.take(step, rank, partial(_copy, tokens))
            file.write(json.dumps([step, tokens[0][plan.rows(step, rank)].tolist()]) + "\n")
            file.flush()
            context.report(Told(step, os.getpid(), None if loader is None else loader.pid))
    if loader is not None:
        # Whoever is behind may still need it.
        wait_until(lambda: not ring.num_ready, look_after)
        loader.close()
    num_bytes = ring.bytes_read
    ring.close()
    return num_bytes


def wait_until(condition: Callable[[], object], idle: Callable[[], None] = lambda: None) -> None:
    """Look at a condition until it holds; `idle` may raise."""
    while not condition():
        idle()
        time.sleep(0.005)


def rows_of(folder: Path, dp: int) -> dict[int, list[list[list[int]]]]:
    """Return what each rank of a life has taken, by step, as far as all of them have."""
    ranks: list[dict[int, list[list[int]]]] = []
    for rank in range(dp):
        path = folder / f"rank-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last line of a killed rank may be half of one.
        ranks.append(dict(json.loads(line) for line in lines if line.endswith("\n")))
    return {step: [own[step] for own in ranks] for step in sorted(set.intersection(*(set(own) for own in ranks)))}


def is_alive(pid: int) -> bool:
    """Return whether a process still runs; one that has ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_gone(pids: Sequence[int], limit_s: float = 20.0) -> None:
    """Wait until none of the processes runs."""
    end_s = time.monotonic() + limit_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end_s, f"processes {left} are left"
        time.sleep(0.02)


def _copy(tokens: list[NDArray[np.int32]], rows: Rows) -> None:
    tokens.append(rows.tokens.copy())


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)
