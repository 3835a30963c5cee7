"""Manifest of a dataset folder: what its files hold, their checksums, and where the tokens came from.

DIR/manifest.json       this
DIR/tokenizer.json      of the `tokenizers` library; missing where tokens were imported without one
DIR/documents.idx       int64, little endian: position of each document's first token, then the number of tokens
DIR/shard-00000.bin     uint16 or uint32, little endian: tokens of whole documents, each with its end
DIR/sources.json        every input file, its size and checksum
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from netlayer.errors import ConfigError

VERSION = 1
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "documents.idx"
TOKENIZER_FILE = "tokenizer.json"
SOURCES_FILE = "sources.json"
INDEX_DTYPE = "<i8"
_BLOCK_BYTES = 1 << 20

TokenDtype = Literal["uint16", "uint32"]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Facts):
    """One file of tokens."""

    file: str
    tokens: int = Field(gt=0)
    documents: int = Field(ge=0)
    checksum: str


class File(_Facts):
    """A file of the folder beside the shards."""

    file: str
    checksum: str


class TokenizerFacts(_Facts):
    """Tokenizer that made the ids; `checksum` is that of its file."""

    name: str
    checksum: str


class Manifest(_Facts):
    """Content of a dataset folder; `provenance` alone has no part in its fingerprint.

    Args:
        version: of this format.
        dtype: of the tokens in the shards, little endian.
        vocab_size: every id is below it.
        end_of_document: id that ends every document; None where that is not known.
        tokenizer: None where tokens were imported without one.
        tokens, documents: of all shards.
        index: the document offsets.
        shards: in the order of their tokens.
        provenance: command, date, package version, source files, what was skipped.
    """

    version: int
    dtype: TokenDtype
    vocab_size: int = Field(gt=0, le=2**31)
    end_of_document: int | None = Field(ge=0)
    tokenizer: TokenizerFacts | None
    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    index: File
    shards: tuple[Shard, ...]
    provenance: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Digest of tokens, document boundaries and vocabulary: the same for two runs over the same text."""
        content = self.model_dump(exclude={"provenance": True, "tokenizer": {"name"}})
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """Return the manifest as the text of its file, its fingerprint in it."""
        return json.dumps({**self.model_dump(), "fingerprint": self.fingerprint}, indent=1) + "\n"


def dtype_for(vocab_size: int) -> TokenDtype:
    """Return the narrowest dtype that holds every id below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_manifest(folder: Path, field: str = "dataset") -> Manifest:
    """Read the manifest of a dataset folder.

    Raises:
        ConfigError: it is missing, damaged, edited, or of a later version.
    """
    file = folder / MANIFEST_FILE
    remedy = "give a folder that `netlayer data prepare` or `netlayer data import` made"
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        rule = f"has no {MANIFEST_FILE}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(field, folder, rule, remedy) from exc
    except OSError as exc:
        raise ConfigError(field, file, f"cannot be read ({exc.strerror})", remedy) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(field, file, f"is not JSON ({exc})", remedy) from exc
    if not isinstance(tree, dict) or "version" not in tree:
        raise ConfigError(field, file, "is no manifest of a dataset", remedy)
    if tree["version"] != VERSION:
        rule = f"has version {tree['version']}, known is {VERSION}"
        raise ConfigError(field, file, rule, "prepare it with this netlayer, or use a later one")
    fingerprint = tree.pop("fingerprint", None)
    try:
        manifest = Manifest.model_validate_json(json.dumps(tree))
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(field, file, f"{place}: {first['msg']}", remedy) from exc
    _check_sums(manifest, fingerprint, file, field)
    return manifest


def _check_sums(manifest: Manifest, fingerprint: object, file: Path, field: str) -> None:
    """Raise ConfigError for a manifest that does not agree with itself."""
    remedy = "copy the folder again, or prepare it anew"
    if manifest.fingerprint != fingerprint:
        raise ConfigError(field, file, "is not as it was written: its fingerprint does not match", remedy)
    counts = {key: sum(getattr(shard, key) for shard in manifest.shards) for key in ("tokens", "documents")}
    for key, count in counts.items():
        if count != getattr(manifest, key):
            raise ConfigError(field, file, f"{key} = {getattr(manifest, key)}, and its shards hold {count}", remedy)


def checksum(file: Path) -> str:
    """Return the checksum of a file, as `b2sum -l 128` prints it.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
