"""Facts about a dataset for `netlayer data inspect`: counts, and samples as text. Values are JSON's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.printing import escaped
from trainer.data.dataset.folder import TokenFolder
from trainer.data.dataset.megatron import MegatronTokens
from trainer.data.dataset.vocabulary import open_tokenizer, tokenizer_path

_SHOWN_TOKENS = 64


def count(dataset: TokenFolder | MegatronTokens) -> dict[str, Any]:
    """Return the numbers of a dataset, and where it came from."""
    facts: dict[str, Any] = {
        "name": dataset.name,
        "tokens": dataset.num_tokens,
        "documents": dataset.num_documents,
        "tokens_per_document": dataset.num_tokens / dataset.num_documents,
        "vocab_size": dataset.vocab_size,
        "fingerprint": dataset.fingerprint,
    }
    if isinstance(dataset, MegatronTokens):
        return {**facts, "dtype": dataset.dtype.name, "sequences": dataset.num_sequences}
    manifest = dataset.manifest
    return {
        **facts,
        "dtype": manifest.dtype,
        "shards": len(manifest.shards),
        "end_of_document": manifest.end_of_document,
        "tokenizer": manifest.tokenizer.model_dump() if manifest.tokenizer else None,
        "provenance": {key: value for key, value in manifest.provenance.items() if key != "plan"},
    }


def samples(
    dataset: TokenFolder | MegatronTokens, number: int, tokenizer_file: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the beginnings of `number` documents, spread evenly over all; `text` is None without a tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be read, or has fewer ids than the dataset.
    """
    file = tokenizer_path(tokenizer_file) if tokenizer_file else getattr(dataset, "tokenizer_file", None)
    tokenizer = open_tokenizer(file) if file else None
    if tokenizer and tokenizer_file:
        size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if size < dataset.vocab_size:
            rule = f"has {size:,} token ids, and {dataset.name} {dataset.vocab_size:,}"
            raise ConfigError("--tokenizer", file, rule, "give the one that it was made with")
    number = min(number, dataset.num_documents)
    for sample in range(number):
        document = sample * (dataset.num_documents - 1) // max(1, number - 1)
        start, end = dataset.document_start(document), dataset.document_start(document + 1)
        ids = dataset.read(start, min(end - start, _SHOWN_TOKENS)).tolist()
        text = escaped(tokenizer.decode(ids, skip_special_tokens=False)) if tokenizer else None
        yield {"document": document, "tokens": end - start, "first_ids": ids[:16], "text": text}
