"""A corpus made ready: tokenised once, kept in a cache folder, and shared by all ranks as memory-mapped files.

The cache is keyed by what the text says, not by when it was written, so a touched file costs nothing and a changed one
is never missed. A folder appears there whole or not at all; one that is damaged is built again. Of several processes
that want it at once (the ranks of a launcher), one builds it, and the others wait. The few used last stay, older ones
go when a new one is built, but for those that a run has lately said it uses.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import DataConfig
from netlayer.errors import ConfigError
from netlayer.lock import exclusive
from trainer.data.corpus import FOLDER_FIELD, Documents, check_vocab_size, read_documents

logger = logging.getLogger(__name__)

_FORMAT = 3
_KEPT = 4  # corpora in a cache folder
_IN_USE_S = 3600.0  # a run opens the corpus that it has found, and says again that it uses it, within this time
_LOCK = ".corpus.lock"
_FACTS_FILE = "facts.json"
_TOKENIZER_FILE = "tokenizer.json"
_TRAIN_FILE = "train.npy"
_VALIDATION_FILE = "validation.npy"

# Called with what is being done, how many documents are done, and of how many.
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CorpusFacts:
    """Facts about the text that was trained on, for the report; `vocab_size` is the one that the tokenizer reached."""

    train_files: int
    validation_files: int
    skipped_files: int
    text_bytes: int
    train_tokens: int
    validation_tokens: int
    vocab_size: int
    cache_hit: bool


@dataclass(frozen=True)
class Corpus:
    """Folder of the tokens, and facts about them. To send a path to a rank costs nothing, and ranks share the pages."""

    folder: Path
    facts: CorpusFacts

    def train_tokens(self) -> NDArray[np.integer]:
        return _open(self.folder / _TRAIN_FILE)

    def validation_tokens(self) -> NDArray[np.integer]:
        return _open(self.folder / _VALIDATION_FILE)

    def note_in_use(self) -> None:
        """Keep it in its cache for another while: on a shared file system a removed file is lost to who has it open."""
        with contextlib.suppress(OSError):  # a cache that is only readable has no order of use
            os.utime(self.folder)

    @property
    def tokenizer_file(self) -> Path:
        """Return the tokenizer's path, in the format of the `tokenizers` library."""
        return self.folder / _TOKENIZER_FILE

    @property
    def identity(self) -> Mapping[str, str]:
        """Digests of the `text`, with its split, and of the `tokenizer`."""
        record = json.loads((self.folder / _FACTS_FILE).read_text(encoding="utf-8"))
        return {"text": record["text"], "tokenizer": record["digests"][_TOKENIZER_FILE]}


def prepare_corpus(
    config: DataConfig,
    vocab_size: int,
    seed: int,
    cache_folder: Path,
    on_stage: OnStage | None = None,
    tokenizer_file: Path | None = None,
) -> Corpus:
    """Read, split and tokenise the text, or find it done in `cache_folder`.

    Args:
        config: which text.
        vocab_size: most tokens of the vocabulary.
        seed: draws the files where there is more than `max_mib`.
        cache_folder: made if missing.
        on_stage: called with progress.
        tokenizer_file: to tokenise with; None: one is trained on the text.

    Raises:
        ConfigError: the text or the vocabulary cannot be used.
        OSError: `cache_folder` cannot be written.
    """
    check_vocab_size(vocab_size)
    report = on_stage or (lambda _stage, _done, _total: None)
    report("reading", 0, 1)
    documents = read_documents(config, seed)
    text = _text_digest(documents)
    folder = cache_folder / f"corpus-{_key(text, vocab_size, tokenizer_file)}"
    cached = _find(folder, documents.skipped, logging.DEBUG)
    if cached:
        return cached
    cache_folder.mkdir(parents=True, exist_ok=True)
    # One process at a time. Between machines that share the folder a lock may not hold, and who has it may hang; then
    # each builds, and the first one's folder stays.
    with exclusive(cache_folder / _LOCK, lambda owner: report(f"waiting for the text: {owner}", 0, 1)) as lock:
        cached = _find(folder, documents.skipped, logging.WARNING)  # another process may have built it meanwhile
        if cached:
            return cached
        shutil.rmtree(folder, ignore_errors=True)

        def on_build(stage: str, done: int, total: int) -> None:
            lock.progress(f"{stage}, {done} of {total} documents")
            report(stage, done, total)

        counts = _build(folder, documents, text, vocab_size, tokenizer_file, on_build)
        _remove_old(cache_folder, time.time())
    return Corpus(folder, CorpusFacts(**counts, skipped_files=documents.skipped, cache_hit=False))


