"""Reading what strangers wrote: files of bounded size, JSON that is an object, names that are safe to print.

A name goes into CSV, GraphML, terminals and messages, so it may hold no control character and may not begin like a
spreadsheet's formula. Not covered: what the contents mean.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError

_MOST_BYTES = 256 * 2**20
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:/@()\[\]#, +-]{0,252}")


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        ConfigError: it is missing, no plain file, unreadable, above 256 MiB, or not UTF-8.
    """
    name = show(path)
    try:
        if not path.is_file():
            raise ConfigError("FILES", name, "is no file", "give files that exist")
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError("FILES", name, f"is above {_MOST_BYTES // 2**20} MiB", "give the fabric alone")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as exc:
        reason = "not UTF-8 text" if isinstance(exc, ValueError) else exc.strerror
        raise ConfigError("FILES", name, f"cannot be read ({reason})", "give a readable text file") from exc


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """The object in a JSON text.

    Raises:
        ConfigError: the text is damaged, or its top is no object.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError("FILES", show(path), f"is no JSON ({exc})", "fetch the file again, it is damaged") from exc
    if not isinstance(tree, dict):
        raise ConfigError("FILES", show(path), "holds no JSON object", "give the file as the tool wrote it")
    return tree


def clean(name: object, what: str, path: Path) -> str:
    """The name, once it is safe.

    Raises:
        ConfigError: it is no text, empty, too long, or holds characters that no device name needs.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    rule = f"in {show(path)} is no usable {what}"
    raise ConfigError("name", show(name), rule, "use letters, digits and _ . : / @ ( ) - after the first")


def show(value: object) -> str:
    """A stranger's text in one safe line."""
    return ascii(str(value))[1:-1][:200]
