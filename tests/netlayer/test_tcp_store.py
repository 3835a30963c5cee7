"""A TCPStore that is there, late, or never: on loopback."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from netlayer.errors import ConfigError, StoreUnreachable
from netlayer.store.tcp_store import first_line, open_tcp_store

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=60)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nothing listens at, as long as the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_client_meets_its_server_and_keeps_the_timeout():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(open_tcp_store, "127.0.0.1", port, LONG, serves=False)  # before its server
        server = open_tcp_store("127.0.0.1", port, LONG, serves=True)
        found = client.result(timeout=60)
    server.set("a", "v")
    assert found.get("a") == b"v"
    assert found.timeout == server.timeout == LONG


def test_where_nothing_listens_it_says_who_should_have(free_port, capfd):
    with pytest.raises(StoreUnreachable) as caught:
        open_tcp_store("127.0.0.1", free_port, SHORT, serves=False)
    told = f"no store at 127.0.0.1:{free_port} (Connection refused); rank 0 serves it: has it started"
    assert str(caught.value).startswith(told)
    assert capfd.readouterr().err == ""


def test_while_nothing_listens_it_says_how_long_it_tries(free_port, monkeypatch, caplog):
    monkeypatch.setattr("netlayer.store.tcp_store._TELL_EVERY_S", 0.0)
    with pytest.raises(StoreUnreachable):
        open_tcp_store("127.0.0.1", free_port, SHORT, serves=False, server="the launcher")
    assert f"no store at 127.0.0.1:{free_port} yet (Connection refused), which the launcher serves" in caplog.text


@pytest.mark.parametrize("serves", [True, False])
def test_a_host_that_is_none_is_one_line(serves):
    with pytest.raises(StoreUnreachable, match=r"^no store at a\.\.b:29500 \(it is no host name\); rank 0 serves it"):
        open_tcp_store("a..b", 29500, SHORT, serves=serves)


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: is taken on the machine of rank 0") as caught:
            open_tcp_store("127.0.0.1", port, LONG, serves=True)
    assert "\n" not in str(caught.value)


def test_of_what_torch_says_the_first_line_is_kept():
    assert first_line(RuntimeError("it broke\nframe #0: c10::Error")) == "it broke"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_ctrl_c_ends_the_search(free_port):
    code = (
        "import logging, sys; from datetime import timedelta; from netlayer.store import tcp_store; "
        "logging.basicConfig(); tcp_store._TELL_EVERY_S = 0.0; "
        "tcp_store.open_tcp_store('127.0.0.1', int(sys.argv[1]), timedelta(hours=1), serves=False)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(free_port)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "no store at" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt")
