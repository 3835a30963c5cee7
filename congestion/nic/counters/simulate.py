"""Made-up counter logs: the periodic traffic of a training job on one server's NICs, and faults planted in it.

For tests, and for who wants to see what detection says. Such a log says `simulated` in each of its files. Not covered:
any fabric (the simulator is `congestion.simulation.simulate`): bursts have a fixed shape, and a fault touches its own
NIC alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from congestion.nic.counters.log import Ints, Log

Floats = NDArray[np.float64]
Kind = Literal["pfc-storm", "ecn-storm", "flap", "timeout", "retransmission", "silent", "slow"]
COUNTERS = (
    "xmit_bytes",
    "rcv_bytes",
    "port_rcv_packets",
    "np_ecn_marked_roce_packets",
    "np_cnp_sent",
    "rp_cnp_handled",
    "rx_prio3_pause",
    "rx_prio3_pause_duration",
    "link_down_events_phy",
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
)
_EPOCH_NS = 1_793_000_000_000_000_000
_PACKET_BYTES = 4096 + 70
# Shares of a step in which data moves: four gathers, and the gradients at its end.
_BURSTS = ((0.02, 0.06), (0.14, 0.18), (0.26, 0.30), (0.38, 0.42), (0.62, 0.86))


@dataclass(frozen=True)
class Fault:
    """One planted fault: at which second, for how long, on which NIC."""

    kind: Kind
    at_s: float
    for_s: float = 1.0
    nic: int = 2


@dataclass(frozen=True)
class Job:
    """Traffic without faults.

    Args:
        step_s, jitter: a step's length, and the standard deviation of it as a share.
        nic_bps: rate during a burst.
        marked: share of packets that carry a mark, during bursts.
        pause_every_steps, pause_s: checkpoints, in which no NIC moves anything; 0 for none.
        skew_s: the most that one NIC is behind another.
    """

    num_nics: int = 8
    step_s: float = 3.0
    jitter: float = 0.02
    nic_bps: float = 400e9
    marked: float = 0.02
    pause_every_steps: int = 200
    pause_s: float = 12.0
    skew_s: float = 0.004


def simulate_log(
    seconds: float, period_ms: float = 100.0, job: Job | None = None, faults: Sequence[Fault] = (), seed: int = 0
) -> Log:
    """The log of `seconds` of a job, with faults in it; the same for the same seed."""
    job = job or Job()
    random = np.random.default_rng(seed)
    num = round(seconds * 1e3 / period_ms)
    time_s = np.arange(num) * period_ms / 1e3 + random.uniform(0, 0.02 * period_ms / 1e3, num)  # a sampler is late
    breaks_s, share = _steps(job, seconds, random)
    columns: list[str] = []
    parts: list[Floats] = []
    for nic in range(job.num_nics):
        late = random.uniform(0, job.skew_s)
        moved = _bytes_moved(time_s, breaks_s + late, share, job)
        for counter, values in _nic(moved, time_s, job, [one for one in faults if one.nic == nic], random).items():
            columns.append(f"mlx5_{nic}/1/{counter}")
            parts.append(values)
    table: Ints = np.stack(parts, axis=1).astype(np.int64) + random.integers(0, 2**40, len(parts))
    about = {"source": "simulated", "period_ms": period_ms, "host": "simulated", "seed": seed}
    return Log(columns, (time_s * 1e9).astype(np.int64) + _EPOCH_NS, table, about)


def _steps(job: Job, seconds: float, random: np.random.Generator) -> tuple[Floats, Floats]:
    """The instants between which a NIC sends evenly or not at all, and how many steps' bytes it has moved at each."""
    num = int(seconds / job.step_s * 1.2) + 2
    lengths = job.step_s * np.clip(random.normal(1.0, job.jitter, num), 0.7, 1.5)
    pauses = np.zeros(num)
    if job.pause_every_steps:
        pauses[job.pause_every_steps :: job.pause_every_steps] = job.pause_s
    begins = np.cumsum(np.append(0.0, lengths[:-1])) + np.cumsum(pauses)
    edges = np.array(_BURSTS).ravel()
    busy = sum(end - begin for begin, end in _BURSTS)
    done = np.cumsum([part for begin, end in _BURSTS for part in (0.0, (end - begin) / busy)])
    instants = begins[:, None] + lengths[:, None] * edges[None, :]
    return instants.ravel(), (np.arange(num)[:, None] + done[None, :]).ravel()


def _bytes_moved(time_s: Floats, breaks_s: Floats, share: Floats, job: Job) -> Floats:
    busy_s = job.step_s * sum(end - begin for begin, end in _BURSTS)
    moved: Floats = np.interp(time_s, breaks_s, share) * job.nic_bps / 8 * busy_s
    return moved


def _nic(
    moved: Floats, time_s: Floats, job: Job, faults: Sequence[Fault], random: np.random.Generator
) -> dict[str, Floats]:
    """Return the counters of one simulated NIC over time, by name, with its faults.

    Args:
        moved: bytes sent up to each time.
    """
    rate = np.diff(moved, prepend=moved[0])
    for fault in faults:
        if fault.kind in ("silent", "flap", "slow"):
            rate = np.where(_during(fault, time_s), rate * (0.5 if fault.kind == "slow" else 0.0), rate)
    packets = rate / _PACKET_BYTES
    marked = packets * job.marked * random.uniform(0, 2, len(packets))
    marked = _with(faults, "ecn-storm", time_s, marked, packets * 0.8)
    wait = np.diff(time_s, prepend=time_s[0])
    # A healthy port is paused now and then, for some microseconds a time.
    paused = (
        np.where((random.random(len(packets)) < 0.05) & (rate > 0), random.uniform(0, 0.02, len(packets)), 0) * wait
    )
    paused = _with(faults, "pfc-storm", time_s, paused, wait * 0.6) * 1e6
    late = (random.random(len(packets)) < 1e-4) * 1.0  # a packet out of sequence, some a minute
    counts = {
        "xmit_bytes": rate,
        "rcv_bytes": rate,
        "port_rcv_packets": packets,
        "np_ecn_marked_roce_packets": marked,
        "np_cnp_sent": marked / 4,
        "rp_cnp_handled": marked / 4,
        "rx_prio3_pause": paused / 5,
        "rx_prio3_pause_duration": paused,
        "link_down_events_phy": _once(faults, "flap", time_s),
        "local_ack_timeout_err": _once(faults, "timeout", time_s),
        "packet_seq_err": _with(faults, "retransmission", time_s, 0 * wait, wait * 5000),
        "out_of_sequence": late,
    }
    return {name: np.floor(np.cumsum(count)) for name, count in counts.items()}


def _during(fault: Fault, time_s: Floats) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (time_s >= fault.at_s) & (time_s < fault.at_s + fault.for_s)
    return mask


def _with(faults: Sequence[Fault], kind: Kind, time_s: Floats, usual: Floats, planted: Floats) -> Floats:
    for fault in faults:
        if fault.kind == kind:
            usual = np.where(_during(fault, time_s), planted, usual)
    return usual


def _once(faults: Sequence[Fault], kind: Kind, time_s: Floats) -> Floats:
    count = np.zeros(len(time_s))
    for fault in faults:
        if fault.kind == kind:
            count[np.searchsorted(time_s, fault.at_s)] += 1
    return count
