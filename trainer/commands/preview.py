"""Preview of a job before any of it starts: its size, and effects that its file does not show.

Not covered: its memory (`netlayer.workload.memory`), and what is refused (`netlayer.config.tree`, `trainer.train`). No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from netlayer.config.tree import DataConfig, JobConfig, MetricsConfig, ModelConfig, Section
from netlayer.workload.memory import why_no_copies
from netlayer.workload.model_size import num_parameters, padded_vocabulary
from netlayer.workload.presets import MODELS
from netlayer.workload.stages import num_layers
from netlayer.workload.zero_bubble import why_no_zero_bubble
from trainer.data.order import Blend
from trainer.ramps import batch_size

_MOST_SHOWN = 8


def lines(job: JobConfig, backend: Literal["gloo", "nccl"], memory: str, *, is_traced: bool = False) -> list[str]:
    """Return all lines of the preview; `memory` is the one of `check_memory`."""
    return [
        f"{job.name}: {size(job, backend)}",
        f"memory (estimate): {memory}",
        *(f"note: {note}" for note in notes(job, backend, is_traced=is_traced)),
    ]


def size(job: JobConfig, backend: Literal["gloo", "nccl"]) -> str:
    """Return one line: parameters, ranks and their degrees, steps, and the batch of each."""
    layout, batch = job.parallel.layout, job.batch
    count = job.optimizer.steps
    chunks = f"vpp {layout.vpp}, " * (layout.vpp > 1)
    further = "".join(f", {name} {degree}" for name, degree in layout.further_degrees.items())
    degrees = f"tp {layout.tp}, pp {layout.pp}{_layers_by_stage(job)}, {chunks}dp {layout.dp}{further}"
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)} ({degrees}; {backend})"
    ramped = f"{batch.start_size} to " * (0 < batch.start_size < batch.global_batch_size)
    sequences = f"{ramped}{batch.global_batch_size} sequences of {job.model.seq_len:,} tokens"
    return f"{num_parameters(job.model):,} parameters on {ranks}; {count:,} step{'s' * (count > 1)} of {sequences}"


def _layers_by_stage(job: JobConfig) -> str:
    """Return the numbers of layers by stage; empty where all stages have the same."""
    layers = [num_layers(job, stage) for stage in range(job.parallel.pp)]
    if min(layers) == max(layers):
        return ""
    if len(layers) > _MOST_SHOWN:
        return f" ({min(layers):g} to {max(layers):g} layers each)"
    return f" ({' + '.join(f'{number:g}' for number in layers)} layers)"


def notes(job: JobConfig, backend: Literal["gloo", "nccl"], *, is_traced: bool = False) -> list[str]:
    """Return a line for each setting of the job that has no effect, or that the trainer changes.

    Args:
        is_traced: whether the run is given `--trace`.
    """
    model, tp, optimizer = job.model, job.parallel.tp, job.optimizer
    lines = [f"job.{key} has no effect: {why}" for key, why in _without_effect(job)]
    if others := _overrides_of_preset(model):
        lines.append(f"not all of the preset {model.preset}, for given beside it: {', '.join(others)}")
    padded = padded_vocabulary(model.vocab_size, tp)
    if padded > model.vocab_size:
        lines.append(
            f"job.model.vocab_size = {model.vocab_size:,} is no multiple of job.parallel.tp = {tp}: padded to "
            f"{padded:,} with rows that no token uses and the loss omits"
        )
    if optimizer.warmup_steps > optimizer.steps:
        lines.append(
            f"job.optimizer.warmup_steps = {optimizer.warmup_steps:,} is above job.optimizer.steps = "
            f"{optimizer.steps:,}: the learning rate never reaches job.optimizer.lr"
        )
    if (last := batch_size(job.batch, optimizer.steps)) < job.batch.global_batch_size:
        lines.append(
            f"job.batch.start_size = {job.batch.start_size:,} grows to {last:,} in job.optimizer.steps = "
            f"{optimizer.steps:,}, and never to job.batch.global_batch_size = {job.batch.global_batch_size:,}"
        )
    if job.loop.cuda_graph and backend == "gloo":
        lines.append("job.loop.cuda_graph has no effect on a CPU")
    elif job.loop.cuda_graph and is_traced:
        lines.append("--trace shows no parts of a step that is replayed, for job.loop.cuda_graph = true")
    lines += _rounded_weights(job.data)
    if job.overlap.windows is True and (backend == "gloo" or job.parallel.dp_cp == 1):
        lines.append("job.overlap.windows has no effect: only data-parallel ranks on NCCL have them")
    return lines


def _without_effect(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Keys that are not left as they are by default, with why they might as well be."""
    model, optimizer, batch = job.model, job.optimizer, job.batch
    kinds = {model.window_pattern[layer % len(model.window_pattern)] for layer in range(model.layers)}
    pattern = f"model.window_pattern = {model.window_pattern}"
    if "f" in model.window_pattern and not model.attention_window:
        yield pattern, "job.model.attention_window is 0, full"
    elif model.attention_window and "w" not in kinds:
        yield f"model.attention_window = {model.attention_window}", f"no layer has it, by job.{pattern}"
    elif kinds != set(model.window_pattern):
        yield pattern, f"its f comes behind the last of job.model.layers = {model.layers}"
    if _is_given(model, "rotary_base") and model.positions != "rotary":
        yield f"model.rotary_base = {model.rotary_base:g}", f"job.model.positions is {model.positions}"
    yield from _scaling_without_effect(model)
    if _is_given(optimizer, "decay_share") and optimizer.schedule != "wsd":
        yield f"optimizer.decay_share = {optimizer.decay_share:g}", f"job.optimizer.schedule is {optimizer.schedule}"
    if _is_given(optimizer, "min_lr_ratio") and optimizer.schedule == "constant":
        yield f"optimizer.min_lr_ratio = {optimizer.min_lr_ratio:g}", "job.optimizer.schedule is constant"
    if _is_given(batch, "increment_steps") and not 0 < batch.start_size < batch.global_batch_size:
        yield f"batch.increment_steps = {batch.increment_steps}", "there is no ramp"
    if not job.parallel.balance and job.parallel.pp == 1:
        yield "parallel.balance = false", "job.parallel.pp is 1"
    yield from _data_without_effect(job.data)
    yield from _overlap_without_effect(job)
    yield from _metrics_without_effect(job.metrics)


