"""`Report`: sections of text, tables and charts as one HTML file that fetches nothing, and a PNG of each chart.

The page carries its scripts, its style and all data; its security policy forbids every connection and every script but
its own two. One spec makes a chart's interactive and its PNG form. Not covered: what to say; every command says its
own.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TypeVar, get_args

import jinja2
import markupsafe

import netlayer
from netlayer import environ
from netlayer.errors import ConfigError
from netlayer.report.plots import Plot, script_json, vega_bundle
from netlayer.report.section import Section, Sources, sources_of
from netlayer.report.theme import DARK, page_config
from netlayer.verdict import Verdict

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class _Badge:
    word: Verdict
    sentence: str


class Report:
    """One page. Sections stand in the order in which they were opened.

    Args:
        title: heading and window title.
        subtitle: one line: what ran, on what.
        commit: of the code that ran, for the header; this checkout's own, where None.
        created: shown in UTC; now, where None.
    """

    def __init__(
        self, title: str, subtitle: str = "", *, commit: str | None = None, created: datetime | None = None
    ) -> None:
        self.title, self.subtitle = title, subtitle
        self.commit: str = environ.snapshot()["commit"] if commit is None else commit
        self.created = (created or datetime.now(UTC)).astimezone(UTC)
        self.sections: list[Section] = []
        self._badge: _Badge | None = None
        self._chart_names: set[str] = set()

    def verdict(self, word: Verdict, sentence: str) -> None:
        """The badge at the top; a later one replaces it.

        Raises:
            ValueError: the word is none of PASS, NO VERDICT, WARN, FAIL.
        """
        if word not in get_args(Verdict):
            raise ValueError(f"verdict = {word!r}: one of {', '.join(get_args(Verdict))}")
        self._badge = _Badge(word, sentence)

    def section(self, title: str, text: str = "", *, source: Sources = None) -> Section:
        """Open a section; `source` (measured, simulated, predicted) marks all of its numbers.

        Raises:
            ValueError: an unknown source.
        """
        section = Section(title, _anchor(title, len(self.sections)), text, sources_of(source), self._chart_names)
        self.sections.append(section)
        return section

    def fill(self, subject: Subject, sections: Iterable[Callable[[Report, Subject], object]]) -> Report:
        """Open the sections of a page in order and return the report.

        Args:
            subject: what the page is about: a run's rows, a record.
            sections: each a function that opens one section, or none where the subject has nothing for it.
        """
        for section in sections:
            section(self, subject)
        return self

    @property
    def plots(self) -> tuple[Plot, ...]:
        """Every chart of the report, in order."""
        return tuple(plot for section in self.sections for plot in section.plots)

    def html(self) -> str:
        """The page as text."""
        scripts = {"vega": vega_bundle(), "page": _part("page.js")}
        return _template().render(
            report=self,
            badge=self._badge,
            version=netlayer.__version__,
            created=f"{self.created:%Y-%m-%d %H:%M} UTC",
            style=markupsafe.Markup(_part("page.css")),
            dark=DARK,
            policy=_policy(scripts.values()),
            scripts={name: markupsafe.Markup(script) for name, script in scripts.items()},
            plots=markupsafe.Markup(self._plots_json()),
        )

    def write(self, out_dir: Path | str) -> Path:
        """Write plots/<name>.png for each chart, then report.html, each whole or not at all. Returns the page's path.

        All is drawn before the first file is written. A file of the same name is replaced, others are left alone.

        Raises:
            ConfigError: the folder cannot be written.
        """
        out_dir = Path(out_dir)
        contents = {f"plots/{plot.name}.png": plot.png(self._stamp(plot)) for plot in self.plots}
        contents["report.html"] = self.html().encode()
        with _translated(out_dir):
            for name, content in contents.items():
                _replace(out_dir / name, content)
        return out_dir / "report.html"

    def _stamp(self, plot: Plot) -> str:
        return f"{' and '.join(plot.source)} · {self.title} · {self.created:%Y-%m-%d %H:%M} UTC"

    def _plots_json(self) -> str:
        return script_json({"config": page_config(), "specs": {plot.name: plot.spec for plot in self.plots}})


def _anchor(title: str, position: int) -> str:
    """An id that no other section has and that stays the same from run to run."""
    return f"{position + 1}-{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}".rstrip("-")


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["prose"] = _prose
    return environment.from_string(_part("page.html.j2"))


def _prose(text: str) -> markupsafe.Markup:
    """Escaped text with `words` between backticks as code."""
    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))


def _part(name: str) -> str:
    return files("netlayer.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """Return the Content-Security-Policy: only these scripts, and pictures next to the page; no connections."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    rules = [
        "default-src 'none'",
        f"script-src {allowed}",
        "style-src 'unsafe-inline'",
        "img-src 'self' file: data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def _replace(path: Path, content: bytes) -> None:
    """Write next to the target, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _translated(out_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ConfigError("--out", out_dir, f"cannot be written ({exc.strerror})", "give a folder that can") from exc
