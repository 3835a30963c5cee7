"""Checkpoints of a folder, and the facts next to their tensors. Needs no torch: who launches reads it too."""

from __future__ import annotations

import contextlib
import itertools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.config.renamed import with_new_keys
from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.errors import EXIT_FAILED, ConfigError, NetlayerError
from netlayer.units import format_size
from trainer.checkpoint.digest import digest
from trainer.checkpoint.distcp import SUFFIX, file_reader, read_trailer
from trainer.checkpoint.names import (
    FORMAT,
    META,
    METADATA,
    OLD_FORMAT,
    OWN_DIGEST,
    PENDING,
    TOKENIZER,
    as_location,
    checkpoints_in,
    halves_in,
    is_there,
    pending_in,
    step_of,
)

# Of job.model: neither shapes nor meaning.
_SHAPELESS = frozenset(
    {"preset", "dtype", "compile", "recompute", "recompute_modules", "operators"}
    | {"fp8", "fp8_first", "fp8_last", "fp8_param_gather", "fp8_tp_gather"}
)
_DEFAULTS: Mapping[str, Any] = ModelConfig().model_dump(mode="json")
ALTERED = "it is not as it was written"
_DAMAGE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # errors that say what storage holds
_AT_ONCE = 32  # files that are looked at: each waits for storage, and a large job has ten thousand


class Unreadable(ConfigError):
    """A checkpoint cannot be read, which says nothing of the checkpoint: a fault of storage or network, maybe short."""

    exit_code = EXIT_FAILED  # else it would count as a wrong job, which is not started again


class Damaged(ConfigError):
    """A checkpoint does not hold what was written: no later start can read it either."""


@dataclass(frozen=True)
class Meta:
    """Facts next to the tensors: `step` steps were taken, with samples drawn by `seed`, in this job.

    Args:
        job: the job of the run, section by section.
        corpus: digests of the text and of the tokenizer; empty where the run had none.
        digests: of every other file by its name; of one of tensors it is that of its header, or its digests.
        field: option by which the user named it, for errors.
        passed_over: newer folders that `find` left: pending, or without `meta.json`.
        data: datasets (`Sampler.state`) and `num_samples` that were trained on; None: drawn with replacement.
        format: how tensors are stored.
    """

    path: Path
    step: int
    seed: int
    tp: int
    pp: int
    job: Mapping[str, Mapping[str, Any]]
    corpus: Mapping[str, str]
    digests: Mapping[str, str]
    field: str = "--resume"
    passed_over: Sequence[Path] = ()
    data: Mapping[str, Any] | None = None
    format: int = FORMAT

    @property
    def is_fresh(self) -> bool:
        """Whether no step was taken: it holds parameters alone, as an imported model does, and a run starts anew."""
        return self.step == 0

    @property
    def files(self) -> list[str]:
        """Names of the files that hold its tensors."""
        if self.format == OLD_FORMAT:
            places = itertools.product(range(self.tp), range(self.pp))
            return [file_name(tp, pp) for tp, pp in places]
        return [name for name in self.digests if name != TOKENIZER]

    @property
    def model(self) -> Mapping[str, Any]:
        """Keys of job.model; one that its version did not have is what the default says, not what a preset does now."""
        return {**_DEFAULTS, **self.job["model"]}

    @property
    def tokenizer_file(self) -> Path:
        """Return the tokenizer's path, in the format of the `tokenizers` library.

        Raises:
            ConfigError: it is not there, or not as it was written.
        """
        if not (self.path / TOKENIZER).is_file():
            raise ConfigError(self.field, self.path, f"lacks {TOKENIZER}", "give a checkpoint of `netlayer train`")
        with self.undamaged(TOKENIZER):
            if digest((self.path / TOKENIZER).read_bytes()) != self.digests[TOKENIZER]:
                raise ValueError(ALTERED)
        return self.path / TOKENIZER

    @contextlib.contextmanager
    def undamaged(self, name: str) -> Iterator[None]:
        """Read one of its files in the block; errors as those of `undamaged`."""
        with undamaged(self.field, self.path / name):
            yield


