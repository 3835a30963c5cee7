"""The servers that `bench.init_time` measures, each fresh, on loopback and in a process of its own; and what they need.

Not covered: TLS, several servers.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.init_time import traffic as init_traffic
from bench.init_time.traffic import Way
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.store import redis_scripts
from netlayer.store.redis_server import find_redis_binary

_SPARE_FILES = 64
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


def check_redis() -> Path:
    """The Redis server that will be started.

    Raises:
        HardwareMissing: there is none here.
    """
    binary = find_redis_binary()
    if binary is None:
        raise HardwareMissing("no redis-server or valkey-server here; install redis-server, or give --store tcp")
    return binary


@contextlib.contextmanager
def server(way: Way, num_ranks: int) -> Iterator[tuple[int, psutil.Process]]:
    """A fresh server of the kind; its port and process.

    Raises:
        HardwareMissing: there is no Redis server here.
        CheckFailed: it ended while it started.
    """
    with contextlib.ExitStack() as stack:
        if way.store == "redis":
            folder = Path(tempfile.mkdtemp(prefix="nl-init-"))
            stack.callback(shutil.rmtree, folder)
            port, process = _start_redis(folder, num_ranks, stack)
        else:
            libuv = "0" if way.method == "baseline" else "1"
            process = subprocess.Popen(
                [sys.executable, "-c", _TCP_SERVER, libuv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the generator; this one ends with its stdin
            )
            stack.callback(_end, process)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.strip().isdigit():
                raise CheckFailed("torch's TCPStore server ended while it started")
            port = int(line)
        yield port, psutil.Process(process.pid)


def _start_redis(folder: Path, num_ranks: int, stack: contextlib.ExitStack) -> tuple[int, subprocess.Popen[str]]:
    """Start a server that ends with `stack`, also where it never answers or the wait is interrupted."""
    binary = check_redis()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    options = {"bind": "127.0.0.1", "port": port, "save": "", "dir": folder, "maxclients": num_ranks + _SPARE_FILES}
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, *arguments, "--tcp-backlog", "4096"], stdout=log, stderr=log, text=True)
    stack.callback(_end, process)
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as first:
            for script in (redis_scripts.SET, redis_scripts.ADD, redis_scripts.COMPARE_SET):
                first.sendall(init_traffic.command(b"SCRIPT", b"LOAD", script.text.encode()))
                first.recv(4096)
            return port, process
        time.sleep(_POLL_S)
    raise CheckFailed(f"redis-server did not start: {(folder / 'log').read_text().strip()[-300:]}")


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    process.terminate()
    process.wait()
