"""How a long command ends early."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest

from netlayer.launch.early_end import ASKED_TO_STOP, Ended, ending_at, reason_of
from netlayer.launch.interrupt import Interrupted, uninterrupted


def be_terminated() -> None:
    """Once, and twice more while what is left to do is done."""
    with contextlib.ExitStack() as left, ending_at(signal.SIGTERM):
        for _ in range(2):
            left.callback(os.kill, os.getpid(), signal.SIGTERM)
        with left.pop_all():
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_sigterm_ends_the_block_as_an_exception_and_all_is_as_before_behind_it() -> None:
    with pytest.raises(SystemExit) as ended:
        be_terminated()
    assert ended.value.code == ASKED_TO_STOP == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


BOTH = (signal.SIGTERM, signal.SIGUSR1)


def be_ended_by(signum: signal.Signals, done: list[str]) -> None:
    with ending_at(*BOTH), uninterrupted():
        signal.raise_signal(signum)
        done.append("whole")


@pytest.mark.parametrize("signum", BOTH)
def test_it_waits_for_what_must_happen_whole(signum: signal.Signals) -> None:
    done: list[str] = []
    with pytest.raises(Ended) as ended:
        be_ended_by(signum, done)
    assert (ended.value.code, done) == (128 + signum, ["whole"])
    assert [signal.getsignal(each) for each in BOTH] == [signal.SIG_DFL] * 2


def drop(exc_type: type[BaseException]) -> None:
    """As libraries written in C do."""
    with contextlib.suppress(exc_type):
        signal.raise_signal(signal.SIGTERM)


def translate() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except SystemExit:
        found = ValueError("something else")
    raise found


class Tool:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def finalise() -> None:
    Tool()
    time.sleep(60)


@pytest.mark.parametrize("body", [lambda: drop(SystemExit), translate, finalise], ids=["dropped", "translated", "late"])
def test_it_is_not_lost_wherever_it_lands(body: Callable[[], None]) -> None:
    with pytest.raises(Ended) as ended, ending_at(signal.SIGTERM):
        body()
    assert ended.value.code == ASKED_TO_STOP


def test_who_sets_handlers_in_the_block_takes_the_signals_over() -> None:
    seen: list[int] = []
    with ending_at(*BOTH):
        owner = signal.signal(signal.SIGUSR1, lambda signum, _frame: seen.append(signum))
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, owner)
    assert seen == [signal.SIGUSR1]


@pytest.mark.parametrize(
    ("exc", "says"),
    [
        (Interrupted(), "Ctrl-C"),
        (SystemExit(143), "SIGTERM"),
        (SystemExit(7), "exit code 7"),
        (RuntimeError("no room"), "no room"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_ended_it_is_a_word_not_a_number(exc: BaseException, says: str) -> None:
    assert reason_of(exc) == says
