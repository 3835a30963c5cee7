"""torch's TCPStore at an address, opened within its timeout, or with one line that says who should have served it.

torch's own client waits for its server in C++: Ctrl-C goes unheard, every attempt is logged with a stack, and the
timeout is taken twice. Here plain sockets wait until something listens, and torch connects then. Not covered: a
listener that is no TCPStore and never answers, for which torch's client waits without end.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from netlayer.errors import ConfigError, StoreUnreachable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore  # which torch's own types do not show

__all__ = ["first_line", "open_tcp_store"]

logger = logging.getLogger(__name__)

_ATTEMPT_S = 2.0  # to connect; Ctrl-C is heard at once in it
_ANSWER_S = 10.0  # torch's client may take so long, twice, for a server that listens already
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_SHORTEST_S = 0.05
_TELL_EVERY_S = 10.0


def open_tcp_store(host: str, port: int, timeout: timedelta, *, serves: bool, server: str = "rank 0") -> TCPStore:
    """A client of the store, and the store itself where this process `serves` it.

    Args:
        timeout: the longest wait for the server, and then the store's own.
        server: who serves the store, in words.

    Raises:
        ConfigError: the port is taken.
        StoreUnreachable: nothing answers at the address within the timeout.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    _await_address(host, port, deadline_s, server, listens=not serves)
    patience = timedelta(seconds=max(min(deadline_s - time.monotonic(), _ANSWER_S), _SHORTEST_S))
    use_libuv = os.environ.get("USE_LIBUV", "1") == "1"
    try:
        store = TCPStore(host, port, None, serves, patience, False, True, use_libuv=use_libuv)
    except RuntimeError as exc:  # torch.distributed's errors are RuntimeErrors
        if serves and "EADDRINUSE" in str(exc):
            rule = "is taken on the machine of rank 0, which serves the store there"
            raise ConfigError("MASTER_PORT", port, rule, "give a free port, or end what listens there") from exc
        if serves:
            rule = f"rank 0 serves it, and cannot reach it there: is {host} this machine?"
        else:
            rule = f"something listens there, but {server}'s store does not answer"
        raise StoreUnreachable(f"no store at {host}:{port} ({first_line(exc)}); {rule}") from exc
    store.set_timeout(timeout)
    return store


def first_line(error: BaseException) -> str:
    """Return the first line of torch's message, without its C++ stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _await_address(host: str, port: int, deadline_s: float, server: str, *, listens: bool) -> None:
    """Return when the host is known and, for `listens`, something listens at the port."""
    pause_s, told_s = _FIRST_PAUSE_S, time.monotonic()
    while (trouble := _trouble(host, port, deadline_s, listens=listens)) is not None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise StoreUnreachable(
                f"no store at {host}:{port} ({trouble}); {server} serves it: has it started, or given up already? "
                "See its log, or correct MASTER_ADDR and MASTER_PORT"
            )
        if time.monotonic() >= told_s + _TELL_EVERY_S:
            told_s = time.monotonic()
            waits = f"no store at {host}:{port} yet ({trouble})"
            logger.warning("%s, which %s serves; trying for another %.0f s", waits, server, left_s)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _trouble(host: str, port: int, deadline_s: float, *, listens: bool) -> str | None:
    """Why the address cannot be used now; None: it can."""
    try:
        if not listens:
            socket.getaddrinfo(host, port)
            return None
        seconds = max(min(deadline_s - time.monotonic(), _ATTEMPT_S), _SHORTEST_S)
        with socket.create_connection((host, port), seconds) as probe:
            # On loopback a socket may be given the very port that it looks for, and so meet itself.
            return "nothing listens there" if probe.getsockname() == probe.getpeername() else None
    except UnicodeError:
        return "it is no host name"
    except OSError as exc:
        return exc.strerror or str(exc)
