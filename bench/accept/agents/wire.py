"""Messages between the run, its agents and their workers: JSON lines over pipes and sockets.

One object a line; nothing that is read is executed or unpickled. `agent` and `fleet` define the messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

_CHUNK_BYTES = 1 << 16
JOB = "job "
"""Prefix of the names of an agent's child processes that measure NICs."""
Message = dict[str, Any]


class Reader:
    """Reader of complete lines from a file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._left = b""

    def read(self) -> list[Message] | None:
        """Wait for data and return the complete messages; None at the end of the stream."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except ConnectionError:
            return None
        if not chunk:
            return None
        *lines, self._left = (self._left + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b"{")]


def write(fd: int, message: Mapping[str, Any]) -> None:
    """Write one message completely.

    Raises:
        OSError: the reader is gone.
    """
    remaining = memoryview(json.dumps(message).encode() + b"\n")
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]
