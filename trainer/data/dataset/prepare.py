"""Input files made into a dataset folder: planned in shards, tokenised by workers, resumed where a run was killed.

A shard is what one worker makes of one unit of the plan. The plan depends on the inputs and the options alone, so the
tokens are the same whoever works at it, and however often it was interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from netlayer.errors import ConfigError
from netlayer.results import writing
from netlayer.units import format_size
from topology.workers import in_order_of_end
from trainer.data.corpus import Document
from trainer.data.dataset.inputs import (
    INPUT_FIELD,
    Damage,
    Kind,
    OnError,
    Piece,
    Skipped,
    Source,
    Text,
    find_sources,
    plan_units,
    read_texts,
)
from trainer.data.dataset.manifest import (
    SOURCES_FILE,
    TOKENIZER_FILE,
    VERSION,
    Manifest,
    Shard,
    TokenDtype,
    TokenizerFacts,
    checksum,
)
from trainer.data.dataset.vocabulary import (
    TOKENIZER_FIELD,
    LossCounter,
    Vocabulary,
    open_tokenizer,
    read_vocabulary,
    tokenizer_path,
)
from trainer.data.dataset.writer import (
    OUT_FIELD,
    SyncedFile,
    check_out,
    hold_to_plan,
    kept_if_begun,
    open_part,
    provenance,
    publish,
    published,
    shard_file,
    write_index,
    write_synced,
)
from trainer.data.tokenizer import train_tokenizer

logger = logging.getLogger(__name__)

TRAIN = "train"
_SHARDS = 1024  # about as many as a plan has, between these sizes
_LEAST_UNIT_BYTES, _MOST_UNIT_BYTES = 16 << 20, 1 << 30
_NAMED_TEXTS = 3  # of files without a known ending, in a note
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 1 << 20  # that the tokenizer gets at once

# Called with the name of a stage, what is done, of how much, and a few words.
OnStage = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class PrepareOptions:
    """Inputs, and how tokens are made of them.

    Args:
        inputs: files and folders.
        tokenizer: a `tokenizer.json`, a folder with one, or `train`.
        vocab_size: most tokens of the vocabulary: to be trained, or of the model; None: 2,048 to train, else any.
        end_token: that ends each document; None: the tokenizer's own.
        text_field: key of JSON lines, or column, that holds the text.
        pattern, kind, split: as for `find_sources`.
        on_error: what to do about a document that cannot be used.
        unit_bytes: input of one shard; None: chosen by how much there is.
        tokenizer_bytes: text that a tokenizer is trained on, evenly from all shards.
    """

    inputs: tuple[Path, ...]
    tokenizer: str
    vocab_size: int | None = None
    end_token: str | None = None
    text_field: str = "text"
    pattern: str = "*"
    kind: Kind | None = None
    split: str | None = None
    on_error: OnError = "fail"
    unit_bytes: int | None = None
    tokenizer_bytes: int = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """A dataset that is ready.

    Args:
        manifest: its manifest.
        skipped: documents that were skipped, by reason.
        examples: the first of each.
        shards_reused: shards that an earlier run had finished.
        was_there: whether an earlier run had finished all of it.
        texts_beside: files read as one text each, though the others hold rows.
    """

    manifest: Manifest
    skipped: dict[str, int]
    examples: dict[str, str] = field(default_factory=dict)
    shards_reused: int = 0
    was_there: bool = False
    texts_beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One unit of the plan, as a worker gets it; all that it names lies on a file system that it sees."""

    number: int
    unit: tuple[Piece, ...]
    part: Path
    tokenizer_checksum: str
    end_of_document: int
    dtype: TokenDtype
    text_field: str
    on_error: OnError


@dataclass(frozen=True)
class Result:
    """Facts about a finished shard, kept beside it until the dataset is whole; `sources` are (path, checksum)."""

    tokens: int
    documents: int
    checksum: str
    lengths_checksum: str
    input_bytes: int
    skipped: dict[str, int]
    examples: dict[str, str]
    sources: list[list[str]]
    reused: bool = False
    unknown_tokens: int = 0
    dropped_characters: int = 0


