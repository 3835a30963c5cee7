"""Connections to one Redis server that survive its restarts: deadlines, retries, and writes that run exactly once.

Each call borrows a connection exclusively and returns it, so no two threads share one, and a forked child opens its
own. A lost connection is reopened with exponential back-off and jitter until the deadline of the call. A write is a
script with a serial number: if it is sent again because the answer was lost, it still runs once. Not covered: Redis
Cluster and Sentinel.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - socket loads it for the first host name, under the user's clock
import hashlib
import itertools
import logging
import math
import os
import random
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import unwrap
from pathlib import Path
from typing import Any, TypeVar

from redis import ConnectionPool
from redis.connection import AbstractConnection
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as ConnectionBroken
from redis.exceptions import TimeoutError as AnswerLate

from netlayer.errors import ConfigError, NetlayerError, StoreError, StoreLost, StoreUnreachable
from netlayer.store.meeting import check_url

__all__ = ["Command", "RedisLinks", "Script"]

logger = logging.getLogger(__name__)

Command = tuple[str | bytes | int, ...]
Reply = Any  # what the Redis protocol can say: None, int, bytes or a list of these
T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5.0
_LEAST_CONNECT_S = 0.5  # a socket takes zero for "do not wait at all"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_SHORTEST_BLOCK_S = 0.01  # Redis 6.2 reads less than a millisecond as "forever"
_LONGEST_BLOCK_S = 1e8  # three years; longer waits are without limit
_LOG_EVERY_S = 10.0  # while no server answers
_LAST_MESSAGE_BYTES = 1024
_GRACE_S = 1.0  # the server's own timer ends a blocked command; the client's deadline is this much later
_jitter = random.SystemRandom()  # independent of the user's random seed
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
# A host that dies in silence is noticed after 10 + 3 * 5 s, also by a thread that waits for an answer.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


_GIVE_AUTHORITY = "give its authority as ?ssl_ca_certs=/path/ca.pem"
# Remedy for each part of OpenSSL's reason.
_CERTIFICATE_REMEDIES = {
    "expired": "renew it on the server, or correct this machine's clock",
    "not yet valid": "correct this machine's clock, or the certificate on the server",
    "ostname mismatch": "write the host name that it was made for, or add ?ssl_check_hostname=false",
    "IP address mismatch": "write the host name that it was made for, or add ?ssl_check_hostname=false",
}
_CODES = {NoPermissionError: "NOPERM ", ReadOnlyError: "READONLY ", OutOfMemoryError: "OOM "}
# Rule that is broken, and remedy, for each part of the server's answer.
_REFUSALS = {
    "READONLY": (
        "must name the primary, this server is a replica of another",
        "give the address that INFO replication shows there as master_host",
    ),
    "NOPERM": (
        "its user must be allowed what the store does",
        "ACL SETUSER NAME ~netlayer:* +@read +@write +@blocking +@scripting +@connection +info",
    ),
    "MOVED ": ("must name one server, this is a node of a Redis Cluster", "give a Redis without cluster-enabled"),
    "CLUSTERDOWN": ("must name one server, this is a node of a Redis Cluster", "give a Redis without cluster-enabled"),
    "DB index is out of range": ("has a database number that the server does not have", "write /0, or no number"),
}
# Remedy for a server that accepted the connection and fails later, for each part of its answer.
_FAILING = {
    "OOM command not allowed": "raise maxmemory there, or remove what killed runs left (netlayer.store.remove_run)",
    "MISCONF": "free the server's disk: it cannot write its data there, and its log says why",
}


class Script:
    """A Lua script; sent by its hash, and in full if the server does not have it cached."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisLinks:
    """All connections of one process to one server.

    Args:
        url: `redis://[user:password@]host:port/db`, `rediss://...?ssl_ca_certs=/path/ca.pem`, `unix:///path`.
        admit: called on every new connection, with a function that sends one command and returns its answer.
        timeout_s: longest time of one attempt to connect, in seconds.
    """

    def __init__(self, url: str, admit: Callable[[Callable[..., Reply]], None], timeout_s: float) -> None:
        self._admit = admit
        self._pool, first = _parse(url, max(min(_CONNECT_TIMEOUT_S, timeout_s), _LEAST_CONNECT_S), self._on_connect)
        self.address = _address(url, self._pool.connection_kwargs)
        self.closed = False
        self._pid = os.getpid()
        self._idle = deque([_Link(first)])
        self._lent: set[_Link] = set()

    def ask(
        self,
        commands: Sequence[Command],
        deadline: float,
        *,
        patient: bool = True,
        reconnect_until: float = math.inf,
    ) -> list[Reply]:
        """Send idempotent commands in one round trip and return their answers.

        Args:
            commands: commands that may safely be sent again.
            deadline: monotonic time by which the answers must arrive.
            patient: if False, try only once.
            reconnect_until: monotonic time until which a broken connection is reopened; at least one retry is made.
        """
        return self._persist(
            deadline, lambda link: link.exchange(commands, deadline), patient=patient, reconnect_until=reconnect_until
        )

    def run(
        self,
        script: Script,
        namespace: bytes,
        arguments: Sequence[str | bytes | int],
        deadline: float,
        reconnect_until: float = math.inf,
    ) -> Reply:
        """Run a writing script once: it gets the connection's name and a serial number before `arguments`."""
        link = self._borrow()
        link.serial += 1
        command = (1, namespace, link.name, link.serial, *arguments)
        return self._persist(
            deadline,
            lambda link: link.evaluate(script, command, deadline),
            link=link,
            reconnect_until=reconnect_until,
        )

    def block(self, commands: Callable[[str], list[Command]], deadline: float) -> list[Reply] | None:
        """Send blocking commands (BLMOVE, BLPOP) and return their answers; None at the deadline.

        `commands` is called for every attempt with the remaining seconds, formatted for Redis.
        """
        return self._persist(deadline, lambda link: link.block(commands, deadline))

    def close(self) -> None:
        """Close every connection; a call that is under way in another thread fails with StoreError."""
        self.closed = True
        for link in tuple(self._lent):
            link.hang_up()
        while self._idle:
            self._idle.pop().connection.disconnect()

    def _persist(
        self,
        deadline: float,
        attempt: Callable[[_Link], T],
        *,
        link: _Link | None = None,
        patient: bool = True,
        reconnect_until: float = math.inf,
    ) -> T:
        """Call `attempt` on a link until it succeeds, connecting again and logging while the server does not answer.

        Args:
            deadline: monotonic time by which an attempt must succeed.
            link: None: one that is free.
            patient: if False, try only once.
            reconnect_until: monotonic time until which a broken connection is reopened; at least one retry is made.
        """
        link = link or self._borrow()
        logged_s = -math.inf
        try:
            for failures in itertools.count():
                try:
                    with link.dropped_on_error():
                        return attempt(link)
                except (ConnectionBroken, AnswerLate) as exc:
                    until = (
                        min(deadline, reconnect_until) if failures and isinstance(exc, ConnectionBroken) else deadline
                    )
                    self._raise_if_hopeless(exc, until if patient else 0.0)
                    # One may be a server that closes idle connections.
                    if failures >= 1 and time.monotonic() >= logged_s + _LOG_EVERY_S:
                        logged_s, remaining_s = time.monotonic(), until - time.monotonic()
                        patience = f"for another {remaining_s:.0f} s" if math.isfinite(remaining_s) else "without end"
                        logger.warning("no answer from the store at %s (%s); trying %s", self.address, exc, patience)
                except RedisError as exc:
                    raise _refusal(exc, self.address) from exc
                time.sleep(min(_pause(failures), max(deadline - time.monotonic(), 0)))
        finally:
            self._give_back(link)
        raise AssertionError("unreachable")

    def _raise_if_hopeless(self, exc: Exception, deadline: float) -> None:
        if isinstance(exc.__context__, ssl.SSLCertVerificationError):
            reason = exc.__context__.verify_message
            remedy = next((text for part, text in _CERTIFICATE_REMEDIES.items() if part in reason), _GIVE_AUTHORITY)
            rule = f"the server's certificate must be valid ({reason.rstrip('.')})"
            raise ConfigError("store url", self.address, rule, remedy) from exc
        if self.closed:
            raise StoreError(f"the store at {self.address} was closed under way; open a new RedisStore") from exc
        if time.monotonic() >= deadline and "max number of clients" in str(exc):
            rule = f"of the server at {self.address} is reached, and each rank needs a connection"
            remedy = "raise it there (CONFIG SET maxclients, and the server's ulimit -n)"
            raise ConfigError("maxclients", None, rule, remedy) from exc
        if time.monotonic() >= deadline:
            # TLS mismatch gives no reason: a plain server waits for the rest of a line, a TLS-only one hangs up.
            other = "rediss://, where it speaks TLS" if self.address.startswith("redis:") else "redis://, without TLS"
            scheme = "" if self.address.startswith("unix:") else f" (or write {other})"
            remedy = f"start a Redis server there or correct the store's URL{scheme}"
            raise StoreUnreachable(f"no store answers at {self.address} ({exc}); {remedy}") from exc

    def _borrow(self) -> _Link:
        if self.closed:
            raise StoreError(f"the store at {self.address} is closed; open a new RedisStore")
        if self._pid != os.getpid():  # a forked child must not speak on its parent's connections
            self._pid, self._idle, self._lent = os.getpid(), deque(), set()
        try:
            link = self._idle.pop()
        except IndexError:
            link = _Link(self._pool.connection_class(**self._pool.connection_kwargs))
        self._lent.add(link)
        return link

    def _give_back(self, link: _Link) -> None:
        self._lent.discard(link)
        self._idle.append(link)
        if self.closed:
            self.close()

    def _on_connect(self, connection: Any) -> None:
        def ask(*command: str | bytes | int) -> Reply:
            connection.send_command(*command)
            return connection.read_response()

        try:
            with _last_message_kept(connection):
                connection.on_connect()
                self._admit(ask)
        except (AuthenticationError, ResponseError) as exc:
            raise _refusal(exc, self.address, joining=True) from exc


