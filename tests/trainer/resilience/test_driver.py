"""The driver on a simulated fleet: each fault is answered as the policy says, and each crash of its own survived."""

from __future__ import annotations

import errno
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netlayer.errors import ConfigError
from trainer.resilience.bus import TAKE
from trainer.resilience.detect import View
from trainer.resilience.executor import Executor
from trainer.resilience.folder import RunFolder
from trainer.resilience.journal import Journal, entries
from trainer.resilience.link import MAX_READS
from trainer.resilience.machine import TERMINAL, Event, State
from trainer.resilience.messages import Beacon, Heartbeat, seal, unseal
from trainer.resilience.rules import load_rules, match
from trainer.resilience.status import facts, lines

from .fleet import TICK_S, FakeNode, Fleet


def test_a_healthy_run_ends_without_an_incident(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []
    assert fleet.driver.facts.evicted == {}
    assert [incarnation for incarnation, _ in fleet.starts] == [1] * 4


def kill(node: FakeNode) -> None:
    node.die(-9)


def stop(node: FakeNode) -> None:
    node.is_stopped = True


def raise_(node: FakeNode) -> None:
    node.die(1)
    for peer in node.fleet.nodes.values():
        if peer is not node and peer.runs:
            peer.die(1)
            peer.log("symptom", "Connection closed by peer", rank=node.fleet.rank_of(peer))


def lose_number(node: FakeNode) -> None:
    rank = node.fleet.rank_of(node)
    for each in node.fleet.nodes.values():
        each.log("nan", f"the loss is nan on rank {rank}", rank=node.fleet.rank_of(each), names=(rank,))
        each.die(1)


def hang(node: FakeNode) -> None:
    """The rank neither ends nor steps, and its peers name it."""
    rank = node.fleet.rank_of(node)
    for peer in node.fleet.nodes.values():
        if peer is not node:
            peer.die(1)
            peer.log("named", f"rank {rank} does not answer", rank=node.fleet.rank_of(peer), names=(rank,))


def hardware(node: FakeNode) -> None:
    node.log("hardware", "NVRM: Xid 79", rank=None)


def corrupt(node: FakeNode) -> None:
    rank = node.fleet.rank_of(node)
    for each in node.fleet.nodes.values():
        each.log("corrupt", f"rank {rank} has other parameters", rank=node.fleet.rank_of(each), names=(rank,))
        each.die(1)


def freeze(node: FakeNode) -> None:
    node.is_frozen = True


@pytest.mark.parametrize(
    ("fault", "action", "kind"),
    [
        (kill, "retry", "killed"),
        (stop, "retry", "stopped"),
        (raise_, "retry", "exited"),
        (lose_number, "retry", "nan"),
        (hang, "retry", "named"),
        (hardware, "evict", "hardware"),
        (corrupt, "evict", "corrupt"),
        (freeze, "evict", "node_lost"),
    ],
)
def test_a_fault_is_blamed_on_its_node_and_the_run_goes_on(
    fault: Callable[[FakeNode], None], action: str, kind: str, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(12)
    node = fleet.node(2)
    fault(node)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [(action, kind, [node.name])]
    assert list(fleet.driver.facts.evicted) == ([node.name] if action == "evict" else [])
    [incident] = fleet.driver.facts.incidents
    assert 0 < incident["detected_s"] <= incident["suspended_s"] <= incident["diagnosed_s"] < incident["resumed_s"]
    assert incident["resumed_s"] <= incident["caught_up_s"]


def test_a_process_that_is_killed_is_answered_within_a_heartbeat(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    fleet.node(1).die(-9)
    at_s = fleet.clock.now_s
    fleet.until_state(State.SUSPEND)
    assert fleet.clock.now_s - at_s < 1.0


def test_a_second_fault_of_the_same_node_evicts_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    name = fleet.node(1).name
    fleet.node(1).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(16)
    fleet.node(1).die(-9)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [name]), ("evict", "killed", [name])]
    assert list(fleet.driver.facts.evicted) == [name]


def test_two_nodes_that_fail_at_once_are_both_blamed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    both = [fleet.node(0), fleet.node(3)]
    both[0].die(-9)
    both[1].log("hardware", "NVRM: Xid 79", rank=None)
    fleet.until_state(State.RUN)
    assert fleet.finish() is State.COMPLETED
    blamed = {name for _, _, names in fleet.decisions for name in names}
    assert both[1].name in blamed
    assert set(fleet.driver.facts.evicted) == {both[1].name}


def test_a_fault_during_the_repair_is_another_incident(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    first, second = fleet.node(0), fleet.node(1)
    first.die(-9)
    fleet.until_state(State.START)
    fleet.until(lambda: second.runs)
    second.die(-9)
    assert fleet.finish() is State.COMPLETED
    assert [names for _, _, names in fleet.decisions] == [[first.name], [second.name]]


def test_a_lost_number_that_comes_again_elsewhere_is_the_jobs(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for rank in (1, 2):
        fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.driver.view.step == 12)
        lose_number(fleet.node(rank))
        fleet.until(lambda: fleet.driver.facts.state is not State.RUN)
    assert fleet.finish() is State.FAILED
    assert "it comes from the job or its data" in fleet.driver.facts.reason
    assert fleet.driver.facts.evicted == {}


def fail_at_step_12(fleet: Fleet, fault: Callable[[FakeNode], None], node: Callable[[], FakeNode]) -> State:
    """Let a fault come whenever step 12 is taken, for as long as the run goes on."""
    for _ in range(20):
        fleet.until(lambda: fleet.driver.facts.state in (State.RUN, *TERMINAL))
        fleet.until(lambda: fleet.driver.facts.state in TERMINAL or fleet.driver.view.step == 12)
        if fleet.driver.facts.state in TERMINAL:
            return fleet.driver.facts.state
        if not node().runs:
            return fleet.finish()
        fault(node())
        fleet.until(lambda: fleet.driver.facts.state is not State.RUN)
    raise AssertionError(fleet.decisions)


# ByteRobust (https://arxiv.org/abs/2509.16293) finds many faults of processes to be the program's, at one step of it.
def test_a_fault_that_goes_with_the_rank_evicts_nobody(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=2)
    assert fail_at_step_12(fleet, raise_, lambda: fleet.node(1)) is State.FAILED
    assert "brought no new step" in fleet.driver.facts.reason
    assert fleet.driver.facts.evicted == {}
    assert len({name for _, _, [name] in fleet.decisions}) > 1


def test_a_fault_that_went_with_the_rank_is_not_held_against_its_nodes_later(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=2)
    blamed = []
    for _ in range(3):
        fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.driver.view.step == 12)
        blamed.append(fleet.node(1))
        raise_(blamed[-1])
        fleet.until_not(State.RUN)
    assert blamed[0] is blamed[1] is not blamed[2]
    fleet.until_step(20)
    raise_(blamed[0])  # a fault of its own, elsewhere
    fleet.until_not(State.RUN)
    fleet.until_step(28)
    raise_(blamed[2])
    assert fleet.finish() is State.COMPLETED
    assert fleet.driver.facts.evicted == {}
    assert [(action, name) for action, _, [name] in fleet.decisions[3:]] == [
        ("retry", blamed[0].name),
        ("retry", blamed[2].name),
    ]


def test_a_fault_that_stays_with_the_node_evicts_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(2)
    culprit = fleet.node(1)
    assert fail_at_step_12(fleet, raise_, lambda: culprit) is State.COMPLETED
    assert fleet.decisions == [("retry", "exited", [culprit.name])] * 2 + [("evict", "exited", [culprit.name])]
    assert list(fleet.driver.facts.evicted) == [culprit.name]


@pytest.mark.parametrize("later", [0, 1])
def test_a_fault_that_went_with_the_rank_counts_against_neither_node_later(later: int, tmp_path: Path) -> None:
    """Rank 1 fails twice at a step, and once more with another node's; each of the two nodes is killed once, later."""
    fleet = Fleet(tmp_path, spares=2)
    for _ in range(3):
        fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.driver.view.step == 12)
        raise_(fleet.node(1))
        fleet.until_not(State.RUN)
    fleet.until_state(State.RUN)
    [first, _, other] = [name for _, _, [name] in fleet.decisions]
    assert first != other
    fleet.until_step(30)
    name = (first, other)[later]
    fleet.nodes[name].die(-9)
    fleet.until_not(State.RUN)
    fleet.until_step(36)
    assert fleet.decisions[3:] == [("retry", "killed", [name])]
    assert fleet.driver.facts.evicted == {}
    fleet.nodes[name].die(-9)  # what is its own counts as ever
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions[4:] == [("evict", "killed", [name])]


