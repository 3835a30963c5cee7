"""Rendezvous of the ranks of a run: a Redis server given by URL, else an embedded Redis, else TCPStore on loopback.

The parent process of a run opens it and passes the ranks an `init_method` for torch.distributed. Ranks started by
another launcher have no such parent and rendezvous at rank 0 (`init_method_under`). Nothing here imports torch, so
that a process that only launches starts quickly.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from netlayer.environ import check_loopback
from netlayer.errors import ConfigError, NetlayerError
from netlayer.store.redis_server import OLDEST_REDIS, EmbeddedRedis, find_redis_binary

if TYPE_CHECKING:
    from netlayer.launch.rank import RankEnv

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0
SCHEMES = ("redis", "rediss", "unix")
_MASTER_PORT = 29500  # torch's own default


@dataclass(frozen=True)
class MeetingPlace:
    """An open store server; `url` is empty if the ranks use a TCPStore of rank 0.

    Args:
        url: address of the Redis server.
        description: kind of store, for reports; never contains a password.
        runs: run ids handed out so far.
    """

    url: str
    description: str
    runs: list[str] = field(default_factory=list, repr=False)

    def init_method(self, run: str) -> str:
        """Return a new, unique `init_method` for one process group; `run` is part of its run id."""
        if not self.url:
            return _loopback_url()
        self.runs.append(f"{run}-{secrets.token_hex(4)}")
        return with_run(self.url, self.runs[-1])


@contextmanager
def meeting_place(url: str = "") -> Iterator[MeetingPlace]:
    """Open the store for the rendezvous; an embedded server stops at the end of the block.

    Raises:
        ConfigError: `url` is not a redis://, rediss:// or unix:// address, or the loopback interface is down.
        StoreUnreachable: no server answers there, or the embedded server does not start.
    """
    check_loopback()
    if url:
        parsed = urlsplit(with_run(url, "check"))
        _ping(url)
        place = MeetingPlace(url, f"Redis at {parsed.hostname or parsed.path}")
        try:
            yield place
        finally:
            _clear(place)
    elif importlib.util.find_spec("redis") is None or find_redis_binary() is None:
        missing = "no redis package" if importlib.util.find_spec("redis") is None else "no redis-server"
        yield MeetingPlace("", f"TCPStore on loopback ({missing} on this machine)")
    else:
        with EmbeddedRedis() as server:
            yield MeetingPlace(server.url, f"embedded Redis from {find_redis_binary()}")


def init_method_under(env: RankEnv) -> str:
    """Return the `init_method` for ranks of another launcher: `env://`, or rank 0's address.

    srun and mpirun do not set MASTER_ADDR, which is needed only if the ranks run on several hosts.

    Raises:
        ConfigError: the ranks run on several hosts and MASTER_ADDR is not set.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return "env://"
    if env.world_size > env.local_world_size and "MASTER_ADDR" not in os.environ:
        rule = "is not set, and the ranks run on several hosts"
        raise ConfigError("MASTER_ADDR", None, rule, "export the name of rank 0's host, or start with torchrun")
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", str(_MASTER_PORT))
    return f"tcp://{address}:{port}"


def register_schemes(init_method: str) -> None:
    """Register our URL schemes with torch if this address has one of them; others need no import of redis."""
    if init_method.partition("://")[0] in SCHEMES:
        import netlayer.init_method  # noqa: F401 - importing it registers the schemes


def check_url(url: str) -> None:
    """Refuse an address with an unescaped /, ? or # in user or password: the rest would be parsed as a path.

    Raises:
        ConfigError: there is an @ after the first /, ? or #. The message shows no part of the URL, which may have the
            password.
    """
    scheme, _, rest = url.partition("://")
    if scheme in ("redis", "rediss") and "@" in rest[len(re.split(r"[/?#]", rest, maxsplit=1)[0]) :]:
        rule = "has an @ behind its first /, ? or #"
        remedy = "percent-encode these in user, password, path and options: / as %2F, ? as %3F, # as %23, @ as %40"
        raise ConfigError("store url", None, rule, remedy)


def with_run(url: str, run: str) -> str:
    """Return the server's address with a run id, as `netlayer.init_method` reads it.

    `redis://host:port/DB` becomes `redis://host:port/RUN?db=DB`; `unix:///socket` becomes `unix:///socket?run=RUN`.

    Raises:
        ConfigError: the scheme is not supported, or the path of a redis:// address is not a database number.
    """
    check_url(url)
    parts = urlsplit(url)
    query = parse_qsl(parts.query)
    if parts.scheme not in SCHEMES:
        raise ConfigError("job.store.url", None, "is no redis://, rediss:// or unix:// address", "correct it")
    if parts.scheme == "unix":  # not geturl(), which would drop the empty authority of unix:///path
        return f"unix://{parts.netloc}{parts.path}?{urlencode([*query, ('run', run)])}"
    database = parts.path.strip("/")
    if database and not database.isdigit():
        raise ConfigError("job.store.url", None, "its path is no database number", "drop the path, or write /0")
    return parts._replace(path=f"/{run}", query=urlencode([*query, ("db", database)] if database else query)).geturl()


def _clear(place: MeetingPlace) -> None:
    """Remove the keys of runs whose ranks were killed; ranks that leave normally remove them by themselves."""
    from netlayer.store.redis_run import remove_run

    for run in place.runs:
        try:
            remove_run(place.url, run, _PING_TIMEOUT_S)
        except NetlayerError as exc:  # not worth failing the run
            logger.warning("the keys of run %s stay on the server: %s", run, exc)


def _ping(url: str) -> None:
    """Check that a new enough Redis server answers, before anything is started that would wait for it."""
    from netlayer.store.redis_link import RedisLinks

    links = RedisLinks(url, lambda _ask: None, _PING_TIMEOUT_S)
    try:
        [info] = links.ask([("INFO", "server")], time.monotonic() + _PING_TIMEOUT_S, patient=False)
    finally:
        links.close()
    match = re.search(r"\bredis_version:(\d+)\.(\d+)", bytes(info).decode())
    if match and (int(match[1]), int(match[2])) < OLDEST_REDIS:
        version = f"{match[1]}.{match[2]}"
        raise ConfigError(
            "job.store.url", None, f"the server is Redis {version}, which lacks BLMOVE", "give Redis >= 6.2"
        )


def _loopback_url() -> str:
    """Return a TCPStore address on a free port."""
    return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


def free_port(address: str) -> int:
    """Return a port that is free at an address of this host, and that no outgoing connection is given meanwhile.

    Rank 0 listens there seconds later, once it has imported torch: a port that the kernel hands out by itself may then
    belong to a connection of any process of the host (EADDRINUSE).

    Raises:
        OSError: the address is none of this host.
    """
    for port in random.SystemRandom().sample(_fixed_ports(), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _fixed_ports() -> Sequence[int]:
    """Return the unprivileged ports that the kernel gives to no outgoing connection, 50 at least."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        first, last = 32768, 60999  # Linux's default
    below, above = range(10_000, first), range(last + 1, 65_536)
    return next((ports for ports in (below, above) if len(ports) >= 50), range(10_000, 65_536))
