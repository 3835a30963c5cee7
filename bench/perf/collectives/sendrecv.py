"""`sendrecv_perf`: every rank sends its buffer to the next one and receives the previous one's: a ring of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import perf_command

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    backend.sendrecv(call.recv, call.send)


COLLECTIVE = Collective(
    name="sendrecv",
    summary="Every rank sends its buffer to the next rank and receives the previous rank's.",
    bus_factor=lambda _: 1.0,
    launch=_launch,
    expect=lambda place: [Part((place.rank - 1) % place.ranks, 0)],
    shows_op=True,
    checks_in_place=False,  # one buffer cannot be sent and overwritten at once
    min_ranks=2,
)
command = perf_command(COLLECTIVE)