@pytest.mark.parametrize("goes", ["evicted by hand", "lost"])
def test_a_fault_that_went_with_the_rank_to_a_third_node_is_not_held_against_the_first(
    goes: str, tmp_path: Path
) -> None:
    """Two nodes change places, the second leaves the run before the step, and the fault comes in its successor."""
    fleet = Fleet(tmp_path, spares=2)
    for _ in range(2):
        fleet.until_step(12)
        raise_(fleet.node(1))
        fleet.until_not(State.RUN)
    fleet.until_state(State.RUN)
    [first, _] = [name for _, _, [name] in fleet.decisions]
    second = fleet.node(1).name
    if goes == "lost":
        fleet.node(1).is_dead = True
    else:
        fleet.folder.ask("evict", second)
    fleet.until_not(State.RUN)
    fleet.until_step(12)
    third = fleet.node(1).name
    raise_(fleet.node(1))
    fleet.until_not(State.RUN)
    fleet.until_step(30)
    assert len({first, second, third}) == 3
    assert fleet.decisions[3:] == [("retry", "exited", [third])]
    for name in (first, third):  # the first fault of its own, of either
        fleet.nodes[name].die(-9)
        fleet.until_not(State.RUN)
        fleet.until_step(fleet.driver.facts.furthest_step + 4)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions[4:] == [("retry", "killed", [first]), ("retry", "killed", [third])]
    assert list(fleet.driver.facts.evicted) == [second]


def test_a_node_that_is_lost_where_another_failed_does_not_acquit_that_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=2)
    for _ in range(2):
        fleet.until_step(12)
        raise_(fleet.node(1))
        fleet.until_not(State.RUN)
    fleet.until_step(12)
    [first, _] = [name for _, _, [name] in fleet.decisions]
    fleet.node(1).is_dead = True  # it has changed places with the first
    fleet.until_not(State.RUN)
    fleet.until_step(12)
    raise_(fleet.nodes[first])
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions[3:] == [("evict", "exited", [first])]


def test_a_fault_that_goes_with_the_rank_does_not_evict_a_node_that_had_one_before(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, spares=1)
    fleet.until_step(6)
    other = fleet.node(0).name
    fleet.node(0).die(-9)
    fleet.until_not(State.RUN)
    for _ in range(3):
        fleet.until_step(12)
        raise_(fleet.node(1))
        fleet.until_not(State.RUN)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions[0] == ("retry", "killed", [other])
    assert fleet.decisions[3] == ("retry", "exited", [other])
    assert "it goes with the ranks" in fleet.driver.facts.incidents[3]["decision"]["reason"]
    assert fleet.driver.facts.evicted == {}


def test_a_number_that_is_always_lost_on_one_rank_is_the_jobs(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    assert fail_at_step_12(fleet, lose_number, lambda: fleet.node(1)) is State.FAILED
    assert "it comes from the job or its data" in fleet.driver.facts.reason
    assert fleet.driver.facts.evicted == {}
    assert [action for action, _, _ in fleet.decisions] == ["retry", "retry", "give_up"]


def test_a_number_that_one_node_alone_loses_evicts_nobody(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=1, spares=1)
    assert fail_at_step_12(fleet, lose_number, lambda: fleet.node(0)) is State.FAILED
    assert fleet.driver.facts.evicted == {}


# A scheduler that ends its step (https://github.com/pytorch/pytorch/issues/88251: every rank gets a SIGTERM), a program
# that crashes in all ranks (https://github.com/NVIDIA/Megatron-LM/issues/1880: -11), a model too large for the GPUs.
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGSEGV, None])
def test_processes_killed_on_most_nodes_at_once_blame_none(signum: int | None, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=2)
    for step in (8, 16, 24):
        fleet.until_step(step)
        for rank in range(4):
            if signum is None:
                fleet.node(rank).log("memory", "torch.OutOfMemoryError: CUDA out of memory", rank=rank)
            fleet.node(rank).die(1 if signum is None else -signum)
        fleet.until_not(State.RUN)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "memory" if signum is None else "killed", [])] * 3
    assert fleet.driver.facts.evicted == {}


