"""The page on runs that survive says what the code does."""

from __future__ import annotations

from pathlib import Path

from trainer.resilience.machine import table

PAGE = Path(__file__).parents[3] / "docs" / "run.md"


def test_the_page_has_every_transition_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = text.partition("| state | event | next state |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert [tuple(row.strip("| ").split(" | ")) for row in rows.splitlines()] == table()
