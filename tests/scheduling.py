"""Gives each worker of pytest-xdist whole files of tests, the longest first (`--dist loadfile`).

Fixtures of a module are made once, ranks that several tests look at are launched once. What compiles the simulator's
kernels goes to one worker: each variant takes half a minute. pytest-xdist's own groups are not used, for it marks them
in test names by an attribute that pytest 9.2 no longer reads: every test then goes to whichever worker is free.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

_KERNELS = "kernels"
_COMPILING = ("tests/congestion/nic/test_switch_settings.py", "tests/bench/test_sim_speed.py")
"""Files that compile kernels, beside all in tests/congestion itself."""

# Of 15 seconds and more on an idle machine: begun last, one of these would keep a worker busy alone.
_LONGEST = (
    _KERNELS,
    "tests/trainer/test_layouts.py",
    "tests/collectives/test_sharded.py",
    "tests/integration/test_quickstart.py",
    "tests/contracts/test_walks.py",
    "tests/trainer/resilience/test_run.py",
    "tests/collectives/test_pipeline.py",
    "tests/collectives/test_hang.py",
    "tests/trainer/test_feed.py",
    "tests/contracts/test_workload.py",
    "tests/trainer/test_cli.py",
    "tests/bench/test_hang_blame.py",
    "tests/collectives/test_dropin.py",
    "tests/trainer/test_peer_copies.py",
    "tests/trainer/test_checkpoint.py",
    "tests/collectives/test_sharded_alone.py",
    "tests/trainer/test_checkpoint_beside.py",
    "tests/trainer/test_memory.py",
    "tests/trainer/test_fp8.py",
    "tests/trainer/test_context.py",
    "tests/collectives/test_tensor.py",
    "tests/integration/test_probe_namespaces.py",
    "tests/netlayer/test_launch.py",
    "tests/netlayer/test_rendezvous.py",
)


def unit_of(nodeid: str) -> str:
    """Return what is run by one worker: a test's file, or all that compile the simulator's kernels."""
    file = nodeid.partition("::")[0]
    compiles = file in _COMPILING or str(PurePosixPath(file).parent) == "tests/congestion"
    return _KERNELS if compiles else file


class FileScheduling(LoadScopeScheduling):
    """Hands out files, those that are known to take long before the others."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        longest = next((unit for unit in _LONGEST if unit in self.workqueue), None)
        if longest is not None:
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