# A scheduler or launcher ends all ranks, the faulty one's too. That one is only "named" says nothing then.
@pytest.mark.parametrize("kind", ["nan", "corrupt"])
def test_who_is_named_is_blamed_though_all_processes_are_killed(kind: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(8)
    node = fleet.node(2)
    for rank in range(4):
        if rank != 2:
            fleet.node(rank).log(kind, "rank 2 does not answer", rank=rank, names=(2,))
        fleet.node(rank).die(-signal.SIGTERM)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("evict" if kind == "corrupt" else "retry", kind, [node.name])]


def test_ranks_that_name_each_other_while_all_are_killed_blame_none(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(8)
    for rank in range(4):
        other = (rank + 1) % 4
        fleet.node(rank).log("named", f"rank {other} does not answer", rank=rank, names=(other,))
        fleet.node(rank).die(-signal.SIGTERM)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [])]


# https://github.com/horovod/horovod/pull/2829: one rank is killed, and its peers abort when they lose it.
def test_peers_that_abort_when_one_is_killed_are_not_blamed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    name = fleet.node(2).name
    for rank in (0, 1, 3):
        fleet.node(rank).die(-signal.SIGABRT)
    fleet.clock.now_s += 0.2
    fleet.node(2).die(-signal.SIGKILL)  # seen last
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [name])]


def test_a_loss_that_is_lost_on_all_ranks_blames_no_node(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    line = "error: step 13: the loss is " + ", ".join(f"nan on rank {rank} (dp={rank})" for rank in range(4))
    for _ in range(2):
        fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.driver.view.step == 12)
        for rank in range(4):
            found = match(load_rules(), "rank", line, rank, fleet.node(rank).now_ns())
            assert found is not None
            fleet.node(rank).matches.append(found)
            fleet.node(rank).step = 12
            fleet.node(rank).die(1)
        fleet.until(lambda: fleet.driver.facts.state is not State.RUN)
    assert fleet.finish() is State.FAILED
    assert fleet.decisions == [("retry", "nan", []), ("give_up", "nan", [])]
    assert fleet.driver.facts.evicted == {}


def test_a_wrong_job_is_not_started_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_state(State.START)
    fleet.until(lambda: all(node.runs for node in fleet.nodes.values()))
    for node in fleet.nodes.values():
        node.die(2)
    assert fleet.finish() is State.FAILED
    assert "no restart repairs that" in fleet.driver.facts.reason
    assert fleet.driver.facts.evicted == {}


def test_restarts_without_a_new_step_come_to_an_end(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, max_fruitless=3, retries_in_place=100)
    fleet.until_step(12)
    while fleet.driver.facts.state not in TERMINAL:
        if fleet.driver.facts.state in (State.START, State.RUN) and fleet.node(0).runs:
            fleet.node(0).die(-9)
        fleet.tick()
    assert fleet.driver.facts.state is State.FAILED
    assert "brought no new step" in fleet.driver.facts.reason
    pauses = [
        entry["evidence"]["backoff_s"] for entry in entries(fleet.folder.journal) if entry["event"] == "decided: retry"
    ]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 0


def test_evictions_by_hand_are_no_restarts_in_vain(tmp_path: Path) -> None:
    # As https://github.com/kubernetes-sigs/jobset/issues/976: what an operator does must not use up what faults may.
    fleet = Fleet(tmp_path, max_fruitless=2)
    for number in range(1, 6):
        fleet._stepped_s = fleet.clock.now_s + 1e6  # no step is taken meanwhile
        fleet.until_state(State.START)
        fleet.folder.ask("evict", fleet.node(1).name)
        fleet.until(lambda: len(fleet.decisions) == number)  # noqa: B023 - it is called here alone
    assert {(action, kind) for action, kind, _ in fleet.decisions} == {("evict", "asked")}
    assert fleet.driver.facts.fruitless == 0
    fleet._stepped_s = 0.0
    assert fleet.finish() is State.COMPLETED


def test_a_stop_tells_the_step_that_the_run_is_at_and_not_one_before_a_fault(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(24)
    fleet.saved = 5  # as where the disk was full since
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_state(State.RUN)
    fleet.driver.ask_to_stop()
    fleet.until_state(State.STOPPED)
    done = int(fleet.driver.facts.reason.rpartition(" ")[2])
    assert fleet.saved <= done < 24 <= fleet.driver.facts.furthest_step


def test_a_process_that_no_signal_ends_costs_its_node_and_not_the_run(tmp_path: Path) -> None:
    # https://github.com/pytorch/pytorch/pull/185414: the agent waited for ever for a process in the kernel's hands.
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    stuck = fleet.node(2)
    stuck.is_unkillable = True
    fleet.node(0).die(-9)
    assert fleet.finish() is State.COMPLETED
    assert list(fleet.driver.facts.evicted) == [stuck.name]
    assert "not ended after" in fleet.driver.facts.evicted[stuck.name]
    assert stuck.is_dead


def test_an_unclear_hang_is_retried_and_then_isolated(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=4, spares=2, max_fruitless=20)
    fleet.until_step(6)
    culprit = fleet.node(3).name
    # It hangs the job in silence whenever it takes part.
    for _ in range(4000):
        hangs = any(node.name == culprit and node.runs and node.step >= 5 for node in fleet.nodes.values())
        fleet._stepped_s = fleet.clock.now_s if hangs else fleet._stepped_s
        fleet.tick()
        if fleet.driver.facts.state in TERMINAL:
            break
    assert fleet.driver.facts.state is State.COMPLETED
    assert [(action, kind) for action, kind, _ in fleet.decisions][:2] == [("retry", "hung"), ("evict", "hung")]
    assert culprit in fleet.driver.facts.evicted
    assert all(names == [] for _, _, names in fleet.decisions)  # nobody was accused


def test_a_slow_node_that_holds_up_all_others_is_evicted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=200, slow_steps=5, slow_floor_s=5.0)
    fleet.until_step(12)
    fleet.node(0).die(-9)  # so that the typical step is known from an incarnation before
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(20)
    slow = fleet.node(2)
    fleet.step_ms, slow.exposed = 1500.0, 0.05
    fleet.until(lambda: len(fleet.decisions) == 2)
    assert fleet.decisions[1] == ("evict", "slow", [slow.name])


def test_a_slow_node_is_found_in_a_run_that_was_never_restarted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=600, slow_steps=5, slow_floor_s=100.0)
    fleet.until_step(80)
    slow = fleet.node(2)
    fleet.step_ms, slow.exposed = 1500.0, 0.05
    fleet.until(lambda: len(fleet.decisions) == 1)
    assert fleet.decisions == [("evict", "slow", [slow.name])]
    assert fleet.driver.facts.step_ms == 500.0  # though most steps were slow ones


