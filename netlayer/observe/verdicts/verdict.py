"""A verdict and its rows: what one question about a run is answered by, for a person and for a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["found", "suspected", "none", "cannot tell"]
"""`suspected`: something is there that may be noise; nobody should act on it yet."""


@dataclass(frozen=True)
class StragglerRow:
    """A slow rank.

    Args:
        slowdown: 0.5 where its own time is 1.5 times that of its peers.
        cause: part of its own time that makes up most of the excess, `cause_share` of it.
        judged_against: `peers` or `own past`.
        confirmed: whether it may be accused; else `doubt` says why not.
    """

    rank: int
    host: str
    since_step: int
    slowdown: float
    cause: str
    cause_share: float
    score: float
    confidence: float
    judged_against: str
    confirmed: bool
    doubt: str


@dataclass(frozen=True)
class SlowLinkRow:
    """A group of ranks or a pair whose transfers are `slower` (a share) than those of like groups."""

    collective: str
    ranks: str
    slower: float


@dataclass(frozen=True)
class CauseRow:
    """Share of the growth of steps that a cause explains."""

    cause: str
    share: float
    seconds_a_step: float


@dataclass(frozen=True)
class PortRow:
    """A port that moved less than usual in `periods_low` periods, the first of them number `first_low`."""

    port: str
    periods_low: int
    first_low: int


@dataclass(frozen=True)
class LinkRow:
    """95th percentile of the rates of a link's transfers in Gb/s; `parallelism`: data, pipeline, tensor, or nothing."""

    link: str
    parallelism: str
    gbps: float


@dataclass(frozen=True)
class LinkLimitRow(LinkRow):
    """The same with the link's physical rate known."""

    of_limit: float
    reached: bool


@dataclass(frozen=True)
class StartRow:
    """A start of the run.

    Args:
        first_step, last_step: None: it took none.
        seconds: from its first mark to the last thing that it recorded.
        down_before_s: between the last thing of the start before and its first mark.
        until_first_step_s: from its first mark to the begin of its first step; None: it took none.
        steps_lost, lost_s: repeated by a later start, and the seconds in them.
        trained_s: in steps that count.
        ended: as intended.
    """

    start: int
    first_step: int | None
    last_step: int | None
    seconds: float
    down_before_s: float
    until_first_step_s: float | None
    steps_lost: int
    lost_s: float
    trained_s: float
    ended: bool


Row = StragglerRow | SlowLinkRow | CauseRow | PortRow | LinkRow | StartRow


@dataclass(frozen=True)
class Verdict:
    """One question about a run, answered.

    Args:
        subject: `straggler`, `slow link`, `drift`, `traffic`, `link limit`, `effective time`.
        line: the answer for a person, with its figures.
        rows: the same by rank, link, cause or start, for tables.
    """

    subject: str
    state: State
    line: str
    rows: tuple[Row, ...] = ()
