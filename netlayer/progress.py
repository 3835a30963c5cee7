"""Progress on stderr for a person who waits, and the lines of it that a log keeps. stdout stays free for data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import click

from netlayer import log

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_S, _SLOWEST_LINE_S = 10.0, 60.0  # between two lines at first, and in the end
_MOMENT_S, _TICK_S = 2.0, 1.0


class Stages:
    """Progress on stderr: a bar a stage on a terminal, else lines: as a stage begins, each ten
    seconds of it, each minute when it has been long, and as it ends.
    """

    def __enter__(self) -> Stages:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:9}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[words]}"),
        )
        self._console = log.console()
        self._bars: Progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        """One line on stderr, above the bars."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def print(self, text: str, *, err: bool = False) -> None:
        """Data on stdout, or on stderr where stdout is taken; the bars step aside."""
        self._bars.stop()
        click.echo(text, nl=False, err=err)
        self._bars.start()

    @contextmanager
    def open(self, name: str) -> Iterator[Bar]:
        """Show one stage; the block calls the bar that it gets with (done, total, text)."""
        start = monotonic()
        if not self._console.is_terminal:
            self.say(f"{name} ...")
        task = self._bars.add_task(name, total=None, words="")
        bar = Bar(self._bars, task, None if self._console.is_terminal else lambda text: self.say(f"{name}: {text}"))
        yield bar
        self._bars.update(task, total=1, completed=1, words="")
        if not self._console.is_terminal:
            self.say(f"{name} done in {monotonic() - start:.1f} s")

    @contextmanager
    def wait(self, name: str, progress: Callable[[], tuple[int, int, str]] | None = None) -> Iterator[None]:
        """A stage of which nothing is heard until it is over: its seconds are counted. A short one is not shown.

        Args:
            progress: what is done, of how much, and a few words, asked for once a second in another thread.
        """
        over, began = threading.Event(), monotonic()

        def count() -> None:
            if over.wait(_MOMENT_S):
                return
            with self.open(name) as bar:
                while not over.wait(_TICK_S):
                    bar(*(progress() if progress else (0, 0, f"{monotonic() - began:.0f} s so far")))

        counter = threading.Thread(target=count, daemon=True)
        counter.start()
        try:
            yield
        finally:
            over.set()
            counter.join()


class Bar:
    """One stage's bar: call it with what is done, of how much (0: unknown), and a short text.

    Args:
        say: prints the lines that replace the bar where there is no terminal.
    """

    def __init__(self, bars: Progress, task: TaskID, say: Callable[[str], None] | None = None) -> None:
        self._bars, self._task, self._say = bars, task, say
        self._began_s = self._last_line_s = monotonic()

    def __call__(self, done: int, total: int, text: str = "") -> None:
        self._bars.update(self._task, completed=done, total=total or None, words=text)
        now = monotonic()
        if self._say and now - self._last_line_s >= min(max((now - self._began_s) / 10, _LINE_S), _SLOWEST_LINE_S):
            self._last_line_s = now
            self._say(", ".join(filter(None, (f"{done / total:.0%}" if total else "", text))))
