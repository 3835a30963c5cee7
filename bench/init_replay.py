"""A store under the traffic of thousands of simulated ranks: real servers, real sockets, no rank behind them.

One process holds every connection in one epoll loop; the server is another. A simulated rank sends a request, waits
for its answer, thinks for no time, sends the next. What comes out is the store's share of an initialisation and
nothing else: no process starts, no communicator is made. Left out: TLS, several servers.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import init_traffic
from bench.init_traffic import Request, Way
from netlayer import redis_scripts
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.layout import ParallelLayout
from netlayer.redis_server import find_redis_binary

_SPARE_FILES = 64
_MOST_CONNECTING = 256  # at once: what a server's backlog takes
_POLL_S = 0.02
_START_S = 30.0
# torch's server asks for the name of every client that connects, a DNS query each: here it may look into files alone,
# or the machine's name server would be measured.
_TCP_SERVER = """
import ctypes, sys
ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=600), False, use_libuv=sys.argv[1] == "1")
print(store.port, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Replayed:
    """What a replay took.

    Args:
        seconds: from the first connection to the last rank's last answer.
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


def replay(way: Way, layout: ParallelLayout, limit_s: float, say: Callable[[int], None] = lambda _: None) -> Replayed:
    """Let all simulated ranks of the layout meet in a server of this machine.

    Args:
        limit_s: the longest that it may take.
        say: hears how many ranks are done.

    Raises:
        ConfigError: this process may not open so many files.
        HardwareMissing: there is no Redis server here.
        CheckFailed: not all ranks were done in time, or the server closed a connection.
    """
    check_files(layout.world_size)
    with server(way, layout.world_size) as (port, process), _no_collection():
        return _Load(way, layout, port).run(process, limit_s, say)


def check_files(num_ranks: int) -> None:
    """Raise this process's limit of open files to what so many connections need.

    Raises:
        ConfigError: the system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_ranks + _SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        rule = f"allows {hard:,} open files, and {num_ranks:,} connections need {needed:,}"
        raise ConfigError("ulimit -n", None, rule, "raise the hard limit (LimitNOFILE, limits.conf), or lower --ranks")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def server(way: Way, num_ranks: int) -> Iterator[tuple[int, psutil.Process]]:
    """A fresh server of the kind; its port and process."""
    with contextlib.ExitStack() as stack:
        if way.store == "redis":
            folder = Path(tempfile.mkdtemp(prefix="nl-init-"))
            stack.callback(shutil.rmtree, folder)
            port, process = _start_redis(folder, num_ranks)
            stack.callback(_end, process)
        else:
            libuv = "0" if way.method == "baseline" else "1"
            process = subprocess.Popen(
                [sys.executable, "-c", _TCP_SERVER, libuv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(_end, process)
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said.strip().isdigit():
                raise CheckFailed("torch's TCPStore server did not start")
            port = int(said)
        yield port, psutil.Process(process.pid)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector would walk all simulated ranks again and again: more than linear work of the generator's."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _start_redis(folder: Path, num_ranks: int) -> tuple[int, subprocess.Popen[str]]:
    binary = find_redis_binary()
    if binary is None:
        raise HardwareMissing("no redis-server or valkey-server here; install redis-server, or give --store tcp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    options = {"bind": "127.0.0.1", "port": port, "save": "", "dir": folder, "maxclients": num_ranks + _SPARE_FILES}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, *words, "--tcp-backlog", "4096"], stdout=log, stderr=log, text=True)
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as first:
            for script in (redis_scripts.SET, redis_scripts.ADD, redis_scripts.COMPARE_SET):
                first.sendall(init_traffic.command(b"SCRIPT", b"LOAD", script.text.encode()))
                first.recv(4096)
            return port, process
        time.sleep(_POLL_S)
    process.kill()
    raise CheckFailed(f"redis-server did not start: {(folder / 'log').read_text().strip()[-300:]}")


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    process.terminate()
    process.wait()


class _Rank:
    """A simulated rank: its connection, what it still has to say, and the answer that it waits for."""

    __slots__ = ("buffer", "due", "name", "serial", "socket", "todo")

    def __init__(self, opened: socket.socket, name: bytes, todo: Iterator[Request]) -> None:
        self.socket, self.name, self.todo = opened, name, todo
        self.buffer = b""
        self.due: Request | None = None
        self.serial = 0


class _Load:
    def __init__(self, way: Way, layout: ParallelLayout, port: int) -> None:
        self._way, self._layout, self._address = way, layout, ("127.0.0.1", port)
        self._ranks: dict[int, _Rank] = {}
        self._epoll = select.epoll()
        self._come: Counter[str] = Counter()
        self._operations = self._backend = self._bytes = self._done = 0
        self._take = _tcp_answer if way.store == "tcp" else _redis_answer

    def run(self, process: psutil.Process, limit_s: float, say: Callable[[int], None]) -> Replayed:
        ranks = self._layout.world_size
        cpu_before = sum(process.cpu_times()[:2])
        began, own_before = time.perf_counter(), time.process_time()
        waiting = deque(range(ranks))
        connecting: set[int] = set()
        try:
            while self._done < ranks:
                while waiting and len(connecting) < _MOST_CONNECTING:
                    connecting.add(self._connect(waiting.popleft()))
                for fd, _ in self._epoll.poll(_POLL_S):
                    if fd in connecting:
                        connecting.discard(fd)
                        self._go_on(self._ranks[fd])
                        self._epoll.modify(fd, select.EPOLLIN)
                    else:
                        self._hear(self._ranks[fd])
                if time.perf_counter() - began > limit_s:
                    raise CheckFailed(f"{ranks - self._done:,} of {ranks:,} ranks not done after {limit_s:.0f} s")
                say(self._done)
            seconds = time.perf_counter() - began
        finally:
            for rank in self._ranks.values():
                rank.socket.close()
            self._epoll.close()
        return Replayed(
            seconds,
            self._operations,
            self._backend,
            self._bytes,
            sum(process.cpu_times()[:2]) - cpu_before,
            time.process_time() - own_before,
        )

    def _connect(self, number: int) -> int:
        opened = socket.socket()
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.connect_ex(self._address)
        fd = opened.fileno()
        todo = init_traffic.requests(self._way, self._layout, number)
        self._ranks[fd] = _Rank(opened, b"%016x" % number, todo)
        self._epoll.register(fd, select.EPOLLOUT)
        return fd

    def _go_on(self, rank: _Rank) -> None:
        """Say everything up to the next request that is answered."""
        words = b""
        for request in rank.todo:
            words += self._say(rank, request)
            if self._way.store == "redis" or request.kind not in ("VALIDATE", "SET"):
                rank.due = request
                break
        else:
            rank.due = None
            self._done += 1
        if words:
            self._send(rank, words)

    def _say(self, rank: _Rank, request: Request) -> bytes:
        rank.serial += 1
        words = init_traffic.encode(self._way, request, rank.name, rank.serial)
        self._operations += 1
        self._backend += request.is_backend
        return words

    def _send(self, rank: _Rank, words: bytes) -> None:
        self._bytes += len(words)
        if rank.socket.send(words) != len(words):
            raise CheckFailed("a request did not fit into an empty socket")

    def _hear(self, rank: _Rank) -> None:
        try:
            chunk = rank.socket.recv(65536)
        except ConnectionError:
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
