"""Datasets made of Megatron's files, and the other way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from netlayer.results import check_target, writing
from trainer.data.dataset.folder import TokenFolder
from trainer.data.dataset.manifest import (
    INDEX_FILE,
    TOKENIZER_FILE,
    VERSION,
    File,
    Manifest,
    Shard,
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
    open_part,
    provenance,
    publish,
    shard_file,
    write_synced,
)

_MOST_LENGTH = 2**31 - 1  # of a document in Megatron's format
_BLOCK = 1 << 22  # tokens or documents at once
_SHARD_TOKENS = 1 << 28

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


def import_megatron(prefix: Path, out: Path, options: ImportOptions, on_progress: OnProgress) -> Manifest:
    """Make a dataset folder of Megatron's files; every entry of them is checked first.

    Raises:
        ConfigError: the files are damaged, an id does not fit the vocabulary, or `out` cannot be written.
    """
    tokens = MegatronTokens(prefix)
    check_out(out)
    for check in tokens.checks():
        if not check.is_good:
            raise ConfigError(PREFIX_FIELD, tokens.prefix, f"{check.name}: {check.detail}", "write it again")
    vocab_size, end, tokenizer = _vocabulary_of(tokens, options)
    with open_part(out) as part, writing(out, OUT_FIELD):
        folder = part / "dataset"
        facts = None
        if tokenizer:
            facts = TokenizerFacts(
                name=tokenizer.name,
                checksum=write_synced(folder / TOKENIZER_FILE, tokenizer.read_text(encoding="utf-8")),
            )
        dtype = dtype_for(vocab_size)
        shards = list(_write_shards(tokens, folder, f"<{np.dtype(dtype).str[1:]}", options.shard_tokens, on_progress))
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
            provenance=provenance(megatron=[_file_facts(file) for file in tokens.files]),
        )
        publish(part, out, manifest)
    return manifest


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
    tokens: MegatronTokens, folder: Path, dtype: str, shard_tokens: int, on_progress: OnProgress
) -> Iterator[Shard]:
    """Write shards of whole documents; yield their facts."""
    document, start = 0, 0
    number = 0
    while start < tokens.num_tokens:
        upto = tokens.num_documents
        if start + shard_tokens < tokens.num_tokens:
            upto = max(document + 1, tokens.document_at(start + shard_tokens))
            while tokens.document_start(upto) == start:  # a shard without a token
                upto += 1
        if tokens.document_start(upto) == tokens.num_tokens:
            upto = tokens.num_documents  # documents without a token at the end belong to the last shard
        end = tokens.document_start(upto)
        with SyncedFile(folder / shard_file(number)) as file:
            for position in range(start, end, _BLOCK):
                file.write(tokens.read(position, min(_BLOCK, end - position)).astype(dtype))
                on_progress(position, tokens.num_tokens)
        facts = {"tokens": end - start, "documents": upto - document}
        yield Shard(file=shard_file(number), checksum=file.checksum, **facts)
        document, start, number = upto, end, number + 1


def export_megatron(dataset: TokenFolder, prefix: Path, on_progress: OnProgress) -> None:
    """Write a dataset as Megatron's files: a sequence a document; the index comes last, when the tokens are there.

    Raises:
        ConfigError: there are such files already, a document is longer than its format allows, or the disk is full.
    """
    index_file, data_file = (prefix.with_name(prefix.name + end) for end in (".idx", ".bin"))
    for file in (index_file, data_file):
        if file.exists():
            raise ConfigError(PREFIX_FIELD, file, "is there already", "give another prefix, or remove it")
        check_target(PREFIX_FIELD, file)
    longest = max(int(lengths.max()) for lengths in _lengths(dataset))
    if longest > _MOST_LENGTH:
        rule = f"document of {longest:,} tokens is above the {_MOST_LENGTH:,} of Megatron's format"
        raise ConfigError("DIR", dataset.folder, rule, "cut it in two before it is prepared")
    itemsize = np.dtype(dataset.manifest.dtype).itemsize
    with writing(prefix, PREFIX_FIELD):
        with SyncedFile(data_file) as data:
            for start in range(0, dataset.num_tokens, _BLOCK):
                block = dataset.read(start, min(_BLOCK, dataset.num_tokens - start))
                data.write(block.astype(f"<u{itemsize}"))
                on_progress(start, dataset.num_tokens)
        with SyncedFile(index_file) as index:
            write_megatron_index(index.write, dataset.manifest.dtype, dataset.num_documents, lambda: _lengths(dataset))


def _lengths(dataset: TokenFolder) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of all documents in blocks."""
    for first in range(0, dataset.num_documents, _BLOCK):
        yield dataset.document_lengths(first, min(_BLOCK, dataset.num_documents - first))
