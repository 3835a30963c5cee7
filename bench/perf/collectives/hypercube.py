"""`hypercube_perf`: an all-gather in log2(n) exchanges, each with the rank across one dimension of a cube.

The size is the whole result. As in nccl-tests, alg_bw and bus_bw are both what a rank receives from others over the
time. Where we differ: nccl-tests skips other numbers of ranks than powers of two and ends well, we refuse them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.perf.collectives.collective import Collective, Part
from bench.perf.options import PerfOptions, flag_name, perf_command
from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    rank, part, gathered = backend.rank, call.send.numel(), 1
    backend.copy(call.recv[rank * part :][:part], call.send)
    while gathered < backend.ranks:
        peer = rank ^ gathered
        # Where the parts gathered so far begin, of this rank and of its peer.
        own_start, peer_start = (first & ~(gathered - 1) for first in (rank, peer))
        received = call.recv[peer_start * part :][: gathered * part]
        backend.exchange(received, peer, call.recv[own_start * part :][: gathered * part], peer)
        gathered *= 2


def _check(options: PerfOptions, ranks: int) -> None:
    del options
    if ranks & (ranks - 1):
        rule = "hypercube needs a power of two of ranks"
        raise ConfigError(flag_name("ngpus"), ranks, rule, f"give -g {1 << ranks.bit_length() - 1}")


COLLECTIVE = Collective(
    name="hypercube",
    summary="Every rank ends with the parts of all ranks in order, by exchanges along the edges of a cube.",
    bus_factor=lambda _: 1.0,
    alg_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=lambda place: [Part(source, 0) for source in range(place.ranks)],
    receives_all=True,
    check=_check,
    one_launch=False,
)
command = perf_command(COLLECTIVE)