def test_a_rank_that_is_slow_on_the_next_node_too_is_no_nodes_fault(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=200, slow_steps=5, slow_floor_s=5.0)
    fleet.until_step(30)
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(40)
    fleet.step_ms = 1500.0
    while fleet.driver.facts.state not in TERMINAL:
        for node in fleet.nodes.values():
            node.exposed = 0.05 if fleet.rank_of(node) == 2 and node.name in fleet.driver.facts.members else 0.5
        fleet.tick()
    assert [(action, kind) for action, kind, _ in fleet.decisions] == [("retry", "killed"), ("evict", "slow")]
    noted = [entry["evidence"]["finding"] for entry in entries(fleet.folder.journal) if entry["event"] == "noted"]
    assert "before its node was evicted" in noted[-1]["text"]


def test_a_slow_node_stays_where_nobody_could_take_its_place(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=120, slow_steps=5, slow_floor_s=5.0, replace=False)
    fleet.until_step(30)
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(40)
    fleet.step_ms, fleet.node(2).exposed = 1500.0, 0.05
    assert fleet.finish() is State.COMPLETED
    assert len(fleet.decisions) == 1
    noted = [entry["evidence"]["finding"] for entry in entries(fleet.folder.journal) if entry["event"] == "noted"]
    assert any("there is no standby" in each["text"] for each in noted)


def test_everybody_slow_in_turn_evicts_nobody(tmp_path: Path) -> None:
    """A busy machine: in each look another rank waits least, by a lot."""
    fleet = Fleet(tmp_path, steps=120, slow_steps=5, slow_floor_s=5.0)
    fleet.until_step(12)
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(20)
    fleet.step_ms, draw = 1500.0, random.Random(1)
    while fleet.driver.facts.state is State.RUN:
        for node in fleet.nodes.values():
            node.exposed = draw.choice([0.05, 0.6, 0.7])
        fleet.tick()
    assert fleet.finish() is State.COMPLETED
    assert len(fleet.decisions) == 1
    assert fleet.driver.facts.evicted == {}


def test_a_rank_that_does_not_explain_the_lost_time_is_not_blamed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=60, slow_steps=5, slow_floor_s=5.0)
    fleet.until_step(12)
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(20)
    fleet.step_ms = 5000.0  # nine tenths of a step are lost, and one rank waits a sixth less than the others
    for node in fleet.nodes.values():
        node.exposed = 0.95
    fleet.node(2).exposed = 0.78
    assert fleet.finish() is State.COMPLETED
    assert len(fleet.decisions) == 1


def test_a_slow_job_without_a_plain_culprit_goes_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=60, slow_steps=5, slow_floor_s=5.0)
    fleet.until_step(12)
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(20)
    fleet.step_ms = 1500.0
    assert fleet.finish() is State.COMPLETED
    assert len(fleet.decisions) == 1
    noted = [entry for entry in entries(fleet.folder.journal) if entry["event"] == "noted"]
    assert "cannot be told" in noted[0]["evidence"]["finding"]["text"]


def notes_of(fleet: Fleet) -> list[str]:
    noted = [entry["evidence"]["finding"] for entry in entries(fleet.folder.journal) if entry["event"] == "noted"]
    return [each["text"] for each in noted if each["kind"] == "traffic"]


def test_traffic_that_falls_silent_is_noted_before_the_job_counts_as_hung(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, backend="ssh", silence_floor_s=60.0, steps=200)
    fleet.until_step(40)
    assert notes_of(fleet) == []
    for _ in range(40):  # ten seconds in which nobody steps, and nothing is sent
        fleet._stepped_s = fleet.clock.now_s + 1
        fleet.tick()
    [text] = notes_of(fleet)
    assert text.startswith("traffic has fallen to 0.0 MB/s")
    assert text.endswith("on all nodes")
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []  # it went on


def test_a_node_that_sends_less_than_the_others_is_noted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, backend="ssh", steps=200)
    fleet.until_step(40)
    node = fleet.node(2)
    for _ in range(80):
        node.moved_bytes -= 47 * 10**6  # of 100 MB a step, every other tick
        fleet.tick()
    [text] = notes_of(fleet)
    assert "on all nodes" not in text
    assert fleet.driver.facts.evicted == {}


def test_what_comes_back_after_a_while_is_noted_again(tmp_path: Path) -> None:
    # https://github.com/flagos-ai/FlagScale/pull/1243: the second stall of a rank that had recovered was never told of.
    fleet = Fleet(tmp_path, backend="ssh", silence_floor_s=120.0, steps=10_000)
    fleet.until_step(40)
    for silence in range(1, 4):
        for _ in range(60):
            fleet._stepped_s = fleet.clock.now_s + 1
            fleet.tick()
        assert len(notes_of(fleet)) == min(silence, 2)
        for _ in range(int((660 if silence == 1 else 30) / TICK_S)):
            fleet.tick()
    assert fleet.decisions == []


def test_a_note_that_a_full_disk_refused_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, backend="ssh", silence_floor_s=120.0, steps=10_000)
    fleet.until_step(40)
    append, refused = fleet.driver.journal._append, list[str]()

    def append_or_refuse(entry: dict[str, Any]) -> None:
        if entry["event"] == "noted" and not refused:
            refused.append(entry["event"])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(entry)

    monkeypatch.setattr(fleet.driver.journal, "_append", append_or_refuse)
    for _ in range(100):
        fleet._stepped_s = fleet.clock.now_s + 1
        fleet.tick()
    assert (len(notes_of(fleet)), len(refused)) == (1, 1)


def test_a_node_that_fails_its_self_check_never_trains(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.tick()
    fleet.nodes["node-1"].fails_checks = True
    assert fleet.finish() is State.COMPLETED
    assert "gemm: wrong numbers came out" in fleet.driver.facts.evicted["node-1"]
    assert all(name != "node-1" for _, name in fleet.starts)


def test_a_self_check_after_a_fault_overrules_a_retry(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    bad = fleet.node(1)
    bad.fails_checks = True
    bad.die(-9)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("evict", "self_check", [bad.name])]


def test_nodes_that_have_loaded_different_files_are_restarted_once_and_blame_none(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_state(State.VERIFY)
    fleet.node(2).code = "fedcba9876543210"
    fleet.until_state(State.DIAGNOSE)
    for node in fleet.nodes.values():
        node.code = "fedcba9876543210"  # they load what is there now
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "code", [])]
    [incident] = fleet.driver.facts.incidents
    assert f"fedcba9876543210 on {fleet.node(2).name}" in incident["decision"]["reason"]
    assert fleet.driver.facts.code == "fedcba9876543210"


