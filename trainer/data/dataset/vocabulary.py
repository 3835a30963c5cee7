"""Tokenizer of a dataset: any `tokenizer.json`, used so that every text comes back whole, and its end of document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers

from netlayer.errors import ConfigError
from trainer.data.dataset.manifest import TOKENIZER_FILE, TokenDtype, dtype_for
from trainer.data.tokenizer import END_OF_DOCUMENT

TOKENIZER_FIELD = "--tokenizer"
END_FIELD = "--eod"
_WORD_BEGIN = "\u2581"
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_CONFIG_FILE = "tokenizer_config.json"
# Of GPT-2 and its kind, Llama 3, Llama 2 and Mistral, Gemma, and ours. `<|end|>` last: in others it ends a turn.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", END_OF_DOCUMENT)


@dataclass(frozen=True)
class Vocabulary:
    """Facts about a tokenizer: `size` bounds its ids, `end_of_document` is the id that ends each document."""

    size: int
    end_of_document: int
    end_token: str

    @property
    def dtype(self) -> TokenDtype:
        """Narrowest dtype of all ids."""
        return dtype_for(self.size)


def tokenizer_path(path: Path) -> Path:
    """Return the file of a tokenizer: `path`, or the `tokenizer.json` in it where it is a folder."""
    return path / TOKENIZER_FILE if path.is_dir() else path


def open_tokenizer(file: Path, field: str = TOKENIZER_FIELD) -> Tokenizer:
    """Load a tokenizer so that it encodes all of every text, and text alone.

    A saved tokenizer carries how it was used last: one with a maximum length cuts every document there, one with
    padding fills them up. Names of special tokens in a text are read as their characters.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises nothing narrower
        rule = f"cannot be read ({exc})"
        raise ConfigError(field, file, rule, "give a tokenizer.json of the tokenizers library") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_vocabulary(tokenizer: Tokenizer, file: Path, end_token: str | None) -> Vocabulary:
    """Return the facts of a tokenizer.

    Args:
        tokenizer: the tokenizer.
        file: its file; a `tokenizer_config.json` beside it may name its end.
        end_token: token that ends each document; None: the one that the file beside it names, else one of the usual.

    Raises:
        ConfigError: it has no such token, or none of the usual.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise ConfigError(TOKENIZER_FIELD, file, "has an empty vocabulary", "give another tokenizer")
    candidates = [end_token] if end_token else [_configured_end(file), *_USUAL_ENDS]
    end = next((token for token in candidates if token in ids), None)
    if end is None and end_token:
        raise ConfigError(END_FIELD, end_token, f"is no token of {file}", f"give one of its own{_examples(tokenizer)}")
    if end is None:
        rule = "has none of the usual tokens that end a document"
        raise ConfigError(TOKENIZER_FIELD, file, rule, f"name it with {END_FIELD}{_examples(tokenizer)}")
    # Not the number of tokens: published vocabularies have gaps, and the largest id is what an embedding must hold.
    return Vocabulary(max(ids.values()) + 1, ids[end], end)


class LossCounter:
    """Counter of what a tokenizer cannot write: unknown tokens, and characters that it drops without any.

    WordPiece, WordLevel and Unigram give one unknown token for what they lack. A BPE without an unknown token gives
    nothing; byte-level ones lack a character where one of its bytes is no token.

    Args:
        tokenizer: as `open_tokenizer` gives it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.unknown = self.dropped = 0
        self._tokenizer = tokenizer
        tree = json.loads(tokenizer.to_str())
        model = tree["model"]
        token = model.get("unk_token")
        self._unknown_id = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
        is_bpe = model.get("type", "BPE") == "BPE" and "merges" in model
        has_marks = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        self._may_drop = is_bpe and token is None and not model.get("byte_fallback") and not has_marks
        letters = pre_tokenizers.ByteLevel.alphabet() if '"ByteLevel"' in json.dumps(tree.get("pre_tokenizer")) else []
        self._is_byte_level = bool(letters)
        self._lacking = {letter for letter in letters if tokenizer.token_to_id(letter) is None}
        self._may_drop &= bool(self._lacking) or not self._is_byte_level
        self._is_dropped: dict[str, bool] = {}

    def add(self, text: str, ids: Sequence[int]) -> None:
        """Count what is lost of one document."""
        if self._unknown_id is not None:
            self.unknown += ids.count(self._unknown_id)
        if self._may_drop:
            for character in set(text):
                if character not in self._is_dropped:
                    self._is_dropped[character] = self._drops(character)
                if self._is_dropped[character]:
                    self.dropped += text.count(character)

    def _drops(self, character: str) -> bool:
        if not self._is_byte_level:  # white space is what words are split at
            # Metaspace gives a mark of the word's begin even where it has no letter.
            with_letter = self._tokenizer.encode(character, add_special_tokens=False).tokens
            return not character.isspace() and not any(token != _WORD_BEGIN for token in with_letter)
        normalizer = self._tokenizer.normalizer
        written = normalizer.normalize_str(character) if normalizer else character
        [(letters, _)] = _BYTE_LEVEL.pre_tokenize_str(written) or [("", (0, 0))]
        return not self._lacking.isdisjoint(letters)


def _configured_end(file: Path) -> str | None:
    """Return `eos_token` of the configuration that transformers saves beside a tokenizer; None where it has none."""
    try:
        token = json.loads((file.parent / _CONFIG_FILE).read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _examples(tokenizer: Tokenizer) -> str:
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return f", such as {', '.join(special[:4])}" if special else ""
