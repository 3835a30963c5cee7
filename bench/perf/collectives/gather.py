"""`gather_perf`: the root ends with the parts of all ranks in order. The size is the whole result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.gather(call.recv, call.send, call.root)


COLLECTIVE = Collective(
    name="gather",
    summary="The root ends with the parts of all ranks in order.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=lambda place: [Part(source, 0) for source in range(place.ranks)] if place.rank == place.root else [],
    receives_all=True,
    has_root=True,
)
command = perf_command(COLLECTIVE)
