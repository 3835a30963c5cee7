"""`all_reduce_perf`: every rank ends with the reduction of all ranks' buffers. The size is one rank's buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.all_reduce(call.recv, call.send, call.op)


COLLECTIVE = Collective(
    name="all_reduce",
    summary="Every rank ends with the reduction of all ranks' buffers.",
    # Reduce-scatter, then all-gather: in each a link carries all parts but its rank's own, (n - 1) / n of the size.
    bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
    launch=_launch,
    # One part, the whole receive buffer; a source of None is the reduction over all ranks.
    expect=lambda _: [Part(None, 0)],
    reduces=True,
)
command = perf_command(COLLECTIVE)