def find(path: Path, field: str = "--resume", *, has_files: bool = True) -> Meta:
    """Return the metadata of the checkpoint at `path`, or of the newest good one below it or its `checkpoints/`.

    Args:
        field: option by which the user named it, for errors.
        has_files: check that its files are there. One rank of a job does: each rank would look at the files of all.

    Raises:
        ConfigError: there is none, or it is damaged.
        Unreadable: nobody can say.
    """
    path = as_location(path)
    folder, meta_file, newer = _locate(path, field)
    with undamaged(field, folder / meta_file):
        meta = json.loads((folder / meta_file).read_text(encoding="utf-8"))
        if meta["format"] not in (OLD_FORMAT, FORMAT):
            rule = f"has format {meta['format']}, and this version reads {OLD_FORMAT} and {FORMAT}"
            raise ConfigError(field, folder, rule, "go on with the version that wrote it")
        if meta.pop(OWN_DIGEST) != digest(json.dumps(meta).encode()):
            raise ValueError(ALTERED)
        facts = {name: meta[name] for name in ("step", "seed", "tp", "pp", "job", "corpus", "digests", "format")}
        facts["job"] = with_new_keys(facts["job"])
        if folder != path:
            newer += [each for each in pending_in(folder.parent) if step_of(each) > meta["step"]]
        checkpoint = Meta(folder, **facts, field=field, passed_over=newer, data=meta.get("data"))

    def check(name: str) -> None:
        with undamaged(field, folder / name):
            if not is_there(folder / name):
                raise ConfigError(field, folder, f"lacks {name}", "give an older checkpoint")

    if has_files:
        _each(check, checkpoint.files)
    return checkpoint


def _locate(path: Path, field: str) -> tuple[Path, str, list[Path]]:
    """Return the folder of the checkpoint that `find` means, its file of facts, and newer folders that lack it."""
    newer = list[Path]()
    with undamaged(field, path):
        for each in _candidates(path):
            if is_there(each / META):
                return each, META, newer
            if each != path:
                newer.append(each)
        if is_there(path / f"{META}{PENDING}"):  # of an object store, and asked for by its name
            return path, f"{META}{PENDING}", []
        pending = [*pending_in(path), *pending_in(path / "checkpoints")]
    remedy = "give a folder such as runs/train-.../checkpoints/step-000050"
    if pending:
        remedy = f"{pending[-1]} is not verified yet: give that itself, if its run was only killed"
    raise ConfigError(field, path, "holds no good checkpoint" if pending else "holds no checkpoint", remedy)


def _candidates(path: Path) -> Iterator[Path]:
    """Yield a folder, then the checkpoints in it, newest first; a folder that is one is not listed."""
    yield path
    yield from reversed(checkpoints_in(path))
    yield from reversed(checkpoints_in(path / "checkpoints"))


def _each(check: Callable[[str], None], names: Sequence[str]) -> None:
    """Call `check` with each name, several at once; raises what it raises for the first of them."""
    with ThreadPoolExecutor(min(_AT_ONCE, max(len(names), 1)), "looks at a checkpoint") as threads:
        works = [threads.submit(check, name) for name in names]
        try:
            for work in works:
                work.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def check_ends(meta: Meta) -> None:
    """Compare the header or trailer of each file of tensors, and what lists them, with its digest; no tensor is read.

    Raises:
        ConfigError: one is cut short, or not as it was written; names the file.
        Unreadable: nobody can say.
    """

    def check(name: str) -> None:
        with meta.undamaged(name):
            if meta.format == OLD_FORMAT:
                from trainer.checkpoint.file import TensorFile  # only here: it loads torch

                TensorFile(meta.path / name, meta.digests[name])
                return
            if name.endswith(SUFFIX):
                actual = read_trailer(*file_reader(meta.path / name))[0]
            elif name == METADATA:
                actual = digest((meta.path / name).read_bytes())
            else:
                return
            if actual != meta.digests[name]:
                raise ValueError(ALTERED)

    _each(check, meta.files)


def file_name(tp: int, pp: int) -> str:
    """Return the name of the file that the first data-parallel rank of a (tp, pp) position writes."""
    return f"tp{tp}-pp{pp}.safetensors"


def check_model(meta: Meta, job: JobConfig) -> None:
    """Raise ConfigError for another model: it would load in part, or not at all, with torch's words."""
    model = job.model
    for name, value in model.model_dump(mode="json").items():
        before = meta.model[name]
        if name in _SHAPELESS or before == value:
            continue
        is_free = name == "seq_len" and model.positions == "rotary"  # no parameter has its length
        if is_free and job.checkpoint.allow_dataset_change:
            continue
        rule = f"is of a model with {name} = {before}, and the job has {value}"
        remedy = f"set job.model.{name} to that" + (
            ", or job.checkpoint.allow_dataset_change to true" if is_free else ""
        )
        raise ConfigError(meta.field, meta.path, rule, remedy)


