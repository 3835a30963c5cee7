"""Bytes on the link, by hand."""

from __future__ import annotations

import pytest

from bench.perf.collectives.collective import wire_share
from bench.perf.table import algorithm_lines, nvls_used, uses_nvls
from tests.bench.canned import record, row


@pytest.mark.parametrize(
    ("collective", "algorithm", "protocol", "ranks", "share"),
    [
        ("all_reduce", "RING", "SIMPLE", 8, 1.75),
        ("all_reduce", "RING", "LL", 8, 3.5),
        ("all_reduce", "RING", "LL128", 4, 1.6),
        ("all_reduce", "TREE", "SIMPLE", 2, 1.0),
        ("all_reduce", "TREE", "SIMPLE", 4, 2.0),
        ("all_reduce", "NVLS", "SIMPLE", 8, 1.125),  # bus_bw counts 1.75: more than any link carries
        ("all_reduce", "AllReduce_AGxLL_R", "LL", 4, 6.0),
        ("all_gather", "PAT", "SIMPLE", 4, 0.75),
        ("reduce_scatter", "ReduceScatter_LDMC", "SIMPLE", 4, 1.0),
        ("broadcast", "RING", "SIMPLE", 4, 1.0),
    ],
)
def test_known_shares(collective: str, algorithm: str, protocol: str, ranks: int, share: float) -> None:
    assert wire_share(collective, algorithm, protocol, ranks, one_host=True) == pytest.approx(share)


@pytest.mark.parametrize(
    ("collective", "algorithm", "protocol", "one_host"),
    [
        ("all_reduce", "unknown", "unknown", True),
        ("all_reduce", "COLLNET_DIRECT", "SIMPLE", True),
        ("all_reduce", "NVLS", "SIMPLE", False),
        ("all_reduce", "TREE", "SIMPLE", False),
        ("alltoall", "RING", "SIMPLE", True),
        ("all_reduce", "RING", "SOMETHING_NEW", True),
    ],
)
def test_what_is_not_derived_is_unknown(collective: str, algorithm: str, protocol: str, one_host: bool) -> None:
    assert wire_share(collective, algorithm, protocol, 4, one_host=one_host) is None


def test_nvls_is_in_the_name_of_what_uses_it() -> None:
    names = ("NVLS", "NVLS_TREE", "AllReduce_RSxLDMC_AGxSTMC", "RING", "AllReduce_RSxLD_AGxST", "unknown")
    assert [uses_nvls(name) for name in names] == [True, True, True, False, False, None]


def test_a_table_says_whether_nvls_was_used_and_where() -> None:
    switch = {"algorithm": "NVLS", "wire_bw_gbs": 78.57}
    mixed = record([row(False), row(True), row(False, size_bytes=2097152, **switch), row(True, size_bytes=2097152)])
    assert nvls_used(mixed)
    assert list(algorithm_lines(mixed)) == [
        "NVLS used: yes (multicast: unknown)",
        "Algorithm 1048576 B: RING SIMPLE, wire bandwidth 1.750 x algbw",
        "Algorithm 2097152 B out of place: NVLS SIMPLE, wire bandwidth 1.125 x algbw",
        "Algorithm 2097152 B in place: RING SIMPLE, wire bandwidth 1.750 x algbw",
    ]


def test_one_silent_call_leaves_nvls_unknown() -> None:
    silent = row(True, algorithm="unknown", protocol="unknown", wire_bw_gbs=None)
    assert nvls_used(record([row(False), silent])) is None
    assert "unknown, wire bandwidth unknown" in list(algorithm_lines(record([row(False), silent])))[-1]
