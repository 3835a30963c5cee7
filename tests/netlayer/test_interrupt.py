import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from netlayer.launch.interrupt import Interrupted, counted_interrupts, held_interrupt, uninterrupted


def load(num_interrupts: int, done: list[str]) -> None:
    """A block that is interrupted so often, and notes that it came to its end."""
    with held_interrupt():
        for _ in range(num_interrupts):
            os.kill(os.getpid(), signal.SIGINT)
        done.append("whole")


def test_ctrl_c_is_delivered_when_the_block_is_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        load(1, done)
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        load(2, done)
    assert done == []


def test_an_error_of_the_block_stays_where_nobody_interrupts() -> None:
    with pytest.raises(ImportError), held_interrupt():
        raise ImportError


def test_other_threads_and_handlers_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        owner = signal.getsignal(signal.SIGINT)
        with held_interrupt():
            assert signal.getsignal(signal.SIGINT) is owner
    finally:
        signal.signal(signal.SIGINT, handler)
    seen: list[object] = []

    def run() -> None:
        with held_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("num_interrupts", [1, 3])
def test_what_must_happen_whole_does(num_interrupts: int) -> None:
    done: list[str] = []

    def move() -> None:
        with uninterrupted():
            for _ in range(num_interrupts):
                signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        move()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_signal_that_another_thread_takes_waits_too() -> None:
    done: list[str] = []
    begun, end = threading.Event(), threading.Event()

    def idle() -> None:  # not masked: the kernel hands it the signal
        begun.set()
        end.wait()

    thread = threading.Thread(target=idle)
    thread.start()
    begun.wait()

    def move() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            assert select.select([heard], [], [], 60)[0]  # the other thread has taken it
            done.append("whole")

    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told)
    try:
        with pytest.raises(KeyboardInterrupt):
            move()
    finally:
        signal.set_wakeup_fd(before)
        for end_of_pipe in (heard, told):
            os.close(end_of_pipe)
        end.set()
        thread.join()
    assert done == ["whole"]


_WHERE = {
    # As where a dataclass is made: CPython takes what leaves this for uncaught, whoever catches it.
    "text of exec": "    exec('signal.raise_signal(signal.SIGINT)')",
    # As the callbacks of an import: what leaves this is dropped.
    "a finaliser": (
        "    class Tool:\n"
        "        def __del__(self):\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "    Tool()\n"
        "    time.sleep(60)"
    ),
    # As pydantic's serializers: its error has neither a cause nor a context.
    "code whose errors a library translates": (
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        found = ValueError('interrupted')\n"
        "    raise found"
    ),
}


@pytest.mark.parametrize("body", _WHERE.values(), ids=_WHERE.keys())
def test_a_command_ends_alike_wherever_ctrl_c_lands(body: str, tmp_path: Path) -> None:
    (tmp_path / "tried.py").write_text(
        f"import signal, time\nimport click\nfrom netlayer.cli import run\n"
        f"@click.command()\ndef tried():\n{body}\n    click.echo('went on')\nrun(tried, 'tried')\n"
    )
    done = run_in(tmp_path, "-m", "tried")  # `python tried.py` would not show it: it ends in another way
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted")


def test_a_command_s_ctrl_c_waits_too_where_nothing_may_break_off() -> None:
    done: list[str] = []

    def move() -> None:
        with counted_interrupts() as interrupts:
            try:
                with uninterrupted():
                    signal.raise_signal(signal.SIGINT)
                    done.append("whole")
            finally:
                done.append(f"{interrupts.seen} seen")

    with pytest.raises(Interrupted):
        move()
    assert done == ["whole", "1 seen"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_what_python_m_imports_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "__init__.py").write_text(
        "from netlayer.launch.interrupt import end_quietly_until_a_command_runs\nend_quietly_until_a_command_runs()\n"
    )
    (tmp_path / "slow" / "tool.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = run_in(tmp_path, "-m", "slow.tool")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    done = run_in(tmp_path, "-c", "import slow.tool")  # another program's Ctrl-C is its own
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_every_bench_is_such_a_module() -> None:
    code = "import sys; sys.argv[0] = '-m'; import bench, signal; print(signal.getsignal(signal.SIGINT).name)"
    assert run_in(Path.cwd(), "-c", code).stdout.strip() == "SIG_DFL"


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
