"""Rows for NCCL's example tuner plugin: the CSV file that NCCL_TUNER_CONFIG_FILE names, and how the plugin reads it.

Read from github.com/NVIDIA/nccl, plugins/tuner/example/plugin.c and src/enqueue.cc (2.31). What a writer must know:

- Names that the plugin does not know are taken for others in silence: an unknown collective for allreduce, an unknown
  algorithm for ring, an unknown protocol for simple.
- Lines are read 255 bytes at a time: the rest of a longer one, a comment too, is read as a line of its own.
- The first row that matches decides; one whose algorithm NCCL cannot run there is passed over.
- The plugin answers 1 channel where no row matches, and where a row says -1, and NCCL takes any answer but 0 for its
  own. So a file that does not name the channels of every collective and size holds the others to one channel: `check`
  refuses it. The plugin's own page says that -1 keeps NCCL's number.
- A size is that of the whole buffer (the largest of send and receive), bounds inclusive; 4294967295, which that page
  gives for "all sizes", leaves collectives of 4 GiB and more without a row.
- Send and receive are not asked for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from netlayer.errors import ConfigError

Collective = Literal["broadcast", "reduce", "allgather", "reducescatter", "allreduce"]
COLLECTIVES: tuple[Collective, ...] = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
MOST_BYTES = 2**64 - 1
"""Largest size_t: strtoull reads it, and no collective is larger."""
MOST_CHANNELS = 64
"""MAXCHANNELS of NCCL."""
_LINE_BYTES = 255  # fgets with a buffer of 256 reads one less
_REQUIRED, _MOST_FIELDS = 8, 10
_ANY = -1
HEADER = "# colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"


@dataclass(frozen=True)
class TunerRow:
    """One row. -1 matches any number of nodes, ranks, operations, and buffers of either kind.

    Args:
        min_bytes, max_bytes: of the whole buffer, both inclusive.
        channels: 1 to 64; -1 is one, see the module's text.
        has_registered_buffers: 0 no, 1 yes.
    """

    collective: Collective
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int
    num_nodes: int = _ANY
    num_ranks: int = _ANY
    num_pipe_ops: int = _ANY
    has_registered_buffers: int = _ANY

    def line(self) -> str:
        """Return the line of the file."""
        return ",".join(
            str(value)
            for value in (
                self.collective,
                self.min_bytes,
                self.max_bytes,
                self.algorithm,
                self.protocol,
                self.channels,
                self.num_nodes,
                self.num_ranks,
                self.num_pipe_ops,
                self.has_registered_buffers,
            )
        )

    def matches(self, collective: str, num_bytes: int, num_nodes: int, num_ranks: int) -> bool:
        """Whether the plugin takes this row for a collective of one operation whose buffers are of either kind."""
        return (
            self.collective == collective
            and self.min_bytes <= num_bytes <= self.max_bytes
            and self.num_nodes in (_ANY, num_nodes)
            and self.num_ranks in (_ANY, num_ranks)
            and self.num_pipe_ops == _ANY
            and self.has_registered_buffers == _ANY
        )


def read_rows(text: str) -> list[TunerRow]:
    """Read a file as the plugin does: what it makes of each line, wrong names and cut lines included."""
    rows = []
    for line in _as_read(text):
        if line[0] in "#\n" or not (content := line.split("\n")[0]):
            continue
        # strtok takes several commas for one, and so has no empty fields.
        fields = [field.strip(" \t") for field in content.split(",") if field][:_MOST_FIELDS]
        if len(fields) < _REQUIRED:
            continue
        numbers = [_c_int(field) for field in fields[5:]]
        rows.append(
            TunerRow(
                next((known for known in COLLECTIVES if known == fields[0]), "allreduce"),
                _c_unsigned(fields[1]),
                _c_unsigned(fields[2]),
                fields[3] if fields[3] in ALGORITHMS else "ring",
                fields[4] if fields[4] in PROTOCOLS else "simple",
                *numbers,
            )
        )
    return rows


def channels_of(rows: Sequence[TunerRow], collective: str, num_bytes: int, num_nodes: int, num_ranks: int) -> int:
    """Return the channels that NCCL runs a collective with under the plugin: 1 where no row names a number."""
    row = next((row for row in rows if row.matches(collective, num_bytes, num_nodes, num_ranks)), None)
    return 1 if row is None or row.channels == _ANY else row.channels


def check(rows: Sequence[TunerRow], communicators: Sequence[tuple[int, int]], text: str = "") -> None:
    """Refuse rows that the plugin would take otherwise than written, or that leave something to one channel.

    Args:
        communicators: (nodes, ranks) of those that the job makes.
        text: the file that they were written to, whose lines are looked at too.

    Raises:
        ConfigError: a name or a number is none; a collective has sizes without a row; a line is too long.
    """
    for row in rows:
        for field, value, known in (
            ("algorithm", row.algorithm, ALGORITHMS),
            ("protocol", row.protocol, PROTOCOLS),
            ("colltype", row.collective, COLLECTIVES),
        ):
            if value not in known:
                rule = "is not known to NCCL's example tuner, which would take another in silence"
                raise ConfigError(f"tuner.{field}", value, rule, f"give one of {', '.join(known)}")
        if not 1 <= row.channels <= MOST_CHANNELS:
            rule = f"is not in 1..{MOST_CHANNELS}; NCCL's example tuner makes one channel of -1"
            raise ConfigError("tuner.channels", row.channels, rule, "name the number of channels")
        if row.min_bytes > row.max_bytes:
            raise ConfigError("tuner.minbytes", row.min_bytes, f"is above maxbytes = {row.max_bytes}", "swap them")
    for (num_nodes, num_ranks), collective in itertools.product(communicators, COLLECTIVES):
        gap = first_gap(rows, collective, num_nodes, num_ranks)
        if gap is not None:
            where = f"{num_ranks} ranks on {num_nodes} nodes"
            rule = f"has no row for {gap:,} bytes on {where}, which NCCL's example tuner runs on 1 channel"
            raise ConfigError("tuner", collective, rule, "measure it too, or write no file at all")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line.encode()) + 1 > _LINE_BYTES:
            rule = f"has {len(line.encode())} bytes, and the plugin reads {_LINE_BYTES} at a time"
            raise ConfigError("tuner", f"line {number}", rule, "shorten it")


def first_gap(rows: Sequence[TunerRow], collective: str, num_nodes: int, num_ranks: int) -> int | None:
    """Return the least size that no row takes on a communicator, whatever its buffers; None where all have one."""
    spans = sorted(
        (row.min_bytes, row.max_bytes) for row in rows if row.matches(collective, row.min_bytes, num_nodes, num_ranks)
    )
    covered = -1
    for low, high in spans:
        if low > covered + 1:
            break
        covered = max(covered, high)
    return None if covered >= MOST_BYTES else covered + 1


def to_csv(rows: Sequence[TunerRow], communicators: Sequence[tuple[int, int]], comments: Sequence[str] = ()) -> str:
    """Return the file's text, comments first, each on lines that the plugin reads whole.

    Raises:
        ConfigError: see `check`.
    """
    lines = [f"# {part}" for comment in comments for part in _parts(comment)]
    text = "\n".join([*lines, HEADER, *(row.line() for row in rows)]) + "\n"
    check(rows, communicators, text)
    return text


def _parts(comment: str) -> list[str]:
    return re.findall(r".{1,100}(?:\s|$)", " ".join(comment.split())) or [""]


def _as_read(text: str) -> list[str]:
    """Cut a text into what fgets gives: up to 255 bytes, or a line with its end."""
    pieces = []
    for line in text.splitlines(keepends=True):
        pieces += [line[at : at + _LINE_BYTES] for at in range(0, len(line), _LINE_BYTES)]
    return pieces


def _c_unsigned(text: str) -> int:
    """Convert as strtoull does, a minus sign wrapped around."""
    match = re.match(r"\s*([+-]?)(\d+)", text)
    if match is None:
        return 0
    value = min(int(match[2]), MOST_BYTES)
    return (2**64 - value) % 2**64 if match[1] == "-" else value


def _c_int(text: str) -> int:
    """Convert as atoi does: 0 where there is no number."""
    match = re.match(r"\s*([+-]?\d+)", text)
    return int(match[1]) if match else 0
