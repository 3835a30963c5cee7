"""The decision on findings that are given: who is blamed, and who is not."""

from __future__ import annotations

import pytest

from netlayer.config.resilience import ResilienceConfig
from trainer.resilience.detect import Finding, Kind
from trainer.resilience.machine import Facts
from trainer.resilience.policy import Incident, decide, diagnose

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


def test_a_lost_number_is_told_with_the_step_at_which_it_was_lost_before() -> None:
    facts = Facts(members=NODES)
    first = Incident(1, 99, line("nan", "a"), detected_s=1.0)
    first.decision = decide(first, facts, ResilienceConfig(), 0).to_json()
    facts.incidents = [first.to_json()]
    decision = decide(Incident(2, 100, line("nan", "b"), detected_s=2.0), facts, ResilienceConfig(), 0)
    assert decision.action == "give_up"
    assert "it was lost after step 99 before, on a: it comes from the job or its data" in decision.reason
