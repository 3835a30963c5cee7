"""The decision on findings that are given: who is blamed, and who is not."""

from __future__ import annotations

import pytest

from trainer.resilience.detect import Finding, Kind
from trainer.resilience.policy import Incident, diagnose

NODES = ["a", "b", "c", "d"]


def killed(*nodes: str, kind: Kind = "killed") -> list[Finding]:
    return [Finding(kind, "cause", node, NODES.index(node), "was killed by signal 11", 5) for node in nodes]


def line(kind: Kind, *nodes: str) -> list[Finding]:
    return [Finding(kind, "evidence", node, NODES.index(node), f"a line about {node}", 9) for node in nodes]


# A job that loses its number or a peer crashes in most ranks (https://github.com/NVIDIA/Megatron-LM/issues/1880: -11).
@pytest.mark.parametrize("kind", ["corrupt", "named", "nan"])
def test_a_cause_that_has_a_place_goes_before_kills_on_most_nodes(kind: Kind) -> None:
    findings = [*killed("a", "b", "c"), *line(kind, "d")]
    assert diagnose(Incident(1, 8, findings), 4)[:2] == (kind, ("d",))


@pytest.mark.parametrize(
    "more",
    [
        [],
        line("named", "b"),  # it was killed as well, maybe before: named for that
        line("nan", "a", "b", "c", "d"),
        line("slow", "d"),
        [Finding("nan", "evidence", "", None, "on all ranks", 9)],
        [Finding("named", "note", "d", 3, "named, and a note only", 9)],
    ],
)
def test_kills_on_most_nodes_blame_none_where_nothing_else_has_a_place(more: list[Finding]) -> None:
    kind, nodes, reason, _ = diagnose(Incident(1, 8, [*killed("a", "b", "c"), *more]), 4)
    assert (kind, nodes) == ("killed", ())
    assert reason.startswith("on most nodes at once")
