"""Processes of healthy nodes that outlive a fault: which are kept, what they give back, and who is ended anyway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from netlayer.errors import NetlayerError
from netlayer.store.redis_server import find_redis_binary
from trainer.resilience.machine import State
from trainer.resilience.processes import TrainingProcesses

from .fleet import Fleet

_LIMIT_S = 60.0


def until(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


class Node:
    """Two training processes of `fake_survivor`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = TrainingProcesses(folder / "node", 1)
        command = ["tests.trainer.resilience.fake_survivor", str(folder)]
        self.processes.start(command, (0, 1), self.environ(1), keeps=True)

    def environ(self, start: int) -> Mapping[str, str]:
        return {**os.environ, "MASTER_PORT": str(start), "WORLD_SIZE": "2"}

    def pids(self, start: int) -> list[int]:
        """Process ids of both ranks of a start, once they train."""
        files = [self.folder / f"pid-{start}-{rank}" for rank in (0, 1)]
        until(lambda: all(file.exists() and file.read_text() for file in files), f"start {start}")
        return [int(file.read_text()) for file in files]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.processes.kill()


def test_processes_go_on_in_the_next_start(node: Node) -> None:
    pids = node.pids(1)
    node.processes.suspend(_LIMIT_S)
    statuses = [(each.state, each.exit_code, each.was_ended, each.step) for each in node.processes.statuses()]
    assert statuses == [("ended", 143, True, 5)] * 2
    assert (node.folder / "given-back-1-0").exists()
    assert (node.folder / "released-1-0").exists()  # of an object that only the garbage collector frees
    node.processes.go_on(2, (0, 1), node.environ(2))
    assert node.pids(2) == pids
    node.processes.replace_silent(_LIMIT_S)
    assert [each.state for each in node.processes.statuses()] == ["running", "running"]
    assert "start 2 of rank 0" in (node.folder / "node" / "rank00000.0002.log").read_text()
    (node.folder / "done").touch()
    until(lambda: node.processes.are_ended, "the last step")
    assert [each.exit_code for each in node.processes.statuses()] == [0, 0]


def test_a_process_that_has_failed_says_so_before_it_waits(node: Node) -> None:
    pids = node.pids(1)
    (node.folder / "fail-1").touch()
    until(lambda: node.processes.statuses()[1].state == "ended", "the failed one")
    assert [(each.exit_code, each.was_ended) for each in node.processes.statuses()] == [(None, False), (1, False)]
    node.processes.suspend(_LIMIT_S)
    (node.folder / "fail-1").unlink()
    node.processes.go_on(2, (0, 1), node.environ(2))
    assert node.pids(2) == pids


