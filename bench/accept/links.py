"""The agents of a run: started here, over ssh, or come by themselves under torchrun, srun and mpirun.

An agent that was started ends with its pipe: nothing is left of it, however the run ends. Left out: what is said.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.accept.wire import Message, Reader, write
from netlayer.errors import ConfigError
from netlayer.rank import RankEnv

_MODULE = ("-m", "bench.accept.agent")
_END_S = 3.0
_MEET_S = 120.0


@dataclass
class Link:
    """One agent.

    Args:
        host: its name for people.
        address: at which the others reach it.
        ranks: whose workers it forks.
        reader, sink: its messages, and the descriptor of ours.
        process: what carries it, where we have started it.
    """

    host: str
    address: str
    ranks: tuple[int, ...]
    reader: Reader
    sink: int
    process: subprocess.Popen[bytes] | None = None
    alive: bool = True
    began: bool = False
    said: dict[str, Any] = field(default_factory=dict)

    def say(self, message: Mapping[str, Any]) -> None:
        """Send; a link that is broken is noted and found dead later."""
        with contextlib.suppress(OSError):
            write(self.sink, message)

    def hear(self) -> list[Message] | None:
        found = self.reader.read()
        if found is None:
            self.alive = False
        return found

    def close(self) -> None:
        """End the agent and wait for it."""
        self.alive = False
        if self.process is None:
            with contextlib.suppress(OSError):
                os.close(self.sink)
        else:
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_local(ranks: Sequence[int], log: IO[bytes]) -> Link:
    """An agent of this machine for all ranks."""
    command = [sys.executable, *_MODULE]
    return _start("localhost", "127.0.0.1", ranks, command, log)


def start_ssh(host: str, ranks: Sequence[int], ssh: str, log: IO[bytes]) -> Link:
    """An agent on a host that the user's ssh reaches, where netlayer stands in the same folder.

    Args:
        ssh: the command with its options; the host and what runs there follow.
    """
    root = Path(__file__).parent.parent.parent
    there = shlex.join(["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", sys.executable, *_MODULE])
    return _start(host, host, ranks, [*shlex.split(ssh), host, f"cd {shlex.quote(str(root))} && exec {there}"], log)


def _start(host: str, address: str, ranks: Sequence[int], command: Sequence[str], log: IO[bytes]) -> Link:
    root = str(Path(__file__).parent.parent.parent)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=root, start_new_session=True
        )
    except OSError as exc:
        raise ConfigError("--ssh", command[0], f"cannot be run ({exc.strerror})", "give the ssh command") from exc
    assert process.stdin is not None
    assert process.stdout is not None
    return Link(host, address, tuple(ranks), Reader(process.stdout.fileno()), process.stdin.fileno(), process)


def meet_agents(env: RankEnv, port: int) -> list[Link]:
    """Rank 0 of a launcher: the agents of the other ranks, which `join_run` has made.

    Raises:
        ConfigError: not all of them came.
    """
    found: dict[int, Link] = {}
    with socket.create_server(("", port)) as server:
        deadline = time.monotonic() + _MEET_S
        while len(found) < env.world_size - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (address, *_) = server.accept()
            except TimeoutError as exc:
                missing = sorted(set(range(1, env.world_size)) - set(found))
                rule = f"ranks {', '.join(map(str, missing))} did not come within {_MEET_S:g} s"
                raise ConfigError("launcher", env.launcher, rule, "see their output") from exc
            connection.settimeout(None)
            fd = connection.detach()
            reader = Reader(fd)
            for hello in reader.read() or ():
                rank = int(hello["rank"])
                found[rank] = Link(str(hello["host"]), str(address), (rank,), reader, fd)
    return [found[rank] for rank in sorted(found)]


def join_run(env: RankEnv, address: str, port: int) -> None:
    """Every other rank of a launcher: serve the run of rank 0 until it ends."""
    from bench.accept.agent import serve

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
    """Where rank 0 of a launcher listens: beside MASTER_PORT, which a launcher may hold itself."""
    port = int(os.environ.get("MASTER_PORT", "29500"))
    address = os.environ.get("MASTER_ADDR") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    return address, port + 1 if port < 65535 else port - 1
