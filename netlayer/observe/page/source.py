"""Source of the page's payloads: one state of a run at a time, read again where its files have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from netlayer.errors import ConfigError
from netlayer.observe.events import parse_ranks
from netlayer.observe.page import detail
from netlayer.observe.page.columns import Columns
from netlayer.observe.page.view import Progress, RunView, title_of
from netlayer.printing import printable

_LOAD_SHARE = 5.0
"""Least pause before files are read again, as a multiple of the processor time that the last reading took.

It is no shorter than the reading took by the clock: a slow file system takes no processor time.
"""
_MAX_RANK = 1 << 20


class PageSource:
    """Answers the page's requests for data. Thread-safe.

    Args:
        paths: of a run, or files of evidence.
        link_gbps: rate of a rank's link, for verdicts.

    Raises:
        ConfigError: a path does not exist, there is no file, or nothing in them can be read.
    """

    def __init__(self, paths: Sequence[Path], link_gbps: float | None = None, progress: Progress | None = None) -> None:
        self._link_gbps, self._title = link_gbps, title_of(paths)
        self._columns = Columns(paths)
        self._lock, self._loading = threading.Lock(), threading.Lock()
        started_s = _clocks_s()
        self._columns.refresh(progress)
        if not any(file.kind for file in self._columns.files):
            where = printable(", ".join(map(str, paths)))
            remedy = "give a run's folder, or files of evidence (`netlayer observe report --help` names their kinds)"
            raise ConfigError("RUN", where, "holds nothing that can be read", remedy)
        self._view = RunView.of(self._title, 1, self._columns, link_gbps)
        self._packed: dict[str, bytes] = {}  # the overview, and a map each measure
        self._pause_s, self._read_s = _pause_s(started_s), time.monotonic()

    @property
    def view(self) -> RunView:
        """The newest state that was read."""
        return self._view

    def refresh(self) -> bool:
        """Read files that have changed, unless that was done just now; return whether there is a new state."""
        if not self._loading.acquire(blocking=False):
            return False
        try:
            now_s = time.monotonic()
            if now_s - self._read_s < self._pause_s:
                return False
            columns, started_s = self._columns, _clocks_s()
            changed = columns.refresh()
            # A run that stands still says more with the time that passes, though nothing is written.
            waits = self._view.is_live and self._view.stop.state in ("running", "cannot tell")
            if changed or waits:
                view = RunView.of(self._title, self._view.version + 1, columns, self._link_gbps)
                changed = changed or view.stop.state != self._view.stop.state
                if changed:
                    with self._lock:
                        self._view, self._packed = view, {}
            self._pause_s, self._read_s = _pause_s(started_s), time.monotonic()
            return changed
        finally:
            self._loading.release()

    def get(self, name: str, query: Mapping[str, str]) -> bytes:
        """Return the payload `overview`, `map`, `events`, `rank` or `counters`.

        Raises:
            LookupError: there is no such payload, measure, rank or counter.
            ValueError: a value of the query is none.
        """
        view = self._view
        if name not in ("overview", "map"):
            return self._answer(view, name, query)
        key = name if name == "overview" else f"map {whole(query, 'of', 0, len(view.measures) - 1)}"
        with self._lock:
            known = self._packed.get(key) if view is self._view else None
        if known is None:
            known = self._answer(view, name, query)
            with self._lock:
                if view is self._view:
                    self._packed[key] = known
        return known

    def _answer(self, view: RunView, name: str, query: Mapping[str, str]) -> bytes:
        if name == "overview":
            return view.overview()
        if name == "map":
            number = whole(query, "of", 0, len(view.measures) - 1)
            return view.levels(number)
        if name == "rank":
            return detail.rank(view, whole(query, "rank", 0, _MAX_RANK))
        if name == "events":
            ranks = parse_ranks(query.get("ranks", ""))
            if not 0 < len(ranks) <= detail.MOST_RANKS:
                raise ValueError(f"ranks = {query.get('ranks', '')[:80]}: 1 to {detail.MOST_RANKS} of them")
            if "first" not in query:
                return detail.events(view, ranks, None)
            first = whole(query, "first", -1, 1 << 40)
            return detail.events(view, ranks, (first, whole(query, "last", first, 1 << 40)))
        if name == "counters":
            of_rank = whole(query, "rank", 0, _MAX_RANK) if "rank" in query else None
            span = (float(query["from"]), float(query["to"])) if "from" in query and "to" in query else None
            if span is not None and not -1e9 < span[0] < span[1] < 1e9:
                raise ValueError("from, to: seconds since the run's begin, in order")
            return detail.counters(view, query.get("name", ""), of_rank, span)
        raise LookupError(f"{name}: no such payload")


def _clocks_s() -> tuple[float, float]:
    """Processor time of all threads, since pyarrow reads with its own, and time by the clock."""
    return time.process_time(), time.monotonic()


def _pause_s(started_s: tuple[float, float]) -> float:
    """Return the pause after a reading that began at `started_s` of `_clocks_s` and has just ended."""
    processor_s, wall_s = (now - then for now, then in zip(_clocks_s(), started_s, strict=True))
    return max(1.0, _LOAD_SHARE * processor_s, wall_s)


def whole(query: Mapping[str, str], key: str, low: int, high: int) -> int:
    """Return a whole number of a query.

    Raises:
        ValueError: it is none, or outside the limits.
    """
    text = query.get(key, "")
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
        raise ValueError(f"{key} = {text[:40]!r}: a whole number")
    number = int(text)
    if not low <= number <= high:
        raise ValueError(f"{key} = {number}: {low} to {high}")
    return number
