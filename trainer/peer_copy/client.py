"""A client of one store of checkpoints in memory. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from netlayer.remote.http_server import is_same_secret
from trainer.checkpoint.digest import crc32
from trainer.peer_copy.protocol import (
    CHECK,
    FILES,
    FREE,
    HELLO,
    LIMIT,
    LIST,
    MAX_PART_BYTES,
    NONCE,
    PROOF,
    SIGNATURE,
    STORE,
    proof_of,
    signature_of,
)

CONNECT_S = 5.0  # a machine that is gone says nothing at all
ANSWER_S = 120.0  # a busy one reads a part, or compares many gigabytes, before it answers
_MAX_IDLE = 8  # connections that are kept


class StoreGone(ConnectionError):
    """Nobody answers there, or somebody who is not of this run."""


class Connection:
    """A connection to a store, of one thread at a time.

    Raises:
        StoreGone: see there; so do all methods.
    """

    def __init__(self, url: str, token: str) -> None:
        split = urlsplit(url)
        self._token, self._number, self._url = token, 0, url
        self._http = http.client.HTTPConnection(split.hostname or "", split.port, timeout=CONNECT_S)
        own = secrets.token_hex(16)
        try:
            self._http.connect()
            self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            response, _ = self._exchange("GET", HELLO, {NONCE: own}, b"")
            self._http.sock.settimeout(ANSWER_S)
        except StoreGone:
            self.close()
            raise
        except OSError as exc:
            self.close()
            raise StoreGone(f"{url}: {exc}") from exc
        theirs = response.getheader(NONCE, "")
        if not is_same_secret(proof_of(token, own, theirs), response.getheader(PROOF, "")):
            self.close()
            raise StoreGone(f"{url}: another program answers there")
        self._nonces = f"{own}/{theirs}"

    def request(
        self, method: str, target: str, body: memoryview | bytes = b"", span: str = ""
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the answer to a request, read to its end.

        Args:
            span: content of the Range header.
        """
        self._number += 1
        signature = signature_of(self._token, self._nonces, self._number, method, target, span, len(body))
        headers = {SIGNATURE: signature} | ({"Range": span} if span else {})
        return self._exchange(method, target, headers, body)

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the store has not closed it: one that has nothing to say has nothing to read either."""
        sock = self._http.sock
        return sock is not None and not select.select([sock], [], [], 0)[0]

    def close(self) -> None:
        """End it."""
        self._http.close()

    def _exchange(
        self, method: str, target: str, headers: dict[str, str], body: memoryview | bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self._http.request(method, target, body, headers | {"Content-Length": str(len(body))})
            response = self._http.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise StoreGone(f"{self._url}: {exc or type(exc).__name__}") from exc


class Upload:
    """A file on its way into one store, part by part; it is there once `finish` returns.

    Raises:
        OSError: ENOSPC where the store is full, which `free_bytes` then says; StoreGone; or it refuses the file.
    """

    def __init__(self, url: str, token: str, name: str) -> None:
        self._connection, self._name = Connection(url, token), name
        self._offset = self._crc = 0
        self.free_bytes = -1

    def send(self, content: memoryview | bytes) -> None:
        """Send the next part."""
        view = memoryview(content)
        for start in range(0, len(view), MAX_PART_BYTES):
            part = view[start : start + MAX_PART_BYTES]
            self._crc = crc32(part, self._crc)
            self._put(part, f"offset={self._offset}")
            self._offset += len(part)

    def finish(self) -> None:
        """Have the store show it."""
        self._put(b"", f"offset={self._offset}&final=1&crc={self._crc}")
        self._connection.close()

    def discard(self) -> None:
        """Give it up: a store drops what is not whole when its connection ends."""
        self._connection.close()

    def _put(self, content: memoryview | bytes, query: str) -> None:
        response, text = self._connection.request("PUT", f"{FILES}{quote(self._name)}?{query}", content)
        if response.status == 507:
            self.free_bytes = int(response.getheader(FREE, "-1"))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if response.status != 200:
            raise OSError(errno.EIO, f"the store of a peer refuses {self._name}: {text.decode(errors='replace')}")


class StoreClient:
    """Requests to one store, from any thread; connections are kept.

    Args:
        url: of the store.
        token: of the run.

    Raises:
        StoreGone: nobody answers; so do all methods.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def listing(self) -> dict[str, Any]:
        """Return `files` (bytes by name), `limit_bytes` and `free_bytes`."""
        return dict(json.loads(self._ask("GET", LIST)))

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return bytes of a file.

        Raises:
            FileNotFoundError: it is not there, or ends before `start`.
        """
        if start >= end:
            return b""
        return self._ask("GET", f"{FILES}{quote(name)}", span=f"bytes={start}-{end - 1}")

    def remove(self, name: str) -> int:
        """Remove a file, or all of a folder; return how many that were."""
        return int(json.loads(self._ask("DELETE", f"{FILES}{quote(name)}"))["removed"])

    def check(self, name: str) -> list[str]:
        """Have the store compare a file, or all of a folder, with what was sent; return those that it removed."""
        return list(json.loads(self._ask("POST", f"{CHECK}{quote(name)}"))["damaged"])

    def set_limit(self, num_bytes: int) -> None:
        """Say how much memory it may take."""
        self._ask("POST", f"{LIMIT}?bytes={num_bytes}")

    def end(self) -> None:
        """End the store."""
        self._ask("DELETE", STORE)
        self.close()

    def upload(self, name: str) -> Upload:
        """Begin to write a file."""
        return Upload(self.url, self._token, name)

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, method: str, target: str, span: str = "") -> bytes:
        with self._connection() as connection:
            response, body = connection.request(method, target, span=span)
        if response.status in (404, 416):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
        if response.status not in (200, 206):
            raise OSError(errno.EIO, f"{self.url} answers {response.status}: {body.decode(errors='replace')}")
        return body

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        connection = self._live() or Connection(self.url, self._token)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _live(self) -> Connection | None:
        """Return a connection that was kept and that the store has not closed since."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()
