"""The runs of `bench.convergence`: what each is, as a job of the trainer, and its training into a folder of its own.

All have the same model size, text, seed, number of tokens and held-out windows, and are evaluated at the same numbers
of tokens. `standard` has the standard block and AdamW, `parallel` the parallel block and a sliding window (MegaScale
3.1), `lamb` the standard block and LAMB at a larger batch, so fewer steps; `large_batch` is AdamW at that batch, and
tells what of LAMB's curve is the batch's doing; `fp8` is `standard` with 8-bit products (`model.fp8`). Not covered:
other machines.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.convergence.rows import FACTS_FILE, STANDARD, Before, RunKey, run_name
from netlayer import environ
from netlayer.config.tree import JobConfig, ModelConfig, build_config, build_section
from netlayer.errors import CheckFailed, ConfigError
from netlayer.launch.early_end import ASKED_TO_STOP, reason_of
from netlayer.results import write_text
from netlayer.store.meeting import MeetingPlace
from trainer.data.prepare import Corpus
from trainer.plan import Backend, resolve
from trainer.train import CHECKPOINTS, OnProgress, train

MEGASCALE_KINDS = (STANDARD, "parallel", "lamb")
KINDS = (*MEGASCALE_KINDS, "large_batch", "fp8")
LAMB_EPS = 1e-6
"""Of LAMB's authors (You et al., arXiv 1904.00962), where the user sets none."""
_LEAST_LAMB_STEPS = 4
_CALIBRATION_STEPS, _WARM_UP_STEPS = 16, 6


@dataclass(frozen=True)
class Sizes:
    """Defaults of a model: batch and micro-batch in sequences, peak learning rates, tokens of a run and an evaluation.

    AdamW's rates are GPT-3's (Brown et al., arXiv 2005.14165, table 2.1), but for 1m, whose rate is quickstart's.
    LAMB's is that of a sweep on 1m (375 steps; 1e-2 and 4e-2 were worse), not tuned for the larger ones: begin a sweep
    there (`--runs lamb --lamb-lr 1e-2,2e-2,4e-2`).
    """

    batch: int
    micro: int
    lr: float
    lamb_lr: float
    tokens: int
    validation_tokens: int


SIZES: Mapping[str, Sizes] = {
    "1m": Sizes(batch=16, micro=8, lr=3e-3, lamb_lr=2e-2, tokens=2_000_000, validation_tokens=16_000),
    "125m": Sizes(batch=64, micro=16, lr=6e-4, lamb_lr=2e-2, tokens=300_000_000, validation_tokens=500_000),
    "1.3b": Sizes(batch=128, micro=4, lr=2e-4, lamb_lr=1e-2, tokens=1_000_000_000, validation_tokens=1_000_000),
    "7b": Sizes(batch=256, micro=1, lr=1.2e-4, lamb_lr=1e-2, tokens=1_000_000_000, validation_tokens=1_000_000),
}


@dataclass(frozen=True)
class Settings:
    """Settings that all runs share, from the options of the command.

    Args:
        batch: sequences per step of AdamW; LAMB takes `lamb_times` as many.
        micro: sequences per micro-batch of a rank; None: as many as divide the batch, up to the model's default.
        window: keys that a query of `parallel` sees; 0: a quarter of the sequence.
        evaluations: about how many evaluations of held-out loss per run, besides the one before the first step.
        checkpoints: about how many per run, besides the one at its end; 0: none, not even when asked to stop.
        overrides: keys of `job` that the user has set, by section.
    """

    model: str
    ranks: int
    backend: Backend
    seed: int
    batch: int
    micro: int | None
    lr: tuple[float, ...]
    lamb_lr: tuple[float, ...]
    lamb_times: int
    warmup: float
    lamb_warmup: float
    window: int
    evaluations: int
    checkpoints: int
    validation_tokens: int
    overrides: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Plan:
    """One run; `name` includes the learning rate if there are several runs of its kind."""

    name: str
    kind: str
    job: JobConfig

    @property
    def key(self) -> RunKey:
        return self.kind, self.job.optimizer.lr

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name)

    @property
    def tokens(self) -> int:
        return self.job.optimizer.steps * self.job.batch.global_batch_size * self.job.model.seq_len


def plans(settings: Settings, kinds: Sequence[str], tokens: int, earlier: Collection[RunKey] = ()) -> list[Plan]:
    """Plan runs of at least `tokens` tokens each, rounded up to a whole number of LAMB's steps.

    Args:
        earlier: runs that will be shown with these, whose names must differ.

    Raises:
        ConfigError: there are too few tokens, or a job breaks a rule of the configuration.
    """
    planned = []
    for kind in kinds:
        rates = settings.lamb_lr if kind == "lamb" else settings.lr
        for lr in rates:
            several = {*rates, *(other for of_kind, other in earlier if of_kind == kind)}
            name = run_name(kind, lr, of_several=len(several) > 1)
            planned.append(Plan(name, kind, _job(settings, kind, lr, tokens)))
    return planned


