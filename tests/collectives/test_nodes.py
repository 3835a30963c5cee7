"""Virtual nodes: NCCL's network path on one host, and what a watch says when a rank of it is away, dead or stuck."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.health import checks as health
from collectives.health.trial import HealthRow
from collectives.transport.communicator import Communicator
from collectives.transport.nodes import virtual_node_environ
from collectives.watch.watchdog import Watch
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost, RankFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from tests.collectives.ranks import run_ranks

NUM_GPUS = torch.cuda.device_count()
NUM_NODES = min(NUM_GPUS, 4)
CULPRIT = NUM_NODES - 1  # not the rank that hosts the store
on_gpus = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, found {NUM_GPUS}"),
]


def test_nodes_differ_in_their_identity_alone() -> None:
    first, second = virtual_node_environ(0), virtual_node_environ(1)
    assert first.pop("NCCL_HOSTID") != second.pop("NCCL_HOSTID")
    assert first == second
    assert first["NCCL_NET"] == "Socket"
    assert virtual_node_environ(0, 4, 4)["NCCL_NSOCKS_PERTHREAD"] == "4"


@pytest.mark.parametrize("bad", [(-1, 1, 1), (0, 0, 1), (0, 17, 1), (0, 1, 0), (0, 16, 5)])
def test_numbers_out_of_range_are_value_errors(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 0, 1 and 1"):
        virtual_node_environ(*bad)


def _url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def _join(rank: int, world_size: int, url: str, environ: dict[str, str], timeout_s: float) -> None:
    os.environ.update(environ)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def measure_all_reduce(rank: int, world_size: int, url: str, on_nodes: bool, folder: str) -> list[HealthRow]:
    environ = virtual_node_environ(rank) if on_nodes else {}
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,GRAPH", "NCCL_DEBUG_FILE": f"{folder}/{rank}"}
    _join(rank, world_size, url, environ | debug, 120)
    group = dist.group.WORLD
    assert group is not None
    return health.all_reduce(group, 2**26, repeats=5)


@pytest.mark.parametrize("_", [pytest.param(None, marks=on_gpus, id=f"{NUM_NODES}-nodes")])
def test_an_all_reduce_goes_through_sockets_and_is_right(_: None, tmp_path: Path) -> None:
    rows: dict[bool, list[HealthRow]] = {}
    logs: dict[bool, str] = {}
    for on_nodes in (True, False):
        folder = tmp_path / str(on_nodes)
        folder.mkdir()
        rows[on_nodes] = run_ranks(measure_all_reduce, NUM_NODES, (_url(), on_nodes, str(folder)), limit_s=150)[0]
        logs[on_nodes] = "".join(path.read_text(errors="replace") for path in folder.iterdir())
        assert all(row["ok"] for row in rows[on_nodes]), rows[on_nodes]
    assert re.search(r"via NET/Socket", logs[True])
    assert not re.search(r"via (P2P|SHM)", logs[True])
    assert not re.search(r"via NET", logs[False])
    # No figure is asked of the machine, but a socket cannot come near its links: then they carried the bytes.
    apart, together = (rows[on_nodes][0]["bus_bw_gbs"] for on_nodes in (True, False))
    print(f"bus bandwidth {apart:.2f} GB/s through sockets, {together:.2f} GB/s without")
    assert apart < together / 3


def be_a_node(
    rank: int, world_size: int, url: str, culprit: int, how: str
) -> tuple[CollectiveFailed | None, float, Any]:
    """The culprit is away from the third gather, or dies before it; the error of the others, and when they had it."""
    _join(rank, world_size, url, virtual_node_environ(rank), 60)
    device = torch.device("cuda", rank)
    heard: list[str] = []
    watch = Watch(timeout=timedelta(seconds=8), on_failure=lambda error: heard.append(str(error)))
    comm = Communicator("gather", dist.new_group(timeout=timedelta(seconds=60)), device, watch=watch)
    unsharded_N = torch.zeros(2**20 * world_size, device=device)
    for step in range(3):
        watch.begin_step(step)
        if step == 2 and rank == culprit:
            if how == "killed":
                time.sleep(1)  # or the last gather dies with it: what it sent is still in its sockets
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        comm.all_gather(unsharded_N).wait()
        if step < 2:
            torch.cuda.synchronize()
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 40:
        try:
            watch.check()
        except CollectiveFailed as exc:
            return exc, time.monotonic() - begin_s, heard
        time.sleep(0.05)
    return None, time.monotonic() - begin_s, heard


@pytest.mark.parametrize("how", [pytest.param(how, marks=on_gpus) for how in ("away", "killed")])
def test_a_lost_rank_is_named_on_nccl(how: str) -> None:
    told = run_ranks(be_a_node, NUM_NODES, (_url(), CULPRIT, how), mute=(CULPRIT,), limit_s=120)
    for error, after_s, heard in told[:CULPRIT]:
        assert isinstance(error, CollectiveFailed), heard
        print(f"after {after_s:.1f} s: {error}")
        assert (error.missing, error.silent) == (((CULPRIT,), ()) if how == "away" else ((), (CULPRIT,)))
        size = 4 * NUM_NODES
        assert f"all_gather #4 ({size} MiB) of group gather" in str(error)
        assert f"at step 2: rank {CULPRIT}" in str(error)
        if how == "away":
            assert isinstance(error, CollectiveTimeout)
            assert after_s >= 7.9
            assert "has not arrived: last launched #3" in str(error)
            assert "in be_a_node" in str(error)
    if how == "killed":
        assert any(isinstance(error, PeerLost) and after_s < 7 for error, after_s, _ in told[:CULPRIT]), told


def get_stuck(context: RankContext, url: str) -> None:
    """Ranks of one node each; the last one never comes, and the others synchronise with the device."""
    rank = context.env.rank
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"  # torch waits for four times as long before it ends us
    _join(rank, context.env.world_size, url, virtual_node_environ(rank), 12)
    watch = Watch(timeout=timedelta(seconds=10))
    group = dist.group.WORLD
    watch.track("dp", group)
    x_N = torch.zeros(2**20, device="cuda")
    for step in range(2):
        watch.begin_step(step)
        if step == 1 and rank == CULPRIT:
            time.sleep(600)
        with watch.collective("dp", "all_reduce", x_N.nbytes):
            dist.all_reduce(x_N, group=group)
        torch.cuda.synchronize()


@pytest.mark.parametrize("_", [pytest.param(None, marks=on_gpus, id=f"{NUM_NODES}-nodes")])
def test_the_line_is_in_the_log_before_torch_ends_a_stuck_process(_: None, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        launch(get_stuck, NUM_NODES, args=(_url(),), log_dir=tmp_path, verbosity=0)
    assert failed.value.rank != CULPRIT
    for rank in range(CULPRIT):
        log = (tmp_path / f"rank{rank:04}.log").read_text(errors="replace")
        line = re.search(r"all_reduce #2 \(4 MiB\) of group dp .* has not completed in .* of 10 s at step 1: .*", log)
        assert line, log
        assert f"rank {CULPRIT} " in line[0]
        assert "has not arrived: last launched #1" in line[0]
        assert "in get_stuck" in line[0]
