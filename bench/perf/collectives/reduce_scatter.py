"""`reduce_scatter_perf`: rank r ends with part r of the reduction. The size is one rank's whole input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.reduce_scatter(call.recv, call.send, call.op)


COLLECTIVE = Collective(
    name="reduce_scatter",
    summary="Rank r ends with part r of the reduction of all ranks' buffers.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=lambda place: [Part(None, place.rank * place.count)],
    sends_all=True,
    reduces=True,
)
command = perf_command(COLLECTIVE)
