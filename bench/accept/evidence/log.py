"""A log as text that is safe to look at, and what a parser makes of it: findings, and figures to compare.

Every parser takes a `Text` and returns a `Log`. What it cannot read it says by `Text.damaged`: file, line, what was
expected there and what to do. Nothing in a log is executed, unpickled, unpacked or looked up.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.verdict import Finding

MAX_BYTES = 16 << 20
MAX_LINE = 16384
MAX_ROWS = 20_000
_AGAIN = "take the log again"
# What `mpirun --tag-output` and `srun --label` put before every line.
_LABEL = re.compile(r"^(?:\[\d{1,9},\d{1,9}\]<std(?:out|err)>:[ \t]?|\d{1,9}: )")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202f\u2066-\u2069\ufffe\uffff]|[\ud800-\udfff]")
_MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}


@dataclass(frozen=True)
class Figure:
    """A measurement that its peers and expectations are held against.

    Args:
        series: what it measures; only figures of one series and one `at` are alike.
        at: the point of the series: size and place.
        subject: whom it speaks of.
        value: in `unit`, finite and above zero.
        line: of the log.
        parts: who takes part in it, where that is more than one: the two GPUs of a pair.
        facts: what an expectation may be keyed by; what the log does not say is left out.
    """

    series: str
    at: str
    subject: str
    value: float
    unit: str
    line: int
    higher_is_better: bool = True
    parts: tuple[str, ...] = ()
    facts: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """`342.1 GB/s bus at 1 GiB in place`."""
        return f"{self.value:.4g} {self.unit}" + (f" at {self.at}" if self.at else "")


@dataclass(frozen=True)
class Log:
    """What one run in a file, or a whole file, says.

    Args:
        kind: the tool that wrote it.
        findings: what the log says by itself: errors, wrong data, states.
        figures: measurements to hold against expectations and peers.
        traits: firmware, driver and so on as (what, subject) -> value: held against the majority.
        host: the node that it is about, where the log names exactly one; empty otherwise.
        run: 1, 2, ... where a file holds several runs of its tool; 0 where it holds one.
    """

    kind: str
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()
    traits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    host: str = ""
    run: int = 0


@dataclass(frozen=True)
class Text:
    """A file's text under the name the user gave it."""

    file: str
    content: str

    @cached_property
    def lines(self) -> list[str]:
        """Without the labels of mpirun and srun, and without control characters.

        Raises:
            ConfigError: a line is longer than any tool writes; what searches a line may take its length squared.
        """
        found = self.content.split("\n")
        long = next((at for at, line in enumerate(found, 1) if len(line) > MAX_LINE), 0)
        if long:
            raise self.damaged(
                long, f"has {len(found[long - 1]):,} characters, at most {MAX_LINE:,} are read in a line"
            )
        return [_LABEL.sub("", printable(line)) for line in found]

    @property
    def stem(self) -> str:
        return one_line(Path(self.file).stem)

    def damaged(self, line: int, expected: str, remedy: str = _AGAIN) -> ConfigError:
        """The error that says where the file cannot be read on."""
        return ConfigError(f"{one_line(self.file)}:{line}" if line else one_line(self.file), None, expected, remedy)

    def check_rows(self, num_rows: int, most: int = MAX_ROWS) -> None:
        """Refuse what no tool writes, before time is spent on it.

        Raises:
            ConfigError: more than `most`.
        """
        if num_rows > most:
            raise self.damaged(0, f"has {num_rows:,} rows or cells, at most {most:,} are judged", "give a part of it")

    def check_ended(self, line: int) -> None:
        """Refuse a row of figures whose line has no end: its last figure may lack digits.

        Raises:
            ConfigError: it is the last one, and no line feed follows.
        """
        if line == len(self.lines):
            raise self.damaged(line, "ends inside a row: the run hung, or the log was cut")

    def tree(self) -> dict[str, Any]:
        """The JSON object that the file holds; lines before it (warnings of the tool) are passed over.

        Raises:
            ConfigError: it is no JSON object, or nested too deep.
        """
        start = self.content.find("{")
        before = self.content.count("\n", 0, start)
        try:
            tree = json.JSONDecoder(parse_constant=_no_constant).raw_decode(self.content[start:])[0]
        except json.JSONDecodeError as exc:
            raise self.damaged(before + exc.lineno, f"is no whole JSON: {exc.msg} at column {exc.colno}") from exc
        except (ValueError, RecursionError) as exc:
            # Python's words end with advice to whoever wrote the program.
            words = printable(str(exc)).partition(";")[0].partition(" while ")[0]
            raise self.damaged(before + 1, f"is no JSON that can be used: {words}") from exc
        if not isinstance(tree, dict):
            raise self.damaged(before + 1, "must be a JSON object")
        return tree

    def line_of(self, what: str) -> int:
        """The first line with these words, or 0; beyond the first 256 KiB it is not looked for."""
        at = self.content.find(what, 0, 1 << 18)
        return 0 if at < 0 else self.content.count("\n", 0, at) + 1


def read_text(path: Path) -> Text:
    """The text of a log.

    Raises:
        ConfigError: it is missing, no regular file, empty, too large, or no text.
    """
    text = Text(str(path), "")
    try:
        mode = path.stat()
        if not stat.S_ISREG(mode.st_mode):
            raise text.damaged(0, "must be a file", "give the log itself, or FOLDER/*")
        if mode.st_size > MAX_BYTES:
            remedy = "give the part that the tool itself wrote"
            raise text.damaged(0, f"has {mode.st_size >> 20} MiB, at most {MAX_BYTES >> 20} are read", remedy)
        content = path.read_bytes()
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise text.damaged(0, f"cannot be read ({reason})", "give a file that exists and is yours to read") from exc
    packed = next((name for magic, name in _MAGIC.items() if content.startswith(magic)), None)
    if packed:
        raise text.damaged(0, f"is packed ({packed})", "unpack it first")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise text.damaged(1, "is UTF-16", "save it as UTF-8")
    if b"\x00" in content:
        line = content.count(b"\n", 0, content.index(b"\x00")) + 1
        raise text.damaged(line, "must be text, and holds a zero byte", "give the tool's own text or JSON output")
    decoded = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if not decoded.strip():
        raise text.damaged(0, "is empty", "see whether the tool ran at all, then " + _AGAIN)
    return Text(str(path), decoded)


def printable(text: str) -> str:
    """Text without what a terminal, an XML reader or a bidirectional display would act on."""
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """The same without line feeds and tabs, which the name of a file may hold."""
    return printable(text).replace("\n", "?").replace("\t", "?")


def number(cell: object) -> float | None:
    """A finite number that is not negative, or None."""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    try:
        value = float(cell)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """The JSON object that this should be; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """The JSON list that this should be; an empty one where it is something else."""
    return value if isinstance(value, list) else []


def word(value: object, most: int = 200) -> str:
    """A JSON scalar as short printable text of one line; anything else is empty."""
    return " ".join(printable(str(value)).split())[:most] if isinstance(value, str | int | float) else ""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