class _Link:
    """One connection, in the hands of one thread; it connects when it is used."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.name = secrets.token_hex(8)
        self.serial = 0

    @contextlib.contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Close the connection on any error: an unread answer must not be taken for that of the next command."""
        try:
            yield
        except BaseException:
            self.connection.disconnect()
            raise

    def hang_up(self) -> None:
        """Wake the thread that reads from this connection: it sees the end of the stream."""
        opened = getattr(self.connection, "_sock", None)
        if opened is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        self._send(commands)
        replies = [self._read(deadline - time.monotonic()) for _ in commands]
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    def evaluate(self, script: Script, command: Command, deadline: float) -> Reply:
        try:
            return self.exchange([("EVALSHA", script.sha, *command)], deadline)[0]
        except NoScriptError:
            return self.exchange([("EVAL", script.text, *command)], deadline)[0]

    def block(self, commands: Callable[[str], list[Command]], deadline: float) -> list[Reply] | None:
        sent = commands(_block_seconds(deadline - time.monotonic()))
        self._send(sent)
        replies: list[Reply] = []
        for _ in sent:
            try:
                reply = self._read(deadline - time.monotonic() + (0 if replies else _GRACE_S))
            except AnswerLate:
                reply = None
                self.connection.disconnect()
            if isinstance(reply, ResponseError):
                raise reply
            if reply is None:
                if len(sent) > 1:  # each of the other commands would wait as long again
                    self.connection.disconnect()
                return None
            replies.append(reply)
        return replies

    def _send(self, commands: Sequence[Command]) -> None:
        self.connection.send_packed_command(self.connection.pack_commands(commands))

    def _read(self, seconds: float) -> Reply:
        """Return the next answer; an error reply of the server is returned, not raised."""
        timeout = None if seconds > _LONGEST_BLOCK_S else max(seconds, _SHORTEST_BLOCK_S)
        if not self.connection.can_read(timeout):
            raise AnswerLate(f"no answer in {seconds:.1f} s")
        try:
            return self.connection.read_response()
        except ResponseError as exc:
            return exc


