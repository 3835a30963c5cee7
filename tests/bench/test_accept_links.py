"""How rank 0 of a launcher meets the others, whoever else calls at its port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from bench.accept import nccl_tests
from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import _listen, close_all, meet_agents, start_ssh
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import Result, Settings, flag_late, members_of
from bench.accept.run_output import drain_lists, format_run, judgement_of, sentence, tickets
from netlayer.errors import ConfigError
from netlayer.launch.rank import RankEnv

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


NO_NAME = "Name or service not known"


@pytest.mark.parametrize(
    ("said", "code", "nameless"),
    [
        (f"ssh: Could not resolve hostname node7: {NO_NAME}\r", 255, True),
        (f"channel 0: open failed: connect failed: {NO_NAME}\nstdio forwarding failed", 255, True),  # by a jump host
        ("ssh: connect to host node7 port 22: No route to host", 255, False),
        ("channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed", 255, False),
        (f"sudo: unable to resolve host node7: {NO_NAME}", 255, False),  # it speaks itself, so it was reached
        ("ssh: Could not resolve hostname other: said by its profile", 127, False),
    ],
)
def test_a_name_that_leads_to_no_host_is_told_from_a_host_that_is_dead(
    said: str, code: int, nameless: bool, tmp_path: Path
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit {code}\n")
    (tmp_path / "ssh").chmod(0o755)
    trial = Trial(cast(Fleet, None), members_of([("node7", 2), ("node8", 1)]), work_for("gloo", None), [0, 1, 2])
    with (tmp_path / "log").open("w+b") as log:
        link = start_ssh("node7", [0, 1], str(tmp_path / "ssh"), log)
        assert link.hear() is None  # it has said all
        flag_late(trial, link)
        link.close()
    result = Result(trial)
    assert trial.alive == [2]
    assert bool(drain_lists(trial)) == bool(tickets(result)) == (not nameless)
    assert ("correct node7 in the hosts file" in trial.findings[0].next_step) == nameless
    assert ("without an address: node7; " in sentence(result)) == nameless
    assert ("faulty: node7 (start); " in sentence(result)) == (not nameless)
    assert any(line.startswith("not reached, and in no drain list: node7; ") for line in format_run(result)) == nameless
    assert judgement_of(result).verdict == "FAIL"


def test_nccl_tests_too_drain_no_name_that_leads_to_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho 'ssh: Could not resolve hostname $1: {NO_NAME}' >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    binaries = dict.fromkeys(nccl_tests.BINARIES, tmp_path)
    monkeypatch.setattr(nccl_tests, "find_binaries", lambda _folder: binaries)
    settings = Settings(members_of([("node7", 1)]), "nccl", work_for("nccl", None))
    with (tmp_path / "log").open("w+b") as log:
        link = start_ssh("node7", [0], str(tmp_path / "ssh"), log)
        result = nccl_tests.run_nccl_tests(settings, [link], None)
        link.close()
    assert [finding.file for finding in result.trial.findings] == ["start"]  # once, not for each binary
    assert not drain_lists(result.trial)


def test_paths_in_the_ssh_command_are_from_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-ssh").write_text('#!/bin/sh\necho "$PWD sees $1" >&2\n')
    (tmp_path / "my-ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "log").open("w+b") as log:
        link = start_ssh("node7", [0], "./my-ssh", log)
        assert link.process is not None
        link.process.wait()
        assert link.last_log_line() == f"{tmp_path.resolve()} sees node7"
        link.close()
