"""The NICs' phase of `netlayer accept` over real verbs, in the virtual machine of `make rdma-lab`.

Its agents are real ones. Of several hosts each has an agent of its own in that machine and sees one NIC of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import start_local
from bench.accept.agents.wire import Message
from bench.accept.phases.nics import NicJobs
from bench.accept.phases.trial import Member, Trial
from bench.accept.phases.verbs import measure_verbs
from bench.accept.phases.work import work_for
from congestion.verbs.measure import Plan, measure_pair
from lab.switch import impaired, switched

pytestmark = pytest.mark.rdma
Seen = Mapping[str, Sequence[str]]
"""By host: its NICs."""


class Sees(NicJobs):
    """The jobs of hosts that have some of this machine's NICs each."""

    def __init__(self, fleet: Fleet, seen: Seen) -> None:
        super().__init__(fleet)
        self._seen = seen

    def look(self, hosts: Sequence[str]) -> dict[str, Message]:
        return {
            host: {"devices": [one for one in said["devices"] if one["name"] in self._seen[host]]}
            for host, said in super().look(hosts).items()
        }


@pytest.fixture(scope="module")
def nics() -> Iterator[list[str]]:
    if "NETLAYER_RDMA_LAB" not in os.environ:
        pytest.skip("no Soft-RoCE devices that may be changed; run: make rdma-lab")
    with switched(4) as names:
        yield names


def accept(seen: Seen, folder: Path) -> Trial:
    """The phase over hosts with these NICs."""
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        links = []
        for host in seen:
            link = start_local((), log)
            stack.callback(link.close)
            link.host = host
            links.append(link)
        fleet = Fleet(links)
        assert fleet.begin({}, {}, False) == []
        members = [Member(at, host, at, 0, host) for at, host in enumerate(seen)]
        trial = Trial(fleet, members, work_for("gloo", None), list(range(len(members))))
        measure_verbs(trial, Sees(fleet, seen), "require", lambda _done, _total, _words: None)
    for one in trial.findings:
        print(one)
    return trial


def accused(trial: Trial) -> list[tuple[str, str]]:
    return [(one.verdict, one.label) for one in trial.suspects]


def test_good_nics_pass(nics: list[str], tmp_path: Path) -> None:
    trial = accept({"lab": nics}, tmp_path)
    assert not trial.suspects
    assert {(one.verdict, one.check) for one in trial.findings} == {
        ("PASS", "verbs loopback"),
        ("PASS", "verbs inside the host"),
    }
    assert len({(row["device"], row["remote_device"]) for row in trial.rows}) == 16
    assert {row["wrong_bytes"] for row in trial.rows} == {0}


@pytest.mark.timeout(900)  # it starts 23 processes, in a machine that QEMU may emulate
def test_a_slow_nic_of_a_host_is_named(nics: list[str], tmp_path: Path) -> None:
    plan = Plan(sizes=[1 << 16], kinds=["write"], messages=16, repeats=1, pings=1)
    reached, _ = measure_pair(nics[2], nics[3], plan)
    # An eighth of what the NIC reaches here, which is below any fixed rate where the processor is emulated. A quarter
    # would be too much: of NICs in software, which share the cores, that may be noise.
    rate = f"{max(1, round(reached['median_bps'] / 8e6))}mbit"
    with impaired(nics[2], "tbf", "rate", rate, "burst", "64k", "limit", "4m"):
        trial = accept({"lab": nics}, tmp_path)
    assert accused(trial) == [("FAIL", f"lab: {nics[2]}")]
