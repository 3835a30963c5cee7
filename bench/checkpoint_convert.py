"""`python -m bench.checkpoint_convert`: memory and time of `netlayer checkpoint export` and `import`, without a GPU.

A synthetic checkpoint of a preset, with as many of its layers as --layers says, is written, exported for transformers,
imported, exported again and compared; each conversion runs in a process of its own, whose memory is sampled from
/proc/self/status every 10 ms: `anonymous_bytes` (RssAnon) is what it holds, `resident_bytes` (VmRSS) counts mapped
pages of files too, which the system takes back where it needs them. `start_bytes` of the former is torch and Python,
before any tensor. Everything is deleted at the end. Not covered: other targets, which take the same tensors one by one.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import Config, build_config
from netlayer.errors import CheckFailed
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.units import format_size
from trainer.checkpoint.foreign.convert import export_checkpoint, import_model, model_in, open_foreign
from trainer.checkpoint.foreign.layouts import own_shapes
from trainer.checkpoint.reader import open_checkpoint, write_checkpoint

MAX_RESIDENT_BYTES = 4 << 30
_SAMPLE_S = 0.01


@dataclass(frozen=True)
class ConvertRow:
    """A conversion in a process of its own.

    Args:
        step: export or import.
        num_bytes: of the tensors that were written.
        seconds: with fsync.
        start_bytes: anonymous memory before.
        anonymous_bytes: peak of it.
        resident_bytes: peak with mapped files.
        largest_bytes: of the largest parameter, in float32.
    """

    step: str
    num_bytes: int
    seconds: float
    start_bytes: int
    anonymous_bytes: int
    resident_bytes: int
    largest_bytes: int


@click.command()
@run_options
@click.option("--preset", default="7b", show_default=True, help="Shape: a preset of job.model.")
@click.option("--layers", type=click.IntRange(min=1), help="Blocks [default: all of the preset].")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the checkpoints [default: in --out].")
def command(options: RunOptions, preset: str, layers: int | None, dtype: str, work: Path | None) -> None:
    """Convert a synthetic checkpoint both ways; exit 1 where a process held 4 GiB, or a bit came back otherwise."""
    out, started = open_out(options.out, "checkpoint_convert"), utc_now()
    config = build_config({"job": {"model": {"preset": preset, **({"layers": layers} if layers else {})}}})
    folder = (work or out) / "convert"
    folder.mkdir(parents=True)
    rows: list[ConvertRow] = []
    try:
        write_checkpoint(folder / "own", _random(config), config.job)
        for step, source, target in (
            ("export", "own", "theirs"),
            ("import", "theirs", "back"),
            ("export", "back", "again"),
        ):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                rows.append(pool.submit(convert, step, folder / source, folder / target, dtype, config).result())
            row = rows[-1]
            memory = f"{format_size(row.anonymous_bytes)} anonymous, {format_size(row.resident_bytes)} resident"
            speed = f"{row.num_bytes / row.seconds / 1e6:,.0f} MB/s"
            click.echo(f"{step}: {format_size(row.num_bytes)} in {row.seconds:.1f} s ({speed}), peak {memory}")
        names = sorted(path.name for path in (folder / "theirs").glob("*.safetensors"))
        same = all(_same(folder / "theirs" / name, folder / "again" / name) for name in names)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = RunRecord(
        name="bench.checkpoint_convert",
        source="measured",
        rows=[asdict(row) for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "preset": preset, "layers": config.job.model.layers, "dtype": dtype},
        config=config.model_dump(mode="json"),
        environment=environ.snapshot(options.seed),
        devices=["CPU"],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if not same:
        raise CheckFailed("what was exported again differs from what was exported first")
    if (most := max(row.resident_bytes for row in rows)) >= MAX_RESIDENT_BYTES:
        raise CheckFailed(f"a conversion had {format_size(most)} resident, and may have 4 GiB")


def convert(step: str, source: Path, target: Path, dtype: str, config: Config) -> ConvertRow:
    """Run one conversion in this process, which does nothing else."""
    torch.set_num_threads(1)
    memory = Memory()
    begin_s = time.monotonic()
    with memory:
        if step == "import":
            written = import_model(open_foreign(source, "huggingface"), target)
        else:
            with open_checkpoint(source) as checkpoint:
                written = export_checkpoint(
                    checkpoint, model_in(checkpoint), target, "huggingface", getattr(torch, dtype)
                )
    seconds = time.monotonic() - begin_s
    largest = max(torch.Size(shape).numel() for shape in own_shapes(config.job.model).values()) * 4
    return ConvertRow(
        step, written.num_bytes, seconds, memory.start_bytes, memory.anonymous_bytes, memory.resident_bytes, largest
    )


class Memory:
    """Peaks of this process's memory while the block runs, sampled."""

    def __enter__(self) -> Memory:
        self.start_bytes, self.resident_bytes = _memory()
        self.anonymous_bytes = self.start_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            anonymous, resident = _memory()
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous)
            self.resident_bytes = max(self.resident_bytes, resident)


def _memory() -> tuple[int, int]:
    """Return anonymous and resident bytes of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, resident = (int(lines[key].split()[0]) << 10 for key in ("RssAnon", "VmRSS"))
    return anonymous, resident


def _random(config: Config) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, shape in own_shapes(config.job.model).items():
        yield name, torch.empty(shape).uniform_(-1, 1, generator=generator)


def _same(one: Path, other: Path) -> bool:
    """Compare two files a block at a time."""
    block = 64 << 20
    with one.open("rb") as first, other.open("rb") as second:
        while content := first.read(block):
            if content != second.read(block):
                return False
        return not second.read(1)


if __name__ == "__main__":
    command()
