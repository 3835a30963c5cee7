"""The text of `bench.convergence`: this machine's Python sources and documentation, or a folder's, each text once.

Files are taken in an order that the seed and their names give, so a part of the text is a sample of all of it. Exact
copies, which installed packages are full of, are taken once: a copy of a training file among the held-out ones would
be a loss learned by heart. Not covered: near copies, compressed documentation, what is above 1 MiB (tables, word
lists).
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError

PATTERNS = ("*.py", "*.pyi", "*.md", "*.rst", "*.txt")
_LEAST_BYTES, _MOST_BYTES = 200, 1 << 20
_SKIPPED = frozenset({"__pycache__", "node_modules"})
_PACKAGES = frozenset({"site-packages", "dist-packages"})

OnFile = Callable[[int, int], None]


@dataclass(frozen=True)
class Root:
    """A folder of text, and the name that its files go under: the same wherever the folder is."""

    name: str
    folder: Path


@dataclass(frozen=True)
class Chosen:
    """The files of a run.

    Args:
        files: path of each by the name it goes under, `packages/numpy/linalg/_linalg.py`.
        text_bytes: of all of them.
        by_root: bytes by the first word of the name.
        by_suffix: bytes by `.py`, `.md`, ...
        copies: number of files skipped because another one has the same content.
        unread: number of files skipped because they are no UTF-8, too short, too long, or cannot be read.
        beyond: number of files skipped because there was enough.
    """

    files: Mapping[str, Path]
    text_bytes: int
    by_root: Mapping[str, int]
    by_suffix: Mapping[str, int]
    copies: int
    unread: int
    beyond: int

    def as_record(self) -> dict[str, Any]:
        """Everything, but of the files only how many."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "files": len(self.files)}

    def link_into(self, folder: Path) -> None:
        """Make `folder` a tree of links to the files, as `job.data.folder` wants it."""
        for name, path in self.files.items():
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def machine_roots() -> tuple[Root, ...]:
    """Return the folders of Python sources and documentation that exist on this machine, each once.

    Packages are where this interpreter finds installed distributions, which with a virtual environment may be several;
    a checkout of our own is none of them.
    """
    prefix = Path(sysconfig.get_path("data"))
    installed = {
        Path(str(distribution.locate_file(""))).resolve() for distribution in importlib.metadata.distributions()
    }
    own_folders = {Path.cwd().resolve(), Path(__file__).resolve().parents[2]}
    packages = sorted(folder for folder in installed if folder.name in _PACKAGES or folder not in own_folders)
    named = [
        ("stdlib", Path(sysconfig.get_path("stdlib"))),
        *((f"packages-{number}" if number > 1 else "packages", path) for number, path in enumerate(packages, 1)),
        ("system-packages", Path("/usr/lib/python3/dist-packages")),
        ("doc", Path("/usr/share/doc")),
        ("prefix-doc", prefix / "share" / "doc"),
    ]
    roots: dict[Path, str] = {}
    for name, folder in named:
        if folder.is_dir():
            roots.setdefault(folder.resolve(), name)
    return tuple(Root(name, folder) for folder, name in roots.items())


def folder_root(folder: Path) -> Root:
    """A folder of the user's.

    Raises:
        ConfigError: there is none.
    """
    if not folder.expanduser().is_dir():
        rule = "is a file, not a folder" if folder.expanduser().exists() else "there is no such folder"
        raise ConfigError("--text", folder, rule, "give a folder of text files")
    return Root("text", folder.expanduser().resolve())


def choose(
    roots: Sequence[Root],
    patterns: Sequence[str],
    most_bytes: int,
    seed: int,
    on_file: OnFile = lambda _done, _total: None,
) -> Chosen:
    """Files whose names match a pattern, until they hold `most_bytes`; always the same ones of the same text.

    Args:
        on_file: called with the bytes chosen so far, and the limit.

    Raises:
        ConfigError: there are fewer than two such files.
    """
    names = {f"{root.name}/{name}": root.folder / name for root in roots for name in _list(root.folder, patterns)}
    files: dict[str, Path] = {}
    seen: set[bytes] = set()
    by_root, by_suffix, skipped = Counter[str](), Counter[str](), Counter[str]()
    text_bytes = 0
    for name in sorted(names, key=lambda name: _digest(f"{seed}/{name}".encode("utf-8", "surrogateescape"))):
        if text_bytes >= most_bytes:
            skipped["beyond"] += 1
            continue
        content = _read(names[name])
        digest = _digest(content)
        if not content or digest in seen:
            skipped["copies" if content else "unread"] += 1
            continue
        seen.add(digest)
        files[name] = names[name]
        text_bytes += len(content)
        by_root[name.partition("/")[0]] += len(content)
        by_suffix[names[name].suffix] += len(content)
        on_file(text_bytes, most_bytes)
    if len(files) < 2:
        where = ", ".join(str(root.folder) for root in roots)
        rule = f"matches {len(files)} text files of {_LEAST_BYTES} bytes to 1 MiB in {where}, and two are needed"
        raise ConfigError("--patterns", ",".join(patterns), rule, "give other patterns, or another --text")
    sums = dict(sorted(by_root.items())), dict(sorted(by_suffix.items()))
    why = (skipped[reason] for reason in ("copies", "unread", "beyond"))
    return Chosen(dict(sorted(files.items())), text_bytes, *sums, *why)


def _list(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Relative paths; packages inside the standard library are a root of their own."""
    skipped = _SKIPPED | (_PACKAGES if folder.name not in _PACKAGES else frozenset())
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                yield (Path(path) / name).relative_to(folder).as_posix()


def _read(path: Path) -> bytes:
    """The content; empty where it is no text of a length that is asked for."""
    try:
        if not path.is_file() or not _LEAST_BYTES <= path.stat().st_size <= _MOST_BYTES:
            return b""
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return content


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
