"""Times at which a queue pair sends again after a loss and gives up, so which flaps it outlives: a closed form.

InfiniBand names one time, 4.096 us * 2^T, and R retries. NICs make other things of it, which were measured on idle,
direct links: ConnectX-6 (firmware 20.43) and ConnectX-5 by others, Linux' rxe by us in a virtual machine; see `NICS`.
Not covered: NICs without published figures, and profiles of adaptive retransmission that somebody programmed.

Source of ConnectX: github.com/unionxic/rdma-fault-characterization, harness/ack_timeout and docs/experiments/01.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from congestion.retransmit.nics import NICS, Nic
from netlayer.nccl.ack_timeout import MARGIN, MOST_RETRY_CNT, MOST_TIMEOUT, least_timeout, nominal_s
from netlayer.nccl.variables import preset_of, read_release

__all__ = [
    "MOST_RETRY_CNT",
    "MOST_TIMEOUT",
    "NCCL_RETRY_CNT",
    "NICS",
    "Advice",
    "Nic",
    "Timers",
    "advise",
    "nccl_timeout",
    "nominal_s",
    "recovery_s",
    "schedule",
    "survives",
]

Floats = NDArray[np.float64]

FLOOR_TIMEOUT = 16  # ConnectX takes a lower exponent for this one
# Steps of ConnectX-6's adaptive phase, measured to within 0.5 ms up to exponent 20; beyond they are taken to double on.
_STEPS_S = np.array([8.6, 16.6, 33.7, 67.1, 100.6, 201.4, 536.8, 805.3, 2147.8, 4294.8]) / 1e3
_MEASURED_UP_TO = 20
_RESOLUTION_S = 0.5e-3  # of the measurement
NCCL_RETRY_CNT = preset_of("NCCL_IB_RETRY_CNT", (2, 0, 0))  # of all releases


@dataclass(frozen=True, eq=False)
class Timers:
    """Seconds after the first send that is not answered.

    Args:
        sends_s: when it is sent again, rising; shape (num_sends,).
        error_s: when the queue pair goes to error; inf for one that goes on as it did between its last sends.
    """

    sends_s: Floats
    error_s: float

    @property
    def last_send_s(self) -> float:
        """The last chance; inf for a queue pair that goes on for ever, 0 for one that never sends again."""
        if not self.sends_s.size:
            return 0.0
        return float(self.sends_s[-1]) if np.isfinite(self.error_s) else np.inf

    def waits_ps(self) -> tuple[int, ...]:
        """Time before each send, and at last before the error, as the engine takes it.

        Raises:
            ValueError: it does not end.
        """
        if not np.isfinite(self.error_s):
            raise ValueError("timers without an end: the engine runs those that give up")
        instants = np.round(np.array([0.0, *self.sends_s, self.error_s]) * 1e12)
        return tuple(int(wait) for wait in np.diff(instants))


@dataclass(frozen=True)
class Advice:
    """A setting that outlives a flap.

    Args:
        timeout: least exponent whose product with the retry count, 4.096 us * 2^T * R, is long enough: on any NIC.
        nic_timeout: least exponent that is long enough as the NIC was measured, or `timeout` where that is less.
        lower_s: that product.
        error_s: how long the NIC takes with `timeout` to find that a path is dead.
        recovery_s: from the flap's beginning to the send that passes, there.
    """

    timeout: int
    nic_timeout: int
    retry_cnt: int
    lower_s: float
    error_s: float
    recovery_s: float


def schedule(
    nic: str, timeout: int, retry_cnt: int = NCCL_RETRY_CNT, *, adaptive: bool = True, floor: bool = True
) -> Timers:
    """Return when a queue pair retransmits and when it goes to error, in seconds after a send that is not answered.

    Args:
        nic: one of NICS.
        timeout: the exponent T, 0..31; 0 is no timer at all.
        retry_cnt: R, 0..7.
        adaptive: ROCE_ACCL's roce_adp_retrans_en; off was measured on ConnectX-5 alone.
        floor: ConnectX takes an exponent below 16 for 16; off (min_ack_timeout_limit_disabled = 1) ends the adaptive
            phase too.

    `adaptive` and `floor` change nothing on a NIC that has neither.

    Raises:
        ValueError: an unknown NIC, or a number out of its range.
    """
    if nic not in NICS:
        raise ValueError(f"nic = {nic!r}: one of {', '.join(NICS)}")
    if not 0 <= timeout <= MOST_TIMEOUT:
        raise ValueError(f"timeout = {timeout}: 0..{MOST_TIMEOUT}")
    if not 0 <= retry_cnt <= MOST_RETRY_CNT:
        raise ValueError(f"retry_cnt = {retry_cnt}: 0..{MOST_RETRY_CNT}")
    if timeout == 0:
        return Timers(np.empty(0), np.inf)
    known = NICS[nic]
    events: Floats
    if known.phase_from_s is None:
        events = nominal_s(timeout) * np.arange(1.0, retry_cnt + 2)
    elif floor:
        events = _with_floor(known, known.phase_from_s, timeout, retry_cnt, adaptive)
    else:
        events = _without_floor(known, timeout, retry_cnt)
    endless = known.endless and retry_cnt == MOST_RETRY_CNT
    return Timers(events[:-1], np.inf if endless else float(events[-1]))


def recovery_s(
    timers: Timers, flap_s: float | Floats, *, begin_s: float | Floats = 0.0, streams_s: float = 0.0
) -> Floats:
    """Return the time from a link's going down for `flap_s` to the send that passes; inf where none does.

    Args:
        begin_s: how far into the flap the send was that is lost first; 0 is the worst for the queue pair's life.
        streams_s: how long after that the sender still has packets that it may send: one that arrives after the flap
            shows the receiver the gap, and its NAK brings the loss back within a round trip, before any timer.

    The time of a round trip comes on top. Shapes of `flap_s` and `begin_s` broadcast.

    Raises:
        ValueError: a flap that is not longer than 0, or a send that is not in it.
    """
    flap, begin = np.broadcast_arrays(np.asarray(flap_s, dtype=float), np.asarray(begin_s, dtype=float))
    if not np.all((flap > 0) & (begin >= 0) & (begin < flap)):
        raise ValueError(f"flap_s = {flap_s}, begin_s = {begin_s}: 0 <= begin_s < flap_s")
    needed = flap - begin
    sends = np.append(timers.sends_s, np.inf)
    send_s = sends[np.searchsorted(timers.sends_s, needed)]
    if np.isinf(timers.last_send_s):
        gap = np.diff(timers.sends_s)[-1]
        send_s = np.where(np.isinf(send_s), np.ceil(needed / gap) * gap, send_s)
    return np.where(needed < streams_s, flap, begin + send_s)


def survives(timers: Timers, flap_s: float) -> bool:
    """Whether the queue pair outlives a flap that began as its first unanswered packet was sent."""
    return flap_s <= timers.last_send_s or not np.isfinite(timers.error_s)


def advise(
    longest_flap_s: float, nic: str = "connectx-6", retry_cnt: int = NCCL_RETRY_CNT, *, margin: float = MARGIN
) -> Advice:
    """The least timeout that outlives a flap of that length, with a share of it as margin.

    Raises:
        ValueError: as `least_timeout`, or as `schedule`.
    """
    timeout = least_timeout(longest_flap_s, retry_cnt, margin)
    needed_s = longest_flap_s * (1 + margin)
    timers = schedule(nic, timeout, retry_cnt)
    by_nic = next((t for t in range(1, timeout) if survives(schedule(nic, t, retry_cnt), needed_s)), timeout)
    recovered = float(recovery_s(timers, longest_flap_s))
    return Advice(timeout, by_nic, retry_cnt, retry_cnt * nominal_s(timeout), timers.error_s, recovered)


def nccl_timeout(version: str) -> int:
    """NCCL_IB_TIMEOUT where nobody sets it, of a release such as 2.30.7, or the last of 2.30.

    Raises:
        ValueError: the text is no release of NCCL 2.
    """
    release = read_release(version)
    if release is None:
        raise ValueError(f"version = {version!r}: a release of NCCL such as 2.30.7")
    return preset_of("NCCL_IB_TIMEOUT", release)


def _with_floor(nic: Nic, phase_from_s: float, timeout: int, retry_cnt: int, adaptive: bool) -> Floats:
    """An adaptive phase, which uses one retry up, then timeouts at twice the nominal time of max(T, 16)."""
    nominal = nominal_s(max(timeout, FLOOR_TIMEOUT))
    steps = np.append(_STEPS_S, [nominal_s(later) for later in range(_MEASURED_UP_TO + 1, MOST_TIMEOUT + 2)])
    num_steps = int(np.sum(steps <= nominal + _RESOLUTION_S))
    phase = phase_from_s + np.append(0.0, np.cumsum(steps[:num_steps]))
    first = phase[-1] + min(float(steps[num_steps]), 2 * nominal)
    regular = first + 2 * nominal * np.arange(MOST_RETRY_CNT)
    if adaptive:
        return np.concatenate([phase[phase > 0], regular[: (retry_cnt or nic.units_at_zero) - 1]])
    return np.append(phase[-1], regular[:retry_cnt])


def _without_floor(nic: Nic, timeout: int, retry_cnt: int) -> Floats:
    exponents, ratios = zip(*nic.free_first, strict=True)
    first = np.interp(timeout, exponents, ratios) + nic.free_spacing * nic.free_silent
    return np.asarray(nominal_s(timeout) * (first + nic.free_spacing * np.arange(retry_cnt + 1)))
