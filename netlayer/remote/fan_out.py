"""Execution of a command on many hosts over ssh: argument lists, a time limit each, one table of outcomes.

The remote side's words are quoted for the shell that sshd starts, the profile travels on stdin. How a host is reached
is `netlayer.remote.connection`. A host that does not answer within its limit may still be at work: its journal tells.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from netlayer.launch.interrupt import uninterrupted
from netlayer.printing import printable_line
from netlayer.remote.connection import SSH_FAILED, UNREACHABLE, Connection, Failure, end_all, ssh_command

_AT_ONCE = 16
_LATE = 124


@dataclass(frozen=True)
class Outcome:
    """Outcome of one host.

    Args:
        exit_code: of its command; 255: ssh did not get there, 124: no answer in time.
        result: what it wrote as JSON; None where that is none.
        message: its last line on stderr.
        failure: why it never ran there, where that is known.
    """

    host: str
    exit_code: int
    result: Any
    message: str
    failure: Failure | None = None

    @property
    def word(self) -> str:
        if self.failure:
            return self.failure.word
        texts = {0: "good", 1: "failed", 2: "refused", 3: "no hardware", _LATE: "late", SSH_FAILED: UNREACHABLE.word}
        return texts.get(self.exit_code, f"exit code {self.exit_code}")


def run_on(
    hosts: Sequence[str], arguments: Sequence[str], stdin: str, limit_s: float, ssh: str = "ssh"
) -> list[Outcome]:
    """Run `arguments` on every host, some at once. Returns one outcome a host, in their order.

    Args:
        ssh: the command that reaches a host, with its options.

    Raises:
        ConfigError: that is no command.
    """
    commands = [ssh_command(ssh, host, shlex.join(arguments), batch=True) for host in hosts]
    running: set[Connection] = set()
    lock, interrupted = threading.Lock(), threading.Event()

    def ask(host: str, command: Sequence[str]) -> Outcome:
        try:
            with lock:  # none may start after an interrupt has ended all
                if interrupted.is_set():
                    return Outcome(host, _LATE, None, "interrupted before it was asked")
                connection = Connection(host, command)
                running.add(connection)
        except OSError as exc:
            return Outcome(host, SSH_FAILED, None, f"{command[0]}: {exc.strerror}")
        try:
            answer = _parse(connection.communicate(stdin, limit_s))
            message = printable_line(connection.last_line())[:300]
            return Outcome(host, connection.process.returncode, answer, message, connection.failure())
        except subprocess.TimeoutExpired:
            connection.kill()
            return Outcome(host, _LATE, None, f"no answer within {limit_s:g} s; it may still be at work")
        finally:
            end_all([connection], 0)
            with lock:
                running.discard(connection)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            return list(pool.map(ask, hosts, commands))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with uninterrupted(), lock:
                interrupted.set()
                for connection in running:
                    connection.kill()
            raise


def worst(outcomes: Sequence[Outcome]) -> int:
    """Exit code of the whole: 0 where all are good, else 1; 2 or 3 where all that failed failed so."""
    codes = {outcome.exit_code for outcome in outcomes} - {0}
    return 0 if not codes else codes.pop() if len(codes) == 1 and codes <= {2, 3} else 1


def _parse(printed: str) -> Any:
    try:
        return json.loads(printed)
    except (ValueError, RecursionError):  # a host's answer may be nested without end
        return None
