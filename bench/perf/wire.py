"""Wire share of NCCL's algorithms: the bytes that the busiest rank sends or receives on its link, over the size.

Times alg_bw it is the wire bandwidth: what to hold against the line rate, which bus_bw may exceed where the switch
reduces (NVLS). What is not derived here is unknown: calls between two ranks, of which NCCL's log does not tell the
protocol, trees and NVLS over several hosts, CollNet.
"""

from __future__ import annotations

from collections.abc import Callable

# Bytes on the link for each byte of data: LL sends 4 bytes with a flag of 4, LL128 120 in lines of 128.
_PROTOCOLS = {"SIMPLE": 1.0, "LL": 2.0, "LL128": 128 / 120}
_RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "reduce": lambda _: 1.0,
}
_EXCHANGE = {name: _RING[name] for name in ("all_reduce", "all_gather", "reduce_scatter")}
# The switch fetches every rank's whole buffer to reduce it and writes the result to every rank; of both, a rank's own
# part crosses its link as well.
_IN_SWITCH = {
    "all_reduce": lambda n: 1 + 1 / n,
    "all_gather": lambda _: 1.0,
    "reduce_scatter": lambda _: 1.0,
}
_SHARES: dict[str, dict[str, Callable[[int], float]]] = {
    "RING": _RING,
    "PAT": {name: _RING[name] for name in ("all_gather", "reduce_scatter")},
    # On one host a tree is a chain: its inner ranks pass everything on, up and down.
    "TREE": {"all_reduce": lambda n: 2.0 if n > 2 else 1.0},
    "NVLS": _IN_SWITCH,
    # Symmetric kernels: ST and LD move parts between pairs of ranks, MC goes through the switch.
    "AllReduce_AGxLL_R": {"all_reduce": lambda n: n - 1.0},
    "AllReduce_AGxLLMC_R": {"all_reduce": lambda n: float(n)},
    "AllReduce_RSxLD_AGxST": _EXCHANGE,
    "AllReduce_RSxLDMC_AGxSTMC": _IN_SWITCH,
    "AllGather_LL": _EXCHANGE,
    "AllGather_LLMC": _IN_SWITCH,
    "AllGather_ST": _EXCHANGE,
    "AllGather_STMC": _IN_SWITCH,
    "ReduceScatter_LL": _EXCHANGE,
    "ReduceScatter_LD": _EXCHANGE,
    "ReduceScatter_LDMC": _IN_SWITCH,
}
_ON_ONE_HOST = ("TREE", "NVLS")


def wire_share(collective: str, algorithm: str, protocol: str, ranks: int, *, one_host: bool) -> float | None:
    """Bytes on the busiest rank's link over the size of a collective; None where it is not known.

    Args:
        algorithm, protocol: in NCCL's words, as its log has them.
    """
    if algorithm in _ON_ONE_HOST and not one_host:
        return None
    share, overhead = _SHARES.get(algorithm, {}).get(collective), _PROTOCOLS.get(protocol)
    return None if share is None or overhead is None else share(ranks) * overhead
