"""`all_gather_perf`: every rank ends with the parts of all ranks in order. The size is the whole result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.all_gather(call.recv, call.send)


COLLECTIVE = Collective(
    name="all_gather",
    summary="Every rank ends with the parts of all ranks in order.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=lambda place: [Part(source, 0) for source in range(place.ranks)],
    receives_all=True,
)
command = perf_command(COLLECTIVE)
