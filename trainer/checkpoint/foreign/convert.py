"""Checkpoints of other programs made of ours, and ours of theirs, a tensor at a time.

    huggingface   config.json and safetensors files, as transformers reads and writes them
    safetensors   our own names and shapes
    torchtitan    torch.distributed.checkpoint with the names of torchtitan's Llama 3
    dcp           torch.distributed.checkpoint with our own names

Memory is that of the largest parameter, in the dtypes of both sides. A folder appears under its name when it is whole
and on the disk. What is exported is the model: moments of an optimiser belong to the run that goes on. An imported
folder is a checkpoint of step 0 without them, from which `netlayer train --resume` starts with a fresh optimiser.

Not covered: names and layouts (`trainer.checkpoint.foreign.layouts`), and config.json
(`trainer.checkpoint.foreign.hugging_face`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import tomlkit
import torch
from torch import Tensor

from netlayer.config.file import load_config
from netlayer.config.tree import JobConfig, ModelConfig, build_config, build_section
from netlayer.errors import ConfigError
from netlayer.lock import LockBusy, claimed
from netlayer.results import sync_folder, writing
from netlayer.units import format_size
from trainer.checkpoint.foreign.hugging_face import (
    ARCHITECTURES,
    CONFIG,
    FIELD,
    architecture_of,
    config_of,
    layout_of,
    read_model,
)
from trainer.checkpoint.foreign.layouts import HEAD, TOKENS, Layout, gpt2_layout, own_layout, torchtitan_layout
from trainer.checkpoint.names import PENDING, TOKENIZER
from trainer.checkpoint.reader import Checkpoint, open_checkpoint, write_checkpoint, write_items
from trainer.checkpoint.safetensors_files import SafetensorsFiles, ShardedWriter
from trainer.data.tokenizer import END_OF_DOCUMENT
from trainer.sample import model_of

Target = Literal["huggingface", "safetensors", "torchtitan", "dcp"]
Origin = Literal["huggingface", "safetensors", "dcp"]
OnProgress = Callable[[int, int, str], None]
"""Called with bytes done, of how many, and what is under way."""
JOB = "job.toml"
"""The model, as a job file that `netlayer train` reads, where nothing else of the folder says it."""
OUT_FIELD = "OUT"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MOST_NAMES = 3  # in an error


class Source(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Make `out` in the block, as the one process that does: two would publish each other's halves.

    Raises:
        ConfigError: there is something at `out`, another process makes it, or its folder cannot be written.
    """
    if out.exists():
        raise ConfigError(OUT_FIELD, out, "is there already", "give a new folder, or remove it")
    lock = out.absolute().parent / f".{out.absolute().name}.lock"
    with contextlib.ExitStack() as stack:
        try:
            with writing(out, OUT_FIELD):
                lock.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(claimed(lock))
        except LockBusy as exc:
            raise ConfigError(OUT_FIELD, out, f"is being made by {exc}", "wait for it, or give another folder") from exc
        yield


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Fill a folder in the block, which then appears at `out`, whole and on the disk; else nothing is left.

    Raises:
        ConfigError: there is something at `out`, another process makes it, or it cannot be written.
    """
    part = out.absolute().parent / f".{out.absolute().name}.part"
    with _alone(out), writing(out, OUT_FIELD):
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir()
        try:
            yield part
            sync_folder(part)
            part.rename(out)
            sync_folder(out.absolute().parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


# ---------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True)
class Written:
    """A folder that was written, its tensors and their bytes; a line of what to do next, if there is one."""

    path: Path
    num_tensors: int
    num_bytes: int
    hint: str = ""

    def line(self) -> str:
        text = f"{self.path}: {self.num_tensors:,} tensors, {format_size(self.num_bytes)}"
        return f"{text}; {self.hint}" if self.hint else text


def model_in(source: Checkpoint, config: Path | None = None) -> ModelConfig:
    """Return the model of a checkpoint.

    Args:
        config: a job file that says it, where the checkpoint, of plain torch, does not.

    Raises:
        ConfigError: nobody says it, or two say it.
    """
    if source.meta is None:
        return _own_model(source.path, config, None)
    if config is not None:
        raise ConfigError("--config", config, f"has no effect: {source.path} says its model", "omit it")
    return model_of(source.meta)


def export_checkpoint(
    source: Checkpoint,
    model: ModelConfig,
    out: Path,
    target: Target,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 << 30,
    on_progress: OnProgress = lambda _done, _total, _text: None,
) -> Written:
    """Write the model of a checkpoint for another program.

    Args:
        model: whose it is.
        dtype: of the tensors; None: as they are, float32 in a run's.
        shard_bytes: most bytes of a file, but for a larger tensor.

    Raises:
        ConfigError: the program has no such model, the checkpoint is damaged or lacks a parameter, or `out` cannot be
            written.
    """
    dtype = dtype or getattr(torch, "float64" if model.dtype == "float64" else "float32")
    layout = _target_layout(model, target)
    reader = _Parameters(source)
    if missing := [name for name in layout.pieces if name not in reader]:
        rule = f"lacks {_few(missing)}"
        raise ConfigError(FIELD, source.path, rule, "give a checkpoint of the model that it says")
    num_bytes = sum(math.prod(shape) for shape in layout.shapes.values()) * dtype.itemsize
    tokenizer = None if source.meta is None or TOKENIZER not in source.meta.digests else source.meta.tokenizer_file
    with new_folder(out) as folder:
        tensors = _counted(layout.to_theirs(reader.__getitem__), dtype, num_bytes, on_progress)
        if target in ("huggingface", "safetensors"):
            with ShardedWriter(folder, layout.shapes, dtype, shard_bytes, {}) as writer:
                for name, tensor in tensors:
                    writer.add(name, tensor)
        else:
            write_items(folder, tensors, layout.copies if not layout.needs_copies else {}, file_bytes=shard_bytes)
        if target == "huggingface":
            end_token = None if tokenizer is None else _end_token(tokenizer)
            facts = config_of(model, str(dtype).removeprefix("torch."), end_token)
            _write_json(folder / CONFIG, facts)
        else:
            (folder / JOB).write_text(job_text(model), encoding="utf-8")
        if tokenizer is not None:
            (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
            if target == "huggingface":
                kept = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
                ends = {"eos_token": END_OF_DOCUMENT} if _end_token(tokenizer) is not None else {}
                _write_json(folder / _TOKENIZER_CONFIG, kept | ends)
    return Written(out, len(layout.shapes), num_bytes)


class _Parameters:
    """Parameters of a checkpoint by our names; a tied table may be stored under either of two."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._source

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source.read(self._stored(name))
        self._source.close()  # lets go of the pages that were read
        return tensor

    def _stored(self, name: str) -> str:
        return HEAD if name == TOKENS and name not in self._source else name