def test_no_process_of_a_node_goes_on_where_one_was_killed(node: Node) -> None:
    pids = node.pids(1)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: node.processes.statuses()[1].state == "ended", "the killed one")
    node.processes.suspend(_LIMIT_S)
    assert (node.processes.is_suspended, node.processes.is_killed) == (False, True)
    assert node.processes.why_fresh == "rank 1 has ended with exit code -9"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_no_process_of_a_node_goes_on_where_one_does_not_leave_in_time(node: Node) -> None:
    pids = node.pids(1)
    (node.folder / "hang-1").touch()
    time.sleep(0.2)
    node.processes.suspend(3.0)
    assert [each.exit_code for each in node.processes.statuses()] == [143, -9]
    assert node.processes.why_fresh == "rank 1 does not wait after 3 s"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_no_process_of_a_node_goes_on_where_one_that_waited_has_ended(node: Node) -> None:
    pids = node.pids(1)
    node.processes.suspend(_LIMIT_S)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pids[1]}").exists() or not node.processes._waits(node.processes._processes[1]), "")
    node.processes.go_on(2, (0, 1), node.environ(2))
    assert not set(node.pids(2)) & set(pids)
    assert [each.state for each in node.processes.statuses()] == ["running", "running"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_has_had_windows_ends_instead_of_waiting(tmp_path: Path, fails: bool) -> None:
    for name in ("window-0", "window-1", *(["fail-0"] if fails else [])):
        (tmp_path / name).touch()
    made = Node(tmp_path)
    try:
        if fails:
            until(lambda: made.processes.statuses()[0].exit_code == 1, "the failed one")
        else:
            made.pids(1)
        made.processes.suspend(_LIMIT_S)
        assert "rank 0: it has had windows in the memory of its peers" in made.processes.why_fresh
        assert made.processes.statuses()[0].exit_code == (1 if fails else 143)
        assert not list(tmp_path.glob("given-back-*"))  # which would wait for peers
        log = (tmp_path / "node" / "rank00000.0001.log").read_text()
        assert "does not wait for the next start: it has had windows in the memory of its peers" in log
    finally:
        made.processes.kill()


def test_an_order_to_leave_that_comes_before_the_training_is_followed(node: Node) -> None:
    pids = node.pids(1)
    node.processes.suspend(_LIMIT_S)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    node.processes.go_on(2, (0, 1), node.environ(2))

    def wake() -> None:  # only now, so that both lines are there before one of them is read
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    node.processes.suspend(10.0, wake)
    assert node.processes.is_suspended, node.processes.why_fresh
    node.processes.go_on(3, (0, 1), node.environ(3))
    assert node.pids(3) == pids


def test_a_verdict_does_not_wait_for_the_thread_that_waits_for_it(node: Node) -> None:
    pids = node.pids(1)
    (node.folder / "blame-1").touch()
    until(lambda: node.processes.statuses()[1].state == "ended", "the blaming one")
    assert node.processes.statuses()[1].exit_code == NetlayerError.exit_code
    (node.folder / "blame-1").unlink()
    node.processes.suspend(_LIMIT_S)
    node.processes.go_on(2, (0, 1), node.environ(2))
    assert node.pids(2) == pids


def test_an_order_in_the_midst_of_giving_back_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "leave-again-0").touch()
    made = Node(tmp_path)
    try:
        made.pids(1)
        made.processes.suspend(_LIMIT_S)
        assert made.processes.why_fresh == "rank 0: what the training held could not be given back"
        assert made.processes.statuses()[0].exit_code == 143
    finally:
        made.processes.kill()


_PROGRAM = """
import os, time
from trainer.inprocess.process import Leave, _Orders, _run

theirs, ours = os.pipe()
orders = _Orders(theirs)
begin, end = orders.begin, orders.end
ends = [Leave]


def late_begin():
    begin()
    raise Leave


def early_end():
    if ends:
        raise ends.pop()
    end()


orders.begin = late_begin
print(_run(["colorsys"], orders), orders._is_training)
orders.begin, orders.end = begin, early_end
print(_run(["colorsys"], orders), orders._is_training)
begin()
try:
    orders.leave(1)
    time.sleep(60)
except Leave:
    orders.leave(2)
    print(orders.code)
os._exit(0)
"""


def test_an_order_at_the_edge_of_a_training_leaves_it_once_and_for_all() -> None:
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["143 False", "143 False", "1"], "")


def test_a_kept_process_that_does_not_begin_is_replaced(node: Node) -> None:
    first, second = node.pids(1)
    node.processes.suspend(_LIMIT_S)
    os.kill(second, signal.SIGSTOP)
    node.processes.go_on(2, (0, 1), node.environ(2))
    until(lambda: (node.folder / "pid-2-0").exists(), "the other one")
    node.processes.replace_silent(0.0)
    again = node.pids(2)
    assert (again[0], again[1] == second) == (first, False)


def test_those_that_wait_end_with_the_node(node: Node) -> None:
    pids = node.pids(1)
    node.processes.suspend(_LIMIT_S)
    node.processes.kill()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(("survivors", "kept"), [("keep", {"node-0", "node-2", "node-3"}), ("restart", set())])
