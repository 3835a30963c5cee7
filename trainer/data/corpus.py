"""Text to train on: files of a folder, each either for training or held out for validation.

A file's side depends on a hash of its relative path alone, so it stays where it is when other files come and go. Not
covered: formats other than plain UTF-8 text, and anything that does not fit in memory.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from netlayer.config.tree import DataConfig
from netlayer.errors import ConfigError
from netlayer.launch.rank import speaks
from netlayer.units import format_size

logger = logging.getLogger(__name__)

FOLDER_FIELD = "job.data.folder"
_MIN_VOCAB_SIZE = 257  # one token a byte, and the end of a document
# Of the standard library: other people's packages, and tests, which are long tables of data more than text.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text file: its path inside the folder, with forward slashes, and what it says."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents:
    """The text of a run, in order of name; `skipped` counts files that could not be read as UTF-8."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    skipped: int

    @property
    def text_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.train + self.validation)


def read_documents(config: DataConfig, seed: int) -> Documents:
    """Read and split the folder's text; `seed` draws the files where there is more than `max_mib`.

    Raises:
        ConfigError: no such folder, no matching file, or too few of them, or of what `max_mib` leaves, to hold one out.
    """
    folder, names = find_files(config)
    drawn = _draw(folder, names, config.max_mib, seed)
    if not drawn:
        rule = f"is below the smallest of the {len(names)} files in {folder}"
        raise ConfigError("job.data.max_mib", config.max_mib, rule, "raise it, or give smaller files")
    documents = [document for document in (_read(folder, name) for name in drawn) if document]
    skipped = len(drawn) - len(documents)
    if skipped:
        logger.warning("%d of %d files in %s are not readable UTF-8 text; skipped", skipped, len(drawn), folder)
    if len(documents) < 2:
        readable = f"{len(documents)} readable text file{'s' * (len(documents) != 1)}"
        needs = "and one must be held out for validation"
        if len(drawn) < len(names):
            rule = f"leaves {readable} of {len(names)} files in {folder}, {needs}"
            raise ConfigError("job.data.max_mib", config.max_mib, rule, "raise it")
        raise ConfigError(
            FOLDER_FIELD, folder, f"holds {readable}, {needs}", "give at least two files, or split the one"
        )
    held_out = choose_held_out([document.name for document in documents], config.validation_share)
    return Documents(
        train=tuple(document for document in documents if document.name not in held_out),
        validation=tuple(document for document in documents if document.name in held_out),
        skipped=skipped,
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError for a vocabulary that cannot hold every byte of a text."""
    if vocab_size < _MIN_VOCAB_SIZE:
        rule = f"is below {_MIN_VOCAB_SIZE}: the 256 bytes and the end of a document"
        raise ConfigError("job.model.vocab_size", vocab_size, rule, f"set at least {_MIN_VOCAB_SIZE}")


def text_folder(config: DataConfig) -> Path:
    """The folder of the text: the one given, else the standard library's.

    Raises:
        ConfigError: it is under the home folder (`~`) of a user who has none.
    """
    try:
        return Path(config.folder).expanduser() if config.folder else Path(sysconfig.get_path("stdlib"))
    except RuntimeError as exc:
        raise ConfigError(FOLDER_FIELD, config.folder, "names no home folder", "give a path without ~") from exc


def find_files(config: DataConfig) -> tuple[Path, list[str]]:
    """The folder, and the files in it that the pattern matches, none read yet.

    Raises:
        ConfigError: no such folder, or no matching file.
    """
    folder, skipped_folders = _folder(config)
    names = [name for name in _list_files(folder, skipped_folders) if fnmatch.fnmatch(Path(name).name, config.pattern)]
    if not names:
        rule = f"holds no file that matches job.data.pattern = {config.pattern}"
        raise ConfigError(FOLDER_FIELD, folder, rule, "give another folder or pattern")
    return folder, names


def choose_held_out(names: list[str], share: float) -> frozenset[str]:
    """The files held out: those whose hash, as a number in 0..1, is below `share`; at least one, and never all."""
    ordered = sorted(names, key=_position)
    num_below = sum(_position(name) < share for name in names)
    return frozenset(ordered[: min(max(num_below, 1), len(names) - 1)])


def _folder(config: DataConfig) -> tuple[Path, frozenset[str]]:
    folder = text_folder(config)
    if not config.folder:
        return folder, _STDLIB_SKIPPED
    if not folder.is_dir():
        rule = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise ConfigError(FOLDER_FIELD, config.folder, rule, "give a folder of text files")
    return folder, frozenset()


def _list_files(folder: Path, skipped_folders: frozenset[str]) -> list[str]:
    def report(error: OSError) -> None:
        logger.warning("%s cannot be listed (%s); skipped", error.filename, error.strerror)

    names = []
    for path, folders, files in os.walk(folder, onerror=report):
        folders[:] = [name for name in folders if name not in skipped_folders]
        names += [(Path(path) / name).relative_to(folder).as_posix() for name in files]
    return sorted(names)


def _draw(folder: Path, names: list[str], max_mib: float, seed: int) -> list[str]:
    """Return all files if they fit in `max_mib`; else those that fit, drawn in an order that depends on `seed`."""
    sizes = {name: _size(folder / name) for name in names}
    drawn, room = list[str](), round(max_mib * 2**20)
    if sum(sizes.values()) <= room:
        return names
    for name in sorted(names, key=lambda name: _position(f"{seed}/{name}")):
        if sizes[name] <= room:
            drawn.append(name)
            room -= sizes[name]
    if drawn and speaks(os.environ):
        some, all_of_them = (format_size(sum(sizes[name] for name in of)) for of in (drawn, names))
        template = "job.data.max_mib = %g: %d of the %d files (%s of %s) are trained on; raise it for more of them"
        logger.warning(template, max_mib, len(drawn), len(names), some, all_of_them)
    return sorted(drawn)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a dangling link: `_read` will skip and count it


def _read(folder: Path, name: str) -> Document | None:
    path = folder / name
    if not path.is_file():  # a pipe or a device would block the read for ever
        return None
    try:
        return Document(name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _position(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
