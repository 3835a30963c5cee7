"""Kill a change by SIGKILL at each of its calls that last, one process a case; say what was not undone.

A process of its own, for it forks: `python -m tests.congestion.nic.killed VENDOR EXAMPLE GROUPS`. Prints a JSON object:
how many processes were killed, and the cases after which a rollback left something else than there was before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.congestion.nic.changes import Host, profile_of, quick_folder
from tests.congestion.nic.death import Life, living


def kill_everywhere(vendor: str, example: str, groups: bool) -> dict[str, object]:
    """Every call, before and after it; every third undoing is killed too, at a call that moves along."""
    profile, killed, wrong = profile_of(example), 0, []
    for case in itertools.count():
        at, after = case // 2, bool(case % 2)
        with quick_folder() as folder:
            host = Host(Path(folder), (vendor,), groups)
            change = functools.partial(Host.change, plan=host.plan(profile))
            if not _dies(host, Life(at, after, real=True), change):
                return {"killed": killed, "calls": at, "wrong": wrong}
            killed += 1
            if at % 3 == 0:
                killed += _dies(host, Life(at % 11, after, real=True), Host.roll_back)
            try:
                host.roll_back()
                good = host.now() == host.before and host.state.find_open() is None
            except Exception as exc:  # noqa: BLE001 - a case that went wrong, to be named
                good, example = False, f"{example}: {exc}"
            if not good:
                wrong.append([vendor, example, groups, at, after])
    raise AssertionError("unreachable: the counter has no end")


def _dies(host: Host, life: Life, act: Callable[[Host], object]) -> bool:
    """Whether a process that does this was killed; it had not come to that call otherwise."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), living(life, host.programs):
            act(host)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the change failed by itself"
    return False


if __name__ == "__main__":
    print(json.dumps(kill_everywhere(sys.argv[1], sys.argv[2], sys.argv[3] == "groups")))