def test_nodes_whose_installations_differ_for_good_train_and_it_is_noted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_state(State.VERIFY)
    fleet.node(0).code = "fedcba9876543210"
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "code", [])]
    notes = [entry["evidence"]["finding"] for entry in entries(fleet.folder.journal) if entry["event"] == "noted"]
    assert [each["kind"] for each in notes] == ["code"]
    assert "installations differ" in notes[0]["text"]


def test_a_driver_that_takes_over_knows_which_installations_differ(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_state(State.VERIFY)
    fleet.node(0).code = "fedcba9876543210"
    fleet.until_step(12)
    fleet.driver = fleet.new_driver()
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "code", [])]


def test_files_that_change_between_two_starts_are_told_of(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    for node in fleet.nodes.values():
        node.code = "fedcba9876543210"
    fleet.node(1).die(-9)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [fleet.node(1).name])]
    assert [entry["event"] for entry in entries(fleet.folder.journal)].count("code changed") == 1


def test_a_check_that_cannot_be_made_evicts_nobody(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    node = fleet.node(1)
    node.cannot_check = True
    node.die(-9)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [node.name])]
    assert fleet.driver.facts.evicted == {}
    unclear = [each["unclear_checks"] for each in fleet.driver.facts.incidents]
    assert unclear == [{node.name: "gemm: not done within 120 s"}]
    assert any(f"{node.name} trains unchecked" in line for line in fleet.lines)


def test_a_standby_that_has_passed_goes_before_a_node_that_could_not_be_checked(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(8)
    node = fleet.node(1)
    node.cannot_check = True
    node.die(-9)
    assert fleet.finish() is State.COMPLETED
    assert node.name not in fleet.driver.facts.members
    assert fleet.driver.facts.evicted == {}


def test_a_node_that_cannot_be_checked_is_evicted_where_the_user_wants_that(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, checks_unclear="evict")
    fleet.until_step(8)
    node = fleet.node(1)
    node.cannot_check = True
    node.die(-9)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("evict", "self_check", [node.name])]


def test_a_check_that_fails_on_most_nodes_at_once_blames_none(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    for rank in (0, 1, 2):
        fleet.node(rank).fails_checks = True
    name = fleet.node(1).name
    fleet.node(1).die(-9)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [name])]


def test_a_standby_that_fails_as_the_members_do_is_not_evicted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, spares=1)
    launch = fleet.launch

    def launch_on_a_bad_disk(name: str) -> None:
        launch(name)
        fleet.nodes[name].fails_checks = True

    fleet.launch = launch_on_a_bad_disk  # type: ignore[method-assign]
    fleet.until_step(8)
    fleet.node(0).die(-9)
    fleet.until(lambda: len(fleet.decisions) == 1)
    fleet.until_step(12)
    assert fleet.decisions == [("retry", "killed", ["node-0"])]
    fleet.folder.ask("evict", "node-2")  # what comes later fails as well, in a later round of checks
    assert fleet.finish() is State.COMPLETED
    assert list(fleet.driver.facts.evicted) == ["node-2"]
    assert fleet.driver.facts.next_node == 4


@pytest.mark.parametrize("first_fails", [True, False])
def test_nodes_that_all_fail_their_self_check_alone_are_not_asked_for_without_end(
    first_fails: bool, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, nodes=1, spares=0 if first_fails else 1, steps=200)
    launch = fleet.launch

    def launch_on_a_bad_disk(name: str) -> None:
        launch(name)
        fleet.nodes[name].fails_checks = first_fails or name != "node-0"

    fleet.launch = launch_on_a_bad_disk  # type: ignore[method-assign]
    assert fleet.finish() is (State.FAILED if first_fails else State.COMPLETED)
    assert not first_fails or "failed its self-check: gemm" in fleet.driver.facts.reason
    assert fleet.driver.facts.next_node <= 8


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_that_never_tells_of_its_self_check_holds_no_run_up(spares: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=spares, checks_s=5.0, checks_retries=0)
    fleet.until_step(8)
    node = fleet.node(1)
    node.ignores_checks = True
    node.die(-9)
    fleet.until(lambda: fleet.driver.facts.restarts == 1 and fleet.driver.facts.state is State.RUN, 3000.0)
    assert fleet.finish() is State.COMPLETED
    assert fleet.driver.facts.evicted == {}
    assert (node.name in fleet.driver.facts.members) is (spares == 0)
    assert any(f"{node.name} trains unchecked" in line for line in fleet.lines) is (spares == 0)


def test_a_node_that_never_tells_of_its_self_check_is_evicted_where_the_user_wants_that(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, checks_unclear="evict", checks_s=5.0, checks_retries=0)
    fleet.until(lambda: "node-0" in fleet.nodes)
    fleet.nodes["node-0"].ignores_checks = True
    fleet.until(lambda: bool(fleet.driver.facts.evicted), 3000.0)
    assert fleet.finish() is State.COMPLETED
    [(name, reason)] = fleet.driver.facts.evicted.items()
    assert name == "node-0"
    assert "no result of its self-check within" in reason


@pytest.mark.parametrize("fails", [False, True])
def test_checks_that_are_given_up_are_not_called_failed(fails: bool, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1, checks_s=5.0, checks_retries=0)
    fleet.until(lambda: len(fleet.nodes) == 5)
    fleet.nodes["node-0"].ignores_checks = True
    fleet.nodes["node-1"].fails_checks = fails
    fleet.until_state(State.VERIFY)
    fleet.until(lambda: fleet.driver.facts.state is not State.VERIFY, 3000.0)
    assert fleet.driver.facts.unclear.keys() == {"node-0"}
    assert fleet.driver.facts.evicted.keys() == ({"node-1"} if fails else set())  # in the same round
    assert fleet.lines[-1] == f"verify -> gather (checks {'failed' if fails else 'given up'})"
    assert fleet.finish() is State.COMPLETED


def test_nodes_that_answer_at_once_are_each_looked_at_a_bounded_number_of_times(tmp_path: Path) -> None:
    """Thousands of nodes tell of their self-checks within one round after a fault."""

    def num_calls(nodes: int) -> int:
        fleet = Fleet(tmp_path / str(nodes), nodes=nodes)
        fleet.until_state(State.VERIFY)
        roster, calls = fleet.driver.roster, 0
        checks_of = roster.checks_of

        def counted(name: str) -> Any:
            nonlocal calls
            calls += 1
            return checks_of(name)

        roster.checks_of = counted  # type: ignore[method-assign]
        fleet.until_state(State.START)
        return calls

    assert num_calls(32) < 3 * num_calls(16)


