"""`python -m bench.fp8_gradients`: error of gradients by 8-bit products, by layer and kind of linear.

One model and one micro-batch, forward and backward three times with the same weights, rounded to bfloat16: in float32
(the reference), in bfloat16, and in bfloat16 with 8-bit products. Errors are of each weight's gradient: the norm of the
difference over that of the reference. What bfloat16 itself loses stands beside what 8 bits lose. Weights are new, or a
checkpoint's; tokens are random, or a text's. On a CPU the numbers are the same, slowly. One device, which holds the
model's weights and gradients in float32 and once more in bfloat16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench.mfu.jobs import Jobs, check_overrides, read_layout
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, utc_now, write_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainer.checkpoint.meta import Meta

_LINEAR = re.compile(r"blocks\.(\d+)\.(qkv|out|up|down|inner|outer)\.weights?\b")
Gradients = dict[str, "Tensor"]


@dataclass(frozen=True)
class ErrorRow:
    """Errors of the gradient of one weight, or of several together.

    Args:
        layer: None: all.
        linear: `qkv`, `out`, `up`, `down`, of a parallel block `inner` and `outer`; `all`: every parameter.
        norm: of the reference's gradient.
        error_fp8, error_bf16: norm of the difference from the reference, over `norm`.
        error_fp8_to_bf16: of the difference between both, over the norm of that in bfloat16.
        cosine_fp8: of the angle between the gradient by 8-bit products and the reference.
    """

    layer: int | None
    linear: str
    norm: float
    error_fp8: float
    error_bf16: float
    error_fp8_to_bf16: float
    cosine_fp8: float


@click.command()
@run_options
@click.option("--model", help="Preset of job.model: 125m, 7b, llama3-8b [default: the file's, else 1m].")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Weights and shape of this checkpoint, or run.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text of the tokens, by the checkpoint's tokenizer [default: random tokens].",
)
@click.option("--micro", type=click.IntRange(1), default=1, show_default=True, help="Sequences of the micro-batch.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    options: RunOptions, model: str | None, checkpoint: Path | None, text: Path | None, micro: int, device: str
) -> None:
    """Measure the error of gradients by 8-bit products.

    \b
    Examples:
      python -m bench.fp8_gradients --model 125m --set model.fp8=tensorwise --micro 4
      python -m bench.fp8_gradients --checkpoint runs/a --text README.md --set model.fp8=blockwise
    """
    from trainer.checkpoint.meta import find
    from trainer.sample import choose_device, model_of

    check_overrides(options.overrides)
    if text is not None and checkpoint is None:
        raise ConfigError("--text", text, "needs a tokenizer", "give --checkpoint too, or omit it")
    place = choose_device(device)
    job = Jobs(options, model, read_layout("dp1"), micro, None, "bfloat16")()
    if job.model.fp8 == "off":
        raise ConfigError("job.model.fp8", "off", "there is nothing to compare", "--set model.fp8=tensorwise")
    config, meta = job.model, None
    if checkpoint is not None:
        meta = find(checkpoint, "--checkpoint")
        own = {key: getattr(config, key) for key in ("fp8", "fp8_first", "fp8_last")}
        config = ModelConfig.model_validate({**model_of(meta).model_dump(), **own, "dtype": "bfloat16"})
    out, started = open_out(options.out, "fp8_gradients"), utc_now()
    rows = measure(config, meta, _tokens(config, meta, text, micro, options.seed), place, options.seed)
    for line in lines(rows):
        click.echo(line, err=str(options.json_file) == "-")
    import torch

    record = RunRecord(
        name="bench.fp8_gradients",
        source="measured",
        rows=[asdict(row) for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "model": model or "",
            "checkpoint": str(checkpoint or ""),
            "text": str(text or ""),
            "micro": micro,
        },
        config={**job.model_dump(mode="json"), "model": config.model_dump(mode="json")},
        environment=environ.snapshot(options.seed),
        devices=[torch.cuda.get_device_name() if place.type == "cuda" else "CPU"],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def measure(
    config: ModelConfig, meta: Meta | None, tokens_BT: Tensor, device: torch.device, seed: int
) -> list[ErrorRow]:
    """Return a row a linear and layer, one a kind of linear, and one of all parameters.

    Args:
        config: with the recipe of the 8-bit products.
        meta: of the checkpoint whose weights are taken; None: new ones.
        tokens_BT: one more a sequence than the model sees.
    """
    variants = {
        "float32": {"fp8": "off", "fp8_first": 0, "fp8_last": 0, "dtype": "float32"},
        "bf16": {"fp8": "off", "fp8_first": 0, "fp8_last": 0},
        "fp8": {},
    }
    wide, narrow, scaled = (
        _gradients(config.model_copy(update=changes), meta, tokens_BT.to(device), seed) for changes in variants.values()
    )
    groups = dict[tuple[int | None, str], list[str]]()
    for name in wide:
        match = _LINEAR.match(name)
        if match:
            groups.setdefault((int(match[1]), match[2]), []).append(name)
    kinds = dict.fromkeys(linear for _, linear in groups)
    for kind in kinds:
        groups[None, kind] = [name for (_, linear), names in groups.items() if linear == kind for name in names]
    groups[None, "all"] = list(wide)
    return [_row(layer, linear, names, wide, narrow, scaled) for (layer, linear), names in groups.items()]


def _gradients(config: ModelConfig, meta: Meta | None, tokens_BT: Tensor, seed: int) -> Gradients:
    """Return the gradients of one pass, by name: weights are rounded to bfloat16 in every dtype."""
    import torch

    from trainer.checkpoint.reader import open_found
    from trainer.model.gpt import build_model

    model = build_model(config, seed, tokens_BT.device)
    if meta is not None:
        with torch.no_grad(), open_found(meta) as file:
            for name, parameter in model.named_parameters():
                if name not in file:
                    raise ConfigError(meta.field, meta.path, f"lacks {name}", "give an older checkpoint")
                parameter.copy_(file.read(name))
    model = model.to(torch.bfloat16).to(getattr(torch, config.dtype))
    loss: Tensor = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _row(
    layer: int | None, linear: str, names: Sequence[str], wide: Gradients, narrow: Gradients, scaled: Gradients
) -> ErrorRow:
    def total(function: Callable[[str], Tensor]) -> float:
        return math.fsum(function(name).sum().item() for name in names)

    def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
        return math.sqrt(total(lambda name: (ours[name].double() - theirs[name].double()).square()))

    norm, norm_bf16, norm_fp8 = (
        math.sqrt(total(lambda name, each=each: each[name].double().square()))  # type: ignore[misc]
        for each in (wide, narrow, scaled)
    )
    along = total(lambda name: wide[name].double() * scaled[name].double())
    return ErrorRow(
        layer,
        linear,
        norm,
        error_fp8=apart(scaled, wide) / norm if norm else math.nan,
        error_bf16=apart(narrow, wide) / norm if norm else math.nan,
        error_fp8_to_bf16=apart(scaled, narrow) / norm_bf16 if norm_bf16 else math.nan,
        cosine_fp8=along / norm / norm_fp8 if norm and norm_fp8 else math.nan,
    )


def _tokens(config: ModelConfig, meta: Meta | None, text: Path | None, micro: int, seed: int) -> Tensor:
    """Return [micro, seq_len + 1] tokens of a text's beginning, or random ones."""
    import torch

    from trainer.data.tokenizer import load_tokenizer

    shape = micro, config.seq_len + 1
    if text is None or meta is None:
        return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    tokenizer = load_tokenizer(meta.tokenizer_file, config.vocab_size)
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False).ids
    if len(ids) < math.prod(shape):
        rule = f"has {len(ids):,} tokens, and {micro} x {shape[1]:,} are read"
        raise ConfigError("--text", text, rule, "give a longer one, or a smaller --micro")
    return torch.tensor(ids[: math.prod(shape)]).view(shape)


def lines(rows: Sequence[ErrorRow]) -> list[str]:
    """Return a table: a line a layer, then of all layers; a column a kind of linear, 8 bits and bfloat16."""
    kinds = list(dict.fromkeys(row.linear for row in rows if row.linear != "all"))
    cells = {(row.layer, row.linear): row for row in rows}
    layers = list(dict.fromkeys(row.layer for row in rows))
    table = ["relative error of weights' gradients to float32's: with 8-bit products, and (in bfloat16)"]
    table.append(f"{'layer':>6}" + "".join(f"{kind:>20}" for kind in kinds))
    for layer in layers:
        texts = (f"{cells[layer, kind].error_fp8:.4f} ({cells[layer, kind].error_bf16:.4f})" for kind in kinds)
        table.append(f"{'all' if layer is None else layer:>6}" + "".join(f"{each:>20}" for each in texts))
    whole = cells[None, "all"]
    table.append(
        f"whole gradient: {whole.error_fp8:.4f} ({whole.error_bf16:.4f}), "
        f"cosine with float32's {whole.cosine_fp8:.6f}, norm {whole.norm:.4g}"
    )
    return table


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.fp8_gradients")
