"""A process that dies at its n-th call that lasts: simulated by an exception that nothing survives, or by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from congestion.nic.vendors.tools import Tools

_CALLS = ("write", "fsync", "replace", "rename", "mkdir", "rmdir", "unlink")


class Dead(BaseException):
    """Nothing runs after this."""


class Life:
    """Counts the calls that last.

    Args:
        at: the call at which it ends, from 0; never where negative.
        after: the call is still done.
        real: by SIGKILL rather than `Dead`.
    """

    def __init__(self, at: int, after: bool = False, real: bool = False) -> None:
        self.at, self.after, self.real = at, after, real
        self.calls, self.over = 0, False

    def guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                raise Dead
            mine = self.calls == self.at
            self.calls += 1
            if mine and not self.after:
                self._end()
            try:
                return call(*args, **kwargs)
            finally:
                if mine:
                    self._end()

        return guarded

    def _end(self) -> None:
        if self.real:
            os.kill(os.getpid(), signal.SIGKILL)
        self.over = True
        raise Dead


@contextlib.contextmanager
def living(life: Life, programs: Tools | None = None) -> Iterator[Life]:
    """Within this block the calls count, those of `programs` too."""
    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            stack.enter_context(mock.patch.object(os, name, life.guard(getattr(os, name))))
        if programs is not None:
            stack.enter_context(mock.patch.object(programs, "run", life.guard(programs.run)))
        yield life