def test_nodes_that_are_not_to_blame_keep_their_processes(tmp_path: Path, survivors: str, kept: set[str]) -> None:
    fleet = Fleet(tmp_path, survivors=survivors)
    fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.nodes["node-0"].step > 10)
    fleet.nodes["node-1"].die(-9)
    fleet.until_state(State.SUSPEND)
    fleet.tick()
    everybody = {name for name, each in fleet.nodes.items() if each.assignment.keeps}
    assert everybody == (set(fleet.nodes) if survivors == "keep" else set())  # while it is not known who is to blame
    fleet.until_state(State.RUN)
    assert {name for name, each in fleet.nodes.items() if each.assignment.keeps} == kept
    assert fleet.finish() is State.COMPLETED


def test_the_journal_says_why_a_node_that_could_be_kept_is_not(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, survivors="keep")
    fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.nodes["node-0"].step > 10)
    fleet.nodes["node-2"].not_kept = "rank 2: it has had windows in the memory of its peers"
    fleet.nodes["node-1"].die(-9)
    fleet.until_state(State.SUSPEND)
    fleet.until_state(State.RUN)
    lines = map(json.loads, fleet.folder.journal.read_text().splitlines())
    last = [entry["evidence"] for entry in lines if "kept" in entry["evidence"]][-1]
    assert last["kept"] == ["node-0", "node-3"]
    assert last["not_kept"] == {"node-2": fleet.nodes["node-2"].not_kept}


def test_nobody_is_kept_where_nobody_is_to_blame(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, survivors="keep")
    fleet.until(lambda: fleet.driver.facts.state is State.RUN and fleet.nodes["node-0"].step > 10)
    for each in fleet.nodes.values():
        each.log("symptom", "Connection closed by peer", rank=0)
        each.die(1)
    fleet.until(lambda: bool(fleet.driver.facts.incidents))
    fleet.until_state(State.RUN)
    assert not fleet.driver.facts.incidents[-1]["decision"]["nodes"]
    assert not [name for name, each in fleet.nodes.items() if each.assignment.keeps]


@pytest.mark.slow
@pytest.mark.skipif(find_redis_binary() is None, reason="needs a redis-server")
def test_three_of_four_gloo_processes_outlive_the_kill_of_one_with_equal_losses(tmp_path: Path) -> None:
    from bench.fault_matrix.__main__ import text_folder
    from bench.fault_matrix.job import FaultyJob, config_of

    settings: dict[str, Any] = {"survivors": "keep", "survivors_s": 15.0, "missed": 40, "silence_floor_s": 600.0}
    config = config_of(4, 120, text_folder(tmp_path), **settings)
    whole, job = FaultyJob(tmp_path / "whole", config), FaultyJob(tmp_path / "faulty", config)
    try:
        for each in (whole, job):
            each.start()
            if each is job:
                job.wait(lambda facts: facts.get("state") == "run" and job.step > 50, 180, "before the fault")
                before = {node: [rank.pid for rank in job.ranks(node)] for node in job.facts["members"]}
                job.kill_ranks("node-2")
                job.wait(lambda facts: facts["incarnation"] == 2 and facts["state"] == "run", 180, "after the fault")
                after = {node: [rank.pid for rank in job.ranks(node)] for node in job.facts["members"]}
            assert each.end(180) == 0
    finally:
        whole.kill_all()
        job.kill_all()
    assert [node for node in before if after[node] == before[node]] == ["node-0", "node-1", "node-3"]
    assert job.losses() == whole.losses()
    assert len(job.losses()) == 120
    [kept] = [
        entry["evidence"]["kept"]
        for entry in map(json.loads, (tmp_path / "faulty" / "run" / "journal.jsonl").read_text().splitlines())
        if entry["evidence"].get("kept")
    ]
    assert kept == ["node-0", "node-1", "node-3"]
