"""Launching local ranks: results, logs, who is blamed when one fails, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from netlayer.errors import CollectiveTimeout, ConfigError, RankFailed
from netlayer.launch.launcher import RankContext, RankEnv, detect, launch
from tests.netlayer import launch_targets as targets

REPOSITORY = Path(__file__).parents[2]


def failure_of(how: str, log_dir: Path, num_ranks: int = 2) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        launch(targets.fail, num_ranks, args=(num_ranks - 1, how), log_dir=log_dir)
    assert caught.value.rank == num_ranks - 1
    return caught.value


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


_EARLIER: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _forget_children_of_earlier_tests() -> None:
    """A server that another module keeps for its whole session, say."""
    _EARLIER.clear()
    _EARLIER.update(psutil.Process().children(recursive=True))


def no_children() -> bool:
    return not set(psutil.Process().children(recursive=True)) - _EARLIER


# ---- results, messages, logs


def test_results_come_in_rank_order_and_ranks_know_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a torchrun around us")
    results = launch(targets.describe, 3, args=("a", 2), log_dir=str(tmp_path / "logs"), env={"EXTRA": "given"})
    assert [result["env"] for result in results] == [RankEnv(rank, 3, rank, 3, "netlayer") for rank in range(3)]
    assert [result["args"] for result in results] == [("a", 2)] * 3
    environ = results[2]["environ"]
    assert isinstance(environ, dict)
    assert environ.pop("OMP_NUM_THREADS") == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert environ == {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "EXTRA": "given"}
    assert {(result["torch"], result["stdin"], result["session"]) for result in results} == {(False, "", True)}
    assert no_children()


@pytest.mark.parametrize("where", ["environ", "env"])
def test_omp_num_threads_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7" if where == "environ" else "1")
    env = {"OMP_NUM_THREADS": "7"} if where == "env" else None
    (result,) = launch(targets.describe, 1, log_dir=tmp_path, env=env)
    assert isinstance(result["environ"], dict)
    assert result["environ"]["OMP_NUM_THREADS"] == "7"


def test_progress_arrives_in_order_in_the_calling_thread(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    threads = set()

    def on_message(rank: int, message: tuple[int, str]) -> None:
        seen[rank].append(message[0])
        threads.add(threading.current_thread())

    # More than a pipe holds, so ranks also wait for the launcher.
    assert launch(targets.report_steps, 2, args=(300,), log_dir=tmp_path, on_message=on_message) == [300, 300]
    assert seen == {0: list(range(300)), 1: list(range(300))}
    assert threads == {threading.current_thread()}


def test_a_file_of_the_current_folder_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json of Python')")
    monkeypatch.chdir(tmp_path)
    assert launch(targets.report_steps, 1, args=(0,), log_dir=tmp_path) == [0]


def test_a_rank_ends_though_an_executor_was_never_shut_down(tmp_path: Path) -> None:
    assert launch(targets.leave_a_pool, 2, log_dir=tmp_path) == [0, 1]


def test_a_result_may_be_larger_than_a_pipe(tmp_path: Path) -> None:
    results = launch(targets.return_bytes, 2, args=(5_000_000,), log_dir=tmp_path)
    assert results == [bytes(5_000_000), b"\1" * 5_000_000]


def test_the_log_of_a_rank_holds_python_c_and_file_descriptor_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "rank0000.log").write_text("an earlier launch\n")
    with pytest.raises(RankFailed):
        launch(targets.print_everywhere, 1, log_dir=tmp_path)
    lines = (tmp_path / "rank0000.log").read_text().splitlines()
    assert lines[0] == "an earlier launch"
    assert sorted(lines[1:]) == ["from C", "from a file descriptor", "from python 0", "to stderr"]


def test_an_exception_of_the_callback_ends_the_ranks(tmp_path: Path) -> None:
    def on_message(rank: int, message: object) -> None:
        raise LookupError("no such bar")

    with pytest.raises(LookupError, match="no such bar"):
        launch(targets.report_steps, 1, args=(100_000,), log_dir=tmp_path, on_message=on_message)
    assert no_children()


# ---- failures


def test_an_exception_is_reported_with_rank_log_and_traceback(tmp_path: Path) -> None:
    failed = failure_of("raise", tmp_path)
    assert failed.reason == "ValueError: boom\nin two lines"
    assert "in _raise" in failed.traceback
    assert "in run_rank" not in failed.traceback
    assert failed.log_file == str(tmp_path / "rank0001.log")
    assert "in _raise" in (tmp_path / "rank0001.log").read_text()
    # The other was told to end, and wrote down where it was.
    assert "in fail" in (tmp_path / "rank0000.log").read_text()
    assert no_children()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("unpicklable", "tests.netlayer.launch_targets.Unpicklable: a lock inside"),
        ("return a lock", "TypeError: the return value of fail cannot be pickled: TypeError: cannot pickle"),
        ("report what the parent cannot have", "a message of it cannot be unpickled here: RuntimeError: no rank here"),
        ("exit", "exit code 3 before it returned"),
        ("exit 0", "exit code 0 before it returned"),
        ("sys.exit", "SystemExit: 0"),
        ("SIGKILL", "killed by SIGKILL before it returned"),
        ("SIGSEGV", "killed by SIGSEGV before it returned"),
        ("real-time signal", f"killed by signal {signal.SIGRTMIN + 5} before it returned"),
        ("fork and report", "ValueError: refused in the fork"),
    ],
)
def test_every_way_to_fail_is_named_and_the_others_end(tmp_path: Path, how: str, reason: str) -> None:
    failed = failure_of(how, tmp_path)
    assert failed.reason.startswith(reason)
    assert no_children()
    if how in ("exit", "SIGKILL", "SIGSEGV"):  # no report: the end of the log stands in for it
        assert "last words" in failed.traceback


def test_a_result_that_the_parent_cannot_unpickle_is_a_failure(tmp_path: Path) -> None:
    failed = failure_of("return what the parent cannot have", tmp_path, num_ranks=1)
    assert failed.reason == "its return value cannot be unpickled here: RuntimeError: no rank here"


def test_our_own_error_keeps_its_type_and_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.parallel\.tp = 3") as caught:
        launch(targets.fail, 2, args=(1, "config"), log_dir=tmp_path)
    assert isinstance(caught.value.__cause__, RankFailed)
    assert caught.value.__cause__.rank == 1
    assert "in _raise_config" in caught.value.__cause__.traceback
    assert any("rank 1" in note for note in caught.value.__notes__)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold up the report of the culprit; the wait ends anyway when all ranks have."""
    monkeypatch.setattr("netlayer.launch.launcher._SETTLE_S", 60)
    monkeypatch.setattr("netlayer.launch.launcher._SETTLE_SYMPTOMS_S", 60)


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("complaint", ["[pair.cc:534] Connection closed by peer [127.0.0.1]", "wrong number of bytes"])
def test_a_killed_rank_is_blamed_rather_than_the_peer_that_noticed(tmp_path: Path, complaint: str) -> None:
    with pytest.raises(RankFailed) as caught:
        launch(targets.die_beside_a_complaint, 2, args=(str(tmp_path), complaint), log_dir=tmp_path)
    assert (caught.value.rank, caught.value.reason) == (
        1,
        "killed by SIGKILL before it returned (out of memory? see dmesg)",
    )


