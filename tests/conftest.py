"""What holds for every test."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shell without job control starts background jobs with SIGINT ignored, and programs that tests start would inherit
# it: Ctrl-C could then not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline judges the machine: on a loaded one, an example that is right takes longer than 200 ms.
settings.register_profile("netlayer", deadline=None)
settings.load_profile("netlayer")

_HERE = Path(__file__).parent
_KERNELS = (_HERE / "congestion", _HERE / "bench" / "test_sim_speed.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file runs in one worker; all that compile the simulator's kernels in the same one, for these take minutes."""
    if not config.pluginmanager.hasplugin("xdist"):
        return  # the lab's virtual machine has no workers, and to it the marker is unknown
    for item in items:
        compiles = any(place in (item.path, item.path.parent) for place in _KERNELS)
        item.add_marker(pytest.mark.xdist_group("kernels" if compiles else str(item.path.relative_to(_HERE))))
