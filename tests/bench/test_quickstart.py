"""What quickstart refuses, and what its page and README say: all that needs no run of minutes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.quickstart import command as module
from bench.quickstart.outcome import Outcome, fabric_summary
from bench.quickstart.page import build_page, onwards
from netlayer.config.file import example, load_config
from netlayer.config.tree import Config
from netlayer.environ import Finding
from netlayer.results import RunRecord, load_record
from tests.bench import canned
from tests.full import read_pages
from topology.ecmp.compare import compare_split

REPOSITORY = Path(__file__).parents[2]
REPORTS = REPOSITORY / "reports"


def quickstart(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netlayer", "quickstart", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--config", str(example("h200x8")), "--set", "model.hidden=65536"], 2, "error: job = "),
        (["--set", "data.folder=/no/such"], 2, "error: job.data.folder = /no/such: there is no such folder"),
        (["--set", "data.pattern=*.nothing"], 2, "error: job.data.folder = "),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_before_anything_is_made(
    arguments: list[str], code: int, words: str, tmp_path: Path
) -> None:
    done = quickstart(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_bad_option_is_refused_without_torch_and_numba() -> None:
    heavy = {"torch", "numba", "altair", "pandas"}
    code = f"import sys, bench.quickstart.command; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def incomplete() -> Outcome:
    """A run that was interrupted after the bench."""
    rows = [canned.row(in_place) for in_place in (False, True)]
    findings = [Finding("GPUs", "optional", "none", "a machine with an NVIDIA driver " + "and more " * 20)]
    outcome = Outcome(Config(), "gloo", findings, load_config(example(module.FABRIC)))
    outcome.bench = [canned.record(rows)]
    return outcome


def test_a_run_that_broke_off_shows_what_was_done_and_why() -> None:
    page = build_page(incomplete(), 0, Path("out"), stopped="rank 1 failed").html()
    assert "netlayer quickstart, incomplete" in page
    assert "Interrupted, what was done until then is shown: rank 1 failed" in page
    assert "Acceptance bench" in page
    assert 'class="long"' in page  # long cells wrap, so that the remedy stays on the screen
    assert "<h2>Training" not in page


def test_records_of_a_run_that_broke_off_are_those_of_its_stages() -> None:
    assert module._records(incomplete(), 0, {}, "2026-01-01T00:00:00+00:00") == []


def test_the_commands_of_how_to_go_on_can_be_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canned.record().save(tmp_path / "a run" / "records")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no .venv/bin, as after `make quickstart`
    blocks = onwards(tmp_path / "a run").split("\n\n")
    programs = [
        shlex.split(line)[0]
        for block in blocks
        for line in block.splitlines()
        if re.match(r"\S*(netlayer|_perf) ", line)
    ]
    assert len(programs) == 4
    for program in programs:
        assert subprocess.run([program, "--help"], capture_output=True, check=False).returncode == 0, program
    describe = next(line for line in blocks[2].splitlines() if "describe" in line)
    for command in (describe, blocks[3]):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def fabric_of(seeds: range) -> dict[str, float]:
    fabric = load_config(example(module.FABRIC))
    outcome = Outcome(Config(), "gloo", (), fabric)
    outcome.collisions = compare_split(fabric, seeds=seeds, hashes=("random",), traffics=("permutation",))
    return fabric_summary(outcome)


def kept(name: str) -> RunRecord:
    return load_record(max(REPORTS.glob(f"quickstart_cpu_*.{name}.json")))


def test_the_record_of_the_fabric_is_what_this_code_gives() -> None:
    """Where this fails, the code has changed its figures: `make reports` takes the records and CLAIMS.md anew."""
    [row] = kept("quickstart.fabric").rows
    assert fabric_of(range(module._SEEDS)) == pytest.approx(dict(row), rel=1e-9)


def test_the_pages_say_what_the_records_say() -> None:
    text = " ".join(read_pages().split())
    [fabric] = kept("quickstart.fabric").rows
    [run] = kept("quickstart.summary").rows
    for figure, name in (("excess", "excess"), ("collision_share", "collision")):
        said = f"from {fabric[f'{figure}_whole']:.1%} to {fabric[f'{figure}_split']:.1%}"
        assert said in text, name
    loss = (
        f"{run['validation_loss_first']:.2f} -> {run['validation_loss_last']:.2f} (-{run['validation_loss_fall']:.0%})"
    )
    assert loss in text
    commit = json.loads((max(REPORTS.glob("quickstart_cpu_*.quickstart.summary.json"))).read_text())["environment"][
        "commit"
    ]
    assert commit in text
