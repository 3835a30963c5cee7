"""Execution of a command on many hosts over ssh: argument lists, a time limit each, one table of outcomes.

The remote side's words are quoted for the shell that sshd starts, the profile travels on stdin. Keys, users and jump
hosts are ssh's own configuration. A host that does not answer within its limit may still be at work: its journal tells.
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

from netlayer.errors import ConfigError
from netlayer.printing import printable_line

_AT_ONCE = 16
_LATE, _UNREACHABLE = 124, 255


@dataclass(frozen=True)
class Outcome:
    """Outcome of one host.

    Args:
        exit_code: of its command; 255: ssh did not get there, 124: no answer in time.
        result: what it wrote as JSON; None where that is none.
        message: its last line on stderr.
    """

    host: str
    exit_code: int
    result: Any
    message: str

    @property
    def word(self) -> str:
        texts = {0: "good", 1: "failed", 2: "refused", 3: "no hardware", _LATE: "late", _UNREACHABLE: "unreachable"}
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
    try:
        reach = shlex.split(ssh)
    except ValueError as exc:
        raise ConfigError("--ssh-command", ssh, f"is no command ({exc})", "close its quotes") from exc
    running: set[subprocess.Popen[str]] = set()
    lock = threading.Lock()

    def ask(host: str) -> Outcome:
        command = [*reach, "-o", "BatchMode=yes", "--", host, shlex.join(arguments)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                errors="replace",
            )  # fmt: skip
        except OSError as exc:
            return Outcome(host, _UNREACHABLE, None, f"{command[0]}: {exc.strerror}")
        with lock:
            running.add(process)
        try:
            printed, errors = process.communicate(stdin, timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Outcome(host, _LATE, None, f"no answer within {limit_s:g} s; it may still be at work")
        finally:
            with lock:
                running.discard(process)
        return Outcome(
            host, process.returncode, _parse(printed), printable_line((errors.strip().splitlines() or [""])[-1])[:300]
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            return list(pool.map(ask, hosts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with lock:
                for process in running:
                    process.kill()
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
