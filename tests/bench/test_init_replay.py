"""A replay against servers that fail, and ranks that think."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from bench.init_time import replay as init_replay
from bench.init_time import server as init_server
from bench.init_time.replay import TimeUp, replay
from bench.init_time.traffic import Way, backend_operations, operations
from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout

OURS = Way("ours", "tcp")
LAYOUT = ParallelLayout(dp=4)
CLOSES = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()[0].recv(1)
"""


@contextlib.contextmanager
def process_on(port: int) -> Iterator[tuple[int, psutil.Process]]:
    yield port, psutil.Process()


def test_a_server_that_refuses_is_said(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setattr(init_replay, "server", lambda *_: process_on(taken.getsockname()[1]))
        with pytest.raises(CheckFailed, match=r"the server refuses a connection \(Connection refused\)") as caught:
            replay(OURS, LAYOUT, 60.0)
    assert not isinstance(caught.value, TimeUp)


def test_a_server_that_closes_under_way_is_said(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", CLOSES], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        monkeypatch.setattr(init_replay, "server", lambda *_: process_on(port))
        with pytest.raises(CheckFailed, match="the server closed a connection under way"):
            replay(OURS, ParallelLayout(dp=1), 60.0)


def test_a_server_that_ends_while_it_starts_is_said(monkeypatch):
    monkeypatch.setattr(init_server, "_TCP_SERVER", "raise SystemExit(1)")
    with pytest.raises(CheckFailed, match="TCPStore server ended while it started") as caught:
        replay(OURS, LAYOUT, 60.0)
    assert not isinstance(caught.value, TimeUp)


def a_rank_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, numbers = init_replay.init_traffic.joining, itertools.count()
    monkeypatch.setattr(init_replay.init_traffic, "joining", lambda way: kept(way) if next(numbers) != 2 else iter(()))


def test_time_that_is_up_says_what_was_done_until_then(monkeypatch):
    a_rank_never_comes(monkeypatch)
    with pytest.raises(TimeUp, match="4 of 4 ranks not done after 1 s") as caught:
        replay(OURS, LAYOUT, 1.0)
    assert 0 < caught.value.operations < operations(OURS, LAYOUT) + backend_operations(OURS, LAYOUT)
    assert caught.value.seconds >= 1.0


def test_a_silent_server_is_no_lack_of_time(monkeypatch):
    a_rank_never_comes(monkeypatch)
    monkeypatch.setattr(init_replay, "_SILENCE_S", 1.0)
    with pytest.raises(CheckFailed, match="4 of 4 ranks not done, and no word from the server for 1 s") as caught:
        replay(OURS, LAYOUT, 600.0)
    assert not isinstance(caught.value, TimeUp)


def test_ranks_think_between_joining_and_their_groups_and_say_the_same():
    said: list[int] = []
    total = operations(OURS, LAYOUT) + backend_operations(OURS, LAYOUT)
    found = replay(OURS, LAYOUT, 60.0, said.append, think_s=1.5)
    assert found.operations == total
    assert found.seconds >= 1.5
    assert operations(OURS, LAYOUT) in said  # while all think, all have joined: requests are counted, not ranks
