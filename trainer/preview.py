"""What a user is told of a job before any of it starts: its size, and what its file does not show.

Left out: its memory (`trainer.memory`), and what is refused (`netlayer.config`, `trainer.train`). Needs no torch.
"""

from __future__ import annotations

from typing import Literal

from netlayer.config import JobConfig, ModelConfig
from netlayer.presets import MODELS
from trainer.memory import num_parameters


def lines(job: JobConfig, backend: Literal["gloo", "nccl"], memory: str) -> list[str]:
    """All of it; `memory` is what `check_memory` says."""
    return [
        f"{job.name}: {size(job, backend)}",
        f"memory (estimate): {memory}",
        *(f"note: {note}" for note in notes(job, backend)),
    ]


def size(job: JobConfig, backend: Literal["gloo", "nccl"]) -> str:
    """One line: parameters, ranks and their degrees, steps and what each takes."""
    layout, batch = job.parallel.layout, job.batch
    count = job.optimizer.steps
    chunks = f"vpp {layout.vpp}, " * (layout.vpp > 1)
    degrees = f"tp {layout.tp}, pp {layout.pp}, {chunks}dp {layout.dp}"
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)} ({degrees}; {backend})"
    ramped = f"{batch.start_size} to " * (0 < batch.start_size < batch.global_size)
    sequences = f"{ramped}{batch.global_size} sequences of {job.model.seq_len:,} tokens"
    return f"{num_parameters(job.model):,} parameters on {ranks}; {count:,} step{'s' * (count > 1)} of {sequences}"


def notes(job: JobConfig, backend: Literal["gloo", "nccl"]) -> list[str]:
    """What the trainer does otherwise than the job reads, or what of it has no effect: a line each."""
    model, tp, optimizer = job.model, job.parallel.tp, job.optimizer
    said = []
    if others := _beside_preset(model):
        said.append(f"not all of the preset {model.preset}, for given beside it: {', '.join(others)}")
    if rest := model.vocab_size % tp:
        padded = model.vocab_size + tp - rest
        said.append(
            f"job.model.vocab_size = {model.vocab_size:,} is no multiple of job.parallel.tp = {tp}: padded to "
            f"{padded:,} with rows that no token uses and the loss leaves out"
        )
    if optimizer.warmup_steps > optimizer.steps:
        said.append(
            f"job.optimizer.warmup_steps = {optimizer.warmup_steps:,} is above job.optimizer.steps = "
            f"{optimizer.steps:,}: the learning rate never reaches job.optimizer.lr"
        )
    if "f" in model.window_pattern and not model.attention_window:
        said.append(
            f"job.model.window_pattern = {model.window_pattern} has no effect: job.model.attention_window is 0, full"
        )
    if job.loop.cuda_graph and backend == "gloo":
        said.append("job.loop.cuda_graph has no effect on a CPU")
    if job.overlap.windows and (backend == "gloo" or job.parallel.dp == 1):
        said.append("job.overlap.windows has no effect: only data-parallel ranks on NCCL have them")
    return said


def _beside_preset(model: ModelConfig) -> list[str]:
    """Keys of the shape that are not the preset's: a file gives them, and `--set job.model.preset` leaves them."""
    preset = MODELS.get(model.preset, {})
    return [f"job.model.{key} = {getattr(model, key)}" for key, value in preset.items() if getattr(model, key) != value]
