"""Which checkpoints a folder holds, and what stands beside their tensors. Needs no torch: who launches reads it too."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.config import JobConfig
from netlayer.errors import ConfigError

FORMAT = 2
META = "meta.json"
TOKENIZER = "tokenizer.json"
_SHAPELESS = frozenset(
    {"preset", "dtype", "compile", "recompute", "operators"}
)  # of job.model: neither shapes nor meaning
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Meta:
    """What stands beside the tensors: `step` steps were taken, with samples drawn by `seed`, by this model.

    Args:
        corpus: digests of the text and of the tokenizer; empty where the run had none.
        data: what `job.data` was.
        field: how the user named it, for errors.
    """

    path: Path
    step: int
    seed: int
    tp: int
    pp: int
    model: Mapping[str, Any]
    corpus: Mapping[str, str]
    data: Mapping[str, Any]
    field: str = "--resume"

    @property
    def tokenizer_file(self) -> Path:
        """As the `tokenizers` library reads it.

        Raises:
            ConfigError: it is not there.
        """
        if not (self.path / TOKENIZER).is_file():
            raise ConfigError(self.field, self.path, f"lacks {TOKENIZER}", "give a checkpoint of `netlayer train`")
        return self.path / TOKENIZER


def find(path: Path, field: str = "--resume") -> Meta:
    """The checkpoint at `path`, or the newest one below it (`checkpoints/` of a run too).

    Args:
        field: how the user named it, for errors.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    folders = [path, *reversed(checkpoints_in(path)), *reversed(checkpoints_in(path / "checkpoints"))]
    folder = next((each for each in folders if (each / META).is_file()), None)
    if folder is None:
        remedy = "give a folder such as runs/train-.../checkpoints/step-000050"
        raise ConfigError(field, path, "holds no checkpoint", remedy)
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            rule = f"has format {meta['format']}, and this version reads {FORMAT}"
            raise ConfigError(field, folder, rule, "go on with the version that wrote it")
        step, seed, tp, pp = (int(meta[name]) for name in ("step", "seed", "tp", "pp"))
        found = Meta(folder, step, seed, tp, pp, meta["job"]["model"], dict(meta["corpus"]), meta["job"]["data"], field)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(field, folder, f"is damaged ({exc!r} in {META})", "give an older checkpoint") from exc
    for tp, pp in itertools.product(range(found.tp), range(found.pp)):
        if not (folder / file_name(tp, pp)).is_file():
            raise ConfigError(field, folder, f"lacks {file_name(tp, pp)}", "give an older checkpoint")
    return found


def checkpoints_in(folder: Path) -> list[Path]:
    """Whole ones, oldest first."""
    found = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def file_name(tp: int, pp: int) -> str:
    """What the first data-parallel rank of a place writes."""
    return f"tp{tp}-pp{pp}.safetensors"


def check_model(meta: Meta, job: JobConfig) -> None:
    """Raise ConfigError for another model: it would load in part, or not at all, with torch's words."""
    model = job.model
    for name, value in model.model_dump(mode="json").items():
        if name in _SHAPELESS or name not in meta.model or meta.model[name] == value:
            continue
        is_free = name == "seq_len" and model.positions == "rotary"  # no parameter has its length
        if is_free and job.checkpoint.other_text:
            continue
        rule = f"is of a model with {name} = {meta.model[name]}, and the job has {value}"
        remedy = f"set job.model.{name} to that" + (", or job.checkpoint.other_text to true" if is_free else "")
        raise ConfigError(meta.field, meta.path, rule, remedy)


def check_same_text(meta: Meta, corpus: Mapping[str, str], job: JobConfig) -> None:
    """Raise ConfigError where a job would go on with other text or tokens, and does not say that it means to."""
    if job.checkpoint.other_text or not meta.corpus:
        return
    value, before = job.data.folder or "(standard library)", meta.data.get("folder") or "(standard library)"
    remedy = (
        "give that text, or set job.checkpoint.other_text to true: this one is then read in the checkpoint's tokens"
    )
    if corpus["text"] != meta.corpus.get("text"):
        rule = f"gives another text than {meta.path} was trained on (job.data.folder = {before}, seed {meta.seed})"
        raise ConfigError("job.data.folder", value, rule, remedy)
    if corpus["tokenizer"] != meta.corpus.get("tokenizer"):
        rule = f"gives another tokenizer than {meta.path} has, of the same text (another release of tokenizers?)"
        raise ConfigError("job.data.folder", value, rule, "set job.checkpoint.other_text to true to keep that one")


def seed_of(meta: Meta, given: int | None, job: JobConfig) -> int:
    """The seed to go on with: the checkpoint's.

    Args:
        given: by the user, as an option; None: not at all.

    Raises:
        ConfigError: another was given, and the job does not say that it means other samples.
    """
    if given is None or given == meta.seed:
        return meta.seed
    if job.checkpoint.other_text:
        return given
    rule = f"is another than the {meta.seed} that {meta.path} was trained with"
    raise ConfigError("--seed", given, rule, "leave it out, or set job.checkpoint.other_text to true")