@pytest.mark.usefixtures("_patient")
def test_a_cause_that_takes_its_time_is_blamed_rather_than_the_lost_connection(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0 failed: ValueError: the cause"):
        launch(targets.close_before_failing, 2, args=(str(tmp_path),), log_dir=tmp_path)


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed"):
        launch(targets.ignore_sigterm, 2, args=(str(tmp_path),), log_dir=tmp_path, grace_s=0.3)
    assert "rank 0 did not end" in caplog.text
    assert no_children()


def test_a_hung_rank_is_named_by_a_thread_of_a_waiting_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CollectiveTimeout, match="rank 1 holds up step 3") as caught:
        launch(targets.fail_from_a_thread, 2, log_dir=tmp_path, grace_s=0.3)
    assert caught.value.culprits == (1,)
    assert "rank 1 holds up step 3; all ranks are ended" in caplog.text
    assert "fail_from_a_thread" in (tmp_path / "rank0000.log").read_text(), "where rank 0 was"
    assert no_children()


def test_a_failure_under_another_launcher_ends_with_one_line(tmp_path: Path) -> None:
    program = (
        "import time; from netlayer.errors import PeerLost; from netlayer.launch.rank import RankContext, RankEnv\n"
        "import threading; context = RankContext(RankEnv(1, 2, 1, 2, 'torchrun'))\n"
        "threading.Thread(target=context.fail, args=(PeerLost('rank 0 has ended', silent=(0,)),)).start()\n"
        "time.sleep(600)"
    )
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: rank 0 has ended\n")
    assert "rank 0 has ended" in (tmp_path / "error.json").read_text()


