"""Makes what lies beside it, by the code of commit d247ee8, whose modules were flat: see README.md there."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from collectives.cublaslt import Shape
from collectives.product_choices import ProductChoices
from collectives.small_path import KINDS
from collectives.small_tune import fastest
from collectives.tuning import Measured, TuningTable
from netlayer.config_file import load_config, to_toml

STEPS, SAVED = 4, 2
# As a user of that time wrote it: the keys' names of then, in short.
JOB = f"""\
[cluster]
name = "before-the-move"
gpus_per_server = 1

[job]
name = "tiny"

[job.model]
layers = 1
hidden = 8
heads = 2
ffn_hidden = 16
vocab_size = 272
seq_len = 16

[job.parallel]
dp = 1

[job.batch]
global_size = 4
micro_size = 2

[job.data]
folder = "text"
pattern = "*.txt"

[job.optimizer]
steps = {STEPS}
lr = 0.01
min_lr_share = 0.2
warmup_steps = 1
clip_norm = 0.5

[job.evaluation]
every_steps = {STEPS}
global_batches = 1

[job.checkpoint]
every_steps = {SAVED}
keep = 4
other_text = false

[job.overlap]
bucket_mib = 0.01
keep_gathered = true

[job.loop]
collect_every_steps = 3
"""
# Shapes of products, and what was chosen for each: an algorithm's 64 bytes, or torch's own product.
PRODUCTS = {(2, 3, 4): "0123456789abcdef" * 8, (2, 3, 5): "", (16, 8, 32): "fedcba9876543210" * 8}


def write_text(folder: Path) -> None:
    """Ten files of sentences, of which one is held out."""
    folder.mkdir()
    draws = random.Random(0)
    for number in range(10):
        lines = [
            f"the {draws.choice(('rank', 'link', 'switch'))} sends {draws.randrange(100)} bytes\n" for _ in range(20)
        ]
        (folder / f"file{number:02}.txt").write_text("".join(lines), encoding="utf-8")


def train() -> dict[str, object]:
    """Train by the command of then; what comes out behind the checkpoint of step 2."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(Path("cache").resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "netlayer", "train", "job.toml", "--out", "out", "--seed", "7"]
    subprocess.run(command, check=True, env=environ)
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in Path("out/validation.jsonl").read_text().splitlines()]
    later = [row for row in steps if row["step"] > SAVED]
    return {
        "losses": [row["loss"] for row in later],
        "grad_norms": [row["grad_norm"] for row in later],
        "validation_loss": held_out[-1]["validation_loss"],
    }


def measured(num_ranks: int) -> list[Measured]:
    """Figures of a table in which small messages go one way and larger ones another."""
    return [
        Measured(kind=kind, num_ranks=num_ranks, num_bytes=1024 << power, path=path, median_us=at_0 + slope * power)
        for kind in KINDS
        for power in range(9)
        for path, at_0, slope in (("nccl", 20.0, 1.0), ("one_shot", 4.0 * num_ranks, 1.5 + KINDS.index(kind)))
    ]


def tune() -> dict[str, object]:
    """A table of small collectives and a file of products; the choices that they give."""
    figures = [figure for ranks in (2, 4) for figure in measured(ranks)]
    entries = tuple(fastest(figures, kind, ranks) for kind in KINDS for ranks in (2, 4))
    table = TuningTable(
        source="made up", measured_on="2026-11-26", entries=entries, left_out={"two_shot": "no"}, figures=tuple(figures)
    )
    table.save(Path("small_table.json"))
    products = ProductChoices(Path("products.json"))
    for (rows, inner, columns), chosen in PRODUCTS.items():
        shape = Shape.of(
            *(torch.empty(size, device="meta") for size in ((rows, inner), (inner, columns), (rows, columns)))
        )
        assert shape is not None
        products.add(shape, chosen)
    asked = [
        (kind, ranks, size) for kind in KINDS for ranks in (2, 3, 4, 8) for size in (8, 1024, 5000, 1 << 17, 1 << 20)
    ]
    return {
        "small": [[*each, table.choose(*each)] for each in asked],
        "products": [[*shape, chosen] for shape, chosen in PRODUCTS.items()],
    }


def pack(target: Path) -> None:
    """The text and the checkpoint of step 2, always as the same bytes."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted([*Path("text").iterdir(), *Path(f"out/checkpoints/step-{SAVED:06d}").iterdir()]):
            name = path.relative_to("out") if path.is_relative_to("out") else path
            content, entry = path.read_bytes(), tarfile.TarInfo(str(name))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def main() -> None:
    here, example = Path(__file__).resolve().parent, Path(sys.argv[1]).resolve() / "examples" / "megascale-12288.toml"
    os.chdir(sys.argv[2])
    write_text(Path("text"))
    Path("job.toml").write_text(JOB)
    expected = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), **train(), **tune()}
    pack(here / "checkpoint.tar.xz")
    (record,) = Path("out/records").iterdir()
    shutil.copy(record, here / "record.json")
    for name, path in (("job", Path("job.toml")), ("every_key", example)):
        config = load_config(path)
        (here / f"{name}.toml").write_text(path.read_text() if name == "job" else to_toml(config))
        (here / f"{name}.json").write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n")
    for name in ("small_table.json", "products.json"):
        shutil.copy(name, here / name)
    (here / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
