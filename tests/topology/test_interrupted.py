"""Ctrl-C in the middle of a command: it ends at once, in one line, and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from netlayer.config.file import to_toml
from tests.topology.fabrics import EXAMPLES
from tests.topology.jobs import small

MEGASCALE = str(EXAMPLES / "megascale-12288.toml")


def _begun(out: Path, process: subprocess.Popen[str], pattern: str) -> bool:
    return any(out.glob(pattern)) or process.poll() is not None


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["build", "--config", MEGASCALE], ".part-*/*.csv"),
        (
            ["optimize", "ports", "--config", MEGASCALE, "--traffic", "ring", "--traffic", "pipeline"],
            ".part-*/*ring.csv",
        ),
        (["whatif", "--config", MEGASCALE, "--sample", "0", "--processes", "2"], ".part-*"),
        (["report", "--config", "SMALL", "--processes", "2"], ".part-*"),
    ],
)
# Later: in the midst of the work of two processes.
@pytest.mark.parametrize("delay_s", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_nothing(tmp_path: Path, arguments: list[str], pattern: str, delay_s: float) -> None:
    (tmp_path / "small.toml").write_text(to_toml(small()))
    words = [str(tmp_path / "small.toml") if word == "SMALL" else word for word in arguments]
    out = tmp_path / "out"
    # As a terminal does it: the signal goes to the whole group, workers among it.
    run = subprocess.Popen(
        [sys.executable, "-m", "netlayer", "topology", *words, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not _begun(out, run, pattern) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(delay_s)
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGINT)
    stdout, stderr = run.communicate(timeout=120)
    assert "Traceback" not in stderr
    if (out / "records").exists():  # the signal came after all had been published
        assert list((out / "records").iterdir())
        assert not list(out.glob(".part-*"))
        return
    assert run.returncode == 130
    assert stdout == ""
    assert stderr.splitlines()[-1] == "interrupted"
    assert not out.exists()
