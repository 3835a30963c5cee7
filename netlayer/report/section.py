"""A section of a report: blocks in the order in which they were added, each marked with where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import pandas as pd

from netlayer.report.plots import Plot, spec_of
from netlayer.report.tables import Column, columns_of, number_text
from netlayer.results import Source

Sources = Source | Sequence[Source] | None


@dataclass(frozen=True)
class Figure:
    """One big number: its label above, its unit after it, a hint (what it is compared with, over what) below."""

    label: str
    value: str | int | float | None
    unit: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        return number_text(self.value)


@dataclass(frozen=True)
class TextBlock:
    """A paragraph, a caveat or a command: `kind` tells which."""

    kind: str
    text: str


@dataclass(frozen=True)
class Figures:
    kind: ClassVar[str] = "figures"
    figures: tuple[Figure, ...]
    source: tuple[Source, ...]


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    caption: str
    skipped: str
    source: tuple[Source, ...]

    @property
    def rows(self) -> Iterator[tuple[tuple[Column, str], ...]]:
        """Each row as (column, cell) pairs."""
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            yield tuple(zip(self.columns, cells, strict=True))


@dataclass(frozen=True)
class KeyValues:
    kind: ClassVar[str] = "keyvalues"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picture:
    kind: ClassVar[str] = "plot"
    plot: Plot


Block = TextBlock | Figures | Table | KeyValues | Picture


@dataclass
class Section:
    """Section of a report, made by `Report.section`. Every method adds one block and returns the section.

    `source` of a block replaces the section's own; give both of two sources where one block holds both.
    """

    title: str
    anchor: str
    lead: str
    source: tuple[Source, ...]
    chart_names: set[str] = field(repr=False)
    blocks: list[Block] = field(default_factory=list)

    def text(self, paragraph: str) -> Section:
        """A paragraph; `words` between backticks are set as code."""
        return self._add(TextBlock("text", paragraph))

    def note(self, caveat: str) -> Section:
        """Add a caveat that a reader must know before using the numbers."""
        return self._add(TextBlock("note", caveat))

    def code(self, command: str) -> Section:
        """A command to repeat the section's numbers, or other text in a fixed pitch."""
        return self._add(TextBlock("code", command.strip("\n")))

    def figures(self, *figures: Figure, source: Sources = None) -> Section:
        """Tiles with one big number each.

        Raises:
            ValueError: neither the section nor the call says where the numbers come from.
        """
        return self._add(Figures(figures, self._needed(source, "figures")))

    def keyvalues(self, pairs: Mapping[str, Any]) -> Section:
        """Names and values below each other; a mapping inside is flattened: `model.layers`."""
        return self._add(KeyValues(tuple(_flat(pairs))))

    def table(
        self,
        frame: pd.DataFrame,
        *,
        caption: str = "",
        max_rows: int = 100,
        formats: Mapping[str, str] | None = None,
        source: Sources = None,
    ) -> Section:
        """Add the first `max_rows` rows; the caption says how many are omitted. `formats`: format specs by column.

        Raises:
            ValueError: `max_rows` is below 1, or `formats` names an unknown column.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows = {max_rows}: at least 1")
        skipped = f"The first {max_rows:,} of {len(frame):,} rows." if len(frame) > max_rows else ""
        columns = columns_of(frame.head(max_rows), formats or {})
        return self._add(Table(columns, caption, skipped, sources_of(source) or self.source))

    def chart(self, chart: Any, *, name: str, caption: str = "", alt: str = "", source: Sources = None) -> Section:
        """An Altair chart, from `netlayer.report.charts` or any other, drawn in the house's look.

        Args:
            name: of the picture next to the page: plots/<name>.png.
            caption: what the reader should see in it.
            alt: what it shows, for who cannot see it; the caption where empty.

        Raises:
            ValueError: the name is taken or makes no file name, caption and alt are both empty, no source is known, or
                the chart carries too many rows, a NaN or infinity, or an address to load from.
        """
        if name in self.chart_names:
            raise ValueError(f"chart name = {name!r}: already in this report; a picture has one name")
        if not (alt or caption):
            raise ValueError(f"chart {name!r}: give an alt text or a caption, for readers who cannot see it")
        plot = Plot(name, spec_of(chart, name, alt or caption), caption, alt or caption, self._needed(source, name))
        self.chart_names.add(name)
        return self._add(Picture(plot))

    @property
    def plots(self) -> tuple[Plot, ...]:
        """The section's charts in order."""
        return tuple(block.plot for block in self.blocks if isinstance(block, Picture))

    def _add(self, block: Block) -> Section:
        self.blocks.append(block)
        return self

    def _needed(self, source: Sources, what: str) -> tuple[Source, ...]:
        sources = sources_of(source) or self.source
        if not sources:
            raise ValueError(
                f"{what} in section {self.title!r}: say where the numbers come from, source='measured' or so"
            )
        return sources


def sources_of(source: Sources) -> tuple[Source, ...]:
    """Return one source, several or none as a tuple.

    Raises:
        ValueError: one of them is none of measured, simulated, predicted.
    """
    sources: tuple[Any, ...] = () if source is None else (source,) if isinstance(source, str) else tuple(source)
    for name in sources:
        if name not in get_args(Source):
            raise ValueError(f"source = {name!r}: one of {', '.join(get_args(Source))}")
    return sources


def _flat(pairs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in pairs.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple | set | frozenset):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{key}", "none" if value is None or value == {} else str(value)
