"""Peer groups, verdicts on few or scattered peers, and the common host of slow runs over several hosts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from bench.accept.evidence.log import Figure
from bench.accept.judge.peers import Comparison, Measured, compare_peers
from netlayer.verdict import Finding

SIZES = (64 << 20, 1 << 30)


def run(node: str, value: float, file: str = "", series: str = "all_reduce, 8 ranks", **facts: Any) -> list[Measured]:
    known = {"quantity": "bus_bw_gbs", "collective": "all_reduce", "device": "NVIDIA H100", "ranks": 8, "hosts": 1}
    known = {key: fact for key, fact in (known | facts).items() if fact is not None}
    return [
        Measured(file or f"{node}.txt", "nccl-tests",
                 Figure(series, str(size), node, value * factor, "GB/s bus", 1, facts=known | {"bytes": size}), node)
        for size, factor in zip(SIZES, (0.9, 1.0), strict=True)
    ]  # fmt: skip


def pair(hosts: Iterable[str], value: float, file: str = "") -> list[Measured]:
    parts = tuple(hosts)
    facts = {"quantity": "bus_bw_gbs", "collective": "all_reduce", "device": "NVIDIA H100", "ranks": 16, "hosts": 2}
    return [
        Measured(file or f"{'_'.join(parts)}.txt", "nccl-tests",
                 Figure("all_reduce, 16 ranks", str(size), f"{parts[0]}..{parts[-1]} (2 hosts)", value * factor,
                        "GB/s bus", 1, parts=parts, facts=facts | {"bytes": size}))
        for size, factor in zip(SIZES, (0.8, 1.0), strict=True)
    ]  # fmt: skip


def compare(*groups: list[Measured]) -> Comparison:
    return compare_peers([one for group in groups for one in group])


def bad(comparison: Comparison) -> list[Finding]:
    return [finding for finding in comparison.findings if finding.verdict in ("WARN", "FAIL")]


def test_the_odd_one_of_four_is_named() -> None:
    comparison = compare(run("a", 470), run("b", 468), run("c", 300), run("d", 472))
    [finding] = bad(comparison)
    assert (finding.verdict, finding.subject) == ("FAIL", "c")
    assert len(comparison.judged) == 4


def test_two_that_differ_by_far_warn_and_name_nobody_as_bad() -> None:
    [finding] = bad(compare(run("a", 470), run("b", 260)))
    assert (finding.verdict, finding.subject) == ("WARN", "b and a")
    assert "too few to tell" in finding.expected
    assert "1.81 times" in finding.figure


def test_three_similar_nodes_are_not_judged() -> None:
    comparison = compare(run("a", 470), run("b", 468), run("c", 465))
    assert (comparison.findings, comparison.judged) == ((), frozenset())
    assert "2 others did the same work; 4 alike" in next(iter(comparison.notes.values()))


def test_a_fleet_that_scatters_does_not_pass() -> None:
    comparison = compare(*(run(f"n{at}", value) for at, value in enumerate((260, 300, 380, 430, 470))))
    [finding] = bad(comparison)
    assert (finding.verdict, finding.subject) == ("WARN", "5 like n0")
    assert not [one for one in comparison.findings if one.verdict == "PASS"]


def test_where_most_are_slow_the_fast_ones_do_not_make_it_a_pass() -> None:
    comparison = compare(*(run(f"n{at}", value) for at, value in enumerate((260, 261, 262, 470))))
    assert [finding.verdict for finding in comparison.findings] == ["WARN"]


def test_repeats_of_a_node_are_no_peers() -> None:
    repeats = [run("a", value, f"a{at}.txt") for at, value in enumerate((470, 471, 469, 472))]
    assert compare(*repeats).judged == frozenset()
    # Three nodes, each measured three times, are still three.
    many = [run(node, 470 + at, f"{node}{at}.txt") for node in "abc" for at in range(3)]
    assert compare(*many).judged == frozenset()


def test_a_node_whose_repeats_differ_is_unsteady() -> None:
    [finding] = bad(compare(run("a", 470, "a0.txt"), run("a", 260, "a1.txt")))
    assert (finding.verdict, finding.subject, "repeats" in finding.check) == ("WARN", "a", True)


def test_one_bad_repeat_of_three_does_not_make_its_node_slow() -> None:
    healthy = [run(node, 470) for node in "bcde"]
    findings = bad(compare(run("a", 471, "a0.txt"), run("a", 300, "a1.txt"), run("a", 470, "a2.txt"), *healthy))
    assert [(finding.verdict, "repeats" in finding.check) for finding in findings] == [("WARN", True)]


@pytest.mark.parametrize(
    ("key", "other"),
    [("device", "NVIDIA H200"), ("nccl", 21805), ("nvls", True), ("graph", True), ("ranks", 4)],
)
def test_different_facts_make_no_peers(key: str, other: object) -> None:
    same = [run(node, 470) for node in "abcd"]
    assert bad(compare(*same, run("e", 300, **{key: other}))) == []
    assert [finding.subject for finding in bad(compare(*same, run("e", 300)))] == ["e"]


@pytest.mark.parametrize("key", ["collective", "device", "ranks"])
def test_runs_with_missing_facts_are_compared_with_nothing(key: str) -> None:
    comparison = compare(
        *(run(node, value, **{key: None}) for node, value in zip("abcde", (1, 9, 9, 9, 9), strict=True))
    )
    assert (comparison.findings, comparison.judged) == ((), frozenset())


def test_the_common_host_of_slow_pairs_is_named_and_none_of_a_single_slow_pair() -> None:
    comparison = compare(
        pair(("n1", "n2"), 49), pair(("n3", "n4"), 87), pair(("n5", "n6"), 88), pair(("n6", "n7"), 49),
        pair(("n7", "n4"), 50),
    )  # fmt: skip
    findings = {finding.subject: finding for finding in bad(comparison)}
    assert set(findings) == {"n7", "either of n1 and n2"}
    assert (findings["n7"].verdict, findings["either of n1 and n2"].verdict) == ("FAIL", "WARN")
    assert "drain n7" in findings["n7"].next_step
    assert "drain neither" in findings["either of n1 and n2"].next_step
    # Two fast pairs are no yardstick for themselves.
    [fast] = [finding for finding in comparison.findings if finding.subject == "4 hosts in 2 runs"]
    assert fast.verdict == "NO VERDICT"


def test_the_common_host_is_named_though_no_fast_pair_has_its_partners() -> None:
    [finding] = bad(compare(pair("ab", 200), pair("ac", 205), pair("de", 380), pair("fg", 382), pair("hi", 379)))
    assert (finding.verdict, finding.subject) == ("FAIL", "a")


def test_one_slow_pair_of_many_fails_and_both_hosts_are_candidates() -> None:
    [finding] = bad(compare(pair("ab", 200), pair("cd", 380), pair("ef", 382), pair("gh", 379)))
    assert (finding.verdict, finding.subject) == ("FAIL", "either of a and b")


def test_a_partner_that_is_fast_elsewhere_is_cleared() -> None:
    [finding] = bad(compare(pair("ab", 200), pair("bc", 380), pair("cd", 382), pair("de", 379)))
    assert finding.subject == "a, or its path to b"
    assert "drain nothing" in finding.next_step


def test_two_hosts_that_are_fast_elsewhere_leave_the_path_between_them() -> None:
    [finding] = bad(compare(pair("ab", 200), pair("bc", 380), pair("ad", 382), pair("de", 379)))
    assert (finding.verdict, finding.subject) == ("WARN", "the path between a and b")


def test_the_same_pair_again_is_a_repeat() -> None:
    findings = bad(
        compare(pair("ab", 200), pair("ba", 201, "again.txt"), pair("cd", 380), pair("ef", 382), pair("gh", 379))
    )
    assert [finding.subject for finding in findings] == ["either of a and b"]


def test_few_or_similar_pairs_have_no_bad_finding() -> None:
    assert compare(pair("ab", 380), pair("cd", 382)).judged == frozenset()
    two = bad(compare(pair("ab", 200), pair("cd", 382)))
    assert [(finding.verdict, finding.subject) for finding in two] == [("WARN", "either of a and b")]
    many = compare(pair("ab", 380), pair("cd", 382), pair("ef", 377), pair("gh", 379))
    assert [finding.verdict for finding in many.findings] == ["PASS"]
    scattered = bad(compare(pair("ab", 300), pair("cd", 330), pair("ef", 365), pair("gh", 400)))
    assert [finding.verdict for finding in scattered] == ["WARN"]


def test_exactly_the_slow_host_is_named_and_healthy_fleets_pass() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        hosts = [f"h{at}" for at in range(dice.randint(6, 16))]
        slow = dice.choice(hosts) if seed % 2 else ""
        pairs = []
        for turn in range(2):  # in two rounds everybody has two partners
            ring = hosts[turn:] + hosts[:turn]
            pairs += [pair((ring[at], ring[at + 1]), dice.gauss(380, 4) * (0.6 if slow in ring[at : at + 2] else 1))
                      for at in range(0, len(ring) - 1, 2)]  # fmt: skip
        suspects = [finding.subject for finding in bad(compare(*pairs))]
        if not slow:
            assert suspects == [], seed
            continue
        num_runs = sum(slow in one[0].figure.parts for one in pairs)
        assert len(suspects) == 1, seed
        assert suspects[0] == slow if num_runs > 1 else slow in suspects[0], seed