def check_enough(facts: CorpusFacts, folder: str, batch_size: int, seq_len: int) -> None:
    """Raise ConfigError where the text holds less than one global batch, or no window to validate on."""
    needed = batch_size * (seq_len + 1)
    remedy = "give more text, or lower job.batch.global_batch_size or job.model.seq_len"
    value = folder or "(standard library)"
    if facts.train_tokens < needed:
        rule = f"gives {facts.train_tokens} tokens to train on, and one global batch takes {needed}"
        raise ConfigError(FOLDER_FIELD, value, rule, remedy)
    if facts.validation_tokens < seq_len + 1:
        rule = f"gives {facts.validation_tokens} held-out tokens, and one sequence takes {seq_len + 1}"
        raise ConfigError(FOLDER_FIELD, value, rule, remedy + ", or raise job.data.validation_share")


def _find(folder: Path, skipped_files: int, level: int) -> Corpus | None:
    """The corpus, where it is there and whole."""
    if not folder.exists():
        return None
    try:
        facts = _load_facts(folder, skipped_files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        logger.log(level, "the cached corpus %s is damaged (%s); it is built again", folder, exc)
        return None
    corpus = Corpus(folder, facts)
    corpus.note_in_use()
    return corpus


def _text_digest(documents: Documents) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for side in (documents.train, documents.validation):
        digest.update(f"\n{len(side)}".encode())
        for document in side:
            text = document.text.encode()
            digest.update(f"\n{len(text)} ".encode() + text)
    return digest.hexdigest()


def _key(text: str, vocab_size: int, tokenizer_file: Path | None) -> str:
    tokenizer = importlib.metadata.version("tokenizers") if tokenizer_file is None else _digest(tokenizer_file)
    return hashlib.blake2b(f"{_FORMAT} {tokenizer} {vocab_size} {text}".encode(), digest_size=16).hexdigest()


def _load_facts(folder: Path, skipped_files: int) -> CorpusFacts:
    """Return the facts in the folder's own record, after a check of every file's digest; any error means damage."""
    record = json.loads((folder / _FACTS_FILE).read_text(encoding="utf-8"))
    for name in (_TOKENIZER_FILE, _TRAIN_FILE, _VALIDATION_FILE):
        if _digest(folder / name) != record["digests"][name]:
            raise ValueError(f"{name} is not as it was written")
    if not isinstance(record["text"], str):
        raise TypeError("no digest of the text")
    return CorpusFacts(**record["facts"], skipped_files=skipped_files, cache_hit=True)


def _build(
    folder: Path,
    documents: Documents,
    text: str,
    vocab_size: int,
    tokenizer_file: Path | None,
    on_stage: OnStage,
) -> dict[str, int]:
    """Train or load the tokenizer, tokenise all documents and publish them as `folder`; return their counts."""
    # Here, for a hit needs no tokenizer: the library costs a tenth of a second to load.
    from trainer.data.tokenizer import encode, load_tokenizer, train_tokenizer

    total = len(documents.train) + len(documents.validation)
    on_stage("training the tokenizer", 0, total)
    if tokenizer_file is None:
        tokenizer = train_tokenizer(documents.train, vocab_size)
    else:
        tokenizer = load_tokenizer(tokenizer_file, vocab_size)
    scratch = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        # Not its own `save`: what that raises on a full disk is no OSError.
        (scratch / _TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        sides = ((_TRAIN_FILE, documents.train, 0), (_VALIDATION_FILE, documents.validation, len(documents.train)))
        for name, side, before in sides:
            on_documents = functools.partial(_tell_tokenising, on_stage, before, total)
            np.save(scratch / name, encode(tokenizer, side, vocab_size, on_documents))
        counts = {
            "train_files": len(documents.train),
            "validation_files": len(documents.validation),
            "text_bytes": documents.text_bytes,
            "train_tokens": len(_open(scratch / _TRAIN_FILE)),
            "validation_tokens": len(_open(scratch / _VALIDATION_FILE)),
            "vocab_size": tokenizer.get_vocab_size(),
        }
        digests = {name: _digest(scratch / name) for name in (_TOKENIZER_FILE, _TRAIN_FILE, _VALIDATION_FILE)}
        record = json.dumps({"facts": counts, "digests": digests, "text": text}, indent=1)
        (scratch / _FACTS_FILE).write_text(record, encoding="utf-8")
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return counts


def _remove_old(cache_folder: Path, now_s: float) -> None:
    """Keep the corpora used last, and every one that may be in use. Halves of killed runs go as well."""
    corpora = sorted(cache_folder.glob("corpus-*"), key=_used_s, reverse=True)
    for folder in [*corpora[_KEPT:], *cache_folder.glob("building-*")]:
        if _used_s(folder) < now_s - _IN_USE_S:
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("%s is no longer used: removed", folder)


def _used_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another run has removed it
        return 0.0


def _tell_tokenising(on_stage: OnStage, before: int, total: int, done: int) -> None:
    on_stage("tokenising", before + done, total)


def _publish(scratch: Path, folder: Path) -> None:
    """Rename is atomic; where another run was first, its folder holds the same bytes and stays."""
    scratch.chmod(0o755)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _open(file: Path) -> NDArray[np.integer]:
    tokens: NDArray[np.integer] = np.load(file, mmap_mode="r", allow_pickle=False)
    return tokens


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