def _data_without_effect(data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.datasets:
        for key in ("folder", "pattern", "validation_share", "max_mib"):
            if _is_given(data, key):
                yield f"data.{key} = {getattr(data, key)}", "it is of text, and job.data.datasets takes its place"
    for key in ("loader", "read_ahead", "ring_folder"):
        if _is_given(data, key) and not data.counts_samples:
            yield f"data.{key} = {str(getattr(data, key)).lower()}", "samples of text are drawn by each rank"
        elif _is_given(data, key) and key != "loader" and not data.loader:
            yield f"data.{key} = {getattr(data, key)}", "job.data.loader is false"


def _rounded_weights(data: DataConfig) -> Iterator[str]:
    """Weights that no period of a blend has exactly."""
    if not data.datasets:
        return
    total = sum(config.weight for config in data.datasets.values())
    names = sorted(data.datasets)
    for name, share in zip(names, Blend([data.datasets[name].weight for name in names]).shares, strict=True):
        if abs(float(share) - data.datasets[name].weight / total) > 1e-9:
            yield f"job.data.datasets.{name} has {float(share):.4%} of the sequences: shares are rounded to {share}"


def _metrics_without_effect(metrics: MetricsConfig) -> Iterator[tuple[str, str]]:
    for key in ("prometheus_address", "prometheus_old_names"):
        if _is_given(metrics, key) and not metrics.prometheus_port:
            yield f"metrics.{key} = {str(getattr(metrics, key)).lower()}", "job.metrics.prometheus_port is 0"


def _scaling_without_effect(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield keys of `model.rope_scaling` that change nothing here, each with the reason."""
    scaling = model.rope_scaling
    if model.positions != "rotary":
        if scaling.rope_type != "default":
            yield f"model.rope_scaling.rope_type = {scaling.rope_type}", f"job.model.positions is {model.positions}"
        return
    if scaling.rope_type == "llama3":
        return
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if _is_given(scaling, key):
            why = f"job.model.rope_scaling.rope_type is {scaling.rope_type}"
            yield f"model.rope_scaling.{key} = {getattr(scaling, key):g}", why


def _overlap_without_effect(job: JobConfig) -> Iterator[tuple[str, str]]:
    is_alone, is_wide = job.parallel.dp_cp == 1, job.model.dtype == "float64"
    if job.overlap.reduce_dtype == "bfloat16" and (job.parallel.gradient_ranks == 1 or is_wide):
        why = "job.model.dtype is float64" if is_wide else "job.parallel.dp is 1: none are reduced"
        yield "overlap.reduce_dtype = bfloat16", why
    no_copies = why_no_copies(job)
    if no_copies and not job.overlap.peer_reduce:
        yield "overlap.peer_reduce = false", no_copies
    elif not no_copies and not job.overlap.peer_memory and "peer_reduce" in job.overlap.model_fields_set:
        yield f"overlap.peer_reduce = {str(job.overlap.peer_reduce).lower()}", "job.overlap.peer_memory is false"
    carries_more = job.parallel.pp > 1 or (job.parallel.tp > 1 and job.overlap.tp and not is_wide)
    if no_copies and not job.overlap.peer_memory and not carries_more:
        yield "overlap.peer_memory = false", no_copies
    if job.overlap.save_gathered_input and job.parallel.tp == 1:
        yield "overlap.save_gathered_input = true", "job.parallel.tp is 1: nothing is gathered"
    if not job.overlap.cp and job.parallel.cp == 1:
        yield "overlap.cp = false", "job.parallel.cp is 1: no keys are gathered"
    if not job.overlap.zero_bubble and (reason := why_no_zero_bubble(job)):
        yield "overlap.zero_bubble = false", reason
    if job.overlap.step_in_backward and is_alone:
        yield "overlap.step_in_backward = true", "job.parallel.dp is 1: nothing is gathered"


def _is_given(section: Section, key: str) -> bool:
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _overrides_of_preset(model: ModelConfig) -> list[str]:
    """Keys of the shape that are not the preset's: a file gives them, and `--set job.model.preset` leaves them."""
    preset = MODELS.get(model.preset, {})
    return [f"job.model.{key} = {getattr(model, key)}" for key, value in preset.items() if _differs(model, key, value)]


def _differs(model: ModelConfig, key: str, value: object) -> bool:
    own = getattr(model, key)
    return bool(own != (type(own).model_validate(value) if isinstance(own, Section) else value))
