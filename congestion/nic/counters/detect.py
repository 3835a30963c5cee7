"""Detection of faults by counters: PFC and ECN storms, link flaps, retransmissions, and NICs that fall silent or slow.

Every rule looks at one sample after another and needs two of them at most, but for what is told by the step (`slow`,
`stalled`). An episode is one event, however long. Not covered: why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from congestion.kernels.jit import entry
from congestion.nic.counters.pattern import Pattern
from congestion.nic.counters.signals import KINDS, Floats, Ints, Signals
from netlayer.config.tree import Section
from netlayer.verdict import MIN_PEERS

Bools = NDArray[np.bool_]
ALL_PORTS = "all ports"
_CLEAR = 5  # samples without it that end an episode
_BUSY = 0.25  # share of the usual traffic from which on a sample counts as one with traffic
_LEAST_PACKETS_PER_S = 1000.0  # fewer give no share of marks worth the name
_DECAY = 0.9999  # a sample, of the largest traffic seen
_SLOW_CHECKS = 2
_ALL_SLOW_CHECKS = 12  # three periods
_UNKNOWN_PERIOD_S = 3.0
_BIN_NS = 95_000_000  # what the rhythm is told by; a little less than ten samples of 10 ms


_ALONE = ("pfc-storm", "pfc-frames", "ecn-storm", "flap", "timeout", "retransmission")  # told of a port by itself
_ROWS = tuple(
    map(KINDS.index, ("pause", "pause_frames", "packets", "marked", "link_downs", "timeouts", "resent"))
)  # handed to the kernel: numba would keep them with it, and not see that they changed


class Thresholds(Section):
    """Limits past which a signal is an alarm."""

    pause_share: float = Field(0.1, gt=0, le=1, description="PFC storm: share of the time that a port is paused")
    pause_frames_per_s: float = Field(20_000, gt=0, description="the same, of a NIC that counts frames alone")
    marked_share: float = Field(0.5, gt=0, le=1, description="ECN storm: share of the packets received with a mark")
    resent_per_s: float = Field(100, gt=0, description="retransmissions: sequence errors a second")
    timeouts: int = Field(1, ge=1, description="retransmit timers that ran out, between two samples")
    silent_share: float = Field(0.1, gt=0, lt=1, description="silent: below this share of the other ports' traffic")
    slow_share: float = Field(0.7, gt=0, lt=1, description="slow: below this share of what it usually moves a step")
    stalled_s: float = Field(30.0, gt=0, description="stalled: all ports idle for so long, and for ten steps")


@dataclass
class Event:
    """One episode.

    Args:
        port: `mlx5_0/1`, or ALL_PORTS.
        begin_ns: of the first sample that shows it.
        found_ns: of the sample at which it was told.
        samples: from the first to that one, both counted, in readings of the counters concerned.
        figure: the worst value; `limit` is what it was held against.
        end_ns: of the last sample that shows it; None while it goes on.
    """

    kind: str
    port: str
    begin_ns: int
    found_ns: int
    samples: int
    figure: float
    limit: float
    unit: str
    end_ns: int | None = None

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        whole = dict(vars(self))
        whole["lasted_s"] = None if self.end_ns is None else (self.end_ns - self.begin_ns) / 1e9
        return whole


@dataclass
class _Rule:
    """One kind of alarm: the state of its episodes, by port."""

    kind: str
    unit: str
    confirm: int
    highest: bool  # is the worst value the highest one
    streak: NDArray[np.int64]
    quiet: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    worst: Floats
    open: dict[int, Event] = field(default_factory=dict)
    idle: bool = True  # no episode, and nothing that may become one

    def update(
        self, ports: Sequence[str], time_ns: int, bad: Bools, fresh: Bools, figure: Floats, limit: float
    ) -> list[Event]:
        """Take the next sample; return the episodes that it makes certain."""
        if self.idle and not bad.any():  # nearly always
            return []
        bad = bad & fresh
        self.idle = False
        begins = bad & (self.streak == 0)
        self.begin_ns[begins] = time_ns
        self.worst[begins] = figure[begins]
        pick = np.fmax if self.highest else np.fmin
        self.worst[bad] = pick(self.worst[bad], figure[bad])
        self.streak[bad] += 1
        self.quiet[bad] = 0
        good = fresh & ~bad
        self.quiet[good] += 1
        events = [self._note_bad(int(port), ports, time_ns, limit) for port in np.flatnonzero(bad)]
        for port in np.flatnonzero(good):
            self._calm(int(port))
        self.idle = not self.open and not self.streak.any()
        return [event for event in events if event is not None]

    def _note_bad(self, port: int, ports: Sequence[str], time_ns: int, limit: float) -> Event | None:
        worst = float(self.worst[port])
        known = self.open.get(port)
        if known is not None:
            known.figure, known.end_ns = worst, time_ns
            return None
        if self.streak[port] < self.confirm:
            return None
        begin = int(self.begin_ns[port])
        event = Event(self.kind, ports[port], begin, time_ns, int(self.streak[port]), worst, limit, self.unit, time_ns)
        self.open[port] = event
        return event

    def _calm(self, port: int) -> None:
        if port not in self.open:
            self.streak[port] = 0  # what was not confirmed at the next sample was none
        elif self.quiet[port] >= _CLEAR:
            del self.open[port]
            self.streak[port] = 0


class Detector:
    """Takes samples of `columns` in order; `events` holds all that was found, `update` says what is new."""

    def __init__(self, columns: Sequence[str], thresholds: Thresholds | None = None) -> None:
        self.signals = Signals(columns)
        self.ports = self.signals.ports
        self.limits = thresholds or Thresholds()
        self.events: list[Event] = []
        self.pattern = Pattern(len(self.ports))
        num = len(self.ports)
        self._everyone, self._nobody = np.ones(num, dtype=bool), np.zeros(num, dtype=bool)
        self._usual = np.zeros(num)
        self._idle_since_ns: int | None = None
        self._last_ns: int | None = None
        self._moved, self._bin_ns = np.zeros(num), 0
        self._excused_ns = np.zeros(num, dtype=np.int64)
        self._period_s = _UNKNOWN_PERIOD_S
        self._frames_alone = self.signals.has("pause_frames") & ~self.signals.has("pause")
        alone = self._limits_alone()
        self._limits = np.array([alone[rule] for rule in _ALONE])
        self._figures = np.zeros((len(_ALONE), num))
        self._bad, self._fresh = np.zeros((2, len(_ALONE), num), dtype=bool)
        self._look_at_each()  # compiles, which no sample should wait for
        self._rules = {
            "pfc-storm": _rule("pfc-storm", "share of the time paused", num),
            "pfc-frames": _rule("pfc-storm", "pause frames/s", num),
            "ecn-storm": _rule("ecn-storm", "share of packets marked", num),
            "flap": _rule("flap", "link downs", num, confirm=1),
            "timeout": _rule("timeout", "timeouts", num, confirm=1),
            "retransmission": _rule("retransmission", "sequence errors/s", num),
            "silent": _rule("silent", "share of the other ports", num, highest=False),
            "slow": _rule("slow", "share of a usual step", num, confirm=_SLOW_CHECKS, highest=False),
            "all-slow": _rule("slow", "share of a usual step", 1, confirm=_ALL_SLOW_CHECKS, highest=False),
            "stalled": _rule("stalled", "s without traffic", 1, confirm=1),
        }

    def _limits_alone(self) -> dict[str, float]:
        limits = self.limits
        return {
            "pfc-storm": limits.pause_share,
            "pfc-frames": limits.pause_frames_per_s,
            "ecn-storm": limits.marked_share,
            "flap": 1.0,
            "timeout": float(limits.timeouts),
            "retransmission": limits.resent_per_s,
        }

    @property
    def step_s(self) -> float | None:
        """The length of a step, once it is known."""
        return self._period_s if self.pattern.period else None

    def update(self, time_ns: int, values: Sequence[int] | Ints) -> list[Event]:
        """Take one sample; return the episodes that it makes certain."""
        self.signals.update(time_ns / 1e9, values)
        if self._last_ns is None:
            self._last_ns = self._bin_ns = time_ns
            return []
        events = [*self._each_alone(time_ns), *self._traffic(time_ns)]
        self._last_ns = time_ns
        self.events += events
        return events

    def _each_alone(self, time_ns: int) -> list[Event]:
        """Storms and losses, which a port shows by itself: all at once, for nearly always there is none."""
        if not self._look_at_each() and all(self._rules[rule].idle for rule in _ALONE):
            return []
        return [
            event
            for place, rule in enumerate(_ALONE)
            for event in self._update(
                rule, time_ns, self._bad[place], self._fresh[place], self._figures[place], float(self._limits[place])
            )
        ]

    def _look_at_each(self) -> bool:
        """Fill the figures of _ALONE; return whether one is bad."""
        signals, arrays = self.signals, (self._limits, self._figures, self._bad, self._fresh)
        any_bad: bool = _of_each(_ROWS, signals.rate, signals.count, signals.fresh, self._frames_alone, *arrays)
        return any_bad

    def _traffic(self, time_ns: int) -> list[Event]:
        """Compare each port's traffic with the other ports' at once, and with its own step."""
        traffic, gone = self.signals.get("traffic"), self.signals.unreadable("traffic")
        rate = np.where(gone, 0.0, traffic.rate)
        self._usual = np.maximum(self._usual * _DECAY, rate)
        fresh = traffic.fresh | gone
        middle, members = self._members(rate)
        limit = self.limits.silent_share
        events: list[Event] = []
        if middle:  # between bursts nobody is told from anybody
            share = rate / middle
            events = self._update("silent", time_ns, members & (share < limit), fresh, share, limit)
        for port in self._rules["silent"].open:  # whose steps are short for as long as one of them holds the silence
            self._excused_ns[port] = time_ns + round(1.5e9 * self._period_s)
        return [*events, *self._stalled(time_ns, float(rate.sum())), *self._by_step(time_ns, traffic.count)]

    def _members(self, rate: Floats) -> tuple[float, Bools]:
        """The middle port's traffic and who is held against it: none where too few move data, or hardly any."""
        largest = float(self._usual.max(initial=0.0))
        members: Bools = self._usual > _BUSY * largest
        if int(members.sum()) < MIN_PEERS:
            return 0.0, self._nobody
        middle = _middle(rate[members])
        return (middle, members) if middle > _BUSY * _middle(self._usual[members]) else (0.0, self._nobody)

    def _stalled(self, time_ns: int, rate: float) -> list[Event]:
        idle = rate < 0.01 * float(self._usual.sum())
        if not idle or self._idle_since_ns is None:
            self._idle_since_ns = time_ns if idle else None
        since_s = (time_ns - self._idle_since_ns) / 1e9 if self._idle_since_ns is not None else 0.0
        limit = max(self.limits.stalled_s, 10 * self._period_s)
        return self._of_all("stalled", time_ns, since_s >= limit, since_s, limit)

    def _by_step(self, time_ns: int, moved: Floats) -> list[Event]:
        """Look for slow steps, once in a tenth of a second: a step is longer."""
        self._moved += moved
        since_ns = time_ns - self._bin_ns
        if since_ns < _BIN_NS:
            return []
        known = self.pattern.period
        judged = self.pattern.update(self._moved)
        if self.pattern.period and self.pattern.period != known:
            self._period_s = self.pattern.period * since_ns / 1e9
        self._moved = np.zeros(len(self.ports))
        self._bin_ns = time_ns
        if not judged:
            return []
        limit = self.limits.slow_share
        below, ratio, common = self.pattern.below(limit), self.pattern.ratio, self.pattern.common
        below &= self._excused_ns < time_ns
        slow = self._update("slow", time_ns, below, self._everyone, ratio, limit)
        return [*slow, *self._of_all("all-slow", time_ns, 0.05 < common < limit, common, limit)]

    def _update(self, rule: str, time_ns: int, bad: Bools, fresh: Bools, figure: Floats, limit: float) -> list[Event]:
        return self._rules[rule].update(self.ports, time_ns, bad, fresh, figure, limit)

    def _of_all(self, rule: str, time_ns: int, bad: bool, figure: float, limit: float) -> list[Event]:
        state = self._rules[rule]
        if state.idle and not bad:
            return []
        one = np.ones(1, dtype=bool)
        return state.update([ALL_PORTS], time_ns, one & bad, one, np.array([figure]), limit)


