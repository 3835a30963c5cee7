"""Datasets made of Megatron's files, and the other way."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from netlayer.lock import LockBusy, claimed
from netlayer.results import check_target, sync_folder, writing
from trainer.data.dataset.folder import TokenFolder
from trainer.data.dataset.manifest import (
    INDEX_FILE,
    TOKENIZER_FILE,
    VERSION,
    File,
    Manifest,
    Shard,
    TokenDtype,
    TokenizerFacts,
    checksum,
    dtype_for,
)
from trainer.data.dataset.megatron import PREFIX_FIELD, MegatronTokens, write_megatron_index
from trainer.data.dataset.vocabulary import END_FIELD, open_tokenizer, read_vocabulary, tokenizer_path
from trainer.data.dataset.writer import (
    OUT_FIELD,
    IndexWriter,
    SyncedFile,
    check_out,
    hold_to_plan,
    kept_if_begun,
    open_part,
    provenance,
    publish,
    published,
    shard_file,
    write_synced,
)

logger = logging.getLogger(__name__)

_MOST_LENGTH = 2**31 - 1  # of a document in Megatron's format
_BLOCK = 1 << 22  # tokens or documents at once
_SHARD_TOKENS = 1 << 28
_NOTE_EVERY = 64 * _BLOCK  # tokens: what an export that is killed writes again, at most

# Called with what is done, and of how much.
OnProgress = Callable[[int, int], None]


class ImportOptions(NamedTuple):
    """Facts about imported tokens that their files do not hold.

    Args:
        tokenizer: that made them; None where nobody knows.
        vocab_size: bound of their ids; None: the tokenizer's, else one above the largest.
        end_token: that ends each document: a token of the tokenizer, or an id; None: the tokenizer's own, if any.
        shard_tokens: most tokens of a shard, but for a longer document.
    """

    tokenizer: Path | None = None
    vocab_size: int | None = None
    end_token: str | None = None
    shard_tokens: int = _SHARD_TOKENS


class Imported(NamedTuple):
    """A dataset that was imported, and how many of its shards an earlier run had finished."""

    manifest: Manifest
    shards_reused: int = 0
    was_there: bool = False


def import_megatron(prefix: Path, out: Path, options: ImportOptions, on_progress: OnProgress) -> Imported:
    """Make a dataset folder of Megatron's files, or go on with it where an earlier run was killed.

    Every entry of the files is checked first.

    Raises:
        ConfigError: the files are damaged, an id does not fit the vocabulary, or `out` cannot be written. Shards that
            are finished stay for the next run.
    """
    tokens = MegatronTokens(prefix)
    plan = _describe(tokens, options)
    if earlier := published(out, plan):
        return Imported(earlier, was_there=True)
    check_out(out)
    for check in tokens.checks():
        if not check.is_good:
            raise ConfigError(PREFIX_FIELD, tokens.prefix, f"{check.name}: {check.detail}", "write it again")
    vocab_size, end, tokenizer = _vocabulary_of(tokens, options)
    with open_part(out) as part, kept_if_begun(part), writing(out, OUT_FIELD):
        hold_to_plan(part, plan, out)
        folder = part / "dataset"
        facts = None
        if tokenizer:
            facts = TokenizerFacts(
                name=tokenizer.name,
                checksum=write_synced(folder / TOKENIZER_FILE, tokenizer.read_text(encoding="utf-8")),
            )
        dtype = dtype_for(vocab_size)
        shards, shards_reused = _write_shards(tokens, part, dtype, options.shard_tokens, on_progress)
        with SyncedFile(folder / INDEX_FILE) as index_file:
            index = IndexWriter(index_file)
            for first in range(0, tokens.num_documents, _BLOCK):
                index.add(tokens.document_lengths(first, min(_BLOCK, tokens.num_documents - first)))
        manifest = Manifest(
            version=VERSION,
            dtype=dtype,
            vocab_size=vocab_size,
            end_of_document=end,
            tokenizer=facts,
            tokens=index.tokens,
            documents=index.documents,
            index=File(file=INDEX_FILE, checksum=index_file.checksum),
            shards=tuple(shards),
            provenance=provenance(megatron=[_file_facts(file) for file in tokens.files], plan=plan),
        )
        publish(part, out, manifest)
    return Imported(manifest, shards_reused)


def _describe(tokens: MegatronTokens, options: ImportOptions) -> dict[str, str]:
    """Return digests of all that the dataset depends on, by the name that a user knows it by."""
    stats = [(str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in tokens.files]
    parts = {
        PREFIX_FIELD: json.dumps([stats, tokens.fingerprint, options.shard_tokens]),
        "--tokenizer": checksum(tokenizer_path(options.tokenizer)) if options.tokenizer else "",
        "--vocab-size": str(options.vocab_size),
        END_FIELD: str(options.end_token),
        "version": str(VERSION),
    }
    return {key: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for key, text in parts.items()}


def _file_facts(file: Path) -> dict[str, object]:
    return {"file": str(file.absolute()), "bytes": file.stat().st_size, "checksum": checksum(file)}


def _vocabulary_of(tokens: MegatronTokens, options: ImportOptions) -> tuple[int, int | None, Path | None]:
    """Return the bound of the ids, the id that ends a document, and the tokenizer's file."""
    largest = tokens.vocab_size - 1
    size, end, file = options.vocab_size or largest + 1, None, None
    if options.tokenizer:
        file = tokenizer_path(options.tokenizer)
        vocabulary = read_vocabulary(open_tokenizer(file), file, options.end_token)
        size, end = options.vocab_size or vocabulary.size, vocabulary.end_of_document
    elif options.end_token:
        if not options.end_token.isdecimal():
            rule = "is the name of a token, and no tokenizer is named"
            raise ConfigError(END_FIELD, options.end_token, rule, "give its id, or --tokenizer")
        end = int(options.end_token)
    if largest >= size:
        name, value = ("--tokenizer", file) if file and not options.vocab_size else ("--vocab-size", size)
        rule = f"has {size:,} tokens, and the largest id of {tokens.prefix} is {largest}"
        raise ConfigError(name, value, rule, "give the vocabulary that it was made with")
    return size, end, file


