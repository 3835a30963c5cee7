"""Rows about flaps: each setting at each flap, the setting that a flap asks for, and a ring all-reduce through one.

The first two are the closed form of `retransmit`; the ring is run packet by packet, its timers those of the setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from congestion.retransmit.timers import NICS, Timers, advise, recovery_s, schedule, survives
from congestion.scenarios.catalogue import build_scenario
from congestion.simulation.settings import Settings
from congestion.simulation.simulate import Outcome, simulate

Row = dict[str, Any]
RING_RANKS, RING_BYTES = 8, 16_000_000
_PS = 10**12
_LONGER_THAN_ANY_RUN_PS = 10**6 * _PS


@dataclass(frozen=True)
class Setting:
    """Settings of a queue pair and its NIC; the fields are the arguments of `schedule`."""

    nic: str
    timeout: int
    retry_cnt: int
    adaptive: bool = True
    floor: bool = True

    @property
    def timers(self) -> Timers:
        return schedule(self.nic, self.timeout, self.retry_cnt, adaptive=self.adaptive, floor=self.floor)

    @property
    def mode(self) -> str:
        """The adaptive phase: on, off, `no floor`, which ends it too, or `-` where the NIC has neither."""
        if not NICS[self.nic].has_floor:
            return "-"
        if not self.floor:
            return "no floor"
        return "on" if self.adaptive else "off"

    def to_row(self) -> Row:
        return {"nic": self.nic, "timeout": self.timeout, "retry_cnt": self.retry_cnt, "adaptive": self.mode}


@dataclass(frozen=True)
class Recovery:
    """Predicted course of a flap under a setting.

    Args:
        flap_s: length of the flap, s.
        recovery_s: from its beginning to the send that passes, s; None: the queue pair has gone to error before.
        error_s: after which a dead path is given up, s; None: never.
        longest_flap_s: that the setting outlives, s; None: there is no longest.
    """

    setting: Setting
    flap_s: float
    recovery_s: float | None
    error_s: float | None
    longest_flap_s: float | None

    @property
    def survives(self) -> bool:
        """Whether the queue pair outlives the flap."""
        return self.recovery_s is not None

    def to_row(self) -> Row:
        """Return the columns of a record."""
        return {
            **self.setting.to_row(),
            "flap_s": self.flap_s,
            "survives": self.survives,
            "recovery_s": self.recovery_s,
            "error_s": self.error_s,
            "longest_flap_s": self.longest_flap_s,
            "source": "predicted",
        }


@dataclass(frozen=True)
class FlapAdvice:
    """The least timeouts that outlive a flap with a margin, and their price.

    Args:
        flap_s: length of the flap, s.
        timeout: exponent that is enough on any NIC.
        nic_timeout: exponent that is enough as `nic` was measured.
        lower_s: what `timeout` outlives on any NIC, s.
        recovery_s: from the flap's beginning to the send that passes, s, on `nic` with `timeout`.
        error_s: after which `nic` gives up a dead path with `timeout`, s; None: never.
    """

    flap_s: float
    nic: str
    retry_cnt: int
    timeout: int
    nic_timeout: int
    lower_s: float
    recovery_s: float
    error_s: float | None

    def to_row(self) -> Row:
        """Return the columns of a record."""
        return {**asdict(self), "source": "predicted"}


def of_one_nic(settings: Sequence[Setting]) -> list[Setting]:
    """Return those that differ from the first in the timeout alone, with the most retries of all."""
    most, first = max(setting.retry_cnt for setting in settings), settings[0]
    return [one for one in settings if (one.nic, one.mode, one.retry_cnt) == (first.nic, first.mode, most)]


def recoveries(settings: Iterable[Setting], flaps_s: Sequence[float]) -> list[Recovery]:
    """Predict each setting's course of each flap."""
    rows: list[Recovery] = []
    for setting in settings:
        timers = setting.timers
        error_s = timers.error_s if np.isfinite(timers.error_s) else None
        for flap_s, recovery in zip(flaps_s, recovery_s(timers, np.array(flaps_s)).tolist(), strict=True):
            recovered_s = recovery if survives(timers, flap_s) else None
            rows.append(Recovery(setting, flap_s, recovered_s, error_s, timers.last_send_s if error_s else None))
    return rows


def advices(flaps_s: Iterable[float], nic: str, retry_cnt: int) -> list[FlapAdvice]:
    """Return for each flap the least timeouts that outlive it with a fifth to spare, and what they cost."""
    rows: list[FlapAdvice] = []
    for flap_s in flaps_s:
        advice = advise(flap_s, nic, retry_cnt)
        error_s = advice.error_s if np.isfinite(advice.error_s) else None
        timeouts = advice.timeout, advice.nic_timeout
        rows.append(FlapAdvice(flap_s, nic, retry_cnt, *timeouts, advice.lower_s, advice.recovery_s, error_s))
    return rows


def ring_rows(
    settings: Iterable[Setting],
    flaps_s: Sequence[float],
    seed: int,
    say: Callable[[int, int, str], None] | None = None,
    compiling: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Row]:
    """A ring all-reduce, one of whose hosts is cut off half-way: `delay_s` of the whole, against `predicted_s`.

    Settings that never give up are omitted. `delay_s` is None where the collective does not end; `stuck` counts the
    ranks with flows that do not then, `failed` the pairs of ranks whose queue pair is in error.
    """
    case = build_scenario(
        "ring-all-reduce",
        [f"scenario.ranks={RING_RANKS}", f"scenario.num_bytes={RING_BYTES}"],
        seed,
        fabric="star",
    )
    # A timer that never runs out changes nothing, and has one variant of the kernels compiled for both kinds of run.
    idle = (_LONGER_THAN_ANY_RUN_PS,)
    whole = simulate(case.fabric, case.flows, Settings(), "none", seed=seed, timeouts_ps=idle, compiling=compiling)
    ending = [setting for setting in settings if np.isfinite(setting.timers.error_s)]
    down_ps = int(whole.finish_ps.max()) // 2
    rows: list[Row] = []
    for setting in ending:
        timers = setting.timers
        for flap_s in flaps_s:
            flap = (0, down_ps, down_ps + round(flap_s * _PS))
            outcome = simulate(
                case.fabric, case.flows, Settings(), "none", seed=seed, flaps=(flap,), timeouts_ps=timers.waits_ps()
            )
            predicted = float(recovery_s(timers, flap_s))
            rows.append(
                {
                    **setting.to_row(),
                    "flap_s": flap_s,
                    **_ring_row(outcome, whole),
                    "predicted_s": predicted if np.isfinite(predicted) else None,
                    "source": "simulated",
                }
            )
            if say:
                say(len(rows), len(ending) * len(flaps_s), f"flap of {flap_s:g} s")
    return rows


def _ring_row(outcome: Outcome, whole: Outcome) -> Row:
    """Compare a ring all-reduce with a host cut off (`outcome`) and one without (`whole`), as columns of a row."""
    ended, flow = outcome.finish_ps >= 0, outcome.state.flow
    failed = flow[["src", "dst"]][flow["failed"] > 0]
    return {
        "idle_s": int(whole.finish_ps.max()) / _PS,
        "delay_s": int(outcome.finish_ps.max() - whole.finish_ps.max()) / _PS if ended.all() else None,
        "stuck": len(np.unique(flow["src"][~ended])),
        "failed": len(np.unique(failed)),
        "retransmissions": int(flow["resent"].sum()),
    }