def run(
    plan: Plan,
    corpus: Corpus,
    place: MeetingPlace,
    folder: Path,
    facts: Mapping[str, Any],
    on_progress: OnProgress,
    before: Before | None = None,
) -> str:
    """Train one run and write its facts, then its rows, into `folder`; return why it diverged, empty if it did not.

    Args:
        facts: the record's entries besides the job: seed, ranks, backend, device, text.
        before: the part of the run that an earlier call did; None if the run begins here.

    Raises:
        NetlayerError: as `train`, except for a NaN or infinite loss, which is a result: the run diverged.
        SystemExit: a run with checkpoints was asked to stop, and did so after saving one; exit code 143.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = {"run": plan.name, "kind": plan.kind, **facts, "job": plan.job.model_dump(mode="json")}
    known["job"]["data"] = {}  # the text is that of `facts`
    spent_minutes: float | None = 0.0
    if before:
        before.write_rows(folder)
        known["resumed_at"] = [*(step for step in before.curve.resumed_at if step < before.step), before.step]
        spent_minutes = before.curve.facts.get("wall_minutes")  # unknown where the earlier call was killed
    began = time.monotonic()

    def note(more: Mapping[str, Any]) -> None:
        wall_minutes = None if spent_minutes is None else spent_minutes + (time.monotonic() - began) / 60
        write_text(folder / FACTS_FILE, json.dumps({**known, **more, "wall_minutes": wall_minutes}, indent=1) + "\n")

    write_text(folder / FACTS_FILE, json.dumps(known, indent=1) + "\n")
    try:
        resolved = resolve(
            plan.job,
            corpus,
            ranks=facts["ranks"],
            init_method=place.init_method(plan.folder_name),
            backend=facts["backend"],
            out=folder,
            seed=facts["seed"],
            resume=before.checkpoint if before else None,
            stops_gently=plan.job.checkpoint.every_steps > 0,
        )
        result = train(resolved, on_progress)
    except CheckFailed as exc:
        stopped = str(exc).replace("job.optimizer.lr", "--lamb-lr" if plan.kind == "lamb" else "--lr")
        note({"stopped": stopped})
        return stopped
    except BaseException as exc:
        note({"interrupted": reason_of(exc)})
        raise
    known |= {"parameters": result.num_parameters, "devices": result.devices}
    known |= {"nccl_settings": list(result.nccl_settings)}
    if result.stop:
        ended = SystemExit(ASKED_TO_STOP)
        note({"interrupted": reason_of(ended)})
        raise ended
    note({"stopped": ""})
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return ""


def tokens_in(minutes: float, settings: Settings, corpus: Corpus, place: MeetingPlace, folder: Path) -> int:
    """Measure a few steps of the standard run and return the tokens of `minutes` of them, without evaluations."""
    job = _job(settings, STANDARD, settings.lr[0], 10**18)
    optimizer = job.optimizer.model_copy(update={"steps": _CALIBRATION_STEPS, "warmup_steps": 0})
    evaluation = job.evaluation.model_copy(update={"every_steps": _CALIBRATION_STEPS, "global_batches": 1})
    checkpoint = job.checkpoint.model_copy(update={"every_steps": 0})
    job = job.model_copy(update={"optimizer": optimizer, "evaluation": evaluation, "checkpoint": checkpoint})
    folder.mkdir(parents=True, exist_ok=True)
    resolved = resolve(
        job,
        corpus,
        ranks=settings.ranks,
        init_method=place.init_method("calibration"),
        backend=settings.backend,
        out=folder,
        seed=settings.seed,
    )
    result = train(resolved)
    each_s = sum(row["step_ms"] for row in result.steps[_WARM_UP_STEPS:]) / 1e3 / (_CALIBRATION_STEPS - _WARM_UP_STEPS)
    tokens: int = round(60 * minutes / each_s * job.batch.global_batch_size * job.model.seq_len)
    return tokens


def device_name(backend: Backend) -> str:
    """Return the device type of the ranks, by its name in `netlayer.workload.flops`."""
    return next((gpu.name for gpu in environ.list_gpus()), "GPU") if backend == "nccl" else "CPU"


def check_overrides(overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse settings that the comparison itself sets.

    Raises:
        ConfigError: names the setting, and the option for it.
    """
    for section, keys in overrides.items():
        for key in keys:
            remedy = _OWN.get((section, key)) or _OWN.get((section, ""))
            if remedy:
                raise ConfigError("--set", f"job.{section}.{key}", "has no effect: the comparison sets it", remedy)


