"""A click group that imports a sub-command when it is called, never to list it: `--help` starts without libraries."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import click

from netlayer.launch.interrupt import held_interrupt


class Lazy(NamedTuple):
    """A sub-command that lives elsewhere: `package.module:attribute`, and its line of help."""

    target: str
    help: str


def load(target: str) -> Any:
    """The object at `package.module:attribute`."""
    module, _, attribute = target.partition(":")
    with held_interrupt():
        return getattr(importlib.import_module(module), attribute)


class LazyGroup(click.Group):
    """A group of `click.group(cls=LazyGroup, lazy={name: Lazy(...)})`.

    Args:
        lazy: sub-commands by name.
        loader: imports a target.
        renamed: new names by old ones, which are understood with a warning and not listed.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, Lazy],
        loader: Callable[[str], click.Command] = load,
        renamed: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy, self._loader, self._renamed = lazy, loader, renamed or {}

    def add_lazy(self, lazy: Mapping[str, Lazy], loader: Callable[[str], click.Command]) -> None:
        """Take sub-commands of a package above this group's own, which may not name them itself."""
        self._lazy, self._loader = {**self._lazy, **lazy}, loader

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if new_name := self._renamed.get(cmd_name):
            old, new = f"{ctx.command_path} {cmd_name}", f"{ctx.command_path} {new_name}"
            click.echo(f"warning: `{old}` is now `{new}`; the old name works until 0.5", err=True)
            cmd_name = new_name
        lazy = self._lazy.get(cmd_name)
        return self._loader(lazy.target) if lazy else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            message = exc.format_message().removesuffix(".")
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near or near[0] in message:  # click knows those that are not lazy
                raise
            raise click.UsageError(f"{message}. Did you mean '{near[0]}'?", ctx=exc.ctx) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._line(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _line(self, ctx: click.Context, name: str) -> str:
        lazy = self._lazy.get(name)
        command = None if lazy else super().get_command(ctx, name)
        return lazy.help if lazy else command.get_short_help_str(80) if command else ""
