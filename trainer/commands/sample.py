"""`netlayer sample`: text from a checkpoint, as it comes."""

from __future__ import annotations

import math
from pathlib import Path

import click

from netlayer.errors import ConfigError


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to resume from [default: a new document].")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Most tokens to add.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    help="Above 1 bolder, below 1 surer; 0: always the likeliest token.",
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Draw among so many of the likeliest [0: all].")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the draws.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all.")
def sample(
    checkpoint: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: str,
    verbose: int,
) -> None:
    """Write text with the model of CHECKPOINT: a checkpoint of any layout, or a run's folder for its newest.

    One process, on a GPU where there is one; the same seed gives the same text. stdout is the prompt and what follows.

    \b
    Examples:
      netlayer sample runs/a --prompt 'def main(' --tokens 100 --temperature 0.8 --top-k 40
      netlayer sample runs/a/checkpoints/step-000050 --temperature 0
    """
    from netlayer import log
    from netlayer.launch.interrupt import held_interrupt
    from trainer.checkpoint.meta import find

    log.configure(verbose)
    _check(prompt, temperature)
    meta = find(checkpoint, "CHECKPOINT")
    with held_interrupt():  # torch takes two seconds to load
        from trainer.sample import Sampler, choose_device, model_of, needed_bytes
    chosen = choose_device(device)
    needed = needed_bytes(model_of(meta)) / 2**20
    click.echo(f"{meta.path}: step {meta.step}, about {needed:,.0f} MiB on the {chosen.type}", err=True)
    sampler = Sampler(meta, chosen)
    for part in sampler.text(prompt, tokens, temperature, top_k, seed):
        click.echo(part, nl=False)
    click.echo()


def _check(prompt: str, temperature: float) -> None:
    """Raise ConfigError for what the options' own types let through."""
    if math.isnan(temperature):
        raise ConfigError("--temperature", temperature, "is no number", "give one from 0 to 100")
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:  # Python gives bytes that it cannot read as halves of surrogate pairs
        raise ConfigError("--prompt", ascii(prompt), "is not UTF-8 text", "give the text in UTF-8") from exc
