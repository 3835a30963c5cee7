"""Bounded HTTP server: connections, bodies and silence have limits; who shows a secret, its owner says.

`http.server` has none of these limits: each connection is a thread for as long as the other side likes, and a body is
as long as its header says. Everything here runs before a request is known to be a friend's. Subclasses say what is
served, and who may have it: see `netlayer.observe.page.server` and `trainer.peer_copy.store`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

NETLAYER = "netlayer"


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


class BoundedHandler(BaseHTTPRequestHandler):
    """One connection, which may be silent for `timeout` seconds."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = NETLAYER, ""
    timeout = 60.0

    def handle(self) -> None:
        """Answer requests until the other side goes, which is no error."""
        with contextlib.suppress(OSError):
            super().handle()

    def finish(self) -> None:
        """Close the connection, of which the other side may be gone."""
        with contextlib.suppress(OSError):
            super().finish()

    def body_length(self, most: int) -> int:
        """Return the length of the body in bytes.

        Raises:
            Refusal: it is not given as a plain number, or more than `most`.
        """
        text = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not text.isascii() or not text.isdigit():
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the length of the body is not given", closes=True)
        if len(text) > len(str(most)) or int(text) > most:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has {most} bytes at most", closes=True)
        return int(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (of http.server)
        """Log a line of http.server; it names what was asked, so only on demand."""
        logger.debug("%s %s", self.address_string(), format % args)
