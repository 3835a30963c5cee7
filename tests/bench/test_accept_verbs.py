"""The NICs' phase over simulated figures: whom it names, what it says where nothing can run, and one real agent."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import start_local
from bench.accept.agents.wire import Message
from bench.accept.cli import accept
from bench.accept.phases.nics import Nic, NicJobs, Route, RouteFailure, RouteResults, Speed, rounds
from bench.accept.phases.trial import Trial
from bench.accept.phases.verbs import Mode, measure_verbs
from bench.accept.phases.work import work_for
from bench.accept.run import members_of
from bench.accept.run_output import drain_lists
from netlayer.errors import ConfigError

RATE = "400 Gb/sec (4X NDR)"
NONE = "no RDMA device below /sys/class/infiniband; use a machine with one"


@dataclass
class World:
    """NICs of several hosts with a fault among them; its figures are simulated.

    Args:
        hosts, nics: numbers of both; hosts of `bare` have no NIC.
        slow: labels of a NIC, or of the two of a link, that are four times slower.
        broken: the same, that fail.
        once: the same, that fail the first time.
        own: the slow or broken one is so to itself too.
    """

    hosts: int
    nics: int
    slow: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    own: bool = False
    bare: tuple[str, ...] = ()
    gpus: bool = True
    tried: list[Route] = field(default_factory=list)

    def look(self, hosts: Sequence[str]) -> dict[str, Message]:
        return {host: {"error": NONE} if host in self.bare else {"devices": self._devices()} for host in hosts}

    def _devices(self) -> list[Message]:
        gpus = [f"0000:{at:02x}:00.0" for at in range(2)] if self.gpus else []
        common = {"rate": RATE, "soft": False, "gpus": gpus, "lacks": ""}
        down = {**common, "name": "mlx5_9", "lacks": "its port is DOWN; connect its cable"}
        return [*({**common, "name": f"mlx5_{at}"} for at in range(self.nics)), down]

    def measure(self, routes: Sequence[Route]) -> RouteResults:
        ends = [end for route in routes for end in {route.src, route.dst}]
        assert len(ends) == len(set(ends))
        return {route: self._one(route) for route in routes}

    def _one(self, route: Route) -> Speed | RouteFailure:
        first = route not in self.tried
        self.tried.append(route)
        if route.gpu and route.src.name == "mlx5_1":
            return RouteFailure("GPUDirect is missing: no module; run: modprobe nvidia_peermem", False)
        if self._meets(self.broken, route) or (first and self._meets(self.once, route)):
            return RouteFailure(f"{route.src.name}: queue pair 7 went to error: transport retry counter exceeded", True)
        scatter = 1 + len(self.tried) % 3 / 100
        factor = 4 if self._meets(self.slow, route) else 1
        return Speed(390e9 / scatter / factor, 2.1 * scatter)

    def _meets(self, who: tuple[str, ...], route: Route) -> bool:
        ends = {route.src.label, route.dst.label}
        return bool(who) and set(who) <= ends and (len(ends) > 1 or self.own)


def tried(world: World, mode: Mode = "auto") -> Trial:
    members = members_of([(f"h{at}", 2) for at in range(world.hosts)])
    trial = Trial(cast(Fleet, None), members, work_for("gloo", None), [member.rank for member in members])
    measure_verbs(trial, world, mode, lambda _done, _total, _words: None)
    return trial


def accused(trial: Trial, verdict: str = "FAIL") -> set[str]:
    return {one.label for one in trial.suspects if one.verdict == verdict}


def test_healthy_nics_are_accused_of_nothing_and_every_kind_of_route_is_judged() -> None:
    trial = tried(World(4, 4))
    assert not trial.suspects
    found = {(one.check, one.verdict) for one in trial.findings}
    kinds = ("loopback", "loopback to GPU memory", "inside the host", "across hosts")
    assert {(f"verbs {kind}", "PASS") for kind in kinds} <= found
    assert ("verbs loopback to GPU memory", None) in found  # those that lack GPUDirect


@pytest.mark.parametrize(("hosts", "nics"), [(1, 4), (4, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("kind", ["slow", "broken"])
@pytest.mark.parametrize("own", [False, True])
def test_a_bad_nic_is_named_and_nobody_else(hosts: int, nics: int, kind: str, own: bool) -> None:
    bad = f"h{hosts - 1}: mlx5_{nics - 1}"
    world = World(hosts, nics, own=own, gpus=False, **{kind: (bad,)})
    trial = tried(world)
    named = accused(trial)
    assert named == {bad}, trial.findings
    assert not accused(trial, "WARN")
    [node] = {line for lines in drain_lists(trial).values() for line in lines if "scontrol" in line}
    assert f"nodename=h{hosts - 1} " in node
    assert all(one.next_step for one in trial.findings if one.verdict == "FAIL")


@pytest.mark.parametrize("kind", ["slow", "broken"])
def test_a_bad_link_is_named_as_a_link(kind: str) -> None:
    trial = tried(World(5, 2, gpus=False, **{kind: ("h1: mlx5_1", "h3: mlx5_1")}))
    assert accused(trial) == {"h1: mlx5_1 - h3: mlx5_1"}
    assert not drain_lists(trial)


def test_what_fails_once_is_a_warning() -> None:
    trial = tried(World(4, 1, once=("h2: mlx5_0",), gpus=False))
    assert (accused(trial), accused(trial, "WARN")) == (set(), {"h2: mlx5_0"})


def test_too_few_nics_are_measured_and_not_judged() -> None:
    trial = tried(World(2, 1, slow=("h1: mlx5_0",), gpus=False))
    assert not trial.suspects
    assert all("4 NICs" in one.expected for one in trial.findings if "not run" not in one.figure)


@pytest.mark.parametrize(
    ("bare", "mode", "verdict"),
    [(("h0", "h1"), "auto", None), (("h0", "h1"), "require", "FAIL"), (("h1",), "auto", "WARN")],
)
def test_a_host_without_nics_is_said(bare: tuple[str, ...], mode: Mode, verdict: str | None) -> None:
    trial = tried(World(2, 1, bare=bare), mode)
    found = {one.subject: one for one in trial.findings if "no RDMA device" in one.figure}
    assert set(found) == set(bare)
    for one in found.values():
        assert (one.verdict, one.next_step) == (verdict, "use a machine with one")
        assert one.figure.startswith("not run: no RDMA device")
    assert {one.label for one in trial.suspects if one.label in bare} == (set(bare) if verdict else set())


def test_a_port_that_is_down_is_said() -> None:
    [down] = [one for one in tried(World(1, 4, gpus=False)).findings if one.subject == "h0: mlx5_9"]
    assert (down.verdict, down.figure, down.next_step) == (None, "not run: its port is DOWN", "connect its cable")


@given(st.integers(2, 6), st.integers(1, 4))
def test_rounds_hold_every_route_once_and_grow_with_the_number_of_partners(hosts: int, nics: int) -> None:
    every = [Nic(f"h{host}", f"mlx5_{nic}", RATE) for host in range(hosts) for nic in range(nics)]
    routes = [Route(src, dst) for src in every for dst in every if src != dst]
    packed = rounds(routes)
    assert Counter(route for batch in packed for route in batch) == Counter(routes)
    for batch in packed:
        ends = [end for route in batch for end in (route.src, route.dst)]
        assert len(ends) == len(set(ends))
    assert len(packed) <= 4 * len(every)


def command(*words: object) -> Result:
    return CliRunner().invoke(accept, [str(word) for word in words])


def test_without_a_device_the_report_says_so_and_passes_or_fails_as_asked(tmp_path: Path) -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has RDMA devices")
    for mode, code, verdict in (("auto", 0, None), ("require", 1, "FAIL")):
        found = command("--ranks", 2, "--backend", "gloo", "--only", "verbs", "--verbs", mode, "--json", "-")
        assert found.exit_code == code, found.output
        rows = json.loads(found.stdout)["rows"]
        [row] = [row for row in rows if row["table"] == "finding"]
        assert (row["verdict"], row["figure"].partition(" below")[0]) == (verdict, "not run: no RDMA device")
        assert row["next_step"]


@pytest.mark.parametrize(
    "words",
    [("--verbs", "off", "--only", "verbs"), ("--verbs", "require", "--only", "gemm"),
     ("--verbs", "require", "--runner", "nccl-tests")],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(words: tuple[str, ...]) -> None:
    error = command(*words).exception
    assert isinstance(error, ConfigError)
    assert "--verbs" in str(error)


def test_an_agent_runs_jobs_and_tells_how_they_ended(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        link = start_local((), log)
        try:
            fleet = Fleet([link])
            assert fleet.begin({}, {}, False) == []
            jobs = [("localhost", "a"), ("localhost", "b"), ("localhost", "c")]
            fleet.start(jobs[0], {"do": "pair", "source": "nix0", "target": "nix0", "plan": {"kinds": ["write"]}})
            fleet.start(jobs[1], {"do": "no such thing"})
            fleet.start(jobs[2], {"do": "look"})
            said = fleet.answers(jobs, 60)
            assert said[jobs[0]]["guilty"] is False
            assert "ended with code 1" in said[jobs[1]]["died"]
            assert {"error"} <= set(said[jobs[2]]) or {"devices"} <= set(said[jobs[2]])
            found = NicJobs(fleet).measure([Route(Nic("localhost", "nix0", RATE), Nic("localhost", "nix1", RATE))])
            [trouble] = found.values()
            assert isinstance(trouble, RouteFailure)
            assert not trouble.is_hardware_fault
        finally:
            link.close()
    assert "KeyError: 'no such thing'" in (tmp_path / "log").read_text()


def test_the_phase_needs_no_torch() -> None:
    import subprocess

    code = "import sys, bench.accept.phases.verbs; print({'torch', 'pydantic', 'numpy', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
