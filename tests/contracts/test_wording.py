"""What the check of wording reports, and that a seed draws the same functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import wording

_LONG = "def lengthy():\n" + "    print()\n" * wording.LONG_LINES


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ('"""Reads files.\n\nNot covered: folders.\n"""\n', []),
        ('"""Reads files. Omitted: folders."""\n', ["form"]),
        ('"""Reads files. Not\nhere: folders."""\n', ["form"]),
        ('"""Of files."""\n', ["docstring"]),
        ("# nobody vouches for it\n", ["word"]),
        ("found = 1\n", ["name"]),
        ("class Seen:\n    pass\n", ["name"]),
        (_LONG, ["bare"]),
        (f"@triton.jit\n{_LONG}", []),
        (_LONG.replace("    print()\n", '    """Print lines."""\n', 1), []),
    ],
)
def test_a_place_that_breaks_a_rule_is_reported(source: str, kinds: list[str], tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [place.kind for place in wording.find_places(file)] == kinds


def test_a_seed_draws_the_same_functions(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("".join(_LONG.replace("lengthy", f"lengthy{number}") for number in range(9)))
    drawn = list(wording.draw_functions([file], 3, 7))
    assert drawn == list(wording.draw_functions([file], 3, 7))
    assert len(set(drawn)) == 3
