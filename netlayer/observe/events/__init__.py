"""Events of a run: one schema for what every rank did, writers of streams, and one reader. Needs no torch."""

from netlayer.observe.events.matching import split_collectives
from netlayer.observe.events.reader import EventReader, read_events
from netlayer.observe.events.schema import (
    MARKS,
    SCHEMA_VERSION,
    SEGMENTS,
    Counter,
    Event,
    Mark,
    Origin,
    Segment,
    arrow_schema,
    events_of,
    format_ranks,
    parse_ranks,
    to_batch,
)
from netlayer.observe.events.writer import EventWriter

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