def _target_layout(model: ModelConfig, target: Target) -> Layout:
    if target == "huggingface":
        return layout_of(architecture_of(model), model)
    return torchtitan_layout(model) if target == "torchtitan" else own_layout(model)


def _counted(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, total: int, on_progress: OnProgress
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    for name, tensor in tensors:
        on_progress(done, total, name)
        yield name, tensor.to(dtype)
        done += tensor.numel() * dtype.itemsize
    on_progress(done, total, "")


def _end_token(tokenizer: Path) -> int | None:
    """Return the id of our end of a document, read as JSON: the library is not needed for it."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        for token in json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]:
            if token["content"] == END_OF_DOCUMENT:
                return int(token["id"])
    return None


def job_text(model: ModelConfig) -> str:
    """Return a job file with the model alone, as far as it is not the default."""
    plain = ModelConfig().model_dump(mode="json")
    keys = model.model_dump(mode="json", exclude={"preset", "compile", "operators", "recompute", "recompute_modules"})
    keys = {name: value for name, value in keys.items() if value != plain[name]}
    return tomlkit.dumps({"job": {"model": keys}})


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- import


@dataclass(frozen=True)
class Foreign:
    """A model of another program, complete and of the right shapes.

    Args:
        path: where it is.
        model: what it is here.
        layout: its names.
        tensors: by its names.
        dtype: that holds all of them without loss.
        tokenizer: its file, if it has one.
    """

    path: Path
    model: ModelConfig
    layout: Layout
    tensors: Source
    dtype: torch.dtype
    tokenizer: Path | None


def open_foreign(path: Path, origin: Origin, config: Path | None = None, seq_len: int | None = None) -> Foreign:
    """Open and check a model of another program; of its tensors only the shapes are read.

    Args:
        config: a job file with the model, where the folder has no `job.toml`; not for huggingface.
        seq_len: tokens of a training sequence; None: the most that the model reads. Only where positions are rotary.

    Raises:
        ConfigError: it is damaged or incomplete, or of a model that is not computed here.
    """
    if not path.exists():
        raise ConfigError(FIELD, path, "is not there", "give a file or a folder")
    tokenizer = path / TOKENIZER if (path / TOKENIZER).is_file() else None
    buffers: tuple[str, ...] = ()
    if origin == "dcp":
        checkpoint = open_checkpoint(path, FIELD)
        dcp = _DcpTensors(checkpoint)
        model = _own_model(path, config, seq_len, checkpoint)
        layout = torchtitan_layout(model) if dcp.is_torchtitan else own_layout(model)
        _check_tensors(path, layout, dcp.shapes, ())
        return Foreign(path, model, layout, dcp, dcp.wide_dtype(), tokenizer)
    if origin == "safetensors":
        model = _own_model(path, config, seq_len)
        files, layout = SafetensorsFiles(path), own_layout(model)
    else:
        if config is not None:
            rule = f"has no effect: the model is what {CONFIG} says"
            raise ConfigError("--config", config, rule, "omit it")
        name, model = read_model(_read_config(path), path / CONFIG, seq_len)
        files, buffers = SafetensorsFiles(path), ARCHITECTURES[name].buffers
        is_bare = name == "GPT2LMHeadModel" and "wte.weight" in files
        layout = gpt2_layout(model, "") if is_bare else layout_of(name, model)
    _check_tensors(path, layout, files.shapes, buffers)
    used = [piece.name for pieces in layout.pieces.values() for piece in pieces]
    dtype = files.wide_dtype(used)
    narrow = "bfloat16" if all(files.dtypes[each] == "BF16" for each in used) else "float32"
    model = model.model_copy(update={"dtype": "float64" if dtype == torch.float64 else narrow})
    _check_copies(path, layout, files)
    return Foreign(path, model, layout, files, dtype, tokenizer)


def import_model(foreign: Foreign, out: Path, on_progress: OnProgress = lambda _done, _total, _text: None) -> Written:
    """Make a checkpoint of step 0 of another program's model.

    Raises:
        ConfigError: a tensor cannot be read, the tokenizer has more tokens than the model, or `out` cannot be written.
    """
    tokenizer = None if foreign.tokenizer is None else _tokenizer_text(foreign.tokenizer, foreign.model.vocab_size)
    keys = foreign.model.model_dump(mode="json", exclude={"preset"})
    job = build_config({"job": {"model": keys}}).job
    ours = ((name, foreign.layout.to_ours(name, foreign.tensors.__getitem__)) for name in foreign.layout.pieces)
    pieces = itertools.chain.from_iterable(foreign.layout.pieces.values())
    num_bytes = sum(math.prod(piece.shape) for piece in pieces) * foreign.dtype.itemsize
    tensors = _counted(ours, foreign.dtype, num_bytes, on_progress)
    extras = {JOB: job_text(foreign.model).encode()}
    with _alone(out):
        write_checkpoint(out, tensors, job, tokenizer=tokenizer, field=OUT_FIELD, extras=extras)
    hint = f"netlayer train {out / JOB} --resume {out} trains it"
    return Written(out, len(foreign.layout.pieces), num_bytes, hint)


# ---------------------------------------------------------------------------------------------------- rewrite


def reshard_checkpoint(
    source: Checkpoint,
    out: Path,
    file_bytes: int,
    model_only: bool = False,
    on_progress: OnProgress = lambda _done, _total, _text: None,
) -> Written:
    """Write a checkpoint anew in the current format, whatever ranks had written it.

    Args:
        file_bytes: most bytes of a file, about.
        model_only: without the state of the optimiser, as a checkpoint of step 0, from which a run starts anew.

    Raises:
        ConfigError: it is pending, not one of ours or damaged, or `out` cannot be written.
    """
    meta = source.meta
    if meta is None:
        rule = "is of plain torch.distributed.checkpoint"
        raise ConfigError(FIELD, source.path, rule, "make it one of ours with netlayer checkpoint import --from dcp")
    if meta.path.name.endswith(PENDING):
        rule = "is not verified yet, and a copy would not show that"
        raise ConfigError(FIELD, source.path, rule, "resume from it, or give an older one")
    names = source.parameters() if model_only else source.names()
    dtypes = {name: source.dtype(name).itemsize for name in names}
    total = sum(math.prod(source.shape(name)) * width for name, width in dtypes.items())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        done = 0
        for name in names:
            on_progress(done, total, name)
            tensor = source.read(name)
            source.close()
            yield name, tensor
            done += tensor.nbytes
        on_progress(done, total, "")

    job = build_section(JobConfig, {**meta.job, "model": meta.model}, "job.")
    tokenizer = meta.tokenizer_file.read_bytes() if TOKENIZER in meta.digests else None
    with _alone(out):
        write_checkpoint(
            out,
            tensors(),
            job,
            step=0 if model_only else meta.step,
            seed=meta.seed,
            corpus=meta.corpus,
            tokenizer=tokenizer,
            data=None if model_only else meta.data,
            field=OUT_FIELD,
            file_bytes=file_bytes,
        )
    return Written(out, len(names), total)


class _DcpTensors:
    """Tensors of a folder of torch.distributed.checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.shapes = {name: checkpoint.shape(name) for name in checkpoint.parameters()}
        # torchtitan before 2026 had neither `qkv_linear` nor `lm_head`.
        self._renamed = {_older(name): name for name in self.shapes if _older(name) != name}
        self.shapes |= {new: self.shapes.pop(old) for new, old in self._renamed.items()}

    @property
    def is_torchtitan(self) -> bool:
        return "tok_embeddings.weight" in self.shapes

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(self._renamed.get(name, name))
        self._checkpoint.close()
        return tensor

    def wide_dtype(self) -> torch.dtype:
        dtypes = {self._checkpoint.dtype(self._renamed.get(name, name)) for name in self.shapes}
        return torch.float64 if torch.float64 in dtypes else torch.float32


def _older(name: str) -> str:
    if name == "output.weight":
        return "lm_head.weight"
    return name.replace(".attention.w", ".attention.qkv_linear.w") if not name.endswith(".wo.weight") else name


def _own_model(
    path: Path, config: Path | None, seq_len: int | None, checkpoint: Checkpoint | None = None
) -> ModelConfig:
    """Return the model of a folder that holds our names, or torchtitan's, and no config.json."""
    folder = path if path.is_dir() else path.parent
    file = config or folder / JOB
    if config is None and checkpoint is not None and checkpoint.meta is not None:
        model = model_of(checkpoint.meta)
    elif not file.is_file():
        rule = f"does not say of which model it is: it has no {JOB}"
        raise ConfigError(FIELD, path, rule, "give a job file with its [job.model] as --config")
    else:
        model = load_config(file).job.model
    if seq_len not in (None, model.seq_len):
        if model.positions == "learned":
            rule = f"is not the seq_len = {model.seq_len} of {file}: each learned position is a parameter"
            raise ConfigError("--seq-len", seq_len, rule, "omit it")
        model = model.model_copy(update={"seq_len": seq_len})
    return model


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(FIELD, path, f"has no {CONFIG}", "give a folder as transformers saves it") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(FIELD, path / CONFIG, f"cannot be read ({exc})", "download or write it again") from exc
    if not isinstance(config, dict):
        raise ConfigError(FIELD, path / CONFIG, "is no JSON object", "download or write it again")
    return config


def _check_tensors(path: Path, layout: Layout, shapes: Mapping[str, tuple[int, ...]], buffers: tuple[str, ...]) -> None:
    """Compare names and shapes with those of the model.

    Raises:
        ConfigError: a tensor is missing, of another shape, or would be left behind.
    """
    pieces = {piece.name: piece for piece in itertools.chain.from_iterable(layout.pieces.values())}
    remedy = "give all files of the model, and the configuration that belongs to them"
    if missing := [name for name in pieces if name not in shapes]:
        raise ConfigError(FIELD, path, f"lacks {_few(missing)}", remedy)
    for name, piece in pieces.items():
        if shapes[name] != piece.shape:
            rule = f"{name} has shape {list(shapes[name])}, and its configuration says {list(piece.shape)}"
            raise ConfigError(FIELD, path, rule, remedy)
    known = pieces.keys() | layout.copies.keys()
    if extra := [name for name in shapes if name not in known and not name.endswith(buffers)]:
        rule = f"has {_few(extra)}, which the model of its configuration lacks"
        raise ConfigError(FIELD, path, rule, "give a model that is computed here")


def _check_copies(path: Path, layout: Layout, files: SafetensorsFiles) -> None:
    """Raise ConfigError where a tied head is stored and is another than the embedding: one of both would be lost."""
    for copy, name in layout.copies.items():
        if copy in files and not torch.equal(files[copy], files[name]):
            rule = f"{copy} differs from {name}, and its configuration ties them"
            raise ConfigError(FIELD, path, rule, "set tie_word_embeddings to what the model was trained with")


def _tokenizer_text(file: Path, vocab_size: int) -> bytes:
    """Return a tokenizer's file, once its largest id is known to have a row."""
    content = file.read_bytes()
    try:
        tree = json.loads(content)
        vocabulary = tree["model"]["vocab"]
        # Unigram has a list of (token, score).
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        largest = max(itertools.chain(ids, (token["id"] for token in tree.get("added_tokens") or ())), default=-1)
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ConfigError(FIELD, file, f"is no tokenizer ({exc})", "download it again, or remove it") from exc
    if largest >= vocab_size:
        rule = f"has a token {largest:,}, and the model has {vocab_size:,} tokens"
        raise ConfigError(FIELD, file, rule, "give the tokenizer that belongs to the model, or remove it")
    return content


def _few(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
