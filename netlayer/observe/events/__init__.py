"""Events of a run: one schema for what every rank did, writers of streams, and one reader. Needs no torch.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.observe.events.matching import split_collectives as split_collectives
    from netlayer.observe.events.reader import EventReader as EventReader
    from netlayer.observe.events.reader import read_events as read_events
    from netlayer.observe.events.schema import MARKS as MARKS
    from netlayer.observe.events.schema import SCHEMA_VERSION as SCHEMA_VERSION
    from netlayer.observe.events.schema import SEGMENTS as SEGMENTS
    from netlayer.observe.events.schema import Counter as Counter
    from netlayer.observe.events.schema import Event as Event
    from netlayer.observe.events.schema import Mark as Mark
    from netlayer.observe.events.schema import Origin as Origin
    from netlayer.observe.events.schema import Segment as Segment
    from netlayer.observe.events.schema import arrow_schema as arrow_schema
    from netlayer.observe.events.schema import events_of as events_of
    from netlayer.observe.events.schema import format_ranks as format_ranks
    from netlayer.observe.events.schema import parse_ranks as parse_ranks
    from netlayer.observe.events.schema import to_batch as to_batch
    from netlayer.observe.events.writer import EventWriter as EventWriter

__all__ = [
    "MARKS",
    "SCHEMA_VERSION",
    "SEGMENTS",
    "Counter",
    "Event",
    "EventReader",
    "EventWriter",
    "Mark",
    "Origin",
    "Segment",
    "arrow_schema",
    "events_of",
    "format_ranks",
    "parse_ranks",
    "read_events",
    "split_collectives",
    "to_batch",
]

_SCHEMA = (
    "MARKS",
    "SCHEMA_VERSION",
    "SEGMENTS",
    "Counter",
    "Event",
    "Mark",
    "Origin",
    "Segment",
    "arrow_schema",
    "events_of",
    "format_ranks",
    "parse_ranks",
    "to_batch",
)

__getattr__ = lazy_names(
    __name__,
    {
        "EventReader": ".reader",
        "EventWriter": ".writer",
        "read_events": ".reader",
        "split_collectives": ".matching",
        **dict.fromkeys(_SCHEMA, ".schema"),
    },
)
