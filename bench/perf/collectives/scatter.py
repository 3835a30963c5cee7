"""`scatter_perf`: rank r ends with part r of the root's buffer. The size is the root's whole buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.scatter(call.recv, call.send, call.root)


COLLECTIVE = Collective(
    name="scatter",
    summary="Rank r ends with part r of the root's buffer.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=lambda place: [Part(place.root, place.rank * place.count)],
    sends_all=True,
    has_root=True,
)
command = perf_command(COLLECTIVE)
