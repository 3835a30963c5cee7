"""Lines of JSON between the run, its agents and their workers, over pipes and sockets.

One object a line; nothing that is read is executed or unpickled. Left out: who sends what (`agent`, `fleet`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

_CHUNK_BYTES = 1 << 16
JOB = "job "
"""With this begin the names of an agent's children that measure NICs."""
Message = dict[str, Any]


class Reader:
    """Whole lines out of a file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._left = b""

    def read(self) -> list[Message] | None:
        """What has come, waiting for the first byte of it; None at the end."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except ConnectionError:
            return None
        if not chunk:
            return None
        *lines, self._left = (self._left + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b"{")]


def write(fd: int, message: Mapping[str, Any]) -> None:
    """One message, whole.

    Raises:
        OSError: nobody reads any more.
    """
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        left = left[os.write(fd, left) :]