def test_a_check_that_is_made_at_last_is_no_longer_unclear(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(8)
    fleet.driver.facts.unclear["node-4"] = "no result of its self-check within 270 s"
    fleet.driver.facts.checked.remove("node-4")
    fleet.tick()
    assert "node-4" in fleet.driver.facts.checked
    assert fleet.driver.facts.unclear == {}


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
def test_the_first_of_several_errors_is_told_by_compared_clocks(skew_s: float, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.skew_ns = {"node-1": int(skew_s * 1e9)}
    fleet.until_step(20)
    first, second = fleet.nodes["node-2"], fleet.nodes["node-1"]
    first.die(1)
    for _ in range(6):  # a second and a half later, more than the messages take
        fleet.tick()
    second.die(1)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "exited", ["node-2"])]


def test_errors_closer_than_the_clocks_blame_nobody(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.skew_ns = {"node-1": -50_000_000}  # it would be blamed, if clocks were taken at their word
    fleet.until_step(20)
    fleet.nodes["node-2"].die(1)
    fleet.nodes["node-1"].die(1)
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "exited", [])]
    assert "which of these was first cannot be told" in fleet.driver.facts.incidents[0]["decision"]["reason"]


def test_errors_on_one_machine_are_ordered_by_its_clock(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for node in fleet.nodes.values():
        node.machine = "one"
    fleet.until_step(20)
    first, second = fleet.nodes["node-2"], fleet.nodes["node-1"]
    first.machine = second.machine = "one"
    first.die(1)
    second.die(1)
    second.ended_ns += 5_000_000
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "exited", ["node-2"])]


