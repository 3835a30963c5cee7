"""Make the files that the commands of README and docs/ take for granted, in the current folder: for tests/full.py.

The examples, logs under the names that the pages use, a job, a card, and text to train on.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from netlayer.commands.example_files import copy_examples


def main() -> None:
    """Write all of them."""
    copy_examples(Path())
    for number, log in enumerate(sorted(Path("logs").glob("nccl_node*.txt"))[:3]):
        shutil.copy(log, f"node{number}.log")
    shutil.copy("laptop.toml", "job.toml")
    Path("my_card.toml").write_text('like = "H100"\nmemory_gbps = 2000\nbf16_tflops = 756.5\ngemm = 0.62\n')
    _text()


def _text() -> None:
    """Python for C's sake: the command looks at names alone."""
    for path in Path("congestion").rglob("*.py"):
        shutil.copy(path, Path(os.environ["HOME"]) / "src" / f"{'_'.join(path.parts)}.c")
    Path("my-text").mkdir()
    for path in Path().rglob("*.md"):
        if "my-text" not in path.parts and ".venv" not in path.parts:
            shutil.copy(path, Path("my-text") / "_".join(path.parts))


if __name__ == "__main__":
    main()
