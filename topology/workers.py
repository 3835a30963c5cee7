"""One function over many batches: in processes here, or on a Dask cluster by its address, as they come back.

A Ctrl-C ends the workers at once; a worker whose parent is gone ends by itself. Not covered: what the batches are
(sweep).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from netlayer.errors import ConfigError
from netlayer.launch.interrupt import uninterrupted

Batch = TypeVar("Batch")
Result = TypeVar("Result")
BatchResults = Generator[tuple[int, Result], None, None]
Submit = Callable[[Callable[[Any], Any], Any], "Future[Any]"]

_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", re.ASCII)
_CONNECT_S = 3.0


def in_order_of_end(
    function: Callable[[Batch], Result],
    batches: Sequence[Batch],
    *,
    processes: int | None = None,
    dask: str | None = None,
) -> BatchResults[Result]:
    """(index, result) of every batch, first those that end first; close the generator to give up the others.

    Args:
        function: pickles; so do its arguments and results.
        processes: workers here; the cores of this machine where None; with 1 all runs in this process.
        dask: address of a Dask scheduler, whose workers have netlayer.

    Raises:
        ConfigError: no scheduler answers at `dask`, or Dask is not installed.
    """
    workers = min(processes or os.cpu_count() or 1, len(batches))
    if dask:
        return _on_dask(function, batches, dask)
    if workers <= 1:
        return ((index, function(batch)) for index, batch in enumerate(batches))
    return _in_processes(function, batches, workers)


def check_dask_address(address: str) -> tuple[str, int]:
    """Return host and port of `tcp://HOST:PORT`.

    Raises:
        ConfigError: the address has another form.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ConfigError(
            "--dask", address, "is no address of a scheduler", "write tcp://HOST:PORT as the scheduler prints it"
        )
    return match[2].strip("[]"), int(match[3])


def check_scheduler(address: str) -> None:
    """Check that something listens at the address of a Dask scheduler.

    Raises:
        ConfigError: nothing does, the address has another form, or Dask is not installed.
    """
    place = check_dask_address(address)
    if importlib.util.find_spec("distributed") is None:
        raise ConfigError("--dask", address, "Dask is not installed", "pip install 'netlayer[dask]'")
    try:
        socket.create_connection(place, timeout=_CONNECT_S).close()
    except OSError as exc:
        raise _no_scheduler(address, exc) from exc


def _no_scheduler(address: str, exc: BaseException) -> ConfigError:
    return ConfigError("--dask", address, f"no scheduler answers ({exc})", "start one: dask scheduler")


def _in_processes(function: Callable[[Batch], Result], batches: Sequence[Batch], workers: int) -> BatchResults[Result]:
    with _pool(workers) as pool:
        with uninterrupted():
            futures: dict[Future[Result], int] = {
                pool.submit(function, batch): index for index, batch in enumerate(batches)
            }
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextlib.contextmanager
def standing(processes: int | None = None, *, dask: str | None = None) -> Iterator[Submit]:
    """Workers for many rounds: a function that hands one batch to them, and gives what will be its result.

    Args:
        processes, dask: as for `in_order_of_end`; with 1 process a batch is done when it is handed over.
    """
    workers = processes or os.cpu_count() or 1
    if dask:
        with _dask_client(dask) as (_, client):
            yield lambda function, batch: client.submit(function, batch, pure=False)
    elif workers <= 1:
        yield _done_at_once
    else:
        with _pool(workers) as pool:
            yield lambda function, batch: _handed(pool, function, batch)


def _handed(pool: ProcessPoolExecutor, function: Callable[[Any], Any], batch: Any) -> Future[Any]:
    with uninterrupted():
        return pool.submit(function, batch)


def _done_at_once(function: Callable[[Any], Any], batch: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(function(batch))
    return future


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: this process may hold threads of numba and of the progress bar.
    with uninterrupted():  # a semaphore half made is never given back
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker)
    before = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """End when the parent is gone."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _on_dask(function: Callable[[Batch], Result], batches: Sequence[Batch], address: str) -> BatchResults[Result]:
    with _dask_client(address) as (distributed, client):
        futures = {
            client.submit(function, batch, key=f"netlayer-{os.getpid()}-{index}", pure=False): index
            for index, batch in enumerate(batches)
        }
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                yield futures[future], future.result()
        except ModuleNotFoundError as exc:
            rule = f"a worker lacks a module ({exc.name})"
            raise ConfigError("--dask", address, rule, "install netlayer where the workers run") from exc
        finally:
            client.cancel(list(futures))


@contextlib.contextmanager
def _dask_client(address: str) -> Iterator[tuple[Any, Any]]:
    check_scheduler(address)  # for a client that fails is noisy
    distributed: Any = importlib.import_module("distributed")
    try:
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TimeoutError) as exc:
        raise _no_scheduler(address, exc) from exc
    try:
        yield distributed, client
    finally:
        client.close()
