"""Statistics of a network interface as `ethtool -S` prints them, asked of the kernel by the same ioctl.

Layouts: include/uapi/linux/ethtool.h (ethtool_sset_info, ethtool_gstrings, ethtool_stats). The names are read once, the
numbers with one call a sample. Not covered: the netlink interface, which has no statistics of a driver's own.
"""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_SET_STATS = 1
_NAME_BYTES = 32
_MISSING = -1
# PFC of each priority, what the port dropped, and that its link went down; mlx5's names, bnxt_en's, ice's.
_WATCHED = re.compile(
    r"[rt]x_prio\d_(pause|pause_duration|pause_transition)|rx_prio\d_discards|[rt]x_discards_phy|link_down_events_phy"
    r"|[rt]x_pause_storm_(warning|error)_events|rx_prio\d_buf_discard"
    r"|pfc_pri\d_[rt]x_(duration_us|transitions)|[rt]x_pfc_ena_frames_pri\d|link_down_events"
    r"|[rt]x_priority_\d_xo(n|ff)\.nic"
)


def is_watched(name: str) -> bool:
    """Whether detection, or a person who looks for its cause, wants this statistic."""
    return _WATCHED.fullmatch(name) is not None


class Ethtool:
    """One interface's statistics; made by `open`."""

    def __init__(self, netdev: str, port: str, sock: socket.socket, names: list[str]) -> None:
        self._sock, self._netdev = sock, netdev
        chosen = [place for place, name in enumerate(names) if is_watched(name) and names.index(name) == place]
        self._places = chosen
        self.columns = [f"{port}/{names[place]}" for place in chosen]
        self._num = len(names)

    @classmethod
    def open(cls, netdev: str, port: str) -> Ethtool | None:
        """The statistics of an interface, as columns of a port; None where its driver has none that is watched."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            names = list_names(sock, netdev)
        except OSError:  # a driver without statistics, or no such interface
            names = []
        if not any(map(is_watched, names)):
            sock.close()
            return None
        return cls(netdev, port, sock, names)

    def read(self) -> list[int]:
        """Return the watched counters; -1 for each if the interface has gone."""
        try:
            numbers = read_numbers(self._sock, self._netdev, self._num)
        except OSError:
            return [_MISSING] * len(self._places)
        return [min(numbers[place], 2**63 - 1) for place in self._places]

    def close(self) -> None:
        self._sock.close()


def list_names(sock: socket.socket, netdev: str) -> list[str]:
    """The names of an interface's statistics, in the kernel's order.

    Raises:
        OSError: there is no such interface, or its driver has no statistics.
    """
    size = _ask(sock, netdev, array.array("B", struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SET_STATS, 0)))
    mask, num = struct.unpack_from("=QI", size, 8)
    if not mask or not num:
        return []
    blank = struct.pack("=III", _GSTRINGS, _SET_STATS, num) + bytes(num * _NAME_BYTES)
    text = _ask(sock, netdev, array.array("B", blank))[12:]
    parts = [text[at : at + _NAME_BYTES] for at in range(0, num * _NAME_BYTES, _NAME_BYTES)]
    return [part.split(b"\0", 1)[0].decode("ascii", "replace") for part in parts]


def read_numbers(sock: socket.socket, netdev: str, num: int) -> tuple[int, ...]:
    """The numbers, in the order of their names.

    Raises:
        OSError: the interface has gone.
    """
    answer = _ask(sock, netdev, array.array("B", struct.pack("=II", _GSTATS, num) + bytes(8 * num)))
    return struct.unpack_from(f"={num}Q", answer, 8)


def _ask(sock: socket.socket, netdev: str, request: array.array[int]) -> bytes:
    address, _ = request.buffer_info()
    name = netdev.encode()
    if len(name) > 15:
        raise OSError(f"{netdev}: no interface has so long a name")
    fcntl.ioctl(sock.fileno(), _SIOCETHTOOL, struct.pack("16sP", name, address))
    return request.tobytes()
