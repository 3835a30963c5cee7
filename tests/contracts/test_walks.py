"""How many modules a reader opens who follows one thing through the project, and that the architecture names these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import walks
from tests.wording import comment_share

# As measured by `python -m tests.walks`: who adds a module to a walk folds one, or says here why not.
MOST = {
    "gradient": 5,
    "reduced gradient": 5,
    "gradient to optimiser": 7,
    "parameter in stage 3": 5,
    "reshard in stage 3": 4,
    "parameter in stage 3, backward": 5,
    "gradient in stage 3": 5,
    "reduced gradient in stage 3": 5,
    "packet": 25,
    "flow": 39,
    "nic apply": 18,
    "nccl-tests row": 6,
    "job file": 119,
}
# Ten of each record the rank's events, from the monitor with its late steps to the file. Five are sections of the
# configuration that do not fit into the tree's module. Ten of `netlayer.workload` estimate memory; `bucket_units` is
# apart from `buckets` because collectives use the latter without a configuration. Nine let ranks meet.
MOST_UP_TO_THE_LOOP, MOST_ON_THE_PATH_TO_THE_LOOP = 73, 8
_PARAGRAPHS = {
    "gradient": "**A gradient**",
    "reduced gradient": "**A reduced gradient**",
    "gradient to optimiser": "**A gradient**",
    "parameter in stage 3": "**A unit's parameters**",
    "reshard in stage 3": "**The same unit's parameters**",
    "parameter in stage 3, backward": "**A unit's parameters**",
    "gradient in stage 3": "**Its gradient**",
    "reduced gradient in stage 3": "**A reduced gradient**",
    "packet": "**A packet**",
    "flow": "**A flow**",
    "nic apply": "**`nic apply`**",
    "nccl-tests row": "**A row of `all_reduce_perf`**",
    "job file": "**A job file**",
}


LEAST_COMMENTS = 0.06
# Sections of configuration: each field says by its `description`, not by a comment, what it is for.
_FIELDS = {"netlayer.config.tree", "congestion.simulation.settings"}


# Both compile the simulator's kernels, for minutes, in a process of their own.
_COMPILED = ("packet", "flow")
_SLOW = {name: [pytest.mark.slow(minutes=4)] for name in _COMPILED}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, walks.Outcome]:
    return walks.follow_all(walks.OF_RANKS, tmp_path_factory.mktemp("walks"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOW.get(name, [])) for name in MOST])
def test_a_walk_stays_as_short_and_goes_as_the_architecture_says(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    outcome = request.getfixturevalue("of_ranks")[name] if name in walks.OF_RANKS else walks.follow(name, tmp_path)
    assert len(outcome.entered) <= MOST[name], outcome.entered
    if name == "job file":
        assert len(outcome.to_via) <= MOST_UP_TO_THE_LOOP, outcome.to_via
        *path, last = outcome.path
        assert len(path) <= MOST_ON_THE_PATH_TO_THE_LOOP, path
        assert last == "trainer.loop"
    named = _modules_of(name)
    compiled = walks.compiled_modules() if name == "packet" else []
    assert named
    assert not set(named) - {*outcome.entered, *compiled}


def _modules_of(walk: str) -> list[str]:
    """Return the modules that the architecture names for a walk, in order."""
    page = (walks.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    [paragraph] = [each for each in page.split("\n\n") if each.startswith(_PARAGRAPHS[walk])]
    # What comes after that is for other hardware, or for other questions.
    return re.findall(r"`((?:\w+\.)+\w+)`", paragraph.partition("Else:")[0])


@pytest.mark.parametrize("walk", _PARAGRAPHS)
def test_modules_of_a_walk_say_why_at_the_line(walk: str) -> None:
    paths = {name: (walks.ROOT / Path(*name.split("."))).with_suffix(".py") for name in _modules_of(walk)}
    shares = {name: comment_share(path) for name, path in paths.items() if name not in _FIELDS}
    assert shares
    assert not {name: share for name, share in shares.items() if share < LEAST_COMMENTS}


def test_a_walk_without_an_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = walks.WALKS["nic apply"]
    endless = walks.Walk(apply.thing, apply.starts, ["return congestion.nic.commands.shown:no_such_function"])
    monkeypatch.setitem(walks.WALKS, "nic apply", endless)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="nic apply: exit code 0"):
        walks.follow("nic apply", tmp_path)
