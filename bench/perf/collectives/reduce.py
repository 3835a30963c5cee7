"""`reduce_perf`: the root ends with the reduction of all ranks' buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.reduce(call.recv, call.send, call.op, call.root)


COLLECTIVE = Collective(
    name="reduce",
    summary="The root ends with the reduction of all ranks' buffers.",
    bus_factor=lambda _: 1.0,
    launch=_launch,
    expect=lambda place: [Part(None, 0)] if place.rank == place.root else [],
    reduces=True,
    has_root=True,
)
command = perf_command(COLLECTIVE)
