"""A store under the traffic of thousands of simulated ranks: real servers, real sockets, no rank behind them.

One process holds every connection in one epoll loop; the server is another. A simulated rank sends a request, waits
for its answer, sends the next at once; only between joining and its groups it may think, for as long as the bootstrap
of a communicator took elsewhere. What comes out is the store's share of an initialisation and nothing else: no process
starts, no communicator is made. Not covered: TLS, several servers.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from bench.init_time import traffic as init_traffic
from bench.init_time.server import check_files, server
from bench.init_time.traffic import Request, Way
from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout

_MOST_CONNECTING = 256  # at once: what a server's backlog takes
_POLL_S = 0.02
_SAY_EVERY_S = 0.2
_SILENCE_S = 30.0  # in which no rank hears or thinks anything: then no time would be enough
_THINK = Request("THINK")


class TimeUp(CheckFailed):
    """A replay that was still going on when its time was up.

    Args:
        operations: that the server had been asked for until then.
        seconds: that they took, without what each rank thinks.
    """

    def __init__(self, message: str, operations: int, seconds: float) -> None:
        self.operations, self.seconds = operations, seconds
        super().__init__(message)

    def __reduce__(self) -> tuple[type[TimeUp], tuple[str, int, float]]:
        return type(self), (str(self), self.operations, self.seconds)


@dataclass(frozen=True)
class Replayed:
    """Cost of a replay: time, operations, bytes and processor time.

    Args:
        seconds: from the first connection to the last rank's last answer, thinking among it.
        operations: that the server was asked for, the backend's among them.
        backend_operations: those alone.
        num_bytes: on the wire, both ways.
        server_cpu_s, generator_cpu_s: of the two processes.
    """

    seconds: float
    operations: int
    backend_operations: int
    num_bytes: int
    server_cpu_s: float
    generator_cpu_s: float


def replay(
    way: Way,
    layout: ParallelLayout,
    limit_s: float,
    say: Callable[[int], None] = lambda _: None,
    *,
    think_s: float = 0.0,
) -> Replayed:
    """Let all simulated ranks of the layout meet in a server of this machine.

    Args:
        limit_s: the longest that it may take.
        say: hears now and then how many operations the server was asked for.
        think_s: what each rank waits between joining and its groups.

    Raises:
        ConfigError: this process may not open so many files.
        HardwareMissing: there is no Redis server here.
        TimeUp: not all ranks were done in time, though they went on.
        CheckFailed: the server refused or closed a connection, refused a request, or was silent for 30 s.
    """
    check_files(layout.world_size)
    with server(way, layout.world_size) as (port, process), _no_collection():
        return _Load(way, layout, port, think_s).run(process, limit_s, say)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector would walk all simulated ranks again and again: more than linear work of the generator's."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Rank:
    """A simulated rank: its connection, what it still has to say, and the answer that it waits for."""

    __slots__ = ("buffer", "due", "name", "serial", "socket", "todo")

    def __init__(self, opened: socket.socket, name: bytes, todo: Iterator[Request]) -> None:
        self.socket, self.name, self.todo = opened, name, todo
        self.buffer = b""
        self.due: Request | None = None
        self.serial = 0


class _Load:
    def __init__(self, way: Way, layout: ParallelLayout, port: int, think_s: float) -> None:
        self._way, self._layout, self._address, self._think_s = way, layout, ("127.0.0.1", port), think_s
        self._ranks: dict[int, _Rank] = {}
        self._epoll = select.epoll()
        self._come: Counter[str] = Counter()
        self._thinking: deque[tuple[float, _Rank]] = deque()  # all think equally long: who began first ends first
        self._operations = self._backend = self._bytes = self._done = 0
        self._take = _tcp_answer if way.store == "tcp" else _redis_answer

    def run(self, process: psutil.Process, limit_s: float, say: Callable[[int], None]) -> Replayed:
        cpu_before = sum(process.cpu_times()[:2])
        began, own_before = time.perf_counter(), time.process_time()
        try:
            self._meet(began, limit_s, say)
            seconds, own_cpu_s = time.perf_counter() - began, time.process_time() - own_before
            server_cpu_s = sum(process.cpu_times()[:2]) - cpu_before
        except psutil.Error as exc:
            raise CheckFailed("the server ended under way") from exc
        finally:
            for rank in self._ranks.values():
                rank.socket.close()
            self._epoll.close()
        return Replayed(seconds, self._operations, self._backend, self._bytes, server_cpu_s, own_cpu_s)

    def _meet(self, began: float, limit_s: float, say: Callable[[int], None]) -> None:
        """Run all simulated ranks to the end of their traffic, connecting some hundred at a time.

        Raises:
            TimeUp: it took more than `limit_s`.
            CheckFailed: the server is silent.
        """
        ranks = self._layout.world_size
        waiting = deque(range(ranks))
        connecting: set[int] = set()
        last_event = last_report = began
        while self._done < ranks:
            while waiting and len(connecting) < _MOST_CONNECTING:
                connecting.add(self._connect(waiting.popleft()))
            events = self._epoll.poll(self._patience_s())
            for fd, _ in events:
                if fd in connecting:
                    connecting.discard(fd)
                    _check_connected(self._ranks[fd].socket)
                    self._go_on(self._ranks[fd])
                    self._epoll.modify(fd, select.EPOLLIN)
                else:
                    self._hear(self._ranks[fd])
            now = time.perf_counter()
            if events or self._thinking:
                last_event = now
            while self._thinking and self._thinking[0][0] <= now:
                self._go_on(self._thinking.popleft()[1])
            if now - began > limit_s:
                message = f"{ranks - self._done:,} of {ranks:,} ranks not done after {limit_s:.0f} s"
                raise TimeUp(message, self._operations, now - began - self._think_s)
            if now - last_event > _SILENCE_S:
                message = f"{ranks - self._done:,} of {ranks:,} ranks not done"
                raise CheckFailed(f"{message}, and no word from the server for {_SILENCE_S:.0f} s")
            if now - last_report > _SAY_EVERY_S:
                last_report = now
                say(self._operations)

    def _patience_s(self) -> float:
        if not self._thinking:
            return _POLL_S
        return min(_POLL_S, max(0.0, self._thinking[0][0] - time.perf_counter()))

    def _connect(self, number: int) -> int:
        opened = socket.socket()
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = opened.fileno()
        joining = init_traffic.joining(self._way)
        thinking = (_THINK,) if self._think_s else ()
        todo = itertools.chain(joining, thinking, init_traffic.grouping(self._way, self._layout, number))
        self._ranks[fd] = _Rank(opened, b"%016x" % number, todo)
        _check_begun(opened.connect_ex(self._address))
        self._epoll.register(fd, select.EPOLLOUT)
        return fd

    def _go_on(self, rank: _Rank) -> None:
        """Say everything up to the next request that is answered, or until the rank has to think."""
        data = b""
        rank.due = None
        for request in rank.todo:
            if request is _THINK:
                self._thinking.append((time.perf_counter() + self._think_s, rank))
                break
            data += self._say(rank, request)
            if self._way.store == "redis" or request.kind not in ("VALIDATE", "SET"):
                rank.due = request
                break
        else:
            self._done += 1
        if data:
            self._send(rank, data)

    def _say(self, rank: _Rank, request: Request) -> bytes:
        rank.serial += 1
        data = init_traffic.encode(self._way, request, rank.name, rank.serial)
        self._operations += 1
        self._backend += request.is_backend
        return data

    def _send(self, rank: _Rank, data: bytes) -> None:
        self._bytes += len(data)
        try:
            num_sent = rank.socket.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError as exc:
            raise CheckFailed(f"the server closed a connection under way ({exc.strerror})") from exc
        if num_sent != len(data):
            raise CheckFailed("a request did not fit into an empty socket")

    def _hear(self, rank: _Rank) -> None:
        try:
            chunk = rank.socket.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            raise CheckFailed("the server closed a connection under way")
        self._bytes += len(chunk)
        rank.buffer += chunk
        while rank.due is not None and (length := self._take(rank.due, rank.buffer)):
            answer, rank.buffer = rank.buffer[:length], rank.buffer[length:]
            self._answered(rank, rank.due, answer)

    def _answered(self, rank: _Rank, request: Request, answer: bytes) -> None:
        if answer[:1] == b"-" and self._way.store == "redis":
            raise CheckFailed(f"the server refuses {request.kind}: {answer.decode(errors='replace').strip()}")
        if request.kind != "ARRIVE":
            self._go_on(rank)
            return
        self._come[request.key] += 1
        if self._come[request.key] < self._layout.world_size:
            self._go_on(rank)
            return
        if self._way.method == "ours":
            next(rank.todo)  # the last one to come does not wait
        rank.todo = itertools.chain(init_traffic.last_words(self._way, request), rank.todo)
        self._go_on(rank)


def _check_begun(code: int) -> None:
    """Check the code that `connect_ex` returned for a non-blocking socket."""
    if code not in (0, errno.EINPROGRESS):
        raise CheckFailed(f"the server cannot be connected to ({os.strerror(code)})")


def _check_connected(opened: socket.socket) -> None:
    if code := opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise CheckFailed(f"the server refuses a connection ({os.strerror(code)})")


def _tcp_answer(request: Request, buffer: bytes) -> int:
    """Length of a whole answer at the front of the buffer; 0: not all of it is there."""
    if request.kind in ("GET", "COMPARE_SET"):
        if len(buffer) < 8:
            return 0
        length = 8 + int.from_bytes(buffer[:8], "little")
    else:
        length = {"PING": 4, "ADD": 8, "ARRIVE": 8, "WAIT": 1}[request.kind]
    return length if len(buffer) >= length else 0


def _redis_answer(_: Request, buffer: bytes) -> int:
    end = buffer.find(b"\r\n")
    if end < 0:
        return 0
    length = end + 2
    if buffer[:1] == b"$" and buffer[1:2] != b"-":
        length += int(buffer[1:end]) + 2
    return length if len(buffer) >= length else 0
