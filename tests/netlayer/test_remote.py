"""Commands on other hosts by a made-up ssh: failures in words, and that nothing is left however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from netlayer.errors import ConfigError
from netlayer.remote.connection import Connection, end_all, ssh_command
from netlayer.remote.fan_out import Outcome, run_on


def write_ssh(tmp_path: Path, script: str) -> str:
    """A program in ssh's place; `$4` is the host, `$5` the line for its shell."""
    path = tmp_path / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def run_one(ssh: str, limit_s: float = 60.0, stdin: str = "") -> Outcome:
    [outcome] = run_on(["node7"], ["netlayer", "nic", "plan"], stdin, limit_s, ssh)
    return outcome


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("message", "code", "word"),
    [
        ("ssh: Could not resolve hostname node7: Name or service not known", 255, "no address"),
        ("channel 0: open failed: connect failed: No address associated with hostname", 255, "no address"),
        ("ssh: connect to host node7 port 22: Connection refused", 255, "unreachable"),
        ("ssh: connect to host node7 port 22: No route to host", 255, "unreachable"),
        ("root@node7: Permission denied (publickey,password).", 255, "access denied"),
        ("Received disconnect from 10.0.0.7 port 22:2: Too many authentication failures", 255, "access denied"),
        ("No ED25519 host key is known for node7.\nHost key verification failed.", 255, "host key"),
        ("bash: line 1: netlayer: command not found", 127, "not installed"),
        ("sh: 1: netlayer: not found", 127, "not installed"),
        ("/usr/bin/python3: No module named netlayer", 1, "not installed"),
        ("Traceback ...\nModuleNotFoundError: No module named 'pydantic'", 1, "library missing"),
        # The same words of what runs there: it was reached, and failed or refused by itself.
        ("cp: /etc/x: Permission denied (publickey).", 1, "failed"),
        ("ssh: Could not resolve hostname node9: from a tool there", 2, "refused"),
        ("error: mlx5_0: file not found", 3, "no hardware"),
    ],
)
def test_a_failure_is_told_by_what_ssh_or_the_shell_there_says(
    message: str, code: int, word: str, tmp_path: Path
) -> None:
    outcome = run_one(write_ssh(tmp_path, f"cat >&2 <<'END'\n{message}\nEND\nexit {code}"))
    assert (outcome.word, outcome.exit_code) == (word, code)
    assert outcome.message == message.splitlines()[-1]


def test_a_command_that_ran_well_is_good_whatever_stands_in_its_log(tmp_path: Path) -> None:
    script = "echo 'Host key verification failed.' >&2\ncat"
    outcome = run_one(write_ssh(tmp_path, script), stdin='{"a": "\u00e4"}')
    assert (outcome.word, outcome.result) == ("good", {"a": "\u00e4"})


@pytest.mark.parametrize("ssh", ["", " ", "'"])
def test_an_ssh_command_that_is_none_is_refused(ssh: str) -> None:
    with pytest.raises(ConfigError, match=r"--ssh-command = .*is no command"):
        run_one(ssh)


def test_a_wrapper_gets_host_and_line_last_and_batch_mode_is_for_openssh() -> None:
    assert ssh_command("my-ssh -p 22", "node7", "a b") == ["my-ssh", "-p", "22", "node7", "a b"]
    assert ssh_command("ssh", "node7", "a b", batch=True)[1:] == ["-o", "BatchMode=yes", "--", "node7", "a b"]


def test_at_the_limit_what_a_wrapper_started_ends_with_it(tmp_path: Path) -> None:
    ssh = write_ssh(tmp_path, f"echo $$ > {tmp_path}/pids\nsleep 300 &\necho $! >> {tmp_path}/pids\nwait")
    outcome = run_one(ssh, 1.0)
    assert outcome.word == "late"
    wait_until_ended([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_master_connection_that_stays_holds_up_nobody(tmp_path: Path) -> None:
    # As ssh under ControlPersist: a process of its own session that keeps stderr.
    ssh = write_ssh(
        tmp_path, f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300' >/dev/null </dev/null &\necho 7"
    )
    try:
        assert run_one(ssh, 60.0).result == 7
    finally:
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_ctrl_c_ends_those_that_run_and_starts_no_more(tmp_path: Path) -> None:
    ssh = write_ssh(tmp_path, f"echo $$ >> {tmp_path}/pids\nsleep 300 &\necho $! >> {tmp_path}/pids\nwait")
    hosts = [f"node{number}" for number in range(40)]
    code = f"from netlayer.remote.fan_out import run_on\nrun_on({hosts}, ['x'], '', 300.0, {ssh!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < 32:  # of sixteen at once, each two
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    numbers = pids.read_text().split()
    assert len(numbers) == 32
    wait_until_ended([int(pid) for pid in numbers])


def test_a_command_that_stays_answers_over_two_pipes_and_ends_with_its_input(tmp_path: Path) -> None:
    connections = [Connection("localhost", ["cat"]) for _ in range(3)]
    for number, connection in enumerate(connections):
        os.write(connection.sink, b"%d\n" % number)
        assert os.read(connection.source, 100) == b"%d\n" % number
        assert connection.failure() is None
    end_all(connections, 60.0)
    assert [connection.process.returncode for connection in connections] == [0, 0, 0]


def test_one_that_ignores_the_end_of_its_input_is_killed() -> None:
    connection = Connection("localhost", ["sleep", "300"])
    end_all([connection], 0.1)
    assert connection.process.returncode == -signal.SIGKILL
