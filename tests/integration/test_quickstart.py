"""The main job as its user runs it: a real command, real ranks, a real Redis, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from netlayer.results import load_frame
from tests.browser import browse, drawn_plots, needs_chromium
from tests.forked import run_module, start_module

TINY = ("model.layers=1", "model.hidden=32", "model.heads=2", "model.ffn_hidden=64", "model.seq_len=32")


def command(out: Path, *arguments: str) -> list[str]:
    settings = [word for setting in (*TINY, "model.vocab_size=300") for word in ("--set", f"job.{setting}")]
    return [sys.executable, "-m", "netlayer", "quickstart", "--out", str(out), "--steps", "12", *settings, *arguments]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of text: this project's own tests."""
    folder = tmp_path_factory.mktemp("text")
    for number, source in enumerate(sorted(Path("tests").rglob("*.py"))[:30]):
        (folder / f"{number}.py").write_text(source.read_text())
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The user's environment with a temporary folder and a cache of its own, to see what is left behind."""
    folder = tmp_path_factory.mktemp("t")
    return os.environ | {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}


def left_behind(environment: dict[str, str]) -> list[str]:
    """Processes that still carry this test's temporary folder in their environment, and Redis folders in it."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("TMPDIR") == environment["TMPDIR"]
        except (psutil.Error, OSError):
            continue
        if ours and process.status() != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.cmdline()))
    return found + [str(path) for path in Path(environment["TMPDIR"]).rglob("*.sock")]


def wait_until_gone(environment: dict[str, str]) -> list[str]:
    deadline = time.monotonic() + 30
    while (found := left_behind(environment)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, text: Path, environment: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One whole run, which several tests look at."""
    out = tmp_path_factory.mktemp("out")
    done = subprocess.run(
        command(out, "--set", f"data.folder={text}", "--json", str(out / "summary.json")),
        capture_output=True, text=True, env=environment, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_ends_with_a_report_its_pictures_and_records(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = finished
    assert f"report: {out / 'report.html'}" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    folder = next(setting for setting in summary["arguments"]["set"] if "data.folder" in setting).partition("=")[2]
    assert f"<code>*.py</code> under <code>{folder}</code>" in (out / "report.html").read_text()
    page = (out / "report.html").read_text()
    for heading in ("At a glance", "Acceptance bench", "Fabric", "Training", "Environment", "How to go on"):
        assert heading in page
    assert {path.stem for path in (out / "plots").glob("*.png")} >= {"bandwidth", "collision_share", "loss"}
    assert json.loads((out / "summary.json").read_text())["rows"][0]["wrong_elements"] == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.browser
@needs_chromium
def test_a_browser_draws_every_plot_of_its_report(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    document, console = browse(finished[0] / "report.html", tmp_path)
    assert console == []
    plots = drawn_plots(document)
    assert len(plots) == 7
    assert all(plots.values()), plots


@pytest.mark.slow
def test_one_rank_alone_leaves_out_what_needs_two(tmp_path: Path, text: Path, environment: dict[str, str]) -> None:
    one = ("cluster.gpus_per_server=1", "job.parallel.dp=1", f"data.folder={text}")
    done = subprocess.run(
        command(tmp_path, "--json", "-", *(word for setting in one for word in ("--set", setting))),
        capture_output=True, text=True, env=environment, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sendrecv is omitted, it needs at least 2 ranks" in done.stderr
    assert json.loads(done.stdout)["arguments"]["steps"] == 12  # stdout is the record alone
    assert "# Collective test concluded: all_reduce_perf" in done.stderr
    assert "Algorithm bandwidth" in (tmp_path / "report.html").read_text()


def test_its_records_keep_measured_and_simulated_apart(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    records = finished[0] / "records"
    measured, simulated = (load_frame(records, source) for source in ("measured", "simulated"))
    assert {f"bench.{name}" for name in ("all_gather", "reduce_scatter", "all_reduce", "sendrecv")} <= set(
        measured["record_name"]
    )
    assert set(simulated["record_name"]) == {"quickstart.fabric", "topology.ecmp"}
    training = measured[measured["record_name"] == "quickstart.training"]
    assert training["exposed_comm"].between(0, 1).all()


def test_it_says_its_progress_on_stderr_and_its_tables_on_stdout(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = finished
    assert "ranks meet through embedded Redis" in done.stderr
    assert "# Collective test concluded: all_reduce_perf" in done.stdout
    assert "training done in" in done.stderr


def test_it_leaves_no_process_and_no_redis(
    finished: tuple[Path, subprocess.CompletedProcess[str]], environment: dict[str, str]
) -> None:
    assert wait_until_gone(environment) == []


def test_without_a_redis_server_ranks_meet_through_tcpstore_and_it_is_said(
    tmp_path: Path, text: Path, environment: dict[str, str]
) -> None:
    words = command(tmp_path, "--set", f"data.folder={text}")[3:]
    done = run_module("tests.integration.without_redis", *words, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "ranks meet through TCPStore on loopback (no redis-server on this machine)" in done.stderr
    assert "TCPStore on loopback" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "missing.toml"], "there is no such file"),
        (["--set", "job.modl=3"], "did you mean model?"),
        (["--set", "job.parallel.tp=2"], "must equal cluster.servers x cluster.gpus_per_server"),
        (["--set", "cluster.gpus_per_server=6", "--set", "job.parallel.tp=3"], "must divide job.model.heads"),
        (["--set", "data.folder=EMPTY"], "job.data.folder"),
        (["--set", "job.store.url=redis://127.0.0.1:1", "--set", "job.store.timeout_s=2"], "127.0.0.1:1"),
        (
            ["--set", "cluster.servers=2", "--set", "parallel.dp=4", "--set", "batch.global_batch_size=32"],
            "cluster.servers = 2: quickstart starts every rank on this machine",
        ),
        (["--out", "/dev/null/out"], "--out = /dev/null/out: cannot be written"),
        (["--set", "job.launch.backend=nccl"], "want a GPU each"),
        (["--steps", "0"], "--steps"),
        (["--set", "data.folder=/no/such"], "there is no such folder"),
        (["--config", "examples/h200x8.toml", "--set", "model.hidden=65536"], "lower job.model.layers"),
    ],
)
def test_bad_input_ends_with_one_line_and_writes_no_report(
    arguments: list[str], words: str, tmp_path: Path, text: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "empty").mkdir()
    given = [word.replace("EMPTY", str(tmp_path / "empty")) for word in arguments]
    data = [] if any("data.folder" in word for word in given) else ["--set", f"data.folder={text}"]
    done = run_module("netlayer", *command(tmp_path / "out", *data, *given)[3:], env=environment, timeout=120)
    assert done.returncode in (2, 3), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.lower().startswith("error: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert wait_until_gone(environment) == []


@pytest.fixture
def training(tmp_path: Path, text: Path, environment: dict[str, str]) -> Iterator[tuple[Any, list[psutil.Process]]]:
    """A run that has begun to train, forked, and the processes that it started; its stderr is in the file `stderr`."""
    words = command(tmp_path, "--steps", "100000", "--set", f"data.folder={text}")[2:]
    with Path(os.devnull).open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
        started = start_module(*words, stdout=stdout, stderr=stderr, env=environment)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = psutil.Process(started.pid).children(recursive=True)
    yield started, children
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_ctrl_c_in_training_leaves_nothing_and_keeps_what_was_measured(
    tmp_path: Path, text: Path, environment: dict[str, str]
) -> None:
    # A process of its own, not a fork: only so does the environment find whatever it has started.
    started = subprocess.Popen(
        command(tmp_path, "--steps", "100000", "--set", f"data.folder={text}"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(60) == 130
    assert wait_until_gone(environment) == []
    assert all("loss" in json.loads(line) for line in metrics.read_text().splitlines())


def test_a_rank_killed_in_training_is_named_and_nothing_is_left(
    training: tuple[Any, list[psutil.Process]], tmp_path: Path, environment: dict[str, str]
) -> None:
    started, children = training
    [rank] = [child for child in children if child.name() == "rank 1"]
    rank.send_signal(signal.SIGKILL)
    assert started.wait(60) == 1
    *_, note, last = (tmp_path / "stderr").read_text().strip().splitlines()
    assert last.startswith("error: rank 1 (tp=0, pp=0, dp=1; ")
    assert "after step" in last  # the watch tells how far the rank came
    assert ") failed: killed by SIGKILL before it returned (out of memory? see dmesg)" in last
    assert note == f"note: what was done until then is in {tmp_path}"
    page = (tmp_path / "report.html").read_text()
    assert "netlayer quickstart, incomplete" in page
    assert "Acceptance bench" in page
    assert "At a glance" not in page
    assert psutil.wait_procs(children, 30)[1] == []
    assert wait_until_gone(environment) == []
