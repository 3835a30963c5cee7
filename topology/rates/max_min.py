"""Max-min fair rates of flows on their paths, by progressive filling, and how long the flows take at them.

All flows' rates rise together; the link whose capacity is used up first freezes its flows at their fair share, and the
others go on (Bertsekas, Gallager: Data Networks, 1992, 6.5.2). A rate vector is max-min fair exactly where every flow
has a *bottleneck*: a full link on its path on which no flow is faster; `certify` checks that on its own. Not covered:
congestion control's way to these rates, window limits, and latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Ints
from topology.rates.kernels import add_up, caps, fill, gather, narrow

Floats = NDArray[np.float64]

_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Rates:
    """Rates of flows, bits per second, and the link that holds each flow back.

    Args:
        paths: link ids, shape (num_flows, width), NO_LINK where a column is unused.
        capacity_bps: of every link.
        flow_bps: rate of every flow.
        bottleneck: link id of every flow.
    """

    paths: Ints
    capacity_bps: Floats
    flow_bps: Floats
    bottleneck: Ints

    @property
    def link_bps(self) -> Floats:
        """Bits per second over every link."""
        return sum_over_links(self.paths, self.flow_bps, len(self.capacity_bps))

    def certify(self, tolerance: float = 1e-6) -> None:
        """Prove these rates max-min fair, from the rates and paths alone.

        Raises:
            ValueError: a link is over its capacity, or a flow has no bottleneck; the first is named.
        """
        used = self.link_bps
        over = np.flatnonzero(used > self.capacity_bps * (1 + tolerance))
        if len(over):
            link = int(over[0])
            raise ValueError(f"link {link} carries {used[link]:g} bit/s, it has {self.capacity_bps[link]:g}")
        crossed = self.paths != NO_LINK
        flow, _ = np.nonzero(crossed)
        link = self.paths[crossed]
        fastest = np.zeros(len(self.capacity_bps))
        np.maximum.at(fastest, link, self.flow_bps[flow])
        full = used >= self.capacity_bps * (1 - tolerance)
        holds = full[link] & (self.flow_bps[flow] >= fastest[link] * (1 - tolerance))
        has_bottleneck = np.bincount(flow[holds], minlength=len(self.flow_bps)) > 0
        if not has_bottleneck.all():
            raise ValueError(f"flow {int(np.flatnonzero(~has_bottleneck)[0])} has no bottleneck link")


def max_min(paths: Ints, capacity_bps: Floats) -> Rates:
    """The one max-min fair allocation of flows to links, without any limit but the links.

    Args:
        paths: link ids, shape (num_flows, width), NO_LINK where a column is unused; a link at most once a path.
        capacity_bps: of every link, above 0.

    Raises:
        ValueError: a flow crosses no link, or one without capacity.
    """
    paths, capacity_bps = np.ascontiguousarray(paths, dtype=np.int64), np.asarray(capacity_bps, dtype=np.float64)
    flow_bps, bottleneck = caps(paths, capacity_bps)
    if np.isinf(flow_bps).any():
        raise ValueError("a flow crosses no link: nothing bounds its rate")
    if (flow_bps <= 0).any():
        raise ValueError("a flow crosses a link without capacity")
    links = np.flatnonzero(sum_over_links(paths, flow_bps, len(capacity_bps)) > capacity_bps)
    if len(links):
        _fill(paths, links, capacity_bps, flow_bps, bottleneck)
    return Rates(paths, capacity_bps, flow_bps, bottleneck)


def _fill(paths: Ints, links: Ints, capacity_bps: Floats, flow_bps: Floats, bottleneck: Ints) -> None:
    """Lower the flows' caps to their fair rates, in place, over the tight `links` alone.

    A flow's cap is the least capacity on its path. A link that can carry the caps of all its flows holds none of them
    back, so it drops out; in a large fabric those are most.
    """
    number = np.full(len(capacity_bps), -1, dtype=np.int64)
    number[links] = np.arange(len(links))
    local_bottleneck = np.full(len(paths), -1, dtype=np.int64)
    fill(narrow(paths, number), capacity_bps[links], flow_bps, local_bottleneck)
    bottleneck[local_bottleneck >= 0] = links[local_bottleneck[local_bottleneck >= 0]]


def completion_bound_s(paths: Ints, capacity_bps: Floats, num_bytes: Floats, *, start_s: Floats | None = None) -> float:
    """Seconds below which no schedule can end: a flow's begin, and what begins on its link with it or later."""
    begins = np.zeros(len(num_bytes)) if start_s is None else start_s
    crossed = paths != NO_LINK
    flow, link = np.nonzero(crossed)[0], paths[crossed]
    order = np.lexsort((-begins[flow], link))
    flow, link = flow[order], link[order]
    bits = 8.0 * num_bytes[flow]
    passed = np.cumsum(bits)
    first = np.searchsorted(link, link)
    since = passed - passed[first] + bits[first]
    return float((begins[flow] + since / capacity_bps[link]).max(initial=0.0))


