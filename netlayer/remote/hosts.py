"""Host files: one host a line as ssh knows it, `slots=N` after those with several ranks; `#` begins a comment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from netlayer.errors import ConfigError

_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}")
_MOST_SLOTS = 4096
_REMEDY = "give a,b,c or a file with one host a line"


class Host(NamedTuple):
    """A host, and the ranks that run on it."""

    name: str
    slots: int = 1


def is_host(text: str) -> bool:
    """Whether a text may stand where ssh takes a host."""
    return bool(_HOST.fullmatch(text))


def read_hosts(text: str | Path, option: str = "--hosts") -> list[Host]:
    """Read a host file, or a list such as `node1,node2`.

    Args:
        text: the file's path, or the list.
        option: name of the option for errors.

    Raises:
        ConfigError: the file cannot be read, a line is invalid or repeats a host, or there is no host.
    """
    path = Path(text)
    looks_like_a_path = isinstance(text, Path) or "/" in text or path.suffix in (".txt", ".hosts", ".list", ".conf")
    if not path.is_file() and not looks_like_a_path:
        lines = str(text).split(",")
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(option, text, f"cannot be read ({exc})", _REMEDY) from exc
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        slots = fields[1].partition("slots=")[2] if len(fields) == 2 else "1"
        good = len(fields) < 3 and slots.isascii() and slots.isdigit() and 0 < int(slots) <= _MOST_SLOTS
        if not good or not is_host(fields[0]) or fields[0] in hosts:
            where = f"{option} {path}:{number}" if path.is_file() else option
            rule = "must be a host's name, once, with slots=N behind it where it has several ranks"
            raise ConfigError(where, line.strip(), rule, "correct the line" if path.is_file() else _REMEDY)
        hosts[fields[0]] = Host(fields[0], int(slots))
    if not hosts:
        raise ConfigError(option, text, "names no host", _REMEDY)
    return list(hosts.values())