_OWN = {
    ("model", "preset"): "give --model",
    ("model", "parallel_block"): "choose with --runs",
    ("model", "attention_window"): "give --window",
    ("optimizer", "name"): "choose with --runs",
    ("optimizer", "steps"): "give --tokens or --minutes",
    ("optimizer", "lr"): "give --lr or --lamb-lr",
    ("optimizer", "warmup_steps"): "give --warmup or --lamb-warmup",
    ("batch", ""): "give --batch, --micro or --lamb-times",
    ("parallel", ""): "runs are data-parallel alone: give --ranks",
    ("data", ""): "give --text, --patterns or --mib",
    ("evaluation", ""): "give --evaluations or --validation-tokens",
    ("checkpoint", ""): "give --checkpoints",
}


def _job(settings: Settings, kind: str, lr: float, tokens: int) -> JobConfig:
    """Build the configuration of one run.

    A step at LAMB's batch has the tokens of `lamb_times` steps at AdamW's, so counts in steps are scaled by that much.
    """
    model = _model(settings)
    of_lamb = settings.batch * settings.lamb_times * model.seq_len
    lamb_steps = math.ceil(tokens / of_lamb)
    if lamb_steps < _LEAST_LAMB_STEPS:
        rule = (
            f"are fewer than {_LEAST_LAMB_STEPS} steps of {settings.batch} x {settings.lamb_times} x "
            f"{model.seq_len} tokens"
        )
        raise ConfigError("--tokens", tokens, rule, f"give at least {_LEAST_LAMB_STEPS * of_lamb}, or lower --batch")
    is_lamb, is_large = kind == "lamb", kind in ("lamb", "large_batch")
    scale, batch = (1, settings.batch * settings.lamb_times) if is_large else (settings.lamb_times, settings.batch)
    steps, evaluations = lamb_steps * scale, max(1, round(settings.validation_tokens / of_lamb)) * scale
    warmup_steps = round(steps * (settings.lamb_warmup if is_lamb else settings.warmup))
    evaluated_every = math.ceil(lamb_steps / settings.evaluations) * scale
    saved_every = 0
    if settings.checkpoints:
        saved_every = math.ceil(steps / evaluated_every / (settings.checkpoints + 1)) * evaluated_every
    is_parallel = kind == "parallel"
    window = (settings.window or max(1, model.seq_len // 4)) if is_parallel else 0
    sections = {name: dict(keys) for name, keys in settings.overrides.items()}
    eps = {"eps": LAMB_EPS} if is_lamb else {}
    name = "lamb" if is_lamb else "adamw"
    optimizer_keys = {"name": name, "steps": steps, "lr": lr, "warmup_steps": warmup_steps}
    blocks: dict[str, object] = {"parallel_block": is_parallel, "attention_window": window}
    if kind == "fp8" and model.fp8 == "off":  # else as the user sets it
        blocks["fp8"] = "tensorwise"
    tree = {
        **sections,
        "name": f"convergence-{kind}",
        "model": {**model.model_dump(), **blocks},
        "optimizer": {**eps, **sections.get("optimizer", {}), **optimizer_keys},
        "parallel": {"dp": settings.ranks},
        "batch": {"global_batch_size": batch, "micro_batch_size": _micro(settings)},
        "evaluation": {"every_steps": evaluated_every, "global_batches": evaluations},
        "checkpoint": {"every_steps": saved_every, "keep": 1},
    }
    return build_config({"cluster": {"gpus_per_server": settings.ranks}, "job": tree}).job


def _model(settings: Settings) -> ModelConfig:
    dtype = "bfloat16" if settings.backend == "nccl" else "float32"
    tree = {"preset": settings.model, "dtype": dtype, **settings.overrides.get("model", {})}
    return build_section(ModelConfig, tree, "job.model.")


def _micro(settings: Settings) -> int:
    """Return the micro-batch: the option, else the largest up to the model's default that divides a rank's share."""
    if settings.micro:
        return settings.micro
    part, rest = divmod(settings.batch, settings.ranks)
    if rest or not part:
        rule = f"cannot be dealt to {settings.ranks} ranks"
        raise ConfigError("--batch", settings.batch, rule, f"give a multiple of {settings.ranks}")
    largest = sizes_of(settings.model).micro
    return max(size for size in range(1, largest + 1) if part % size == 0)


def sizes_of(model: str) -> Sizes:
    """Return a model's defaults; a model without its own gets those of 7b."""
    return SIZES.get(model, SIZES["7b"])
