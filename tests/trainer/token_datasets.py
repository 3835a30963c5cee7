"""Datasets whose tokens a test can tell: word `tN` is token N, and token 0 ends a document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from trainer.data.dataset import TokenFolder
from trainer.data.dataset.prepare import Prepared, PrepareOptions, prepare_dataset

END = "<|endoftext|>"


def write_tokenizer(file: Path, vocab_size: int = 100, end: str = END) -> Path:
    """Write a tokenizer of whole words: `end` is 0, `t1` is 1, and so on."""
    vocabulary = {end: 0, **{f"t{number}": number for number in range(1, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(file))
    return file


def words(ids: Sequence[int]) -> str:
    return " ".join(f"t{number}" for number in ids)


def write_jsonl(file: Path, documents: Sequence[Sequence[int]]) -> Path:
    file.write_text("".join(json.dumps({"text": words(ids)}) + "\n" for ids in documents), encoding="utf-8")
    return file


def stream(documents: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """All tokens of all documents, with their ends."""
    return np.array([token for ids in documents for token in [*ids, 0]], np.int32)


def some_documents(count: int, seed: int = 0, vocab_size: int = 100) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, rng.integers(1, 30)).tolist() for _ in range(count)]


def prepare(out: Path, *inputs: Path, tokenizer: Path | str, workers: int = 1, **options: object) -> Prepared:
    chosen = PrepareOptions(inputs=inputs, tokenizer=str(tokenizer), **options)  # type: ignore[arg-type]
    return prepare_dataset(chosen, out, workers=workers, on_stage=lambda *_: None)


def write_dataset(
    folder: Path, documents: Sequence[Sequence[int]], unit_bytes: int | None = None, vocab_size: int = 100
) -> TokenFolder:
    """Make a dataset in `folder` / tokens, its inputs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder / "tokenizer.json", vocab_size)
    file = write_jsonl(folder / "in.jsonl", documents)
    prepare(folder / "tokens", file, tokenizer=tokenizer, unit_bytes=unit_bytes)
    return TokenFolder(folder / "tokens")
