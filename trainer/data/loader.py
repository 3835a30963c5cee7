"""The loader: one process a machine that reads the batches of its ranks ahead, into memory that all of them share.

Training steps go through one ring, held-out batches through another: an evaluation always has the same ones, set after
set, so that they too can be read before anybody asks.

MegaScale 3.4: workers of a machine read the same input, so one reads it for all of them. It reads each token that the
machine needs once, whatever the number of ranks. What a step's batch is, it computes (`trainer.data.sampler`): it has
no state, and one that dies is started again where the ring has no batch yet, with nothing skipped or repeated.

[Note: no orphans] A loader ends with the rank that started it: the kernel tells it so (Linux), its standard input ends,
and it looks for its parent whenever it waits. Of the signals that ask a job to stop it hears none: ranks may go on to
the end of a step and want their batches. It needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, NamedTuple

from netlayer.errors import CheckFailed, NetlayerError
from trainer.data.ring import Ring, RingShape
from trainer.data.sampler import BatchPlan, Rows, Sampler, SamplerSpec

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_STARTS = 5
"""Deaths of a loader one after the other without a new batch, after which it is given up."""
_NICE_EXIT_S = 5.0


class HeldOut(NamedTuple):
    """One item of an evaluation: a batch of one of its sets; `samples` are those of a data-parallel rank."""

    name: str
    samples: range


@dataclass(frozen=True)
class EvaluationPlan:
    """Batches of an evaluation, one after the other: all of the first set, then all of the next.

    Args:
        sets: evaluation sets by name.
        global_batches: of each.
        most_samples: of a data-parallel rank in a batch.
        dp: data-parallel ranks.
    """

    sets: Mapping[str, SamplerSpec]
    global_batches: int
    most_samples: int
    dp: int

    @property
    def num_items(self) -> int:
        """Number of items of an evaluation; those of the next are the same again."""
        return len(self.sets) * self.global_batches

    @property
    def num_samples(self) -> int:
        """Number of windows that are taken of a set, spread evenly over it, by all ranks."""
        return self.global_batches * self.most_samples * self.dp

    def item(self, item: int, dp: int) -> HeldOut:
        """Return an item, counted from 1 over all evaluations of a run."""
        number, batch = divmod((item - 1) % self.num_items, self.global_batches)
        # A rank's samples follow each other over all its batches.
        first = (dp * self.global_batches + batch) * self.most_samples
        return HeldOut(list(self.sets)[number], range(first, first + self.most_samples))


@dataclass(frozen=True)
class LoaderPlan:
    """Work of a machine's loader.

    Args:
        sampler: what the samples are.
        batches: which of them each data-parallel rank has in a step.
        dp_ranks: the data-parallel ranks whose batches this machine reads, rising.
        last_step: of the run.
        evaluation: held-out batches; None: the ranks read their own.
    """

    sampler: SamplerSpec
    batches: BatchPlan
    dp_ranks: Sequence[int]
    last_step: int
    evaluation: EvaluationPlan | None = None

    def shape(self, num_slots: int, num_readers: int, *, has_segments: bool, has_mask: bool) -> RingShape:
        """Return the ring that this work needs."""
        num_rows = len(self.dp_ranks) * self.batches.most_samples
        first_step = self.batches.first_step
        return RingShape(num_slots, num_rows, self.sampler.seq_len, num_readers, first_step, has_segments, has_mask)

    def evaluation_shape(self, num_slots: int, num_readers: int) -> RingShape:
        """Return the ring that the held-out batches need: of `evaluation`, which is there."""
        assert self.evaluation is not None
        num_rows = len(self.dp_ranks) * self.evaluation.most_samples
        num_slots = min(num_slots, self.evaluation.num_items)
        packs = self.sampler.packing == "documents"
        return RingShape(num_slots, num_rows, self.sampler.seq_len, num_readers, 1, packs, packs)

    def evaluation_rows(self, dp: int) -> slice:
        """Return where in the rows of held-out batches those of a data-parallel rank are."""
        assert self.evaluation is not None
        share = self.evaluation.most_samples
        first = list(self.dp_ranks).index(dp) * share
        return slice(first, first + share)

    def rows(self, step: int, dp: int) -> slice:
        """Return where in a step's rows those of a data-parallel rank are."""
        share = len(self.batches.samples(step, dp))
        first = list(self.dp_ranks).index(dp) * share
        return slice(first, first + share)

    def fill(self, sampler: Sampler, step: int, rows: Rows) -> int:
        """Read a step's rows; returns how many bytes were read."""
        before = sampler.bytes_read
        for dp in self.dp_ranks:
            sampler.read_into(rows.part(self.rows(step, dp)), self.batches.samples(step, dp))
        return sampler.bytes_read - before

    def fill_held_out(self, samplers: Mapping[str, Sampler], item: int, rows: Rows) -> int:
        """Read the rows of an item of an evaluation; returns how many bytes were read."""
        assert self.evaluation is not None
        num_bytes = 0
        for dp in self.dp_ranks:
            name, samples = self.evaluation.item(item, dp)
            sampler, num_samples = samplers[name], self.evaluation.num_samples
            before = sampler.bytes_read
            sampler.read_evenly_into(rows.part(self.evaluation_rows(dp)), samples, num_samples)
            num_bytes += sampler.bytes_read - before
        return num_bytes