# ---- nothing is left


def pids_in(folder: Path, num_ranks: int) -> list[int]:
    for rank in range(num_ranks):
        targets.wait_for(folder / f"pids{rank}")
    return [int(pid) for rank in range(num_ranks) for pid in (folder / f"pids{rank}").read_text().split()]


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    launch(targets.with_grandchildren, 1, args=(str(tmp_path), True), log_dir=tmp_path)
    pids = pids_in(tmp_path, 1)
    wait_until(lambda: not any(map(runs, pids)), "processes of the rank are left")


LAUNCHER = """
import sys, threading
from pathlib import Path
from netlayer.launch.launcher import RankContext, launch
from tests.netlayer import launch_targets

def mine(context: RankContext, folder: str) -> None:
    launch_targets.with_grandchildren(context, folder, False)

if __name__ == "__main__":
    try:
        launch(mine, 2, args=(sys.argv[1],), log_dir=Path(sys.argv[1]))
    finally:
        print("finally", flush=True)
"""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_to_the_launcher_leaves_no_process(tmp_path: Path, signum: int, code: int) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as launcher:
        pids = pids_in(tmp_path, 2)
        pids += [child.pid for child in psutil.Process(launcher.pid).children(recursive=True)]
        assert len(set(pids)) == 9  # a keeper and two ranks, each with three processes of its own
        launcher.send_signal(signum)
        out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert out == (b"" if signum == signal.SIGKILL else b"finally\n")
    wait_until(lambda: not any(map(runs, pids)), "processes are left")


def test_ranks_end_with_the_launcher_even_without_the_keeper(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path)]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as launcher:
        pids = pids_in(tmp_path, 2)
        ranks = [pids[0], pids[4]]
        (keeper,) = {child.pid for child in psutil.Process(launcher.pid).children()} - set(ranks)
        os.kill(keeper, signal.SIGKILL)
        launcher.kill()
    try:
        wait_until(lambda: not any(map(runs, ranks)), "ranks are left")
    finally:
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_second_signal_cuts_the_grace_short(tmp_path: Path) -> None:
    def on_message(rank: int, message: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # long before the grace ends, or this test would be timed out
        launch(targets.ignore_signals_and_report, 1, log_dir=tmp_path, on_message=on_message, grace_s=3600)
    assert no_children()


def test_a_handler_of_the_caller_is_called_and_restored(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(signum))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            launch(
                targets.report_steps,
                1,
                args=(100_000,),
                log_dir=tmp_path,
                on_message=lambda rank, message: signal.raise_signal(signal.SIGTERM),
            )
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143
    assert calls == [signal.SIGTERM]
    assert no_children()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_are_asked_first_end_by_themselves(tmp_path: Path, signum: signal.Signals) -> None:
    def ask(rank: int, message: object) -> None:
        if rank == 0:  # the other one may not even have begun
            signal.raise_signal(signum)
            signal.raise_signal(signal.SIGTERM)  # so soon, the same request

    assert launch(targets.wait_to_be_asked, 2, log_dir=tmp_path, on_message=ask, asks_first=True) == [signum] * 2
    assert signal.getsignal(signum) is signal.SIG_DFL
    assert no_children()


def test_a_second_signal_ends_ranks_that_were_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlayer.launch.launcher.ECHO_S", 0.1)

    def ask_twice(rank: int, message: object) -> None:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.2)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        launch(targets.never_end, 1, log_dir=tmp_path, on_message=ask_twice, asks_first=True)
    assert caught.value.code == 143
    assert "in never_end" in (tmp_path / "rank0000.log").read_text()  # where it was
    assert no_children()


def test_launch_works_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[int] = []

    def work() -> None:
        results.extend(launch(targets.report_steps, 1, args=(1,), log_dir=tmp_path))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [1]


# ---- what cannot be launched


def test_zero_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        launch(targets.describe, 0, log_dir=tmp_path)


