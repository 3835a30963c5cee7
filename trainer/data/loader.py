"""The loader: one process a machine that reads the batches of its ranks ahead, into memory that all of them share.

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
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from netlayer.errors import CheckFailed, NetlayerError
from trainer.data.ring import Ring, RingShape, wait_until
from trainer.data.sampler import BatchPlan, Rows, Sampler, SamplerSpec

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_STARTS = 5
"""Deaths of a loader one after the other without a new batch, after which it is given up."""
_NICE_EXIT_S = 5.0


@dataclass(frozen=True)
class LoaderPlan:
    """Work of a machine's loader.

    Args:
        sampler: what the samples are.
        batches: which of them each data-parallel rank has in a step.
        dp_ranks: the data-parallel ranks whose batches this machine reads, rising.
        last_step: of the run.
    """

    sampler: SamplerSpec
    batches: BatchPlan
    dp_ranks: Sequence[int]
    last_step: int

    def shape(self, num_slots: int, num_readers: int, *, has_segments: bool, has_mask: bool) -> RingShape:
        """Return the ring that this work needs."""
        num_rows = len(self.dp_ranks) * self.batches.most_samples
        first_step = self.batches.first_step
        return RingShape(num_slots, num_rows, self.sampler.seq_len, num_readers, first_step, has_segments, has_mask)

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


class Loader:
    """The loader of this machine, held by the one rank that starts it, and starts it again.

    Args:
        plan: its work.
        ring: where the batches go; made by this process.
    """

    def __init__(self, plan: LoaderPlan, ring: Ring) -> None:
        self._plan, self._ring = plan, ring
        self._process: subprocess.Popen[bytes] | None = None
        self._num_deaths = 0
        self._progress_at_death = (-1, -1)
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
        if self._process is None or self._process.poll() in (None, 0):
            return
        code = self._process.returncode
        self._let_go(self._process)
        # One that has said why is not started again: it would say the same.
        if self._ring.error:
            return
        progress = self._ring.num_ready, self._ring.bytes_read
        self._num_deaths = 1 if progress != self._progress_at_death else self._num_deaths + 1
        self._progress_at_death = progress
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._num_deaths >= _MOST_STARTS:
            raise CheckFailed(f"the loader has died {self._num_deaths} times over one batch ({how}); is memory short?")
        logger.warning("the loader has died (%s) and is started again; no sample is skipped or repeated", how)
        self._start()

    def close(self) -> None:
        """End it."""
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
                [sys.executable, "-P", *flags, "-c", code, str(self._ring.fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                env=environ,
                pass_fds=(self._ring.fd,),
            )
        order = json.dumps([str(entry) for entry in sys.path]).encode() + b"\n"
        order += pickle.dumps((self._plan, self._ring.shape))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: `check` sees it
            self._process.stdin.write(order)
            self._process.stdin.flush()


def serve() -> None:
    """Entry of the loader's process: stdin holds its work, and ends when its rank has."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    _end_with(parent)
    plan, shape = pickle.load(sys.stdin.buffer)
    ring = Ring.mapped(fd, shape)
    threading.Thread(target=_end_at_eof, args=(sys.stdin.buffer,), daemon=True).start()
    try:
        _read_ahead(plan, ring, parent)
    except NetlayerError as exc:
        ring.fail(str(exc))
        os._exit(1)
    except Exception as exc:  # whatever it is, all ranks of the machine must hear of it
        ring.fail(f"{type(exc).__name__}: {exc}")
        raise
    os._exit(0)


_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _read_ahead(plan: LoaderPlan, ring: Ring, parent: int) -> None:
    first_step, sampler = ring.begin(), plan.sampler.open()

    def look_for_parent() -> None:
        if os.getppid() != parent:
            os._exit(0)

    for step in range(first_step, plan.last_step + 1):
        # One before us may have written it.
        if ring.holds(step):
            continue
        wait_until(partial(ring.has_room, step), look_for_parent)
        ring.write(step, partial(plan.fill, sampler, step))


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