@contextlib.contextmanager
def _last_message_kept(connection: Any) -> Iterator[None]:
    """Add the server's last message ("max number of clients reached") to the error of a broken connection.

    A write may fail first; redis-py then closes the socket with that message unread.
    """
    spare = os.dup(connection._sock.fileno())
    try:
        yield
    except ConnectionBroken as exc:
        message = b""
        with contextlib.suppress(OSError):
            message = os.read(spare, _LAST_MESSAGE_BYTES)  # returns at once: the socket was shut down
        if message.startswith(b"-"):
            raise ConnectionBroken(message[1:].decode(errors="replace").strip()) from exc
        raise
    finally:
        os.close(spare)


def _refusal(exc: RedisError, address: str, *, joining: bool = False) -> NetlayerError:
    """Translate an error reply of the server to our error, with a remedy.

    Redis before 7 puts a text of its own before the error of a command inside a script, so the code is searched
    anywhere in the reply.
    """
    # redis-py removes the code from a reply for which it has a class.
    code = next((code for kind, code in _CODES.items() if isinstance(exc, kind)), "")
    answer = f"{code}{exc}"
    # `LOST` of redis_scripts, which imports this module.
    if "LOSTDATA" in answer:
        name = answer.partition("LOSTDATA ")[2]
        return StoreLost(
            f"store lost its data: the server at {address} no longer holds {name!r} of this run; it evicted keys or "
            "was emptied: start the run again, on a server with maxmemory-policy noeviction"
        )
    rule, remedy = next(
        (entry for part, entry in _REFUSALS.items() if part in answer),
        ("the server must let us in", "correct user, password and database number in the store's URL")
        if joining
        else ("", ""),
    )
    if rule:
        return ConfigError("store url", address, f"{rule} ({answer})", remedy)
    remedy = next((entry for part, entry in _FAILING.items() if part in answer), "")
    return StoreError(f"the store at {address} refuses a command: {answer}" + (f"; {remedy}" if remedy else ""))