def test_a_function_inside_a_function_is_refused(tmp_path: Path) -> None:
    def local(context: RankContext) -> None: ...

    with pytest.raises(ValueError, match="function of a module"):
        launch(local, 1, log_dir=tmp_path)


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="log_dir"):
        launch(targets.describe, 1, log_dir=tmp_path / "file" / "logs")
    assert no_children()


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


SCRIPT = """
from dataclasses import dataclass
from pathlib import Path
from netlayer.launch.launcher import RankContext, launch

@dataclass
class Answer:
    rank: int

def mine(context: RankContext) -> Answer:
    return Answer(context.env.rank)

def nested(context: RankContext) -> list[Answer]:
    return launch(mine, 1, log_dir=Path("nested"))

"""


def test_a_script_with_the_guard_gets_its_own_classes_back(tmp_path: Path) -> None:
    call = 'print(launch(mine, 2, log_dir=Path("logs")), launch(nested, 1, log_dir=Path("logs")))'
    (tmp_path / "script.py").write_text(SCRIPT + f'if __name__ == "__main__":\n    {call}\n')
    for arguments in (["script.py"], ["-m", "script"]):
        done = run_python(*arguments, cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("[Answer(rank=0), Answer(rank=1)] [[Answer(rank=0)]]\n", "")


def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + 'launch(mine, 1, log_dir=Path("logs"))\n')
    done = run_python("script.py", cwd=tmp_path)
    assert "ConfigError: launch(): was called while a rank imported the script; put the call under if" in done.stderr


def test_an_interactive_session_is_refused(tmp_path: Path) -> None:
    done = run_python("-c", SCRIPT + 'launch(mine, 1, log_dir=Path("logs"))', cwd=tmp_path)
    assert "ValueError: target and args must come from files" in done.stderr


# ---- which rank am I

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
SLURM = SLURM_BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
SLURM_EVEN = {name: value for name, value in SLURM.items() if name not in ("SLURM_TASKS_PER_NODE", "SLURM_NODEID")}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, RankEnv(5, 8, 1, 4, "torchrun")),
        (TORCHRUN | SLURM, RankEnv(5, 8, 1, 4, "torchrun")),
        ({**TORCHRUN, "NETLAYER_LAUNCH_ID": "1f"}, RankEnv(5, 8, 1, 4, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, RankEnv(launcher="environ")),
        (OPENMPI, RankEnv(5, 8, 1, 4, "openmpi")),
        (OPENMPI | SLURM, RankEnv(5, 8, 1, 4, "openmpi")),
        (SLURM_BATCH, None),
        (SLURM, RankEnv(3, 7, 1, 2, "slurm")),
        (SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}, RankEnv(6, 7, 0, 1, "slurm")),
        # A step of fewer tasks than its job; a step of one, such as the shell of `srun --pty`.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, RankEnv(3, 4, 1, 2, "slurm")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, None),
        (SLURM_EVEN | {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, RankEnv(3, 8, 1, 4, "slurm")),
        (SLURM_EVEN | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NODEID": "1"}, RankEnv(3, 7, 1, 3, "slurm")),
    ],
)  # fmt: skip
def test_detect(environ: dict[str, str], expected: RankEnv | None) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE"),
        (TORCHRUN | {"RANK": "8"}, "RANK"),
        (TORCHRUN | {"RANK": "-1"}, "RANK"),
        (TORCHRUN | {"RANK": ""}, "RANK"),
        (TORCHRUN | {"RANK": "²"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE"),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "one"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID"),
        (SLURM | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID"),
        (SLURM | {"SLURM_NODEID": "4"}, "SLURM_NODEID"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2(x3)"}, "SLURM_TASKS_PER_NODE"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2x3"}, "SLURM_TASKS_PER_NODE"),
        (SLURM_EVEN, "SLURM_NTASKS_PER_NODE"),
        ({"SLURM_PROCID": "0", "SLURM_STEPID": "0"}, "SLURM_NTASKS"),
    ],
)
def test_detect_names_the_variable_that_is_wrong(environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    assert caught.value.field == field


def test_detect_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(
        "import os\nfrom pathlib import Path\nfrom netlayer.launch.launcher import detect\n"
        "env = detect(os.environ)\nPath(f'rank{env.rank}').write_text(repr(env))\n"
    )
    done = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "who.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [
        repr(RankEnv(rank, 2, rank, 2, "torchrun")) for rank in (0, 1)
    ]