def _write_shards(
    tokens: MegatronTokens, part: Path, dtype: TokenDtype, shard_tokens: int, on_progress: OnProgress
) -> tuple[list[Shard], int]:
    """Write shards of whole documents but for those that an earlier run has finished; facts, and how many it had."""
    shards: list[Shard] = []
    shards_reused, end = 0, 0
    for number, (first, upto) in enumerate(_cut(tokens, shard_tokens)):
        start, end = tokens.document_start(first), tokens.document_start(upto)
        file, facts_file = part / "dataset" / shard_file(number), part / "progress" / f"{shard_file(number)}.json"
        if (shard := _verified(file, facts_file)) is not None:
            shards_reused += 1
        else:
            with SyncedFile(file) as stream:
                for position in range(start, end, _BLOCK):
                    stream.write(tokens.read(position, min(_BLOCK, end - position)).astype(little(dtype)))
                    on_progress(position, tokens.num_tokens)
            shard = Shard(file=file.name, tokens=end - start, documents=upto - first, checksum=stream.checksum)
            write_synced(facts_file, shard.model_dump_json())  # last: where it is, the shard is whole
        shards.append(shard)
        on_progress(end, tokens.num_tokens)
    return shards, shards_reused


def _cut(tokens: MegatronTokens, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the first document of each shard, and the one after its last."""
    document, start = 0, 0
    while start < tokens.num_tokens:
        upto = tokens.num_documents
        if start + shard_tokens < tokens.num_tokens:
            upto = max(document + 1, tokens.document_at(start + shard_tokens))
            while tokens.document_start(upto) == start:  # a shard without a token
                upto += 1
        if tokens.document_start(upto) == tokens.num_tokens:
            upto = tokens.num_documents  # documents without a token at the end belong to the last shard
        yield document, upto
        document, start = upto, tokens.document_start(upto)


def _verified(file: Path, facts_file: Path) -> Shard | None:
    """Return the facts about a finished shard, once it was read and is as it was written."""
    try:
        shard = Shard.model_validate_json(facts_file.read_text(encoding="utf-8"))
        if checksum(file) == shard.checksum:
            return shard
    except (FileNotFoundError, ValueError):
        return None
    logger.warning("%s is not as it was written; it is made again", file)
    return None


def export_megatron(dataset: TokenFolder, prefix: Path, on_progress: OnProgress) -> int:
    """Write a dataset as Megatron's files, or go on where an earlier run was killed: a sequence a document.

    The index comes last, when the tokens are there. Until then they are in a hidden file beside it.

    Returns:
        The number of tokens that an earlier run had written.

    Raises:
        ConfigError: there are such files already, a document is longer than its format allows, the disk is full, or
            another process writes them.
    """
    index_file, data_file = (prefix.with_name(prefix.name + end) for end in (".idx", ".bin"))
    progress_file = prefix.with_name(f".{prefix.name}.progress")
    check_target(PREFIX_FIELD, data_file)
    with contextlib.ExitStack() as stack:
        try:
            with writing(prefix, PREFIX_FIELD):
                stack.enter_context(claimed(prefix.with_name(f".{prefix.name}.lock")))
        except LockBusy as exc:
            raise ConfigError(PREFIX_FIELD, prefix, f"is being written by {exc}", "wait for it") from exc
        written = _written(progress_file, dataset)
        if written != dataset.num_tokens:  # else an earlier run has published them
            for file in (index_file, data_file):
                if file.exists():
                    raise ConfigError(PREFIX_FIELD, file, "is there already", "give another prefix, or remove it")
        longest = max(int(lengths.max()) for lengths in _lengths(dataset))
        if longest > _MOST_LENGTH:
            rule = f"document of {longest:,} tokens is above the {_MOST_LENGTH:,} of Megatron's format"
            raise ConfigError("DIR", dataset.folder, rule, "cut it in two before it is prepared")
        with writing(prefix, PREFIX_FIELD):
            if not data_file.exists():
                _write_data(dataset, data_file, progress_file, written or 0, on_progress)
            if not index_file.exists():
                with SyncedFile(index_file) as index:
                    write_megatron_index(
                        index.write, dataset.manifest.dtype, dataset.num_documents, lambda: _lengths(dataset)
                    )
            sync_folder(index_file.absolute().parent)
            progress_file.unlink(missing_ok=True)
            for file in (index_file, progress_file):
                for stray in file.absolute().parent.glob(f".{glob.escape(file.name)}.*"):  # of runs that were killed
                    stray.unlink(missing_ok=True)
    return written or 0


def _written(progress_file: Path, dataset: TokenFolder) -> int | None:
    """Return how many tokens of this dataset an earlier export had on the disk; None where there was none."""
    try:
        progress = json.loads(progress_file.read_text(encoding="utf-8"))
        return int(progress["tokens"]) if progress["dataset"] == dataset.fingerprint else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _write_data(
    dataset: TokenFolder, data_file: Path, progress_file: Path, written: int, on_progress: OnProgress
) -> None:
    """Write the tokens from `written` on; what a run that is killed has on the disk stays for the next."""
    dtype = little(dataset.manifest.dtype)
    part = data_file.with_name(f".{data_file.name}.part")

    def note(tokens: int) -> None:
        write_synced(progress_file, json.dumps({"dataset": dataset.fingerprint, "tokens": tokens}))

    if not part.exists() or part.stat().st_size < written * dtype.itemsize:
        written = 0
    note(written)
    with part.open("r+b" if part.exists() else "wb") as stream:
        stream.truncate(written * dtype.itemsize)  # what came after the last note may not be whole
        stream.seek(0, os.SEEK_END)
        for start in range(written, dataset.num_tokens, _BLOCK):
            block = dataset.read(start, min(_BLOCK, dataset.num_tokens - start))
            stream.write(block.astype(dtype).data)
            on_progress(start, dataset.num_tokens)
            if (start - written) % _NOTE_EVERY == 0 and start > written:
                stream.flush()
                os.fsync(stream.fileno())
                note(start + len(block))
        stream.flush()
        os.fsync(stream.fileno())
    note(dataset.num_tokens)
    part.replace(data_file)


def little(dtype: TokenDtype) -> np.dtype[np.integer]:
    """Return the type of tokens in files, little endian."""
    return np.dtype(dtype).newbyteorder("<")


def _lengths(dataset: TokenFolder) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of all documents in blocks."""
    for first in range(0, dataset.num_documents, _BLOCK):
        yield dataset.document_lengths(first, min(_BLOCK, dataset.num_documents - first))
