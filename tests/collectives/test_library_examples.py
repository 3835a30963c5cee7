"""Other libraries' loops over the wrapper: the examples run as they stand, where the libraries are installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "launcher"), [("lightning", []), ("accelerate", TORCHRUN)])
def test_an_example_trains(library: str, launcher: list[str]) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = EXAMPLES / f"{library}_sharded.py"
    done = subprocess.run([sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
