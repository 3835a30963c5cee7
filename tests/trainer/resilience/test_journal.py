"""The journal and the state machine: what was cut off is dropped, what is wrong refused, every state has a way on."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlayer.errors import ConfigError
from trainer.resilience.journal import Journal, entries, last_entry
from trainer.resilience.machine import MEANINGS, TERMINAL, TRANSITIONS, Event, Facts, State, next_state


def test_another_driver_goes_on_from_the_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    journal = Journal(file)
    journal.facts.members = ["node-0"]
    journal.move(Event.ENOUGH_NODES, why="x")
    journal.facts.incarnation = 1
    journal.move(Event.CHECKS_PASSED)
    journal.close()
    whole = file.read_bytes()
    for cut in (1, 20, len(whole.splitlines()[-1])):
        file.write_bytes(whole[:-cut])
        again = Journal(file)
        assert again.facts.state is State.VERIFY
        assert again.facts.members == ["node-0"]
        again.move(Event.CHECKS_PASSED)
        again.close()
        assert [entry["to"] for entry in entries(file)] == ["verify", "start"]
    assert oct(file.stat().st_mode & 0o777) == "0o600"


def test_the_run_started_with_its_first_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    for hour in (10, 12):
        monkeypatch.setattr("trainer.resilience.journal.utc_now", lambda hour=hour: f"2026-11-27T{hour}:00:00.5+00:00")
        journal = Journal(path)
        journal.note("driver")
        assert journal.started_s() == datetime(2026, 11, 27, 10, 0, 0, 500_000, UTC).timestamp()
        journal.close()


def test_of_a_long_journal_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.resilience.journal._TAIL_BYTES", 3000)
    file = tmp_path / "journal"
    journal = Journal(file)
    for number in range(50):
        journal.note("noted", number=number)
    journal.close()
    whole = file.read_bytes()
    file.write_bytes(b"damaged" + whole[7:] + b'{"cut')
    assert last_entry(file)["seq"] == 50
    again = Journal(file)
    assert (again.seq, file.read_bytes()[7:]) == (50, whole[7:])
    again.close()
    assert last_entry(tmp_path / "none") == {}


def test_a_full_disk_leaves_the_state_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note("run started")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.move(Event.ENOUGH_NODES)
    assert journal.facts.state is State.GATHER
    journal.move(Event.ENOUGH_NODES)
    journal.close()
    assert [entry["to"] for entry in entries(tmp_path / "journal")] == ["gather", "verify"]


def test_half_a_line_that_cannot_be_removed_at_once_goes_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note("run started")
    write = os.write

    def fails(*_arguments: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        patch.setattr(os, "fsync", fails)
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(OSError, match="Input/output"):
            journal.move(Event.ENOUGH_NODES)
        with pytest.raises(OSError, match="Input/output"):  # nothing is written behind what is left
            journal.move(Event.ENOUGH_NODES)
    journal.move(Event.ENOUGH_NODES)
    journal.close()
    assert [entry["to"] for entry in entries(tmp_path / "journal")] == ["gather", "verify"]


@pytest.mark.parametrize("line", [b"{}\n", b"no json\n", b'{"version": 2, "seq": 1, "facts": {"state": "run"}}\n'])
def test_what_is_no_journal_is_refused(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.write_bytes(line)
    with pytest.raises(ConfigError, match="line 1"):
        Journal(file)


def test_a_transition_that_is_not_in_the_table_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(ValueError, match="no transition"):
        journal.move(Event.FIRST_STEP)
    journal.close()
    with pytest.raises(ValueError, match="no transition"):
        next_state(State.COMPLETED, Event.RESUME_ASKED)


def test_every_state_can_be_left_and_reached() -> None:
    assert set(MEANINGS) == set(State)
    reached, todo = {State.GATHER}, [State.GATHER]
    while todo:
        state = todo.pop()
        new = {after for (before, _), after in TRANSITIONS.items() if before is state} - reached
        reached |= new
        todo += new
    assert reached == set(State)
    for state in set(State) - TERMINAL:
        assert any(before is state for before, _ in TRANSITIONS)
        if state is not State.STOP:
            assert (state, Event.STOP_ASKED) in TRANSITIONS


def test_facts_of_a_later_version_are_read_as_far_as_they_are_known() -> None:
    tree = json.loads(json.dumps({**Facts(members=["a"]).to_json(), "later": 1}))
    assert Facts.from_json(tree) == Facts(members=["a"])