def check_same_text(meta: Meta, corpus: Mapping[str, str], job: JobConfig) -> None:
    """Raise ConfigError where a job would go on with other text or tokens, and does not say that it means to."""
    if job.checkpoint.allow_dataset_change or meta.is_fresh or not meta.corpus or job.data.datasets:
        return
    value, before = job.data.folder or "(standard library)", meta.job["data"].get("folder") or "(standard library)"
    remedy = (
        "give that text, or set job.checkpoint.allow_dataset_change to true: this one is then read in the checkpoint's "
        "tokens"
    )
    if corpus["text"] != meta.corpus.get("text"):
        rule = f"gives another text than {meta.path} was trained on (job.data.folder = {before}, seed {meta.seed})"
        raise ConfigError("job.data.folder", value, rule, remedy)
    if corpus["tokenizer"] != meta.corpus.get("tokenizer"):
        rule = f"gives another tokenizer than {meta.path} has, of the same text (another release of tokenizers?)"
        raise ConfigError(
            "job.data.folder", value, rule, "set job.checkpoint.allow_dataset_change to true to keep that one"
        )


def seed_of(meta: Meta, option_seed: int | None, job: JobConfig) -> int:
    """The seed to go on with: the checkpoint's.

    Args:
        option_seed: from the option `--seed`; None: not set.

    Raises:
        ConfigError: another was given, and the job does not say that it means other samples.
    """
    if option_seed is None or option_seed == meta.seed:
        return meta.seed
    if meta.is_fresh or job.checkpoint.allow_dataset_change:
        return option_seed
    rule = f"is another than the {meta.seed} that {meta.path} was trained with"
    raise ConfigError("--seed", option_seed, rule, "omit it, or set job.checkpoint.allow_dataset_change to true")


def resume_notes(meta: Meta, job: JobConfig) -> list[str]:
    """Lines for the user: from where a job goes on, and what of its optimiser and batch is otherwise than before."""
    lines = [f"resumes from {meta.path}, after step {meta.step:,}"]
    if meta.is_fresh:
        return [f"starts with the parameters of {meta.path}: with the first step, and a new optimiser"]
    for path in meta.passed_over:
        why = "it is not verified yet" if path.suffix == PENDING else f"it lacks {META}"
        lines.append(f"note: {path} is newer, and was passed over: {why}")
    for path in halves_in(meta.path.parent):
        what = f"({format_size(_size(path))}) is what a killed save left"
        lines.append(f"note: {path} {what}; delete it, unless a run still writes there")
    for section in ("optimizer", "batch"):
        for key, value in getattr(job, section).model_dump(mode="json").items():
            before = meta.job[section].get(key, value)
            if value != before:
                bends = key == "steps" and job.optimizer.schedule != "constant"
                also = f", and the {job.optimizer.schedule} schedule of the learning rate moves with it" * bends
                lines.append(f"note: job.{section}.{key} is now {value}, and was {before} up to the checkpoint{also}")
    return lines


def _size(folder: Path) -> int:
    num_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a run that still writes there has moved it
            num_bytes += path.stat().st_size
    return num_bytes


@contextlib.contextmanager
def undamaged(field: str, path: Path) -> Iterator[None]:
    """Read a file of a checkpoint in the block, and say of an error whose it is.

    Raises:
        Damaged: an intact file would not have given that error.
        Unreadable: an intact file could have: the error is one of storage.
    """
    try:
        yield
    except (NetlayerError, AssertionError):
        raise
    except (*_DAMAGE, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise Damaged(field, path, f"is damaged ({_one_line(exc)})", "give an older checkpoint") from exc
    except Exception as exc:
        # Of a server that does not answer clients of object stores have errors of their own: botocore's are no OSError.
        if isinstance(path, Path) and not isinstance(exc, OSError):
            raise
        remedy = "start again; if it stays so, check the storage, or move that checkpoint away"
        raise Unreadable(field, path, f"cannot be read ({_one_line(exc)})", remedy) from exc


def _one_line(exc: Exception) -> str:
    """Return an error's text in one line of bounded length; some errors hold the whole file."""
    if isinstance(exc, UnicodeDecodeError):
        return f"no UTF-8 at byte {exc.start:,}"
    text = f"it lacks {exc}" if isinstance(exc, KeyError) else str(exc) or type(exc).__name__
    return textwrap.shorten(text, 150, placeholder=" ...")
