"""An option that several commands have means one thing in all of them."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from netlayer.cli import cli
from tests.make_reference import walk_commands

OPTIONS = [
    (name, option)
    for name, command, _ in walk_commands(cli, "netlayer", None)
    for option in command.params
    if isinstance(option, click.Option) and not option.hidden
]


def _is_path(option: click.Option) -> bool:
    return isinstance(option.type, click.Path)


MEANINGS: dict[str, tuple[str, Callable[[click.Option], bool]]] = {
    "--hosts": (
        "a host file, or names with commas",
        lambda option: not option.multiple and (_is_path(option) or option.type is click.STRING),
    ),
    "--ssh-command": ("what reaches a host, as a line", lambda option: option.type is click.STRING),
    "--timeout": ("seconds", lambda option: isinstance(option.type, click.FloatRange)),
    "--within": (
        "a share by which figures may differ",
        lambda option: isinstance(option.type, click.FloatRange) and "hare" in (option.help or ""),
    ),
    "--only": ("this part alone, repeatable", lambda option: option.multiple),
    "--seeds": ("a number of seeds", lambda option: isinstance(option.type, click.IntRange)),
    "--out": ("where the output goes", _is_path),
    "--json": ("a file, or - for stdout", _is_path),
}


@pytest.mark.parametrize("flag", MEANINGS)
def test_a_flag_means_one_thing_in_all_commands(flag: str) -> None:
    meaning, holds = MEANINGS[flag]
    options = [(path, each) for path, each in OPTIONS if flag in each.opts]
    assert options
    assert not [path for path, each in options if not holds(each)], f"{flag} is {meaning}"