class Loader:
    """The loader of this machine, held by the one rank that starts it, and starts it again.

    Args:
        plan: its work.
        ring: where the batches go; made by this process.
        held_out: where held-out batches go; None where the plan has none.
    """

    def __init__(self, plan: LoaderPlan, ring: Ring, held_out: Ring | None = None) -> None:
        self._plan, self._ring = plan, ring
        self._rings = [ring] if held_out is None else [ring, held_out]
        # A rank waits for steps in one thread, and for held-out batches in another.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_deaths = 0
        self._progress_at_death: list[tuple[int, int]] = []
        self._start()

    @property
    def pid(self) -> int | None:
        """Its process id, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def check(self) -> None:
        """Start it again if it has died.

        Raises:
            CheckFailed: it dies over and over.
        """
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._process is None or self._process.poll() in (None, 0):
            return
        code = self._process.returncode
        self._let_go(self._process)
        # One that has said why is not started again: it would say the same.
        if self._ring.error:
            return
        progress = [(ring.num_ready, ring.bytes_read) for ring in self._rings]
        self._num_deaths = 1 if progress != self._progress_at_death else self._num_deaths + 1
        self._progress_at_death = progress
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._num_deaths >= _MOST_STARTS:
            raise CheckFailed(f"the loader has died {self._num_deaths} times over one batch ({how}); is memory short?")
        logger.warning("the loader has died (%s) and is started again; no sample is skipped or repeated", how)
        self._start()

    def close(self) -> None:
        """End it."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        self._let_go(process)  # by which it knows
        try:
            process.wait(_NICE_EXIT_S)
        except subprocess.TimeoutExpired:  # it may hang in a read of a file system that is gone
            process.kill()
            process.wait()

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # what was written to one that died is lost
            process.stdin.close()

    def _start(self) -> None:
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline());"
            "from trainer.data.loader import serve; serve()"
        )
        flags = [f"-W{option}" for option in sys.warnoptions] + ["-O"] * sys.flags.optimize
        # Numerical libraries would start a thread a core, for nothing.
        environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", *flags, "-c", code, str(os.getpid()), *(str(ring.fd) for ring in self._rings)],
                stdin=subprocess.PIPE,
                env=environ,
                pass_fds=[ring.fd for ring in self._rings],
            )
        order = json.dumps([str(entry) for entry in sys.path]).encode() + b"\n"
        order += pickle.dumps((self._plan, [ring.shape for ring in self._rings]))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: `check` sees it
            self._process.stdin.write(order)
            self._process.stdin.flush()


def serve() -> None:
    """Entry of the loader's process: stdin holds its work, and ends when its rank has."""
    parent, *fds = (int(argument) for argument in sys.argv[1:])
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    _end_with(parent)
    plan, shapes = pickle.load(sys.stdin.buffer)
    rings = [Ring.mapped(fd, shape) for fd, shape in zip(fds, shapes, strict=True)]
    threading.Thread(target=_end_at_eof, args=(sys.stdin.buffer,), daemon=True).start()
    try:
        _read_ahead(plan, rings, parent)
    except NetlayerError as exc:
        _fail(rings, str(exc))
        os._exit(1)
    except Exception as exc:  # whatever it is, all ranks of the machine must hear of it
        _fail(rings, f"{type(exc).__name__}: {exc}")
        raise
    os._exit(0)


def _fail(rings: Sequence[Ring], line: str) -> None:
    for ring in rings:
        ring.fail(line)


_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class _RingWork:
    """One ring, and what is still to be written into it.

    Args:
        first, last: steps that may be missing; infinity: there is always a next one.
        fill: reads a step's rows, and returns how many bytes were read.
    """

    def __init__(self, ring: Ring, first: int, last: float, fill: Callable[[int, Rows], int]) -> None:
        self._ring, self._next, self._last, self._fill = ring, first, last, fill

    def is_done(self) -> bool:
        # A loader that died may have written some.
        while self._next <= self._last and self._ring.holds(self._next):
            self._next += 1
        return self._next > self._last

    def has_room(self) -> bool:
        return self._ring.has_room(self._next)

    def write(self) -> None:
        self._ring.write(self._next, partial(self._fill, self._next))
        self._next += 1


def _read_ahead(plan: LoaderPlan, rings: Sequence[Ring], parent: int) -> None:
    firsts = [ring.begin() for ring in rings]  # first of all: this counts starts
    # Steps come first: an evaluation comes between them, when their ring is full.
    works = [_RingWork(rings[0], firsts[0], plan.last_step, partial(plan.fill, plan.sampler.open()))]
    if plan.evaluation is not None:
        samplers = {name: spec.open() for name, spec in plan.evaluation.sets.items()}
        works.append(_RingWork(rings[1], firsts[1], math.inf, partial(plan.fill_held_out, samplers)))

    def look_for_parent() -> None:
        if os.getppid() != parent:
            os._exit(0)

    while left := [work for work in works if not work.is_done()]:
        # Readers of both rings wake it by the first one's word: see `Ring.share_wakeup`.
        rings[0].loader_wakeup.wait(lambda left=left: any(work.has_room() for work in left), look_for_parent)  # type: ignore[misc]
        next(work for work in left if work.has_room()).write()


def _end_with(parent: int) -> None:
    """See [Note: no orphans]."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


def _end_at_eof(stdin: IO[bytes]) -> None:
    stdin.read()
    os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that begins inside gets them once it has said what it does with them: before, it would die of one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
