"""Bounded HTTP server: connections, bodies and silence have limits; who shows a secret, its owner says.

`http.server` has none of these limits: each connection is a thread for as long as the other side likes, and a body is
as long as its header says. Everything here runs before a request is known to be a friend's. Subclasses say what is
served, and who may have it: see `netlayer.observe.page.server` and `trainer.peer_copy.store`.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import logging
import math
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

NETLAYER = "netlayer"
MIN_BYTES_PER_S = 65536
"""Of a body: a slower client holds a place for nothing."""


def is_same_secret(one: str, other: str) -> bool:
    """Compare two texts in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


class Refusal(Exception):
    """A request that is not served.

    Args:
        status: HTTP's.
        text: why, for who asked.
        closes: what follows on the connection cannot be told apart.
    """

    def __init__(self, status: int, text: str, *, closes: bool = False) -> None:
        super().__init__(text)
        self.status, self.closes = status, closes


class BoundedServer(ThreadingHTTPServer):
    """Server of at most `max_connections` connections at a time; further ones are closed unread."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    max_connections = 64

    def __init__(self, *args: Any, **options: Any) -> None:
        self._connections = threading.BoundedSemaphore(self.max_connections)
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started: nobody else gives the place back
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (of socketserver)
        logger.exception("a request of %s failed", client_address)


class _TimedReader(socket.SocketIO):
    """Socket reader with a deadline for a whole request: a client that sends a byte a minute is never silent.

    Args:
        limit_s: from the first byte of a request to its last, unless `extend` adds to it.
    """

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        super().__init__(connection, "r")
        self._connection, self._limit_s = connection, limit_s
        self.begin()

    def begin(self) -> None:
        """Wait for the next request, for as long as the connection may be silent."""
        self._deadline = math.inf

    def extend(self, seconds: float) -> None:
        """Give the request that is being read more time."""
        self._deadline += seconds

    def readinto(self, buffer: Any) -> int | None:
        """Read into `buffer` and return the bytes read.

        Raises:
            TimeoutError: the connection was silent for too long, or the request is not there in time.
        """
        silence = self._connection.gettimeout()
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request takes too long to come")
        self._connection.settimeout(remaining if silence is None else min(remaining, silence))
        try:
            count = super().readinto(buffer)
        finally:
            self._connection.settimeout(silence)
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._limit_s
        return count


class BoundedHandler(BaseHTTPRequestHandler):
    """One connection: it may be silent for `timeout` seconds, and a request's head takes no longer as a whole."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = NETLAYER, ""
    timeout = 60.0

    def setup(self) -> None:
        """Open the connection's streams."""
        super().setup()
        self.rfile.close()
        self._reader = _TimedReader(self.connection, self.timeout)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Answer a request that comes in time."""
        self._reader.begin()
        super().handle_one_request()

    def handle(self) -> None:
        """Answer requests until the other side goes, which is no error."""
        with contextlib.suppress(OSError):
            super().handle()

    def finish(self) -> None:
        """Close the connection, of which the other side may be gone."""
        with contextlib.suppress(OSError):
            super().finish()

    def body_length(self, most: int) -> int:
        """Return the length of the body in bytes, which comes at `MIN_BYTES_PER_S` or is not waited for.

        Raises:
            Refusal: it is not given as a plain number, or more than `most`.
        """
        text = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not text.isascii() or not text.isdigit():
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the length of the body is not given", closes=True)
        if len(text) > len(str(most)) or int(text) > most:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has {most} bytes at most", closes=True)
        self._reader.extend(int(text) / MIN_BYTES_PER_S)
        return int(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (of http.server)
        """Log a line of http.server; it names what was asked, so only on demand."""
        logger.debug("%s %s", self.address_string(), format % args)