def completion_s(rates: Rates, num_bytes: Floats, *, resolution: float = 1e-3, start_s: Floats | None = None) -> Floats:
    """Return the end of each flow, seconds, where rates are filled anew as flows begin and end.

    Args:
        rates: of all flows together; their paths and capacities are used.
        num_bytes: of each flow.
        resolution: what begins or ends within this share of a flow's own duration is taken together, so that a run has
            few refills; 0 is exact.
        start_s: when each flow begins; None where all do at 0.

    Raises:
        ValueError: `resolution` is below 0 or not below 1.
    """
    if not 0 <= resolution < 1:
        raise ValueError(f"resolution = {resolution}: from 0 to below 1")
    left, ends, now = 8.0 * num_bytes, np.full(len(num_bytes), np.nan), 0.0
    begins = np.zeros(len(left)) if start_s is None else start_s
    admits = begins - resolution * left / _least_capacity(rates)  # a flow joins a refill that comes so early
    ends[left <= 0] = begins[left <= 0]
    first = rates.flow_bps if start_s is None and not np.any(left <= 0) else None
    joined = np.full(len(left), np.inf)
    while np.isnan(ends).any():
        running = np.flatnonzero(np.isnan(ends) & (admits <= now))
        until = float(begins[admits > now].min(initial=np.inf))
        if not len(running):
            now = until
            continue
        joined[running] = np.minimum(joined[running], now)
        flow_bps = first if first is not None else max_min(rates.paths[running], rates.capacity_bps).flow_bps
        first = None
        takes = left[running] / flow_bps
        least = float(takes.min())
        if now + least > until:
            left[running] -= flow_bps * (until - now)
            now = until
            continue
        # Never below `least`, though `now` may be so large that it does not change by it: one flow at least ends.
        window = least + resolution * float((now - joined[running] + takes).min())
        step = min(window, max(until - now, least))
        done = takes <= step * (1 + _TOLERANCE)
        early = np.maximum(begins[running] - joined[running], 0.0)
        ends[running[done]] = now + takes[done] + early[done]
        left[running[~done]] -= flow_bps[~done] * step
        now += step
    return ends


def _least_capacity(rates: Rates) -> Floats:
    """The least capacity on each path, bits per second."""
    capacity = np.append(rates.capacity_bps, np.inf)  # where NO_LINK points
    return np.asarray(capacity[rates.paths].min(axis=1, initial=np.inf))


def flows_on_links(paths: Ints, num_links: int) -> tuple[Ints, Ints]:
    """Return the flows that share each link: those of link l are `members[start[l]:start[l + 1]]`, in order."""
    grouped: tuple[Ints, Ints] = gather(np.ascontiguousarray(paths, dtype=np.int64), num_links)
    return grouped


def sum_over_links(paths: Ints, amounts: Floats, num_links: int) -> Floats:
    """Sum of `amounts`, one a flow, over the flows on each link: shape (num_links,)."""
    contiguous = np.ascontiguousarray(paths, dtype=np.int64)
    return np.asarray(add_up(contiguous, np.asarray(amounts, dtype=np.float64), num_links))
