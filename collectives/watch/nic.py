"""Bytes that the RDMA ports of this host move, from sysfs, as counters of a run.

Not covered: rates within a step, and counters of errors and congestion (`netlayer nic watch` reads all of them up to a
thousand times a second); which job moved the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from netlayer.errors import HardwareMissing
from netlayer.observe.events.schema import Counter, Origin
from netlayer.observe.port_bytes import BYTE_COUNTERS, SYSFS

_LONGEST = 24  # digits of a counter's text


class NicCounters:
    """The byte counters of all ports, open.

    Args:
        root: `/`, or a copy of a host's sysfs.

    Raises:
        HardwareMissing: there is no RDMA port with counters, or they cannot be read.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files: dict[tuple[str, str], tuple[int, int]] = {}
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        folder = root / SYSFS
        try:
            for path in sorted(folder.glob("*/ports/*/*counters/*")):
                port = f"{path.parts[-5]}/{path.parts[-3]}"
                name, scale = BYTE_COUNTERS.get(path.name, ("", 0))
                if name and (port, name) not in self._files:
                    self._files[port, name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), scale
        except OSError as exc:
            self.close()
            raise HardwareMissing(f"{exc.filename}: cannot be opened ({exc.strerror})") from exc
        if not self._files:
            raise HardwareMissing(f"{folder}: no RDMA port that counts its bytes; is the NIC's driver loaded?")

    def sample(self, origin: Origin, now_ns: int, step: int | None) -> Iterator[Counter]:
        """Yield the bytes of each port and direction since the reading before; none where a counter was reset."""
        for (port, name), (file, scale) in self._files.items():
            text = os.pread(file, _LONGEST, 0).strip()
            if not text.isdigit():
                continue
            total = int(text) * scale
            before_ns, before = self._last.get((port, name), (now_ns, total))
            self._last[port, name] = now_ns, total
            if now_ns > before_ns and total >= before:
                facts = {"port": port}
                moved = float(total - before)
                yield Counter(origin, f"nic.{name}", before_ns, now_ns, moved, "bytes", step, attributes=facts)

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._files.values():
            os.close(file)
        self._files = {}