def test_aborts_of_a_watchdog_are_those_of_victims(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    for rank in (0, 1, 3):  # NCCL's watchdog ends every rank that has waited for rank 2
        fleet.node(rank).die(-6)
        fleet.node(rank).log("symptom", "Watchdog caught collective operation timeout", rank=rank)
    assert fleet.finish() is State.COMPLETED
    assert [(action, names) for action, _, names in fleet.decisions] == [("retry", [])]


def test_an_executor_whose_clock_was_set_back_is_heard(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    node = fleet.node(1)
    node.boot, node.seq = "0" * 16, 0  # started anew, an hour ago by its clock
    fleet.skew_ns[node.name] = -3600 * 10**9
    for _ in range(12):
        fleet.tick()
    assert fleet.driver.view.nodes[node.name].heartbeat.boot == "0" * 16
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []


def test_heartbeats_of_an_executor_that_is_gone_are_old(tmp_path: Path) -> None:
    executor = Executor(Fleet(tmp_path).folder, "node-0", "127.0.0.1")
    old = unseal(executor._heartbeat([]), executor._token, Heartbeat, "run1")
    later = Executor(Fleet(tmp_path).folder, "node-0", "127.0.0.1")
    new = unseal(later._heartbeat([]), later._token, Heartbeat, "run1")
    view = View(1.0)
    assert view.take(new, 0.0)
    assert not view.take(old.model_copy(update={"at_ns": new.at_ns + 10**12, "seq": 99}), 1.0)


def test_a_lost_store_costs_no_node_and_no_restart(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=150)
    fleet.until_step(8)
    fleet.bus.is_down = True
    for _ in range(120):  # half a minute, ten times what a node may be silent
        fleet.tick()
    fleet.bus.heartbeats, fleet.bus.assignments, fleet.bus.beacon = [], {}, b""  # it comes back empty
    fleet.bus.is_down = False
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []


def stay_away(fleet: Fleet, seconds: float, *, sleeps: bool = False) -> None:
    """Let the store, or the driver, be away; its first round after that comes before any heartbeat."""
    fleet.bus.is_down = not sleeps
    for _ in range(int(seconds / TICK_S)):
        fleet.tick(drives=not sleeps)
    fleet.bus.heartbeats, fleet.bus.is_down = [], False
    fleet.clock.now_s += TICK_S
    fleet.driver.round()


@pytest.mark.parametrize("sleeps", [False, True], ids=["store", "driver"])
def test_what_was_away_while_processes_were_killed_costs_no_node(sleeps: bool, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    name = fleet.node(1).name
    fleet.node(1).die(-9)
    fleet.until_state(State.SUSPEND)
    if sleeps:  # its orders are lost too
        fleet.bus.assignments = {}
    stay_away(fleet, 40.0, sleeps=sleeps)
    assert fleet.driver.facts.state is State.SUSPEND
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("retry", "killed", [name])]
    assert fleet.driver.facts.evicted == {}


@pytest.mark.parametrize("sleeps", [False, True], ids=["store", "driver"])
def test_what_was_away_while_nodes_checked_themselves_costs_no_node(sleeps: bool, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, checks_unclear="evict", checks_s=5.0, checks_retries=0)
    fleet.until_state(State.VERIFY)
    stay_away(fleet, 380.0, sleeps=sleeps)  # longer than imports and checks may take
    assert fleet.driver.facts.state is State.VERIFY
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []
    assert fleet.driver.facts.evicted == {}


def test_a_driver_that_slept_while_the_store_was_away_gives_the_time_back_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    for node in fleet.nodes.values():
        node.is_frozen = True
    fleet.bus.is_down = True
    fleet.tick()
    for _ in range(200):
        fleet.tick(drives=False)
    fleet.bus.is_down = False
    fleet.tick()
    assert max(node.heard_s for node in fleet.driver.view.nodes.values()) <= fleet.clock.now_s + 1.0
    at_s = fleet.clock.now_s
    fleet.until_not(State.RUN)
    assert fleet.clock.now_s - at_s < 30


def test_a_driver_that_slept_blames_nobody(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=200)
    fleet.until_step(8)
    for _ in range(200):
        fleet.tick(drives=False)
    fleet.bus.heartbeats = []  # and what came meanwhile is lost
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []


def test_most_nodes_silent_at_once_are_not_evicted_at_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=200)
    fleet.until_step(8)
    for node in list(fleet.nodes.values())[:3]:
        node.is_frozen = True
    for _ in range(30):
        fleet.tick()
    for node in fleet.nodes.values():
        node.is_frozen = False
    assert fleet.finish() is State.COMPLETED
    assert fleet.driver.facts.evicted == {}


def test_eviction_by_hand_of_a_member_and_of_a_standby(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(8)
    fleet.folder.ask("evict", "node-4")
    fleet.until(lambda: "node-4" in fleet.driver.facts.evicted)
    assert fleet.driver.facts.state is State.RUN
    fleet.folder.ask("evict", "node-1")
    fleet.folder.ask("evict", "node-77")  # unknown: said, and nothing else
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("evict", "asked", ["node-1"])]
    assert set(fleet.driver.facts.evicted) == {"node-4", "node-1"}
    assert fleet.blocked == dict.fromkeys(fleet.driver.facts.evicted, True)  # later nodes are kept off their machines


def test_pause_and_resume_by_hand(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    fleet.folder.ask("pause")
    fleet.until_state(State.PAUSED)
    step = fleet.saved
    assert step >= 12  # ranks have saved where they stood
    for _ in range(40):
        fleet.tick()
    assert not any(node.runs for node in fleet.nodes.values())
    fleet.folder.ask("resume")
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []
    assert fleet.furthest[2] > step


def test_a_pause_that_is_asked_for_during_a_repair_comes_after_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    fleet.node(0).die(-9)
    fleet.until_state(State.SUSPEND)
    fleet.folder.ask("pause")
    fleet.until_state(State.PAUSED)
    assert len(fleet.decisions) == 1


def test_what_is_asked_in_a_repair_outlives_the_driver(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, spares=1)
    fleet.until_step(12)
    fleet.node(0).die(-9)
    fleet.until_state(State.SUSPEND)
    fleet.folder.ask("pause")
    fleet.folder.ask("evict", "node-3")
    fleet.driver._read_requests()
    fleet.driver.close()
    fleet.driver = fleet.new_driver()  # the one before was killed there
    fleet.until_state(State.PAUSED)
    assert list(fleet.driver.facts.evicted) == ["node-3"]


def test_a_fault_while_a_pause_is_under_way_does_not_lose_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    fleet.folder.ask("pause")
    fleet.driver._read_requests()
    assert fleet.driver.facts.state is State.DRAIN
    fleet.node(0).die(-9)
    fleet.until_state(State.PAUSED)
    assert [kind for _, kind, _ in fleet.decisions] == ["killed"]


def test_resume_right_after_pause_is_done_when_the_pause_is(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    fleet.folder.ask("pause")
    fleet.folder.ask("resume")
    assert fleet.finish() is State.COMPLETED
    events = [entry["event"] for entry in entries(fleet.folder.journal)]
    assert "pause asked" in events
    assert "resume asked" in events


@pytest.mark.parametrize("state", [State.GATHER, State.VERIFY, State.START, State.RUN, State.SUSPEND, State.DIAGNOSE])
def test_a_stop_ends_the_run_from_every_state(state: State, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, stop_s=5.0)
    if state in (State.SUSPEND, State.DIAGNOSE):
        fleet.until_step(6)
        fleet.node(0).die(-9)
    fleet.until_state(state)
    fleet.folder.ask("stop")
    assert fleet.finish() is State.STOPPED
    for _ in range(8):
        fleet.tick()
    assert not any(node.runs for node in fleet.nodes.values())


def test_a_stopped_run_can_be_resumed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(12)
    fleet.folder.ask("stop")
    fleet.finish()
    fleet.driver.close()
    fleet.driver = fleet.new_driver()
    fleet.driver.resume()
    assert fleet.finish() is State.COMPLETED


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the driver runs after it."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_every_transition_is_taken_over(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, budget, kills = Journal._append, [0], [0]

    def mortal(journal: Journal, entry: dict[str, Any]) -> None:
        budget[0] -= 1
        if budget[0] < 0 and when == "before":
            raise Killed
        append(journal, entry)
        if budget[0] < 0:
            raise Killed

    monkeypatch.setattr(Journal, "_append", mortal)
    faults: list[Callable[[Fleet], None]] = [lambda fleet: fleet.node(1).die(-9), lambda fleet: hardware(fleet.node(2))]
    # Each driver lives for as many entries as the one before, and one more after each round through all states.
    budget[0] = 10**9
    fleet = Fleet(tmp_path, steps=40)
    budget[0] = 0
    life = 1
    seen: set[tuple[str, str]] = set()
    for _ in range(20000):
        try:
            fleet.tick()
        except Killed:
            kills[0] += 1
            seen.add((str(fleet.driver.journal.facts.state), when))
            while True:
                life = life % 4 + 1
                budget[0] = life
                try:
                    fleet.driver = fleet.new_driver()
                    break
                except Killed:
                    kills[0] += 1
        facts = fleet.driver.facts
        if faults and facts.state is State.RUN and fleet.driver.view.step >= 10 * (3 - len(faults)):
            faults.pop(0)(fleet)
        if facts.state in TERMINAL:
            break
    budget[0] = 10**9
    assert fleet.driver.facts.state is State.COMPLETED
    assert kills[0] >= 8
    kinds = [kind for _, kind, _ in fleet.decisions]
    assert sorted(kinds) == ["hardware", "killed"]
    assert len(fleet.driver.facts.evicted) == 1
    # No incarnation was started twice on a node, and none of an earlier driver after one of a later.
    assert len(fleet.starts) == len(set(fleet.starts))


@pytest.mark.parametrize("state", [State.RUN, State.SUSPEND, State.DIAGNOSE, State.GATHER, State.VERIFY])
def test_a_full_disk_ends_no_driver_and_decides_nothing_twice(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, spares=1)
    append, is_full = Journal._append, [False]

    def full(journal: Journal, entry: dict[str, Any]) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, entry)

    monkeypatch.setattr(Journal, "_append", full)
    fleet.until_step(8)
    is_full[0] = state is State.RUN
    node = fleet.node(2)
    node.log("hardware", "NVRM: Xid 79", rank=None)
    if state is not State.RUN:
        fleet.until_state(state)
        is_full[0] = True
    for _ in range(120):  # half a minute
        fleet.tick()
    assert fleet.driver.facts.state is state
    assert fleet.bus.beacon != b""
    is_full[0] = False
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == [("evict", "hardware", [node.name])]
    assert fleet.driver.facts.restarts == 1
    assert list(fleet.driver.facts.evicted) == [node.name]
    assert sum("waits for its disk" in line for line in fleet.lines) == 1
    assert sum(f"{node.name} is evicted" in line for line in fleet.lines) == 1
    assert sum("incident 1: evict" in line for line in fleet.lines) == 1


def test_a_stop_that_cannot_be_put_down_is_done_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)

    def full(*_arguments: object) -> None:
        raise ConfigError("output", None, "cannot be written (No space left on device)", "free some")

    monkeypatch.setattr(RunFolder, "ask", full)
    fleet.driver.ask_to_stop()
    assert fleet.finish() is State.STOPPED


def test_a_request_that_cannot_be_read_for_a_moment_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    fleet.folder.ask("stop")

    def stale(_path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", stale)
        assert list(fleet.folder.asked()) == []
    assert fleet.finish() is State.STOPPED
    assert list(entries(fleet.folder.journal))[-1]["facts"]["furthest_step"] >= 8  # which the next driver goes by


def test_an_executor_does_not_go_back_to_an_earlier_driver(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=100)
    fleet.until_step(5)
    old = fleet.driver
    fleet.driver = fleet.new_driver()
    fleet.until_step(10)
    assert fleet.node(0).assignment.epoch == 2
    stale = Beacon(run="run1", node="*", epoch=1, seq=10**6)
    fleet.bus.beacon = seal(stale, fleet.token)
    old.link._sent.clear()
    old.link._bus = fleet.bus  # type: ignore[assignment]
    old._send(fleet.clock.now_s)  # it woke up, and sends what it thinks
    fleet.tick()
    assert fleet.node(0).assignment.epoch == 2
    assert fleet.finish() is State.COMPLETED


def test_a_shared_folder_that_fails_for_a_moment_ends_no_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(Fleet(tmp_path).folder, "node-0", "127.0.0.1")

    def stale(_folder: object) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunFolder, "store_url", stale)
    executor._hear()
    executor._tell()
    assert executor._sent_s == 0.0


def test_random_faults_in_a_row_end_well_and_accuse_nobody_else(tmp_path: Path) -> None:
    for seed in range(12):
        fleet = Fleet(tmp_path / str(seed), nodes=5, steps=120, seed=seed, spares=1, max_restarts=200)
        draw, hit = random.Random(seed), set[str]()
        for step in (10, 25, 40, 60, 80, 100):
            fleet.until_step(step)
            node = fleet.node(draw.randrange(5))
            hit.add(node.name)
            draw.choice([kill, stop, raise_, hang, hardware, freeze])(node)
            fleet.until_not(State.RUN)
        assert fleet.finish() is State.COMPLETED, seed
        assert len(fleet.decisions) == 6, seed
        assert {name for _, _, names in fleet.decisions for name in names} <= hit, seed
        assert set(fleet.driver.facts.evicted) <= hit, seed


def test_what_is_decided_stands_in_the_events_and_in_the_status(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    name = fleet.node(2).name
    hardware(fleet.node(2))
    fleet.finish()
    fleet.driver.write_status()
    fleet.driver.close()
    [file] = (tmp_path / "events").glob("host-*.jsonl")
    marks = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    names = [mark["name"] for mark in marks]
    assert names == ["run_start", "failure", "eviction", "restart", "run_end"]
    assert marks[2]["attributes"] == {"node": name}
    status = json.loads(fleet.folder.status.read_text())
    assert status["state"] == "completed"
    assert {row["role"] for row in status["nodes"] if row["node"] == name} == {"evicted"}


def test_the_status_shows_ranks_of_executors_of_both_versions_and_how_old_it_is(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    fleet.driver.write_status()
    shown = facts(fleet.folder, has_driver=True)
    rows = {row["node"]: row for row in shown["nodes"]}
    assert [row["ranks"][0]["state"] for row in rows.values()] == ["running"] * 4  # node-1 sends rows
    assert {row["ranks"][0]["rank"] for row in rows.values()} == {0, 1, 2, 3}
    shown["seen_s_ago"] = 3600.0  # its driver is gone, or waits for its disk
    [line] = [line for line in lines(shown) if "node-1: member" in line]
    assert "heard 36" in line
    # As a driver of an earlier version has written it.
    tree = json.loads(fleet.folder.status.read_bytes())
    tree["nodes"] = list(rows.values())
    fleet.folder.status.write_text(json.dumps(tree))
    assert facts(fleet.folder, has_driver=True)["nodes"] == list(rows.values())


def test_a_reason_that_is_no_unicode_does_not_end_the_driver(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(2)
    fleet.driver.facts.evicted["node-0"] = "gone; see \udcff.log"  # as Python has the name of a file that is no UTF-8
    fleet.driver.write_status()
    rows = {row["node"]: row for row in json.loads(fleet.folder.status.read_bytes())["nodes"]}
    assert rows["node-0"]["reason"] == "gone; see \udcff.log"
    assert rows["node-1"]["role"] == "member"


def test_forged_and_replayed_heartbeats_change_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    captured = fleet.node(0).heartbeat(fleet.clock.now_s)
    bad = bytearray(captured)
    bad[-3] ^= 1
    fleet.bus.heartbeats += [bytes(bad), b"x" * 100_000, b"", captured[:10], b"\0" * 32 + captured[32:]]
    fleet.tick()
    assert fleet.driver.link.refused == 5
    for _ in range(20):
        fleet.tick()
    seq = fleet.driver.view.nodes[fleet.node(0).name].heartbeat.seq
    fleet.bus.heartbeats.append(captured)  # seen before
    fleet.tick()
    assert fleet.driver.view.nodes[fleet.node(0).name].heartbeat.seq >= seq
    assert fleet.finish() is State.COMPLETED
    assert fleet.decisions == []
    assert Event.FAULT not in {entry["event"] for entry in entries(fleet.folder.journal)}


def test_who_fills_the_store_does_not_keep_the_driver_from_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path)
    fleet.until_step(8)
    monkeypatch.setattr(fleet.bus, "take_heartbeats", lambda: ([b"forged"] * TAKE, 0))  # for ever
    fleet.driver.round()
    assert fleet.driver.link.refused == TAKE * MAX_READS


def test_jitter_of_a_healthy_run_raises_no_alarm(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, steps=10**6, slow_steps=10)
    fleet.until_step(5)
    draw, late = random.Random(3), dict[str, float]()
    for _ in range(2400):  # ten minutes
        for node in fleet.nodes.values():
            if fleet.clock.now_s > late.get(node.name, 0.0) and draw.random() < 0.01:
                late[node.name] = fleet.clock.now_s + draw.uniform(
                    0.5, 3.0
                )  # of the four seconds that it may be silent
            node.is_frozen = fleet.clock.now_s < late.get(node.name, 0.0)
            node.exposed = draw.uniform(0.02, 0.6)
        fleet.step_ms = draw.choice([450.0, 500.0, 550.0, 900.0])
        fleet.tick()
    assert fleet.driver.facts.state is State.RUN
    assert fleet.decisions == []
    assert fleet.driver.view.step > 300
