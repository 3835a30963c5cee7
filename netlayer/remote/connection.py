"""Connections to other hosts over ssh: the command line, the process behind it, its failures in words, and its end.

All that runs on another host goes through here: commands that answer once (`netlayer.remote.fan_out`) and agents that
stay (`netlayer accept`). Keys, users and jump hosts are ssh's own configuration.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from netlayer.errors import ConfigError

SSH_FAILED = 255  # exit code of ssh itself; other codes are of the remote command
_NOT_FOUND = 127  # of a shell, for a command that it does not find
_END_S = 3.0
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Failure:
    """Reason why the command of a host never ran.

    Args:
        word: for a table.
        remedy: what to do, in which `{host}` stands for the host.
    """

    word: str
    remedy: str


UNREACHABLE = Failure("unreachable", "see whether ssh {host} works and netlayer is installed there at the same place")
NO_ADDRESS = Failure(
    "no address", "correct {host} in the hosts file, or give it an address (DNS, /etc/hosts, ssh's HostName)"
)
ACCESS_DENIED = Failure("access denied", "let this user in without a password: ssh-copy-id {host}, or ssh-add")
HOST_KEY = Failure("host key", "its host key is unknown or has changed: compare it, then accept it by hand: ssh {host}")
NOT_INSTALLED = Failure("not installed", "install netlayer on {host} at the same place as here")
LIBRARY_MISSING = Failure(
    "library missing", "install netlayer with its libraries on {host} and run it again: this host was not measured"
)


class _Rule(NamedTuple):
    """Signs of a failure: a line on stderr, and the exit code with it; None: any but 0, or none yet."""

    failure: Failure
    pattern: str
    codes: Collection[int] | None


# The exit code tells a message of ssh from the same words of a remote program. ssh's are OpenSSH's, of this host, or of
# a jump host with the error text of its C library; shells are bash, dash, zsh and fish. The first that fits counts.
_RULES = (
    _Rule(
        NO_ADDRESS,
        r"^ssh: Could not resolve hostname |open failed: connect failed: (?:Name or service not known"
        r"|Name does not resolve|Temporary failure in name resolution|No address associated with hostname"
        r"|nodename nor servname provided)",
        {SSH_FAILED},
    ),
    _Rule(HOST_KEY, r"^Host key verification failed\.", {SSH_FAILED}),
    _Rule(
        ACCESS_DENIED,
        r"^(?:\S+: )?Permission denied(?: \([\w,-]+\)\.|, please try again\.)|Too many authentication failures",
        {SSH_FAILED},
    ),
    _Rule(
        UNREACHABLE,
        r"^ssh: |^kex_exchange_identification: |^Connection (?:closed|reset) by |open failed: connect failed",
        {SSH_FAILED},
    ),
    _Rule(LIBRARY_MISSING, r"^ModuleNotFoundError: .*\s*\Z", None),
    _Rule(NOT_INSTALLED, r"not found|[Nn]o such file or directory|[Uu]nknown command", {_NOT_FOUND}),
    _Rule(
        NOT_INSTALLED,
        r"\bcd: .*(?:No such file or directory|can't cd to)|^zsh:cd:|No module named '?(?:netlayer|bench)\b",
        {1, 2},
    ),
)


def ssh_command(ssh: str, host: str, line: str, *, batch: bool = False) -> list[str]:
    """Return the arguments that run a line of shell on a host.

    Args:
        ssh: the user's `--ssh-command`, with its options; a wrapper gets host and line as its last two arguments.
        host: as `netlayer.remote.hosts` takes it.
        line: for the shell that sshd starts; `shlex.join` quotes what must not be read by it.
        batch: also give OpenSSH's options with which it never asks, and takes no host for an option.

    Raises:
        ConfigError: `ssh` is no command.
    """
    try:
        reach = shlex.split(ssh)
    except ValueError as exc:
        raise ConfigError("--ssh-command", ssh, f"is no command ({exc})", "close its quotes") from exc
    if not reach:
        raise ConfigError("--ssh-command", ssh, "is no command", "give its name or path, such as ssh")
    return [*reach, *(["-o", "BatchMode=yes", "--"] if batch else []), host, line]


class Connection:
    """A running command of a host, the two pipes to it, and the file that its stderr goes to.

    It has a session of its own: a Ctrl-C at the terminal reaches this process alone, which then ends it with all that
    its ssh started. Its stderr is no pipe, for the master that ssh leaves behind under ControlPersist may hold it open.

    Args:
        host: name, for messages.
        command: program and arguments: of `ssh_command`, or on this host.
        log: file for its stderr, which stays the caller's; a temporary one where None.
        cwd: folder in which the program starts.

    Raises:
        OSError: the program cannot be run.
    """

    def __init__(
        self, host: str, command: Sequence[str], log: IO[bytes] | None = None, cwd: Path | None = None
    ) -> None:
        self.host = host
        with contextlib.ExitStack() as stack:
            self._log: IO[bytes] = log if log is not None else stack.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=cwd,
                start_new_session=True,
            )
            self._own = stack.pop_all()

    @property
    def source(self) -> int:
        """File descriptor from which its stdout is read; at the end of the stream it is lost."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def sink(self) -> int:
        """File descriptor to its stdin; a command that stays ends by itself when this is closed."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    def communicate(self, stdin: str, limit_s: float) -> str:
        """Give a command that answers once all its input; return its output when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended within the limit.
        """
        output, _ = self.process.communicate(stdin.encode(errors="replace"), timeout=limit_s)
        return output.decode(errors="replace")

    def last_line(self) -> str:
        """Return the last line on its stderr that is not blank."""
        return next((line.strip() for line in reversed(self._tail().splitlines()) if line.strip()), "")

    def failure(self) -> Failure | None:
        """Return why the command never ran on its host; None where it did, or nobody knows yet."""
        text = self._tail().replace("\r", "")
        rules = [rule for rule in _RULES if re.search(rule.pattern, text, re.MULTILINE)]
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe is closed shortly before it exits
            self.process.wait(_END_S if rules else 0)
        code = self.process.returncode
        for rule in rules:
            if code in rule.codes if rule.codes is not None else code != 0:
                return rule.failure
        return UNREACHABLE if code == SSH_FAILED else None

    def kill(self) -> None:
        """End it at once, with all that its ssh started and that made no session of its own; any thread may."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended already, or of another user by sudo
            os.killpg(self.process.pid, signal.SIGKILL)

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _end(self, grace_s: float) -> None:
        for limit_s in (grace_s, _END_S):
            try:
                self.process.wait(limit_s)
                break
            except subprocess.TimeoutExpired:
                self.kill()
        self._own.close()


def end_all(connections: Sequence[Connection], grace_s: float = _END_S) -> None:
    """End all at once and wait for them: close their pipes, and kill those that are still there after `grace_s`."""
    for connection in connections:
        connection._close_pipes()
    deadline = time.monotonic() + grace_s
    for connection in connections:
        connection._end(max(0.0, deadline - time.monotonic()))