@entry
def _of_each(rows, rate, count, seen, frames_alone, limits, figures, bad, fresh):  # type: ignore[no-untyped-def]
    """Fill the figure of each rule of _ALONE, and where it is bad; shape (rules, ports). Return whether any is."""
    pause, frames, packets, marked, downs, timeouts, resent = rows
    any_bad = False
    for port in range(frames_alone.size):
        enough = rate[packets, port] >= _LEAST_PACKETS_PER_S
        figures[0, port], fresh[0, port] = rate[pause, port] / 1e6, seen[pause, port]  # it counts microseconds
        figures[1, port] = rate[frames, port] if frames_alone[port] else 0.0
        fresh[1, port] = seen[frames, port]
        figures[2, port] = rate[marked, port] / rate[packets, port] if enough else 0.0
        fresh[2, port] = seen[marked, port] and enough  # between bursts there is nothing to mark
        figures[3, port], fresh[3, port] = count[downs, port], seen[downs, port]
        figures[4, port], fresh[4, port] = count[timeouts, port], seen[timeouts, port]
        figures[5, port], fresh[5, port] = rate[resent, port], seen[resent, port]
        for rule in range(limits.size):
            bad[rule, port] = figures[rule, port] >= limits[rule]
            any_bad |= bad[rule, port]
    return any_bad


def _middle(values: Floats) -> float:
    """The upper median: numpy's own takes longer than all else here."""
    return float(np.sort(values)[len(values) // 2])


def _rule(kind: str, unit: str, num: int, *, confirm: int = 2, highest: bool = True) -> _Rule:
    streak, quiet, begin_ns = (np.zeros(num, dtype=np.int64) for _ in range(3))
    return _Rule(kind, unit, confirm, highest, streak, quiet, begin_ns, np.zeros(num))