def _block_seconds(left: float) -> str:
    if left > _LONGEST_BLOCK_S:
        return "0"
    return f"{max(math.ceil(left * 1000) / 1000, _SHORTEST_BLOCK_S):.3f}"


def _pause(failures: int) -> float:
    # The jitter keeps thousands of ranks from coming back in the same instant.
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures, 16), _LONGEST_PAUSE_S) * _jitter.uniform(0.5, 1.0)


def _parse(url: str, connect_timeout: float, on_connect: Callable[[Any], None]) -> tuple[ConnectionPool, Any]:
    """Return the connection pool and a first, unopened connection, whose construction checks the options."""
    rule = "must be redis://[user:password@]host:port/db, rediss://... or unix:///path, with options of redis-py"
    check_url(url)
    options: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout,
        "socket_timeout": connect_timeout,  # of the handshake; every other answer has the deadline of its call
        "protocol": 2,
        "redis_connect_func": on_connect,
    }
    if "driver_info" in unwrap(AbstractConnection.__init__).__code__.co_varnames:
        options["driver_info"] = None  # saves two round trips on every connection; redis-py 7.2 and later
    if not url.startswith("unix:"):
        keepalive = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
        options |= {"socket_keepalive": True, "socket_keepalive_options": keepalive}
    try:
        pool = ConnectionPool.from_url(url, **options)
        first = pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        # `from None`: what the parsers say may quote a part of the password.
        raise ConfigError("store url", None, rule, "correct the store's URL") from None
    for option in _FILE_OPTIONS:
        path = pool.connection_kwargs.get(option)
        if path and not Path(path).exists():
            raise ConfigError(option, path, "the file must exist", "correct the option in the store's URL")
    return pool, first


def _address(url: str, options: dict[str, Any]) -> str:
    """Return the URL without user, password and options, for messages."""
    scheme = url.partition("://")[0]
    if "path" in options:
        return f"{scheme}://{options['path']}"
    return f"{scheme}://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db', 0)}"
