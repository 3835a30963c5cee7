"""`netlayer checkpoint`: checkpoints of a run, whether they are whole, and those of other programs both ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from netlayer import log
from netlayer.errors import EXIT_FAILED, EXIT_OK, ConfigError
from netlayer.results import check_target, write_text
from netlayer.units import parse_size

_PATH = click.Path(path_type=Path)
_verbose = click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all.")
_json = click.option("--json", "json_file", type=_PATH, help="Also write the facts here; - is stdout.")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.group()
def checkpoint() -> None:
    """List, verify and rewrite checkpoints; exchange models with Hugging Face, torchtitan and plain torch.

    \b
    Examples:
      netlayer checkpoint ls runs/a
      netlayer checkpoint verify runs/a/checkpoints/step-000050
      netlayer checkpoint export runs/a exported/llama --to huggingface --dtype bfloat16
      netlayer checkpoint import downloads/Llama-3.2-1B imported/llama --from huggingface --seq-len 8192
    """


@checkpoint.command()
@click.argument("folder", type=_PATH, metavar="DIR")
@_json
@_verbose
def ls(folder: Path, json_file: Path | None, verbose: int) -> None:
    """List the checkpoints of a run, or of its checkpoints folder, or one: step, format, layout, size, state.

    No tensor is read: `good` was committed behind a finite step and all its files are there; `pending` is not verified
    by a step yet; `damaged` says what is wrong with what describes it; `part` is what a killed save left.

    \b
    Example:
      netlayer checkpoint ls runs/a --json -
    """
    from netlayer.launch.interrupt import held_interrupt

    log.configure(verbose)
    check_target("--json", json_file)
    with held_interrupt():  # torch takes two seconds to load
        from trainer.checkpoint.listing import list_checkpoints
    rows = list_checkpoints(folder)
    if json_file:
        write_text(json_file, json.dumps([row.to_row() for row in rows], indent=1) + "\n")
    if str(json_file) != "-":
        from netlayer.printing import print_rows

        columns = {
            "name": "checkpoint",
            "step": "step",
            "format": "format",
            "layout": "written by",
            "num_parameters": "parameters",
            "content": "content",
            "size_bytes": "size",
            "state": "state",
            "detail": "",
        }
        print_rows(str(folder), [row.to_row() for row in rows], columns)


@checkpoint.command()
@click.argument("path", type=_PATH)
@_json
@_verbose
def verify(path: Path, json_file: Path | None, verbose: int) -> None:
    """Read a checkpoint whole, and compare everything with its digests; exit 1 where something differs.

    PATH is a checkpoint, a run for its newest, or a folder of torch.distributed.checkpoint or safetensors files, which
    without digests are read only.

    \b
    Example:
      netlayer checkpoint verify runs/a
    """
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.printing import print_table
    from netlayer.progress import Stages

    log.configure(verbose)
    check_target("--json", json_file)
    with held_interrupt():  # torch takes two seconds to load
        from trainer.checkpoint.listing import Verification, to_json
    verification = Verification(path)
    with Stages() as stages, stages.wait("verify", lambda: (verification.bytes_read, verification.total_bytes, "")):
        checks = list(verification.checks())
    damaged = [check for check in checks if check.damage]
    if json_file:
        write_text(json_file, to_json(verification, checks))
    if str(json_file) != "-" and damaged:
        lines = [(check.file, check.damage) for check in damaged]
        print_table(str(verification.path), ("damaged file", "what is wrong"), lines)
    elif str(json_file) != "-":
        click.echo(verification.line(checks))
    sys.exit(EXIT_FAILED if damaged else EXIT_OK)


@checkpoint.command()
@click.argument("path", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--file-size", metavar="SIZE", default="4GiB", show_default=True, help="Most bytes of a file, about.")
@click.option("--model-only", is_flag=True, help="Without the optimiser's state: a third of the bytes.")
@_verbose
def reshard(path: Path, out: Path, file_size: str, model_only: bool, verbose: int) -> None:
    """Rewrite a checkpoint of any format into the current one, in as many files as --file-size makes of it.

    A checkpoint has no layout to choose: ranks of any tp, pp and dp read their parts of whole tensors. This makes a few
    large files of those of many ranks, or small ones for a store that wants them, and brings old formats up to date.
    With --model-only a run that resumes from it starts with its first step and a new optimiser.

    \b
    Examples:
      netlayer checkpoint reshard runs/a/checkpoints/step-000250 kept/step-000250 --file-size 50GiB
      netlayer checkpoint reshard runs/old runs/new-format/step-000250
    """
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.progress import Stages

    log.configure(verbose)
    size = _size("--file-size", file_size)
    with held_interrupt():
        from trainer.checkpoint.foreign.convert import reshard_checkpoint
        from trainer.checkpoint.reader import open_checkpoint
    with Stages() as stages, stages.open("reshard") as bar, open_checkpoint(path, "PATH") as source:
        written = reshard_checkpoint(source, out, size, model_only, bar)
    click.echo(written.line())


@checkpoint.command()
@click.argument("path", type=_PATH)
@click.argument("out", type=_PATH)
@click.option(
    "--to",
    "target",
    type=click.Choice(["huggingface", "safetensors", "torchtitan", "dcp"]),
    required=True,
    help="For whom.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the tensors [default: as trained: float32].")
@click.option("--file-size", metavar="SIZE", default="5GB", show_default=True, help="Most bytes of a file, about.")
@click.option("--config", "config_path", type=_PATH, help="Job file with the model, where PATH does not say it.")
@_verbose
def export(
    path: Path, out: Path, target: Any, dtype: str | None, file_size: str, config_path: Path | None, verbose: int
) -> None:
    """Write the model of a checkpoint for another program, in bounded memory and without a GPU.

    PATH is a checkpoint of any layout, or a run for its newest. huggingface: config.json, safetensors files and the
    tokenizer, for transformers: GPT-2, Llama, Mistral and Qwen3. safetensors: our own names. torchtitan: its Llama 3,
    for checkpoint.initial_load_path. dcp: torch.distributed.checkpoint, our names. Without --dtype no bit changes.

    \b
    Examples:
      netlayer checkpoint export runs/a exported/llama --to huggingface --dtype bfloat16
      netlayer checkpoint export runs/a/checkpoints/step-000250 exported/titan --to torchtitan
    """
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.progress import Stages

    log.configure(verbose)
    size = _size("--file-size", file_size)
    with held_interrupt():  # torch takes two seconds to load
        import torch

        from trainer.checkpoint.foreign.convert import export_checkpoint, model_in
        from trainer.checkpoint.reader import open_checkpoint
    with Stages() as stages, stages.open("export") as bar, open_checkpoint(path, "PATH") as source:
        model = model_in(source, config_path)
        chosen = getattr(torch, dtype) if dtype else None
        written = export_checkpoint(source, model, out, target, chosen, size, bar)
    click.echo(written.line())


@checkpoint.command("import")
@click.argument("path", type=_PATH)
@click.argument("out", type=_PATH)
@click.option(
    "--from", "origin", type=click.Choice(["huggingface", "safetensors", "dcp"]), required=True, help="Who wrote it."
)
@click.option(
    "--seq-len", type=click.IntRange(min=1), help="Tokens of a training sequence [default: the most it reads]."
)
@click.option("--config", "config_path", type=_PATH, help="Job file with the model, where PATH does not say it.")
@_verbose
def import_(path: Path, out: Path, origin: Any, seq_len: int | None, config_path: Path | None, verbose: int) -> None:
    """Make a checkpoint of step 0 of another program's model; `netlayer train OUT/job.toml --resume OUT` trains it.

    huggingface: a folder as transformers saves GPT-2, Llama, Mistral or Qwen3, with safetensors files. safetensors,
    dcp: our names, or torchtitan's Llama 3, with job.toml beside or --config. Every tensor must be one of the model,
    and all of the model must be there. Narrow dtypes become float32 without loss; the optimiser starts afresh.

    \b
    Examples:
      netlayer checkpoint import downloads/Llama-3.2-1B imported/llama --from huggingface --seq-len 8192
      netlayer train imported/llama/job.toml --resume imported/llama --set data.datasets.web.path=tokens/web
      netlayer checkpoint import titan/step-1000 imported/titan --from dcp --config llama.toml
    """
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.progress import Stages

    log.configure(verbose)
    with held_interrupt():
        from trainer.checkpoint.foreign.convert import import_model, open_foreign
    with Stages() as stages, stages.open("import") as bar:
        written = import_model(open_foreign(path, origin, config_path, seq_len), out, bar)
    click.echo(written.line())


def _size(field: str, text: str) -> int:
    """Return the bytes of a size option."""
    try:
        size = parse_size(text)
    except ValueError as exc:
        raise ConfigError(field, text, str(exc), "give a size such as 4GiB") from exc
    if size < 1:
        raise ConfigError(field, text, "is no size of a file", "give a size such as 4GiB")
    return size
