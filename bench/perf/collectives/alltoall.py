"""`alltoall_perf`: part j of rank i becomes part i of rank j. The size is one rank's whole buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.alltoall(call.recv, call.send)


COLLECTIVE = Collective(
    name="alltoall",
    summary="Part j of rank i becomes part i of rank j.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=lambda place: [Part(source, place.rank * place.count) for source in range(place.ranks)],
    sends_all=True,
    receives_all=True,
    checks_in_place=False,  # parts would be overwritten before they are sent
)
command = perf_command(COLLECTIVE)
