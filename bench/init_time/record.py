"""Recording of ranks' store traffic: a relay in front of a real server that keeps and decodes every connection's bytes.

TCPStore's requests are one byte of kind and then numbers and strings with a length of eight bytes in front (torch
2.11 to 2.13); Redis' are arrays of strings (RESP 2). Not covered: TLS, which a relay cannot read.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from netlayer.store import redis_scripts

Protocol = Literal["tcp", "redis"]

_KINDS = (
    "VALIDATE",
    "SET",
    "COMPARE_SET",
    "GET",
    "ADD",
    "CHECK",
    "WAIT",
    "GETNUMKEYS",
    "DELETE_KEY",
    "APPEND",
    "MULTI_GET",
    "MULTI_SET",
    "CANCEL_WAIT",
    "PING",
    "QUEUE_PUSH",
    "QUEUE_POP",
    "QUEUE_LEN",
    "LIST_KEYS",
)
_READ_BYTES = 1 << 16
_SCRIPTS = {
    word: name
    for name in ("ADD", "CLEAR", "COMPARE_SET", "JOIN", "LEAVE", "SET")
    for word in (getattr(redis_scripts, name).text, getattr(redis_scripts, name).sha)
}


@dataclass(frozen=True)
class Operation:
    """One request, as the server sees it.

    Args:
        kind: TCPStore's name of it, or the Redis command.
        key: the first thing that it is about.
        num_bytes: of the whole request on the wire.
    """

    kind: str
    key: str
    num_bytes: int


@dataclass
class Talk:
    """One connection: all bytes to the server, and how many came back."""

    sent: bytearray = field(default_factory=bytearray)
    received_bytes: int = 0

    def operations(self, protocol: Protocol) -> list[Operation]:
        return list((_tcp_operations if protocol == "tcp" else _redis_operations)(bytes(self.sent)))


class Relay:
    """Listens on loopback, or on a unix socket, and passes all on to a server there: `with Relay(port) as relay`.

    Args:
        server: a port of 127.0.0.1, or the path of a unix socket; the relay listens on one of the same kind.
        own: the path to listen on where `server` is a path.
    """

    def __init__(self, server: int | Path, own: Path | None = None) -> None:
        self.talks: list[Talk] = []
        self.port = 0
        self._server, self._own = server, own
        self._loop = asyncio.new_event_loop()
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._stop = asyncio.Event()

    def __enter__(self) -> Relay:
        self._thread.start()
        self._open.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        if isinstance(self._server, Path):
            server = await asyncio.start_unix_server(self._relay, self._own)
        else:
            server = await asyncio.start_server(self._relay, "127.0.0.1", 0, backlog=1024)
            self.port = server.sockets[0].getsockname()[1]
        self._open.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Ends without an error when `_serve` cancels it: asyncio reports a cancelled connection as an exception of its
        # own in Python 3.11. Both sides are closed, whatever ends it.
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError, ConnectionError):
            if isinstance(self._server, Path):
                up_reader, up_writer = await asyncio.open_unix_connection(self._server)
            else:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._server)
            with contextlib.closing(up_writer):
                await self._pass_on(reader, writer, up_reader, up_writer)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        talk = Talk()
        self.talks.append(talk)

        def back(chunk: bytes) -> None:
            talk.received_bytes += len(chunk)

        await asyncio.gather(_pump(reader, up_writer, talk.sent.extend), _pump(up_reader, writer, back))


def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None]) -> Awaitable[None]:
    async def run() -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_READ_BYTES):
                note(chunk)
                writer.write(chunk)
                await writer.drain()
        writer.close()

    return run()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> int:
        value: int
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> bytes:
        length = self.number("<Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def line(self) -> bytes:
        end = self.data.index(b"\r\n", self.at)
        line = self.data[self.at : end]
        self.at = end + 2
        return line


def _tcp_operations(data: bytes) -> Iterator[Operation]:
    read = _Reader(data)
    while read.at < len(data):
        start = read.at
        kind = _KINDS[read.number("<B")]
        yield Operation(kind, _tcp_key(kind, read).decode(), read.at - start)


def _tcp_key(kind: str, read: _Reader) -> bytes:
    """Reads the rest of a request; its first key."""
    if kind in ("VALIDATE", "PING"):
        read.number("<I")
        return b""
    if kind in ("GETNUMKEYS", "CANCEL_WAIT", "LIST_KEYS"):
        return b""
    if kind in ("CHECK", "WAIT", "MULTI_GET"):
        keys = [read.text() for _ in range(read.number("<Q"))]
        return keys[0]
    if kind == "MULTI_SET":
        pairs = [(read.text(), read.text()) for _ in range(read.number("<Q"))]
        return pairs[0][0]
    key = read.text()
    if kind == "ADD":
        read.number("<q")
    else:
        for _ in range({"SET": 1, "APPEND": 1, "COMPARE_SET": 2, "QUEUE_PUSH": 1}.get(kind, 0)):
            read.text()
    return key


def _redis_operations(data: bytes) -> Iterator[Operation]:
    read = _Reader(data)
    while read.at < len(data):
        start = read.at
        parts = []
        for _ in range(int(read.line()[1:])):
            length = int(read.line()[1:])
            parts.append(data[read.at : read.at + length])
            read.at += length + 2
        yield Operation(*_redis_words(parts), read.at - start)


def _redis_words(parts: list[bytes]) -> tuple[str, str]:
    """Return the command of a Redis request and its key; a script of ours by its own name, not EVAL or EVALSHA."""
    kind, first = parts[0].decode().upper(), 1
    if kind in ("EVAL", "EVALSHA"):
        kind = _SCRIPTS.get(parts[1].decode(), kind)
        first = 6  # script, 1, namespace, connection, serial, name
    return kind, parts[first].decode(errors="replace") if len(parts) > first else ""
