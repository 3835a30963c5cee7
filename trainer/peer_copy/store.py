"""The store of one machine: a process that holds files of checkpoints in memory, and serves them over HTTP.

It outlives the training processes, so that a run which starts again finds there what it had saved last. Files lie in
unnamed memory (memfd): whoever is killed, nothing of them is left. It ends at SIGTERM, when it is told to, and when
nobody of its run has spoken to it for `hold_s`. Needs no torch.

    GET    /v1/hello              nonce and proof of the store: `trainer.peer_copy.protocol`
    GET    /v1/files/NAME         bytes of a file, or of its Range
    PUT    /v1/files/NAME?offset=N&final=0|1&crc=C    the next part of a file; it is there once the last part is
    DELETE /v1/files/NAME         a file, or all below a folder
    GET    /v1/list               names and sizes
    POST   /v1/check/NAME         compare a file, or all below a folder, with what was sent; damaged ones are removed
    POST   /v1/limit?bytes=N      how much memory it may take
    DELETE /v1/store              end

Not covered: who writes which file where (`trainer.peer_copy.filesystem`), and starting it (`trainer.peer_copy.hosts`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from netlayer.remote.http_server import BoundedHandler, BoundedServer, Refusal, is_same_secret
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
    is_name,
    proof_of,
    signature_of,
)

logger = logging.getLogger(__name__)

MEMORY_NAME = "netlayer-peer-copy"  # of the memory files, as /proc shows them
_MAX_CONNECTIONS = 1024
_STRANGER_S = 20.0  # for which a connection may say nothing before it has shown that it holds the token
_SILENT_S = 300.0  # and after that: a writer waits for the other stores
_RECHECK_S = 600.0  # in which a file that was as it was sent is not compared again: all ranks of a start ask
_READ_BYTES = 1 << 20
_POLL_S = 0.2


class _File:
    """A file in memory. Its pages are given back when the last who reads it lets go of it."""

    def __init__(self) -> None:
        self.fd = _unnamed_memory()
        self.size, self.crc = 0, 0
        self.is_good_until_s = 0.0
        self.lock = threading.Lock()  # of who compares it

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


class Contents:
    """Files by name, within a limit of bytes; what is being uploaded counts too.

    Args:
        limit_bytes: of all files together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._files: dict[str, _File] = {}
        self._used = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Return how much there is room for."""
        return max(0, self.limit_bytes - self._used)

    def reserve(self, num_bytes: int) -> bool:
        """Take room for more bytes, where there is."""
        with self._lock:
            if num_bytes > self.free_bytes:
                return False
            self._used += num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        """Give back room."""
        with self._lock:
            self._used -= num_bytes

    def put(self, name: str, file: _File) -> None:
        """Add a file that is whole, in place of one of this name."""
        with self._lock:
            old = self._files.pop(name, None)
            self._files[name] = file
            self._used -= old.size if old else 0

    def get(self, name: str) -> _File | None:
        """Return a file; None: there is none of this name."""
        return self._files.get(name)

    def below(self, name: str) -> dict[str, _File]:
        """Return a file, or all of a folder, by their names; an empty name is the folder of all."""
        with self._lock:
            items = self._files.items()
            return {each: file for each, file in items if not name or f"{each}/".startswith(f"{name}/")}

    def remove(self, name: str) -> int:
        """Remove a file, or all of a folder; return how many that were."""
        there = self.below(name)
        for each, file in there.items():
            self._drop(each, file)
        return len(there)

    def _drop(self, name: str, file: _File) -> None:
        """Remove a file, unless another one has taken its name meanwhile."""
        with self._lock:
            if self._files.get(name) is file:
                del self._files[name]
                self._used -= file.size

    def check(self, name: str) -> list[str]:
        """Compare a file, or all of a folder, with what was sent; remove those that differ, and return their names."""
        damaged = []
        for each, file in self.below(name).items():
            with file.lock:
                if time.monotonic() < file.is_good_until_s:
                    continue
                if _crc_of(file) == file.crc:
                    file.is_good_until_s = time.monotonic() + _RECHECK_S
                    continue
            logger.warning("%s is not as it was sent: removed", each)
            damaged.append(each)
            self._drop(each, file)
        return damaged


def _crc_of(file: _File) -> int:
    if not file.size:
        return 0
    with mmap.mmap(file.fd, file.size, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        return crc32(view)


def _unnamed_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(MEMORY_NAME)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass
class _Upload:
    """A file of which not all parts are there."""

    name: str
    file: _File


class _Handler(BoundedHandler):
    """One connection."""

    timeout = _STRANGER_S
    disable_nagle_algorithm = True
    server: StoreServer

    def setup(self) -> None:
        super().setup()
        self._nonces, self._number = "", 0
        self._upload: _Upload | None = None

    def finish(self) -> None:
        self._drop_upload()  # of a writer that was killed
        super().finish()

    def do_GET(self) -> None:  # noqa: N802  (of http.server)
        self._serve()

    def do_PUT(self) -> None:  # noqa: N802  (of http.server)
        self._serve()

    def do_POST(self) -> None:  # noqa: N802  (of http.server)
        self._serve()

    def do_DELETE(self) -> None:  # noqa: N802  (of http.server)
        self._serve()

    def _serve(self) -> None:
        try:
            length = self.body_length(MAX_PART_BYTES)
            split = urlsplit(self.path)
            path, query = unquote(split.path), dict(parse_qsl(split.query))
            if self.command == "GET" and path == HELLO:
                self._greet()
                return
            self._check_signature(length)
            if self.command != "PUT" and length:
                raise Refusal(400, "a body that nobody asked for", closes=True)
            self._answer(path, query, length)
        except Refusal as exc:
            self.close_connection = self.close_connection or exc.closes
            self._send(exc.status, str(exc).encode())

    def _greet(self) -> None:
        client = self.headers.get(NONCE, "")
        if not 32 <= len(client) <= 128:
            raise Refusal(400, f"{NONCE} is missing")
        own = secrets.token_hex(16)
        self._nonces, self._number = f"{client}/{own}", 0
        self._send(200, b"", {NONCE: own, PROOF: proof_of(self.server.token, client, own)})

    def _check_signature(self, length: int) -> None:
        """Refuse who does not hold the token: see `trainer.peer_copy.protocol`."""
        self._number += 1
        span = self.headers.get("Range", "")
        arguments = self._nonces, self._number, self.command, self.path, span, length
        signature = signature_of(self.server.token, *arguments)
        if not self._nonces or not is_same_secret(signature, self.headers.get(SIGNATURE, "")):
            raise Refusal(401, "the signature is not of this run", closes=True)
        self.connection.settimeout(_SILENT_S)
        self.server.touch()

    def _answer(self, path: str, query: dict[str, str], length: int) -> None:
        contents = self.server.contents
        if path.startswith(FILES):
            name = _checked_name(path.removeprefix(FILES))
            if self.command == "GET":
                self._send_file(name)
            elif self.command == "PUT":
                self._receive(name, query, length)
            else:
                self._send_json({"removed": contents.remove(name)})
        elif (self.command, path) == ("GET", LIST):
            files = contents.below("")
            state = {"limit_bytes": contents.limit_bytes, "free_bytes": contents.free_bytes}
            self._send_json({"files": {name: file.size for name, file in files.items()}, **state})
        elif self.command == "POST" and path.startswith(CHECK):
            self._send_json({"damaged": contents.check(_checked_name(path.removeprefix(CHECK)))})
        elif (self.command, path) == ("POST", LIMIT):
            contents.limit_bytes = _number_of(query, "bytes")
            self._send_json({})
        elif (self.command, path) == ("DELETE", STORE):
            self._send_json({})
            self.server.end()
        else:
            raise Refusal(404, "no such thing")

    def _send_file(self, name: str) -> None:
        file = self.server.contents.get(name)
        if file is None:
            raise Refusal(404, "no such file")
        start, end = self._span(file.size)
        status = 200 if (start, end) == (0, file.size) else 206
        self.send_response(status)
        self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{file.size}")
        self.end_headers()
        if start < end:
            # `file` stays referenced, so its pages do, also where it is removed meanwhile.
            with os.fdopen(os.dup(file.fd), "rb") as stream:
                self.connection.sendfile(stream, start, end - start)

    def _span(self, size: int) -> tuple[int, int]:
        """Return the first byte that is asked for, and the one after the last."""
        text = self.headers.get("Range", "")
        if not text:
            return 0, size
        first, _, last = text.removeprefix("bytes=").partition("-")
        if not (text.startswith("bytes=") and first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise Refusal(400, "a range is bytes=FIRST-LAST")
        if int(first) >= size:
            raise Refusal(416, f"the file has {size} bytes")
        return int(first), min(size, int(last) + 1)

    def _receive(self, name: str, query: dict[str, str], length: int) -> None:
        """Take the next part of a file; after the last one it is there, if its CRC is what was sent."""
        offset, contents = _number_of(query, "offset"), self.server.contents
        if offset == 0:
            self._drop_upload()
            self._upload = _Upload(name, _File())
        upload = self._upload
        if upload is None or upload.name != name or upload.file.size != offset:
            raise Refusal(409, "not the part that comes next", closes=True)
        if not contents.reserve(length):
            for _ in self._body(length):  # so that the other side is there to read the answer
                pass
            free = {FREE: str(contents.free_bytes)}
            self._drop_upload()
            self._send(507, b"the store is full", free)
            return
        upload.file.size += length  # reserved: `_drop_upload` gives it back
        for block in self._body(length):
            os.pwrite(upload.file.fd, block, offset)
            offset += len(block)
            upload.file.crc = crc32(block, upload.file.crc)
        if query.get("final") == "1":
            if upload.file.crc != _number_of(query, "crc"):
                self._drop_upload()
                raise Refusal(422, "what came is not what was sent")
            contents.put(name, upload.file)
            self._upload = None
        self._send_json({})

    def _body(self, length: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(length, _READ_BYTES)))
        while length:
            count = self.rfile.readinto(buffer[: min(length, len(buffer))])
            if not count:
                raise ConnectionResetError
            length -= count
            self.server.touch()
            yield buffer[:count]

    def _drop_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            self.server.contents.release(upload.file.size)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _checked_name(name: str) -> str:
    if not is_name(name):
        raise Refusal(400, "no name of a file")
    return name


def _number_of(query: dict[str, str], key: str) -> int:
    text = query.get(key, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refusal(400, f"{key} is no number", closes=True)
    return int(text)


class StoreServer(BoundedServer):
    """Serves `Contents` on an address, to those who hold the token.

    Args:
        address: to listen on, without a port: a free one is taken.
        token: of the run.
        limit_bytes: of all files together.

    Raises:
        OSError: the address is not of this machine.
    """

    max_connections = _MAX_CONNECTIONS

    def __init__(self, address: str, token: str, limit_bytes: int) -> None:
        if ":" in address:
            self.address_family = socket.AF_INET6
        super().__init__((address, 0), _Handler)
        self.token, self.contents = token, Contents(limit_bytes)
        self._touched_s = time.monotonic()
        self._ended = threading.Event()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def touch(self) -> None:
        """Note that somebody of the run has spoken."""
        self._touched_s = time.monotonic()

    def end(self) -> None:
        """Have `wait` return."""
        self._ended.set()

    def wait(self, hold_s: float) -> str:
        """Serve until it is told to end, or nobody has spoken for so long; return which, in a line."""
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True).start()
        while not self._ended.wait(min(_POLL_S, hold_s)):
            if time.monotonic() > self._touched_s + hold_s:
                return f"nobody of the run has spoken for {hold_s:g} s"
        return "it was told to"


def main(settings_file: str) -> None:
    """Serve as a daemon. The starter gets its child back at once: with 0 somebody listens already."""
    from trainer.peer_copy.hosts import announce_store, forget_store  # here, for it starts this module

    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    token = Path(settings["token_file"]).read_text(encoding="ascii").strip()
    try:
        server = StoreServer(settings["address"], token, settings["limit_bytes"])
    except OSError as exc:
        sys.exit(f"{settings['address']}: {exc.strerror or exc}")
    if os.fork():
        os._exit(0)
    # Ctrl-C and a hang-up are for the training; it stays for the next start. A rank may have held signals back.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _signum, _frame: server.end())
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    folder, machine = Path(settings["folder"]), settings["machine"]
    announce_store(folder, machine, server.url)
    logger.info("process %d serves at %s", os.getpid(), server.url)
    logger.info("process %d ends: %s", os.getpid(), server.wait(settings["hold_s"]))
    forget_store(folder, machine)
    # At once: threads that serve slow readers would hold it up.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
