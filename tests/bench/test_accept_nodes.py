"""What ranks are told of the nodes that they stand on: the hosts themselves, or virtual ones that share this host."""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from typing import Any, cast

import pytest

from bench.accept import command
from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import Link
from bench.accept.command import AcceptOptions
from bench.accept.phases.trial import Trial
from bench.accept.run import Result, Settings, worker_config
from bench.accept.run_output import drain_lists, sentence
from netlayer.errors import ConfigError
from netlayer.launch.rank import RankEnv
from netlayer.verdict import Finding

HOST = os.uname().nodename


def link_to(host: str, ranks: Any) -> Link:
    reader, sink = os.pipe()
    os.close(reader)
    return Link(host, host, tuple(ranks), cast(Any, None), sink)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "usable_gpus", lambda: ["H200"] * 8)
    monkeypatch.setattr(command, "start_local", lambda ranks, _log: link_to("localhost", ranks))


@contextmanager
def links_of(options: AcceptOptions, backend: str, env: RankEnv | None = None) -> Any:
    with command._open_links(options, env, backend, lambda _host: io.BytesIO()) as opened:
        yield opened


def settings(options: AcceptOptions, backend: str = "nccl", env: RankEnv | None = None) -> Settings:
    with links_of(options, backend, env) as (links, hosts, per_node):
        derived = command._settings(options, hosts, per_node, backend, ["gemm"])
    assert {link.host for link in links} == {member.host for member in derived.members}
    return derived


def trial_of(chosen: Settings) -> Trial:
    ranks = list(range(len(chosen.members)))
    return Trial(cast(Fleet, None), chosen.members, chosen.work, ranks, dry_run=chosen.dry_run)


def accuse(trial: Trial, rank: int) -> None:
    finding = Finding("FAIL", trial.label([rank]), "gemm", "slow", file="gemm")
    trial.flag("gemm", "node", [rank], finding)


@pytest.mark.usefixtures("gpus")
def test_the_gpus_of_a_host_are_one_node_with_nvlink() -> None:
    chosen = settings(AcceptOptions())
    assert [member.label for member in chosen.members] == [f"{HOST}/gpu{at}" for at in range(8)]
    assert {member.node for member in chosen.members} == {0}
    assert not chosen.virtual_nodes
    told = worker_config(chosen, chosen.members[3])
    assert told["device"] == "cuda:3"
    assert not {name for name in told["environ"] if name.startswith("NCCL_")}
    trial = trial_of(chosen)
    accuse(trial, 3)
    [line] = drain_lists(trial)["Slurm"]
    assert f"nodename={HOST} " in line
    assert f"{HOST}/gpu3" in line
    assert "nvlink -s" in trial.link_step([1, 2])


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("asked", "labels", "shared"),
    [
        (AcceptOptions(ranks_per_node=1), ["node0", "node1"], 0),
        (AcceptOptions(ranks_per_node=4), ["node0/gpu0", "node0/gpu1"], 0),
        (AcceptOptions(ranks=16), ["node0", "node1"], 8),  # NCCL takes no two ranks of one node on one GPU
        (AcceptOptions(ranks=16, ranks_per_node=2), ["node0/gpu0", "node0/gpu1"], 8),
    ],
)
def test_virtual_nodes_are_asked_for_and_drain_nobody(asked: AcceptOptions, labels: list[str], shared: int) -> None:
    chosen = settings(asked)
    assert [member.label for member in chosen.members[:2]] == labels
    assert (chosen.virtual_nodes, chosen.shared_gpus) == (True, shared)
    last = worker_config(chosen, chosen.members[-1])
    assert last["device"] == "cuda:7"
    assert last["environ"]["NCCL_P2P_DISABLE"] == "1"
    assert last["environ"]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"  # or one broken group would hold up all later ones
    trial = trial_of(chosen)
    accuse(trial, 1)
    assert not drain_lists(trial)


@pytest.mark.usefixtures("gpus")
def test_cpu_ranks_are_nodes_that_drain_nobody() -> None:
    chosen = settings(AcceptOptions(ranks=4, backend="gloo"), "gloo")
    assert [member.label for member in chosen.members] == ["node0", "node1", "node2", "node3"]
    trial = trial_of(chosen)
    accuse(trial, 3)
    assert not drain_lists(trial)
    assert sentence(Result(trial)).startswith("faulty: node3 (gemm); ")


@pytest.mark.usefixtures("gpus")
def test_a_launcher_on_one_host_starts_the_ranks_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "meet_agents", lambda *_: [link_to(HOST, [rank]) for rank in range(1, 4)])
    env = RankEnv(0, 4, 0, 4, "torchrun")
    chosen = settings(AcceptOptions(), env=env)
    assert [member.label for member in chosen.members] == [f"{HOST}/gpu{at}" for at in range(4)]
    assert not chosen.virtual_nodes
    assert settings(AcceptOptions(ranks_per_node=1), env=env).virtual_nodes
    assert settings(AcceptOptions(backend="gloo"), "gloo", env).members[3].label == "node3"


@pytest.mark.usefixtures("gpus")
def test_hosts_of_a_launcher_are_no_virtual_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "meet_agents", lambda *_: [link_to("other", [1])])
    env = RankEnv(0, 2, 0, 1, "slurm")
    assert [member.label for member in settings(AcceptOptions(), env=env).members] == [HOST, "other"]
    with pytest.raises(ConfigError, match="--ranks-per-node = 1: divides one host"):
        settings(AcceptOptions(ranks_per_node=1), env=env)


def test_hosts_are_drained_by_their_own_name_and_not_by_the_user_of_ssh() -> None:
    chosen = Settings(command.members_of([("root@10.0.0.7", 1), ("localhost", 1)]), "gloo", cast(Any, None))
    trial = trial_of(chosen)
    accuse(trial, 0)
    accuse(trial, 1)
    assert [line.split()[2] for line in drain_lists(trial)["Slurm"]] == ["nodename=10.0.0.7", f"nodename={HOST}"]
