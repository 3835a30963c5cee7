"""How a long bench ends early."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from bench.early_end import ASKED_TO_STOP, ending_at_sigterm, reason_of
from netlayer.interrupt import Interrupted


def be_terminated() -> None:
    """Once, and twice more while what is left to do is done."""
    with contextlib.ExitStack() as left, ending_at_sigterm():
        for _ in range(2):
            left.callback(os.kill, os.getpid(), signal.SIGTERM)
        with left.pop_all():
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_sigterm_ends_the_block_as_an_exception_and_all_is_as_before_behind_it() -> None:
    with pytest.raises(SystemExit) as ended:
        be_terminated()
    assert ended.value.code == ASKED_TO_STOP == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
