"""Process of a rank that outlives a fault of another rank.

It has a pipe from the executor as stdin, and runs a module as `python -m` does. Where that fails, or the executor has
it leave, the process gives back what the training held (groups, threads, further processes, memory of the device), says
so in its progress, and waits for a line with the environment of the next start; then it runs the module again. It keeps
its imports, its CUDA context, and kernels that are compiled.

What it cannot give back, or not in time, is the executor's to end: a process that is started afresh has no past. So has
one whose device fails, that was refused as wrong in itself (exit code 2), or whose pipe ends. And so has one that has
had windows in the memory of its peers, which ends at once: it could open none with a fresh process
(`collectives.transport.leftovers`, [Note: rendezvous]), and kernels that wait for a peer there wait without a limit.

[Note: leaving] The main thread may be in a collective that its peers will never enter. So a thread reads the pipe; it
raises `Leave` in the main one, which acts on it when it is back in Python, and breaks its wait: it aborts all groups,
which ends NCCL's kernels, and where there is no GPU, for gloo cannot be aborted, it shuts every connection, which ends
the waits of the peers as well. So does the watch of the training, which ends the process where it is not kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import runpy
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from netlayer.errors import EXIT_USAGE, NetlayerError
from trainer.resilience.progress import ProgressFile

logger = logging.getLogger(__name__)

LEAVE = "leave"
"""Line of the executor that has the process leave the training; any other is the environment of the next start."""
LOG = "NETLAYER_RUN_LOG"
"""Variable of the next start: file that its output goes to."""
_EXIT_LEFT = 143  # as of a process that SIGTERM has ended

_FAILS_S = 8.0  # for a main thread to leave after a verdict of the watch, before the process ends
_PEER_MEMORY = "it has had windows in the memory of its peers"

_cleanups: list[Callable[[], None]] = []
active: list[_Orders] = []
"""Orders of this process, where it may outlive its training; empty: it ends with it."""


class Leave(BaseException):
    """Raised in the main thread: the training ends here, and the process waits for the next start."""


def on_failure(cleanup: Callable[[], None]) -> None:
    """Have a call made after the training has failed, where the process goes on; else it never is.

    It gives back what the process would else hold for ever, waits for no other rank, and must take seconds at most.
    """
    _cleanups.append(cleanup)


def failing(otherwise: Callable[[NetlayerError], None]) -> Callable[[NetlayerError], None]:
    """Return what a rank does, from any thread, about an error that no exception can bring to its main thread.

    Where the process goes on, it leaves the training, and the line of the error is in its log; it waits for nothing,
    for the main thread may wait for the thread that calls it. A process that has not left within seconds ends. Where it
    does not go on, it does what is given, which ends it.
    """
    if not active:
        return otherwise

    def fail(error: NetlayerError) -> None:
        if has_peer_memory():
            _note_end(error.exit_code, _PEER_MEMORY)
            otherwise(error)
        else:
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
            active[0].leave(error.exit_code, _FAILS_S)

    return fail


def has_peer_memory() -> bool:
    """Whether this process has had windows in the memory of its peers, and so cannot outlive its training."""
    leftovers = sys.modules.get("collectives.transport.leftovers")
    return leftovers is not None and leftovers.num_rendezvous() > 0


class _Orders:
    """Lines of the executor, read by a thread of their own: [Note: leaving]."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._is_training = self._is_leaving = False
        self._is_due = False  # to leave the training that begins next
        self._num_trainings = 0
        self.code = _EXIT_LEFT
        """Exit code of a training that was left."""
        self._next: dict[str, str] | None = None
        self._has_next = threading.Event()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def begin(self) -> None:
        """Let an order to leave raise `Leave` in the main thread, once, until `end`.

        Raises:
            Leave: the order has come already, since this start.
        """
        with self._lock:
            self.code = _EXIT_LEFT
            if self._is_due:
                self._is_due = False
                raise Leave
            self._is_training, self._is_leaving = True, False
            self._num_trainings += 1

    def end(self) -> None:
        """Let no order raise any more, nor one that has just come."""
        with self._lock:
            self._is_training = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), None)

    def next_start(self) -> dict[str, str]:
        """Wait for the environment of the next start."""
        self._has_next.wait()
        self._has_next.clear()
        assert self._next is not None
        return self._next

    def _read(self) -> None:
        with os.fdopen(self._descriptor, "r", encoding="utf-8") as lines:
            for line in lines:
                if line.strip() == LEAVE:
                    with self._lock:
                        self._is_due = not self._is_training
                    self.leave(_EXIT_LEFT)
                else:
                    with self._lock:
                        self._is_due = False  # it was about the start before, which had ended by itself
                    self._next = json.loads(line)
                    self._has_next.set()
        with self._lock:
            if not self._is_training:  # nobody will start it again; in training the executor's keeper decides
                os._exit(_EXIT_LEFT)

    def leave(self, code: int, limit_s: float = 0.0) -> None:
        """Have the main thread leave the training, from any thread; where it does so already, nothing.

        Args:
            code: exit code that it is to have.
            limit_s: after which the process ends where it has not left; 0: none.
        """
        with self._lock:
            if not self._is_training or self._is_leaving:  # a second exception would interrupt the cleanup
                return
            self._is_leaving, self.code, number = True, code, self._num_trainings
            if has_peer_memory():
                _end(code, _PEER_MEMORY)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), ctypes.py_object(Leave))

        def end_if_it_stays() -> None:
            if self._is_training and number == self._num_trainings:
                _end(code, f"it has not left the training within {limit_s:g} s")

        if limit_s:
            timer = threading.Timer(limit_s, end_if_it_stays)
            timer.daemon = True
            timer.start()
        _abort_groups()


