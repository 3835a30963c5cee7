"""The files a simulation reads: HPCC's topo.txt (through `topology`) and its flow.txt.

flow.txt is the number of flows, then `src dst priority dport bytes start` a line, the start in seconds. Starts are
kept as integer picoseconds, as written. Left out: htsim's .cm, priorities (every flow is in one class).
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.graph import Graph

Ints = NDArray[np.int64]

_PS = 10**12
_LAST_PORT = 0xFFFF
_MOST_BYTES = 2**50
_MOST_SECONDS = 10**6
_REMEDY = "mend that line"


@dataclass(frozen=True, eq=False)
class FlowSet:
    """Flows in file order; all arrays of shape (num_flows,).

    Args:
        src, dst: node ids of hosts.
        num_bytes: payload.
        start_ps: when the sender is handed the flow.
        dport: UDP destination port, which ECMP hashes.
    """

    src: Ints
    dst: Ints
    num_bytes: Ints
    start_ps: Ints
    dport: Ints

    def __len__(self) -> int:
        return len(self.src)

    @property
    def sport(self) -> Ints:
        """UDP source port: 10000 + n for the n-th flow of a pair."""
        seen: dict[tuple[int, int], int] = {}
        ports = np.empty(len(self), dtype=np.int64)
        for row, pair in enumerate(zip(self.src.tolist(), self.dst.tolist(), strict=True)):
            seen[pair] = seen.get(pair, -1) + 1
            ports[row] = 10_000 + seen[pair]
        return ports


def read_flows(path: Path, fabric: Graph) -> FlowSet:
    """The flows of a flow.txt between the hosts of `fabric`.

    Raises:
        ConfigError: the file cannot be read, its count does not match, or a line is wrong; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--flows", path, f"cannot be read ({exc})", "give HPCC's flow.txt") from exc
    head = lines[0].strip() if lines else ""
    if not (head.isascii() and head.isdigit()):
        raise _wrong(path, 1, head, "is no number of flows", "write how many flows follow")
    rows = [_flow(path, number, text, fabric) for number, text in enumerate(lines[1:], 2) if text.strip()]
    if len(rows) != int(head):
        raise _wrong(path, 1, head, f"flows are promised, {len(rows)} follow", "correct either")
    if not rows:
        raise ConfigError("--flows", path, "holds no flows", "give at least one")
    return FlowSet(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def _flow(path: Path, number: int, text: str, fabric: Graph) -> tuple[int, int, int, int, int]:
    words = text.split()
    if len(words) != 6:
        raise _wrong(path, number, text, f"has {len(words)} words", "write src dst priority dport bytes start")
    src, dst = (_host(path, number, word, fabric) for word in words[:2])
    if src == dst:
        raise _wrong(path, number, text, f"host {src} sends to itself", "leave such a flow out")
    dport = _whole(path, number, words[3], "dport", _LAST_PORT)
    num_bytes = _whole(path, number, words[4], "bytes", _MOST_BYTES)
    return src, dst, num_bytes, _start(path, number, words[5]), dport


def _host(path: Path, number: int, word: str, fabric: Graph) -> int:
    node = int(word) if word.isascii() and word.isdigit() else -1
    if not 0 <= node < fabric.num_nodes or fabric.is_switch[node]:
        raise _wrong(path, number, word, "is no host of the fabric", f"give a host's id below {fabric.num_nodes}")
    return node


def _whole(path: Path, number: int, word: str, name: str, most: int) -> int:
    value = int(word) if word.isascii() and word.isdigit() and len(word) < 19 else 0
    if not 0 < value <= most:
        raise _wrong(path, number, word, f"{name} must be a whole number of 1..{most}", _REMEDY)
    return value


def _start(path: Path, number: int, word: str) -> int:
    try:
        seconds = Decimal(word)
    except InvalidOperation:
        seconds = Decimal(-1)
    if not (seconds.is_finite() and 0 <= seconds <= _MOST_SECONDS):
        raise _wrong(path, number, word, f"start must be seconds of 0..{_MOST_SECONDS}", _REMEDY)
    return int(seconds * _PS)


def _wrong(path: Path, number: int, value: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"--flows {path}, line {number}", value.strip()[:80], rule, remedy)
