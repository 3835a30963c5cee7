"""How rank 0 of a launcher meets the others, whoever else calls at its port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.accept.links import _listen, close_all, meet_agents, start_ssh
from netlayer.errors import ConfigError
from netlayer.rank import RankEnv

LOCAL = "127.0.0.1"
STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 4096,
    b'{"rank": 9, "host": "x"}\n',
    b'{"rank": "1"}\n',
    b"\xff\n",
    b"1\n",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


class Callers:
    """Call at a port as soon as somebody listens there, in order, from a thread of their own."""

    def __init__(self, port: int, words: Sequence[bytes]) -> None:
        self.found: list[socket.socket] = []
        self._port, self._words, self._over = port, words, threading.Event()
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self.found:
            one.close()

    def _call(self) -> None:
        for said in self._words:
            while not self._over.wait(0.01):
                with contextlib.suppress(ConnectionError):
                    self.found.append(socket.create_connection((LOCAL, self._port)))
                    self.found[-1].sendall(said)
                    break


def test_strangers_are_hung_up_on_and_silent_ones_hold_up_nobody() -> None:
    port = free_port()
    words = [b"", *STRANGERS, json.dumps({"rank": 1, "host": "h1"}).encode() + b"\n"]
    with Callers(port, words) as callers:
        links = meet_agents(RankEnv(0, 2, 0, 2, "torchrun"), LOCAL, port, 60)
        assert [(link.host, link.address, link.ranks) for link in links] == [("h1", LOCAL, (1,))]
        assert callers.found[1].recv(1) == b""
    close_all(links)


def test_ranks_that_do_not_come_are_named_though_others_call() -> None:
    port = free_port()
    with Callers(port, [b'{"rank": ']), pytest.raises(ConfigError, match="ranks 1, 2 did not come within 1 s"):
        meet_agents(RankEnv(0, 3, 0, 3, "torchrun"), LOCAL, port, 1)


def test_it_listens_where_the_others_call_and_nowhere_else() -> None:
    alone, several = RankEnv(0, 2, 0, 2, "torchrun"), RankEnv(0, 2, 0, 1, "slurm")
    port = free_port()
    with _listen(alone, LOCAL, port) as server:
        assert server.getsockname()[0] == LOCAL
        with pytest.raises(ConfigError, match="MASTER_PORT"):
            _listen(alone, LOCAL, port)
    with _listen(several, "localhost", free_port()) as server:  # others could not reach the loopback
        assert server.getsockname()[0] == "0.0.0.0"
    with _listen(several, "192.0.2.1", free_port()) as server:  # an address that is translated before this host
        assert server.getsockname()[0] == "0.0.0.0"


def test_paths_in_the_ssh_command_are_from_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-ssh").write_text('#!/bin/sh\necho "$PWD sees $1" >&2\n')
    (tmp_path / "my-ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "log").open("w+b") as log:
        link = start_ssh("node7", [0], "./my-ssh", log)
        assert link.process is not None
        link.process.wait()
        assert link.last_words() == f"{tmp_path.resolve()} sees node7"
        link.close()