def main(arguments: Sequence[str]) -> int:
    """Run a module again and again, as this module says, and return the exit code of the last time."""
    orders = _Orders(_take_stdin())
    active[:] = [orders]
    while True:
        code = _run(arguments, orders)
        if code in (0, EXIT_USAGE):
            return code
        progress = ProgressFile.of(os.environ, goes_on=True)
        if progress is None:
            return code
        # First, for the time of it says which of several ranks has failed first.
        progress.leave(code)
        if has_peer_memory():  # to give back is to wait for the device, and that for peers that may be gone
            _end(code, _PEER_MEMORY)
        try:
            _give_back()
        except (Exception, Leave):
            logger.warning("what the training held could not be given back", exc_info=True)
            _end(code, "what the training held could not be given back")
        progress.wait()
        environ = orders.next_start()
        os.environ.clear()
        os.environ.update(environ)
        _open_log(environ)
        logger.warning("process %d goes on as rank %s", os.getpid(), environ.get("RANK"))
        ProgressFile.of(os.environ)  # the executor sees by it that the process has begun


def _run(arguments: Sequence[str], orders: _Orders) -> int:
    """Run a module as `python -m` does, and return its exit code; no order raises afterwards."""
    sys.argv = list(arguments)
    try:
        try:
            orders.begin()
            code = _run_module(arguments[0])
        finally:
            orders.end()
    except Leave:  # anywhere in there; it comes once, so nothing interrupts the end again
        orders.end()
        return orders.code
    return code


def _run_module(name: str) -> int:
    """Run a module, and return the exit code that an interpreter would end with.

    Raises:
        Leave: the training was left.
    """
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except Leave:
        raise
    except SystemExit as exc:
        if isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        return 1
    return 0


def _give_back() -> None:
    """Give back what the training held.

    Raises:
        RuntimeError: the device has failed: so would whatever comes next in this process.
    """
    _abort_groups()
    cleanups, _cleanups[:] = _cleanups[::-1], []
    for cleanup in cleanups:
        cleanup()
    del cleanups
    if rendezvous := sys.modules.get("netlayer.rendezvous"):
        rendezvous.forget_meetings()
    gc.unfreeze()
    gc.collect()
    if leftovers := sys.modules.get("collectives.transport.leftovers"):
        leftovers.release_left()  # what was collected just now has left memory registered with NCCL
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # its guards count models, and after some it compiles no more; kernels stay in caches
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _end(code: int, why: str) -> NoReturn:
    """End the process at once, from any thread, and say why it does not wait for the next start."""
    _note_end(code, why)
    os._exit(code)


def _note_end(code: int, why: str) -> None:
    """Say in the log and in the progress why the process ends, and does not wait for the next start."""
    with contextlib.suppress(OSError):  # a full disk, say: it ends all the same
        sys.stderr.write(f"process {os.getpid()} does not wait for the next start: {why}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    with contextlib.suppress(OSError):
        if progress := ProgressFile.of(os.environ, goes_on=True):
            progress.leave(code, why)


def _abort_groups() -> None:
    """Abort all process groups, from any thread; those that cannot be are left to the garbage collector."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return
    with contextlib.suppress(Exception):  # another thread does it, or there is none any more
        if module.is_initialized():
            module._abort_process_group()
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        _shut_connections()


def _shut_connections() -> None:
    """End every TCP connection of this process; their owners close them. Sockets that listen stay."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is none, or was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(link.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                # A listener of gloo's that is shut ends the process.
                if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def _open_log(environ: Mapping[str, str]) -> None:
    """Have stdout and stderr go to the log of this start."""
    if path := environ.get(LOG):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


def _take_stdin() -> int:
    """Return a descriptor of the pipe that no further process inherits; stdin is empty from now on."""
    descriptor = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return descriptor