def prepare_dataset(
    options: PrepareOptions, out: Path, *, workers: int | None = None, dask: str | None = None, on_stage: OnStage
) -> Prepared:
    """Make the dataset at `out`, or go on with it where an earlier run was interrupted.

    Args:
        options: what to make.
        out: folder of the dataset; must not be there, unless as the result of the same call.
        workers: processes here; None: one a core.
        dask: address of a Dask scheduler in place of processes; its workers see the inputs and `out`.
        on_stage: called with progress.

    Raises:
        ConfigError: an input, option or `out` cannot be used, or the disk is full. Nothing is published then, and what
            is finished stays for the next run.
    """
    on_stage("planning", 0, 0, "")
    skipped = Skipped(options.on_error)
    sources = find_sources(options.inputs, skipped, options.pattern, options.kind, options.split)
    total_bytes = sum(source.size_bytes for source in sources)
    if sources and not total_bytes:
        some = f"and {len(sources) - 1} more are" if len(sources) > 1 else "is"
        raise ConfigError(INPUT_FIELD, sources[0].path, f"{some} empty", "give files with text")
    unit_bytes = options.unit_bytes or min(max(total_bytes // _SHARDS, _LEAST_UNIT_BYTES), _MOST_UNIT_BYTES)
    units = plan_units(sources, unit_bytes, skipped)
    plan = _describe(options, units)
    if earlier := _published(out, plan):
        return earlier
    check_out(out)
    with open_part(out) as part, kept_if_begun(part):
        hold_to_plan(part, plan, out)
        tokenizer_file, vocabulary = _place_tokenizer(options, units, part, on_stage)
        tokenizer_checksum = checksum(tokenizer_file)
        task = functools.partial(
            Task,
            part=part,
            tokenizer_checksum=tokenizer_checksum,
            end_of_document=vocabulary.end_of_document,
            dtype=vocabulary.dtype,
            text_field=options.text_field,
            on_error=options.on_error,
        )
        tasks = [task(number, unit) for number, unit in enumerate(units)]
        results = _work(tasks, total_bytes, workers, dask, on_stage)
        on_stage("publishing", 0, 0, "")
        for result in results:
            skipped.counts.update(result.skipped)
            skipped.examples = {**result.examples, **skipped.examples}
        if not any(result.documents for result in results):
            reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.counts.items()) or "no text"
            rule = f"holds no document that can be used ({reasons})"
            shutil.rmtree(part, ignore_errors=True)  # its shards are finished, and nobody wants them
            raise ConfigError(INPUT_FIELD, options.inputs[0], rule, next(iter(skipped.examples.values()), "give text"))
        name = TRAIN if options.tokenizer == TRAIN else Path(options.tokenizer).name
        tokenizer = TokenizerFacts(name=name, checksum=tokenizer_checksum)
        with writing(out, OUT_FIELD):
            manifest = _finish(part, sources, results, vocabulary, tokenizer, skipped, plan)
            publish(part, out, manifest)
    return Prepared(
        manifest,
        dict(skipped.counts),
        skipped.examples,
        sum(result.reused for result in results),
        texts_beside=_texts_beside(sources) if options.kind is None else (),
    )


def _texts_beside(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the files without a known ending where others hold rows: a README next to parquet files is one."""
    texts = tuple(source.path for source in sources if source.kind == "text")
    return texts if len(texts) < len(sources) else ()


# --- the plan --------------------------------------------------------------------------------------------------------


def _describe(options: PrepareOptions, units: Sequence[Sequence[Piece]]) -> dict[str, str]:
    """Return digests of all that the tokens depend on, by the name that a user knows it by.

    What to do about errors is no part of it: a shard without any is the same either way.
    """
    if options.tokenizer == TRAIN:
        tokenizer = f"{TRAIN} {options.vocab_size} {options.tokenizer_bytes}"
    else:
        tokenizer = checksum_of_tokenizer(Path(options.tokenizer))
    pieces = [[(*asdict(piece.source).values(), piece.start, piece.end) for piece in unit] for unit in units]
    parts = {
        "inputs": json.dumps(pieces),
        TOKENIZER_FIELD: tokenizer,
        "--eod": str(options.end_token),
        "--field": options.text_field,
        "version": str(VERSION),
    }
    return {key: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for key, text in parts.items()}


def checksum_of_tokenizer(path: Path) -> str:
    """Return the checksum of a tokenizer's file.

    Raises:
        ConfigError: it cannot be read.
    """
    file = tokenizer_path(path)
    try:
        return checksum(file)
    except OSError as exc:
        remedy = f"give a tokenizer.json, or {TRAIN}"
        raise ConfigError(TOKENIZER_FIELD, file, f"cannot be read ({exc.strerror})", remedy) from exc


def _published(out: Path, plan: dict[str, str]) -> Prepared | None:
    """Return the dataset at `out` where it was made by this very plan: a job that is started again has it done."""
    manifest = published(out, plan)
    return None if manifest is None else Prepared(manifest, manifest.provenance["skipped"], was_there=True)


def _place_tokenizer(
    options: PrepareOptions, units: Sequence[Sequence[Piece]], part: Path, on_stage: OnStage
) -> tuple[Path, Vocabulary]:
    """Return the tokenizer's file in the dataset, trained or copied there, and the facts about it."""
    file = part / "dataset" / TOKENIZER_FILE
    if options.tokenizer != TRAIN:
        original = tokenizer_path(Path(options.tokenizer))
        vocabulary = read_vocabulary(open_tokenizer(original), original, options.end_token)
        if options.vocab_size and vocabulary.size > options.vocab_size:
            rule = f"is below the {vocabulary.size:,} token ids of {original}"
            remedy = f"set at least {vocabulary.size}, here and for the model, or give another tokenizer"
            raise ConfigError("--vocab-size", options.vocab_size, rule, remedy)
        with writing(part, OUT_FIELD):
            write_synced(file, original.read_text(encoding="utf-8"))
        return file, vocabulary
    if not file.exists():  # of a run that was interrupted: the same, for it depends on the plan alone
        documents = _sample_text(options, units)
        on_stage("training the tokenizer", 0, 0, f"{len(documents):,} documents")
        text = train_tokenizer(documents, options.vocab_size or 2048).to_str(pretty=True)
        with writing(part, OUT_FIELD):
            write_synced(file, text)
    return file, read_vocabulary(open_tokenizer(file), file, options.end_token)


def _sample_text(options: PrepareOptions, units: Sequence[Sequence[Piece]]) -> list[Document]:
    """Return the first documents of every unit, in all about `tokenizer_bytes`."""
    documents: list[Document] = []
    skipped = Skipped(options.on_error)
    for number, unit in enumerate(units):
        limit, size = options.tokenizer_bytes // len(units), 0
        for each in (text for piece in unit for text in read_texts(piece, options.text_field)):
            if isinstance(each, Text):
                documents.append(Document(f"{number}", each.text))
                size += len(each.text)
            else:
                skipped.add(each)
            if size >= limit:
                break
    return documents


# --- one shard -------------------------------------------------------------------------------------------------------


def _work(
    tasks: Sequence[Task], total_bytes: int, workers: int | None, dask: str | None, on_stage: OnStage
) -> list[Result]:
    """Return the results of all tasks, in their order."""
    results: dict[int, Result] = {}
    done_bytes = tokens = 0
    on_stage("tokenising", 0, total_bytes, "")
    with contextlib.closing(in_order_of_end(tokenize_unit, tasks, processes=workers, dask=dask)) as ended:
        for number, result in ended:
            results[number] = result
            if dask and not _paths(tasks[number])[0].exists():
                rule = "its workers write to another file system than this host sees"
                raise ConfigError("--dask", dask, rule, "give an --out that all of them share")
            done_bytes, tokens = done_bytes + result.input_bytes, tokens + result.tokens
            progress = f"{len(results)} of {len(tasks)} shards, {tokens:,} tokens"
            on_stage("tokenising", done_bytes, total_bytes, progress)
    return [results[number] for number in range(len(tasks))]


def _paths(task: Task) -> tuple[Path, Path, Path]:
    """Return the files of a shard: its tokens, the lengths of its documents, and the facts about both."""
    progress, name = task.part / "progress", shard_file(task.number)
    return task.part / "dataset" / name, progress / f"{name}.lengths", progress / f"{name}.json"


def tokenize_unit(task: Task) -> Result:
    """Make one shard, or verify the one that an earlier run has finished.

    Raises:
        ConfigError: a document cannot be used and none may be skipped, an input changed, or the disk is full.
    """
    tokens_file, lengths_file, facts_file = _paths(task)
    with writing(task.part, OUT_FIELD):
        if earlier := _verified(task):
            return earlier
        skipped, lengths = Skipped(task.on_error), array("q")
        losses: LossCounter | None = None
        checksums = []
        with SyncedFile(tokens_file) as shard:
            for piece in task.unit:
                piece.source.check_unchanged()
                if piece.is_first:
                    checksums.append([piece.source.path, piece.source.checksum()])
                losses = losses or LossCounter(_tokenizer_of(task))
                for ids in _encode(task, piece, skipped, losses):
                    shard.write(ids)
                    lengths.append(len(ids))
                piece.source.check_unchanged()
        with SyncedFile(lengths_file) as lengths_synced:
            lengths_synced.write(np.frombuffer(lengths, np.int64) if lengths else b"")
        result = Result(
            tokens=sum(lengths),
            documents=len(lengths),
            checksum=shard.checksum,
            lengths_checksum=lengths_synced.checksum,
            input_bytes=sum(piece.size_bytes for piece in task.unit),
            skipped=dict(skipped.counts),
            examples=skipped.examples,
            sources=checksums,
            unknown_tokens=losses.unknown if losses else 0,
            dropped_characters=losses.dropped if losses else 0,
        )
        write_synced(facts_file, json.dumps(asdict(result)))  # last: where it is, the others are whole
    return result


def _verified(task: Task) -> Result | None:
    """Return the facts about a finished shard, once both files were read and are as they were written."""
    tokens_file, lengths_file, facts_file = _paths(task)
    try:
        result = Result(**{**json.loads(facts_file.read_text(encoding="utf-8")), "reused": True})
        if (checksum(tokens_file), checksum(lengths_file)) == (result.checksum, result.lengths_checksum):
            if task.on_error == "skip" or not result.skipped:
                return result
            return None  # made while documents could be skipped: the first of them is now the error
        logger.warning("%s is not as it was written; it is made again", tokens_file)
    except FileNotFoundError:
        pass
    except (ValueError, TypeError) as exc:
        logger.warning("%s is damaged (%s); its shard is made again", facts_file, exc)
    return None


def _encode(task: Task, piece: Piece, skipped: Skipped, losses: LossCounter) -> Iterator[NDArray[np.integer]]:
    """Yield the token ids of every document of a piece, each with its end; what is lost of them goes to `losses`."""
    tokenizer = _tokenizer_of(task)
    for batch in _batches(read_texts(piece, task.text_field), skipped):
        try:
            # Without special tokens: a template would add a beginning, or a second end.
            encodings = tokenizer.encode_batch_fast([text.text for text in batch], add_special_tokens=False)
        except Exception as exc:  # the library raises nothing narrower
            rule = f"cannot encode {piece.source.path}, {batch[0].where} or one of the next {len(batch)} ({exc})"
            raise ConfigError(TOKENIZER_FIELD, None, rule, "give a tokenizer that has every character") from exc
        for text, encoding in zip(batch, encodings, strict=True):
            if ids := encoding.ids:
                losses.add(text.text, ids)
                yield np.array([*ids, task.end_of_document], task.dtype)
            else:
                detail = f"{text.where} gives no token of this tokenizer".lstrip()
                remedy = (
                    f"give a {TOKENIZER_FIELD} that has its characters, or skip such documents with --on-error skip"
                )
                skipped.add(Damage("empty document", piece.source.path, detail, remedy))


def _batches(texts: Iterator[Text | Damage], skipped: Skipped) -> Iterator[list[Text]]:
    """Yield the texts in batches of a size that the tokenizer works at well; damage goes to `skipped`."""
    batch: list[Text] = []
    characters = 0
    for each in texts:
        if isinstance(each, Damage):
            skipped.add(each)
            continue
        batch.append(each)
        characters += len(each.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenizer_of(task: Task) -> Tokenizer:
    if multiprocessing.parent_process() is not None:
        # The library would start a thread a core in each worker.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return _tokenizer(str(task.part / "dataset" / TOKENIZER_FILE), task.tokenizer_checksum)


@functools.lru_cache(maxsize=1)
def _tokenizer(file: str, expected: str) -> Tokenizer:
    """Load a worker's tokenizer once; `expected` is the checksum of the file."""
    if checksum(Path(file)) != expected:
        raise ConfigError(TOKENIZER_FIELD, file, "is another than the one that was planned with", "start again")
    return open_tokenizer(Path(file))


# --- the whole -------------------------------------------------------------------------------------------------------


def _finish(
    part: Path,
    sources: Sequence[Source],
    results: Sequence[Result],
    vocabulary: Vocabulary,
    tokenizer: TokenizerFacts,
    skipped: Skipped,
    plan: dict[str, str],
) -> Manifest:
    """Write index and list of sources of a dataset whose shards are all there; return its manifest."""
    folder = part / "dataset"
    shards = [
        Shard(file=shard_file(number), tokens=result.tokens, documents=result.documents, checksum=result.checksum)
        for number, result in enumerate(results)
        if result.documents
    ]
    for number, result in enumerate(results):
        if not result.documents:  # of a unit whose documents were all skipped
            (folder / shard_file(number)).unlink(missing_ok=True)
    lengths = (np.fromfile(part / "progress" / f"{shard.file}.lengths", np.int64) for shard in shards)
    index, documents, tokens = write_index(folder, lengths)
    checksums = dict(pair for result in results for pair in result.sources)
    rows = [
        {"file": source.path, "bytes": source.size_bytes, "checksum": checksums.get(source.path)} for source in sources
    ]
    sources_checksum = write_synced(folder / SOURCES_FILE, json.dumps(rows, indent=1) + "\n")
    input_bytes = sum(source.size_bytes for source in sources)
    return Manifest(
        version=VERSION,
        dtype=vocabulary.dtype,
        vocab_size=vocabulary.size,
        end_of_document=vocabulary.end_of_document,
        tokenizer=tokenizer,
        tokens=tokens,
        documents=documents,
        index=index,
        shards=tuple(shards),
        provenance=provenance(
            sources={"files": len(sources), "bytes": input_bytes, "checksum": sources_checksum},
            skipped=dict(Counter(skipped.counts)),
            unknown_tokens=sum(result.unknown_tokens for result in results),
            dropped_characters=sum(result.dropped_characters for result in results),
            plan=plan,
        ),
    )


def notes(prepared: Prepared) -> Iterator[str]:
    """Yield a line for each reason for which documents were skipped, and for what an earlier run had done."""
    if prepared.was_there:
        yield "it is there already, made of the same inputs by the same options: nothing was done"
    if prepared.shards_reused:
        yield f"finished by an earlier run, and verified: {prepared.shards_reused} shards"
    for reason, count in prepared.skipped.items():
        example = prepared.examples.get(reason)
        yield f"skipped: {count} x {reason}" + (f", the first: {example}" if example else "")
    if texts := prepared.texts_beside:
        more = f" and {len(texts) - _NAMED_TEXTS} more" if len(texts) > _NAMED_TEXTS else ""
        names = ", ".join(texts[:_NAMED_TEXTS])
        yield f"note: read as text, a document a file, beside files of rows: {names}{more}; omit them with --pattern"
    facts, tokens = prepared.manifest.provenance, prepared.manifest.tokens
    if unknown := facts.get("unknown_tokens", 0):
        share = f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.1%})"
        yield f"warning: {share} are the tokenizer's unknown token: that text is lost; look with netlayer data inspect"
    if dropped := facts.get("dropped_characters", 0):
        yield f"warning: {dropped:,} characters have no token in this tokenizer, and were dropped"


def describe(prepared: Prepared) -> str:
    """Return one line about a dataset."""
    manifest = prepared.manifest
    size = sum(shard.tokens for shard in manifest.shards) * np.dtype(manifest.dtype).itemsize
    shards = len(manifest.shards)
    return (
        f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {shards} shard{'s' * (shards > 1)}, "
        f"{format_size(size)}; vocabulary {manifest.vocab_size:,}"
    )
