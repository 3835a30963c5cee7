"""`python -m bench.mfu.blocks`: blocks of a model alone, forward and backward, beside other versions of this project.

Blocks from the middle of the model, no embedding, head, optimiser or communication: gradients come as autograd's own.
Versions take turns on one device, each in a process of its own (`block_program`) with its tree first on PYTHONPATH, so
that what a change costs or gains is seen at one clock and power limit. Whether they compute the same bits is compared
on the MLP's half block, whose kernels add up in one order, by products that are not chosen by measuring. One device.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bench.mfu.gpus import watched_gpus
from bench.mfu.jobs import Jobs, check_overrides, read_layout
from netlayer import environ
from netlayer.command import FiniteRange, RunOptions, open_out, run_options
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.percentile import percentile
from netlayer.results import RunRecord, utc_now, write_text

_PROGRAM = Path(__file__).with_name("block_program.py")
_HERE = Path(__file__).parents[2]


@dataclass
class Version:
    """One tree of this project, and what its process has answered.

    Args:
        name: of the row; `here` is this tree.
        start: where it imports from, digests, kernels of a step.
        each_ms: a step each.
        clocks_mhz, watts: medians of its turns.
    """

    name: str
    tree: Path
    process: subprocess.Popen[str]
    start: dict[str, Any] = field(default_factory=dict)
    each_ms: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)

    def answer(self) -> dict[str, Any]:
        """Return the next line of the process.

        Raises:
            CheckFailed: it has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CheckFailed(f"{self.name} ({self.tree}): its process ended with {self.process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]

    def take_turn(self) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        return self.answer()["ms"]  # type: ignore[no-any-return]


@click.command()
@run_options
@click.option("--model", help="Preset of job.model: 125m, 7b, llama3-8b [default: the file's, else 1m].")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Blocks.")
@click.option("--micro", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a micro-batch.")
@click.option(
    "--beside",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another tree of this project, as `git archive` unpacks it; may be given several times.",
)
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Turns of each version.")
@click.option("--seconds", type=FiniteRange(0), default=3.0, show_default=True, help="Of a turn.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    options: RunOptions,
    model: str | None,
    layers: int,
    micro: int,
    beside: Sequence[Path],
    rounds: int,
    seconds: float,
    device: str,
) -> None:
    """Measure blocks alone, beside other versions of this project.

    \b
    Examples:
      python -m bench.mfu.blocks --model llama3-8b --set model.seq_len=8192 --set model.fp8=tensorwise
      git archive --prefix=before/ HEAD~1 | tar x && python -m bench.mfu.blocks --model llama3-8b --beside before
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareMissing("no CUDA device: leave --device out, or give cpu")
    check_overrides(options.overrides)
    for tree in beside:
        if not (tree / "trainer" / "model" / "gpt.py").is_file():
            raise ConfigError("--beside", tree, "is no tree of this project", "give the folder that holds trainer/")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    job = Jobs(options, model, read_layout("dp1"), micro, None, "bfloat16" if on_gpu else "float32")()
    out, started = open_out(options.out, "blocks"), utc_now()
    settings = {
        "model": {**job.model.model_dump(mode="json"), "layers": layers},
        "tokens": micro * job.model.seq_len,
        "device": "cuda" if on_gpu else "cpu",
        "seconds": seconds,
        "checked_by": "triton" if on_gpu else "torch",
    }
    names = {"here": _HERE, **{tree.name: tree.resolve() for tree in beside}}
    with _started(names, settings) as versions:
        _measure(versions, rounds, int(on_gpu))
    rows = [_row(version, versions[0], layers) for version in versions]
    for row in rows:
        click.echo(_line(row), err=str(options.json_file) == "-")
    record = RunRecord(
        name="bench.mfu.blocks",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "model": model or "",
            "layers": layers,
            "micro": micro,
            "beside": [str(tree) for tree in beside],
            "rounds": rounds,
            "seconds": seconds,
        },
        config=job.model_dump(mode="json"),
        environment=environ.snapshot(options.seed),
        devices=[torch.cuda.get_device_name() if on_gpu else "CPU"],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


@contextmanager
def _started(trees: dict[str, Path], settings: dict[str, Any]) -> Iterator[list[Version]]:
    """Start a process a tree, one after the other: what each compiles and chooses is not disturbed."""
    with ExitStack() as stack:
        versions = []
        for name, tree in trees.items():
            # -P: modules beside the program have names that Python's own have.
            command_line = [sys.executable, "-P", str(_PROGRAM), json.dumps(settings)]
            process = subprocess.Popen(
                command_line,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])},
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            version = Version(name, tree, process)
            version.start = version.answer()
            if not Path(version.start["trainer"]).resolve().is_relative_to(tree):
                raise CheckFailed(f"{name}: imported trainer from {version.start['trainer']}, and not from {tree}")
            versions.append(version)
        yield versions


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _measure(versions: Sequence[Version], rounds: int, num_gpus: int) -> None:
    """Let the versions take turns, every other round the other way round."""
    with watched_gpus(num_gpus) as log:
        for number in range(rounds):
            for version in versions if number % 2 == 0 else reversed(versions):
                begin = time.monotonic()
                version.each_ms += version.take_turn()
                end = time.monotonic()
                figures = log.between((begin + end) / 2, end)
                if figures is not None and figures.clock_mhz is not None and figures.power_w is not None:
                    version.clocks_mhz.append(figures.clock_mhz)
                    version.watts.append(figures.power_w)


def _row(version: Version, first: Version, layers: int) -> dict[str, Any]:
    """Return the columns of a record; times are of one block."""
    each_ms = [ms / layers for ms in version.each_ms]
    p10_ms, p90_ms = (percentile(each_ms, percent) for percent in (10, 90))
    digests = version.start["digests"]
    kernels = version.start["kernels"]
    return {
        "version": version.name,
        "block_ms": statistics.median(each_ms),
        "p10_ms": p10_ms,
        "p90_ms": p90_ms,
        "each_ms": each_ms,
        "clock_mhz": statistics.median(version.clocks_mhz) if version.clocks_mhz else None,
        "power_w": statistics.median(version.watts) if version.watts else None,
        "kernels_a_block": sum(row["count"] for row in kernels) / layers if kernels else None,
        "repeats": digests[0] == digests[1],
        "same_bits": digests[0] == first.start["digests"][0],
        "kernels": kernels,
    }


def _line(row: dict[str, Any]) -> str:
    at = "" if row["power_w"] is None else f"  {row['clock_mhz']:.0f} MHz {row['power_w']:.0f} W"
    kernels = "" if row["kernels_a_block"] is None else f"  {row['kernels_a_block']:.1f} kernels"
    bits = "same bits" if row["same_bits"] else "other bits" if row["repeats"] else "bits that do not repeat"
    return (
        f"{row['version']:12} {row['block_ms']:9.3f} ms a block ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})"
        f"{at}{kernels}  {bits}"
    )


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.mfu.blocks")
