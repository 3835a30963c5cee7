"""The NICs whose retransmit timers `congestion.retransmit` knows, and what each makes of timeout and retry count.

Apart from the closed form, so that `--help` can name them without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nic:
    """Timers that a NIC makes of timeout and retry count.

    Args:
        measured: what its figures come from.
        phase_from_s: when the steps of the adaptive phase begin; None: a NIC that keeps InfiniBand's product, with
            neither floor nor adaptive phase.
        units_at_zero: what retry_cnt 0 acts as while the adaptive phase is on.
        free_first: the first timeout with the floor off, over 4.096 us * 2^T, by exponent.
        free_spacing: the later ones, over the same.
        free_silent: that first timeout sends nothing.
        endless: retry_cnt 7 never gives up.
    """

    measured: str
    phase_from_s: float | None = None
    units_at_zero: int = 1
    free_first: tuple[tuple[int, float], ...] = ()
    free_spacing: float = 1.0
    free_silent: bool = False
    endless: bool = False

    @property
    def has_floor(self) -> bool:
        """Whether it has a floor and an adaptive phase, which both can be turned off."""
        return self.phase_from_s is not None


NICS = {
    # Of the adaptive instants the first, second and third may be skipped: the first one that is sent varies.
    "connectx-6": Nic(
        "firmware 20.43, exponents 8 to 20",
        phase_from_s=12.5e-3,
        units_at_zero=4,
        free_first=((8, 1.05), (10, 1.02), (12, 0.76), (14, 0.57), (16, 0.64), (17, 0.82), (18, 0.59), (20, 0.83)),
        free_silent=True,
    ),
    # The instants inside its adaptive phase are inferred: ConnectX-6's steps from 0 add up to its 428 ms.
    "connectx-5": Nic(
        "time to the error only, exponents up to 16; with the floor off 8",
        phase_from_s=0.0,
        free_first=((8, 1.14),),
        free_spacing=1.5,
    ),
    "rxe": Nic("Linux 6.1 in a virtual machine, exponents 12 to 18", endless=True),
    "infiniband": Nic("nothing: the product as the specification has it, a lower bound"),
}
