"""Connections to the agents of a run: started locally, over ssh, or by torchrun, srun and mpirun.

An agent that we started ends when its pipe is closed, so that none remains however the run ends. The messages
themselves are defined in `agent` and `fleet`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.accept.agents.wire import Message, Reader, write
from netlayer.errors import ConfigError
from netlayer.launch.rank import RankEnv
from netlayer.printing import printable_text
from netlayer.remote.connection import Connection, Failure, end_all, ssh_command

_MODULE = ("-m", "bench.accept.agents.agent")
_ROOT = Path(__file__).parent.parent.parent.parent
_MEET_S = 120.0
_HELLO_BYTES = 4096


@dataclass
class Link:
    """Connection to one agent.

    Args:
        host: name for messages.
        address: address at which the others reach it.
        ranks: ranks whose workers it forks.
        reader, sink: reader of its messages, and file descriptor for messages to it.
        connection: its process (or ssh) with its log, if we started it.
        alive: False once the connection is lost.
        began: True once its workers have started.
        received: latest messages, by kind.
    """

    host: str
    address: str
    ranks: tuple[int, ...]
    reader: Reader
    sink: int
    connection: Connection | None = None
    alive: bool = True
    began: bool = False
    received: dict[str, Any] = field(default_factory=dict)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a broken connection is ignored here and detected when reading."""
        with contextlib.suppress(OSError):
            write(self.sink, message)

    def hear(self) -> list[Message] | None:
        messages = self.reader.read()
        if messages is None:
            self.alive = False
        return messages

    def last_log_line(self) -> str:
        """Return the last line of its log."""
        return printable_text(self.connection.last_line()) if self.connection else ""

    def failure(self) -> Failure | None:
        """Return why its agent never ran on the host, as ssh or the shell there gave it; None if that is not known."""
        return self.connection.failure() if self.connection else None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Its process (or ssh), if we started it."""
        return self.connection.process if self.connection else None

    def close(self) -> None:
        """End the agent and wait for it."""
        close_all([self])


def close_all(links: Sequence[Link]) -> None:
    """End all agents at once and wait for them."""
    for link in links:
        link.alive = False
        if link.connection is None:
            with contextlib.suppress(OSError):
                os.close(link.sink)
    end_all([link.connection for link in links if link.connection is not None])


def start_local(ranks: Sequence[int], log: IO[bytes]) -> Link:
    """Start an agent on this machine for all ranks."""
    command = [sys.executable, *_MODULE]
    return _start("localhost", "127.0.0.1", ranks, command, log, _ROOT)


def start_ssh(host: str, ranks: Sequence[int], ssh: str, log: IO[bytes]) -> Link:
    """Start an agent on a host over ssh; netlayer must be installed there in the same folder.

    Args:
        host: name of the host.
        ranks: ranks whose workers it forks.
        ssh: ssh command with its options, before the host; relative paths in it are from the current folder.
        log: file for its stderr.

    Raises:
        ConfigError: `ssh` is no command, or cannot be run.
    """
    there = shlex.join(["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", sys.executable, *_MODULE])
    return _start(host, host, ranks, ssh_command(ssh, host, f"cd {shlex.quote(str(_ROOT))} && exec {there}"), log)


def _start(
    host: str, address: str, ranks: Sequence[int], command: Sequence[str], log: IO[bytes], cwd: Path | None = None
) -> Link:
    try:
        connection = Connection(host, command, log, cwd)
    except OSError as exc:
        raise ConfigError(
            "--ssh-command", command[0], f"cannot be run ({exc.strerror})", "give the ssh command"
        ) from exc
    return Link(host, address, tuple(ranks), Reader(connection.source), connection.sink, connection)


def meet_agents(env: RankEnv, address: str, port: int, limit_s: float = _MEET_S) -> list[Link]:
    """Accept the agents of the other ranks (`join_run`) on rank 0 under another launcher.

    Args:
        env: rank and world size.
        address, port: address at which the others look for this rank.
        limit_s: seconds to wait for them.

    Raises:
        ConfigError: not all of them connected, or the port is taken.
    """
    links: dict[int, Link] = {}
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(env, address, port))
        partial_hellos: dict[socket.socket, bytes] = {}  # of connections whose hello is not complete yet
        while missing := set(range(1, env.world_size)) - set(links):
            left_s = deadline - time.monotonic()
            ready = select.select([server, *partial_hellos], [], [], left_s)[0] if left_s > 0 else []
            if not ready:
                ranks = ", ".join(map(str, sorted(missing)))
                rule = f"ranks {ranks} did not come within {limit_s:g} s"
                raise ConfigError("launcher", env.launcher, rule, "see their output")
            for one in ready:
                if one is server:
                    with contextlib.suppress(OSError):  # disconnected already
                        partial_hellos[stack.enter_context(server.accept()[0])] = b""
                elif link := _accept_hello(one, partial_hellos, missing - set(links)):
                    links[link.ranks[0]] = link
    return [links[rank] for rank in sorted(links)]


def _listen(env: RankEnv, address: str, port: int) -> socket.socket:
    """Listen at the address; at all addresses if it is not of this host, or loopback while ranks are on other hosts."""
    with contextlib.suppress(OSError):
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        local = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
        if not local or env.local_world_size == env.world_size:
            server = socket.create_server((str(place[0]), port), family=family)
            server.setblocking(False)
            return server
    try:
        server = socket.create_server(("", port))
    except OSError as exc:
        raise ConfigError("MASTER_PORT", port, f"cannot be listened at ({exc.strerror})", "choose another") from exc
    server.setblocking(False)
    return server


def _accept_hello(
    one: socket.socket, partial_hellos: dict[socket.socket, bytes], missing: Collection[int]
) -> Link | None:
    """Read from a new connection; return its agent once the hello is complete, close it if that is invalid."""
    try:
        chunk, address = one.recv(_HELLO_BYTES), str(one.getpeername()[0])
    except OSError:
        chunk, address = b"", ""
    text = partial_hellos.pop(one) + chunk
    if chunk and b"\n" not in text and len(text) < _HELLO_BYTES:
        partial_hellos[one] = text
        return None
    rank, host = _hello(text)
    if rank not in missing:
        one.close()
        return None
    fd = one.detach()
    return Link(host, address, (rank,), Reader(fd), fd)


def _hello(text: bytes) -> tuple[int, str]:
    """Parse the hello of an agent: rank and host; rank 0, which is never expected, if it is invalid."""
    try:
        match json.loads(text):
            case {"rank": int(rank), "host": str(host)}:
                return rank, printable_text(host)
    except (ValueError, RecursionError):
        pass
    return 0, ""


def join_run(env: RankEnv, address: str, port: int) -> None:
    """Connect to rank 0 under another launcher, and serve its run until it ends."""
    from bench.accept.agents.agent import serve

    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5)
            break
        except OSError as exc:
            if time.monotonic() > deadline:
                raise ConfigError("MASTER_ADDR", address, f"rank 0 does not answer ({exc})", "see its output") from exc
            time.sleep(0.2)
    connection.settimeout(None)
    fd = connection.fileno()
    write(fd, {"rank": env.rank, "host": socket.gethostname()})
    serve(fd, fd)


def master_address() -> tuple[str, int]:
    """Return address and port of rank 0 under another launcher: next to MASTER_PORT, which the launcher may use."""
    port = int(os.environ.get("MASTER_PORT", "29500"))
    address = os.environ.get("MASTER_ADDR") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    return address, port + 1 if port < 65535 else port - 1
