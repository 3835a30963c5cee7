"""`broadcast_perf`: every rank ends with the root's buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.broadcast(call.recv, call.send, call.root)


COLLECTIVE = Collective(
    name="broadcast",
    summary="Every rank ends with the root's buffer.",
    bus_factor=lambda _: 1.0,
    launch=_launch,
    expect=lambda place: [Part(place.root, 0)],
    has_root=True,
)
command = perf_command(COLLECTIVE)
