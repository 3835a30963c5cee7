"""Fluid model of the hybrid: N equal flows, one bottleneck of their line rate, feedback one round trip old.

Each flow has a window W and paces at W / d, by the round trip d = base + q / C that it last saw; T is its target:

    dW/dt = g W (T - d) / d^2         with the window and delay of a round trip ago
    dq/dt = sum of W / d - C          (q stays at or above 0), d as of a round trip ago
    T = base + Q (1 + log2(C d / W))  the target grows by Q a halving of the rate

Fixed point. T = d for all flows; T is the same only if W / d is: all flows have C / N, and the queue is Q (1 + log2 N).
It is the only one.

Stability. Time in round trips at the fixed point, d*; w and y the relative errors of W and d, h = Q / (ln 2 d*):

    all flows together    w' = -g [h w + (1 - h) y],  y' = w - y    by what was a round trip ago, but the w of y'
    one against another   w' = -g h w                         by what was a round trip ago

The second is stable for 0 < g h < pi / 2, at any N: flows become equal by exp(-g h) a round trip. In the first, -y is
the clock that the pace `W / rtt` brings; without it (a rate as a rate) the loop is a double integrator and unstable
for small h at every gain. With it and h = 0 the loop is stable for g < 0.547 (w cot w at w sin w = 1), and h moves the
limit up. `rightmost` gives the real part of the slowest mode for any g and h. The law's gain is 0.25; where no mark
confirms a delay its fall is slower still, so it switches between two stable loops.

Few flows. A window ends where it fills an idle path (`line_window`), C base: where N base is below d*, all N windows
are that, equal with no loop, and the round trip is N base. What is left is the clock, y' = -y by what was a round trip
ago, which is stable (1 < pi / 2).
Drawn by `python -m congestion.simulation.page.fluid_page --out FILE.html`: phase plots from many starts.
Not covered: marks (one cut to the target, then a round trip without a further one, no loop), packets, other limits of
W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NODES = 24  # of the history of a round trip


@dataclass(frozen=True)
class FluidModel:
    """Times in us, rates in bytes/us; `gain` and `queue_us` as `congestion.hybrid` has them."""

    num_flows: int
    base_us: float
    capacity: float = 25_000.0  # 200G
    gain: float = 0.25
    queue_us: float = 8.0

    @property
    def delay_us(self) -> float:
        """Round trip at the fixed point."""
        return self.base_us + self.queue_us * (1 + math.log2(self.num_flows))

    @property
    def held_us(self) -> float:
        """Round trip of windows that each fill an idle path; the flows have the shorter of this and `delay_us`."""
        return self.num_flows * self.base_us

    @property
    def scaling(self) -> float:
        """h: change of the target over the delay, by a relative change of the rate."""
        return self.queue_us / (math.log(2) * self.delay_us)

    @property
    def growth(self) -> float:
        """Real part of the slowest mode near the fixed point, per round trip; stable if negative."""
        return rightmost(self.gain, self.scaling)


def rightmost(gain: float, scaling: float, clocked: bool = True) -> float:
    """Real part of the rightmost root of the linearised model, per round trip.

    Of x'(t) = A x(t) + B x(t - 1) by collocation of the history at Chebyshev points (Breda, Maset, Vermiglio,
    Pseudospectral differencing methods for characteristic roots of delay differential equations, SISC 2005).

    Args:
        clocked: paced at W / rtt; else at a rate that is the law's own state.
    """
    now = np.array([[0.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    ago = np.array(
        [[-gain * scaling, -gain * (1 - scaling), 0], [0, -1.0 if clocked else 0.0, 0], [0, 0, -gain * scaling]]
    )
    points = np.cos(np.pi * np.arange(_NODES + 1) / _NODES)
    weights = np.r_[2.0, np.ones(_NODES - 1), 2.0] * (-1.0) ** np.arange(_NODES + 1)
    gaps = points[:, None] - points[None, :] + np.eye(_NODES + 1)
    slope = weights[:, None] / weights[None, :] / gaps
    slope -= np.diag(slope.sum(axis=1))
    generator = np.kron(2 * slope, np.eye(3))  # over [-1, 0], not [-1, 1]
    generator[:3] = 0
    generator[:3, :3], generator[:3, -3:] = now, ago
    return float(np.linalg.eigvals(generator).real.max())


def trajectory(
    model: FluidModel, windows: Floats, duration_us: float, queue_us: float = 0.0, step_us: float = 0.05
) -> tuple[Floats, Floats]:
    """The model itself, for phase plots: Euler's method.

    Args:
        windows: at the start, bytes, shape (num_flows,).
        queue_us: queueing delay at the start.

    Returns:
        rates: share of the capacity that each flow paces at, shape (num_steps, num_flows).
        queue_us: shape (num_steps,).
    """
    many = round(duration_us / step_us)
    window, queue = np.empty((many, model.num_flows)), np.empty(many)
    rates = np.empty((many, model.num_flows))
    window[0], queue[0] = windows, queue_us
    ago = 0  # when the packet was queued whose ACK comes now
    for i in range(many):
        while ago < i and ago + (model.base_us + queue[ago + 1]) / step_us < i:
            ago += 1
        delay = model.base_us + queue[ago]
        rates[i] = np.minimum(window[i] / (delay * model.capacity), 1)
        if i + 1 == many:
            break
        old = np.minimum(window[ago] / (delay * model.capacity), 1)
        target = model.base_us + model.queue_us * (1 - np.log2(old))
        moved = window[i] + step_us * model.gain * window[ago] * (target - delay) / delay**2
        window[i + 1] = np.maximum(moved, 1.0)  # a byte: what a round trip ago asks for can be more than there is
        queue[i + 1] = max(queue[i] + step_us * (rates[i].sum() - 1), 0)
    return rates, queue
