"""A byte-level BPE tokenizer, trained on the spot on the training files alone, and text turned into tokens.

Every byte has a token, so any text can be written; a special token ends each document, and no text gives it: one that
holds its name is read as its characters. Not covered: pre-tokenizers for other languages than the one regular
expression of GPT-2, which the `tokenizers` library ships.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from netlayer.errors import ConfigError
from trainer.data.corpus import Document, check_vocab_size

logger = logging.getLogger(__name__)

END_OF_DOCUMENT = "<|end|>"
_DOCUMENTS_A_CALL = 32
_GIVEN_UP_S = 1.0  # in which the library comes to ask for more text, unless it has it all

OnDocuments = Callable[[int], None]


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """A BPE of at most `vocab_size` tokens; fewer where the text has no more pairs to merge, which the log says."""
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(tokenizer, documents, trainer)
    tokenizer.encode_special_tokens = True  # as characters; it is none of what a file says of its tokenizer
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        logger.warning(
            "the text gives a vocabulary of %d tokens, fewer than the %d that it may have; the rest is never used",
            reached,
            vocab_size,
        )
    return tokenizer


def _train(tokenizer: Tokenizer, documents: Sequence[Document], trainer: trainers.BpeTrainer) -> None:
    """Train in a thread of its own: the library ignores signals for many seconds, and this one ends at once.

    Where it does, what merges pairs by then is left to end with the process.
    """
    failures: list[BaseException] = []
    is_given_up = threading.Event()

    def texts() -> Iterator[str]:
        for document in documents:
            if is_given_up.is_set():
                raise InterruptedError
            yield document.text

    def run() -> None:
        try:
            tokenizer.train_from_iterator(texts(), trainer)
        except BaseException as exc:  # noqa: BLE001 - raised where it was called
            failures.append(exc)

    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            # A signal may be delivered to a thread of some library, which wakes no wait of this one.
            thread.join(0.1)
    except BaseException:
        is_given_up.set()
        thread.join(_GIVEN_UP_S)  # one that wants the interpreter while that is torn down would abort the process
        raise
    if failures:
        raise failures[0]


def load_tokenizer(file: Path, vocab_size: int) -> Tokenizer:
    """Load a saved tokenizer: of `train_tokenizer`, or one that came with an imported model.

    Raises:
        ConfigError: it cannot be read, or has more tokens than the model.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises nothing narrower
        raise ConfigError("tokenizer", file, f"cannot be read ({exc})", "give another checkpoint") from exc
    if tokenizer.get_vocab_size() > vocab_size:
        rule = f"is below the {tokenizer.get_vocab_size()} tokens of {file}"
        raise ConfigError("job.model.vocab_size", vocab_size, rule, "set it to the checkpoint's")
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document], vocab_size: int, on_documents: OnDocuments
) -> NDArray[np.integer]:
    """All documents as one stream of token ids, each ended by the end-of-document token.

    Args:
        tokenizer: what `train_tokenizer` gave.
        documents: texts in order.
        vocab_size: chooses the dtype: uint16 where every id fits, else uint32.
        on_documents: called with the number of documents done.

    Raises:
        ConfigError: the tokenizer is another program's, without the token that ends a document here.
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    if (end_id := tokenizer.token_to_id(END_OF_DOCUMENT)) is None:
        rule = f"has no {END_OF_DOCUMENT} to end a document of a text with"
        remedy = "make tokens with netlayer data prepare --tokenizer, and give them as job.data.datasets"
        raise ConfigError("tokenizer", None, rule, remedy)
    end = [end_id]
    pieces: list[NDArray[np.integer]] = []
    for first in range(0, len(documents), _DOCUMENTS_A_CALL):
        texts = [document.text for document in documents[first : first + _DOCUMENTS_A_CALL]]
        encodings = tokenizer.encode_batch_fast(texts)
        pieces += [np.asarray(encoding.ids + end, dtype=dtype) for encoding in encodings]
        on_documents(min(first + _DOCUMENTS_A_CALL, len(documents)))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
