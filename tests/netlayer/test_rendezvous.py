"""Every group of a layout, among real ranks on gloo."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netlayer.errors import ConfigError
from netlayer.launch.launcher import launch
from netlayer.layout import DIMENSIONS
from netlayer.rendezvous import open_world
from netlayer.store.meeting import with_run
from tests.forked import forked_ranks

from .conftest import keys_of
from .group_ranks import LAYOUTS, every_layout, faults, on_tcp, retried

NUM_RANKS = 8
LAZY = {"TORCH_GLOO_LAZY_INIT": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    """What ranks do once they have started is tested here; how they start, in `test_launch.py`."""
    with forked_ranks():
        yield


@pytest.fixture(scope="module")
def found(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    init_method = with_run(redis_url, "every-layout")
    logs = tmp_path_factory.mktemp("groups")
    return launch(every_layout, NUM_RANKS, args=(init_method,), log_dir=logs, env=LAZY)


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_each_rank_is_in_its_own_groups(found, number, dimension):
    layout = LAYOUTS[number]
    for rank, sums in enumerate(found):
        own = layout.group_of(dimension, rank)
        assert sums[f"{number} {dimension}"] == (sum(own) if len(own) > 1 else None)


def test_a_group_asked_for_has_a_communicator_of_its_own(found):
    assert [one["asked for"] for one in found] == [sum(LAYOUTS[0].group_of("dp", rank)) for rank in range(NUM_RANKS)]
    assert all(one["another communicator"] for one in found)


def test_partitions_may_be_uneven_and_leave_ranks_out(found):
    assert [one["uneven"] for one in found[:4]] == [[1, 2], [1, None], [None, 2], [None, None]]


def test_a_process_may_open_its_world_again(found):
    assert {one["again"] for one in found} == {sum(range(NUM_RANKS))}


def test_collectives_may_have_a_longer_timeout_than_the_meeting(found):
    for one in found:
        assert one["timeouts of collectives"] == dict.fromkeys(("store", *DIMENSIONS), 77.0)


@pytest.mark.parametrize("address", ["env://", "tcp://"])
def test_ranks_meet_at_a_store_of_rank_0_which_names_who_is_missing(address: str, tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_method = address if address == "env://" else f"tcp://127.0.0.1:{port}"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = launch(on_tcp, 2, args=(init_method,), log_dir=tmp_path, env={**LAZY, **place})
    if address == "env://":
        assert all("WORLD_SIZE = 2: is not the layout's 3" in one.pop("missing") for one in found)
    else:
        assert all(one.pop("missing") == "waiting for rank 2: 2 of 3 have come" for one in found)
    assert found == [{"turn 0": 1, "turn 1": 1}] * 2


@pytest.mark.parametrize("store", ["tcp", "redis"])
def test_a_rank_that_gave_up_may_come_again(store: str, redis_url: str, tmp_path: Path):
    """What it is called then does not depend on how often it has tried."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        init_method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    if store == "redis":
        init_method = with_run(redis_url, "came-again")
    found = launch(retried, 2, args=(init_method, tmp_path / "failed"), log_dir=tmp_path / "logs", env=LAZY)
    assert found[1].pop("failed") == {"tcp": "StoreUnreachable", "redis": "RanksMissing"}[store]
    assert found == [{"turn 0": 1, "turn 1": 1}] * 2
    if store == "redis":
        assert keys_of(redis_url, "came-again") == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("file:///tmp/x", "is no env, tcp, redis"),
        ("tcp://", "MASTER_ADDR: is neither in the environment nor a host in init_method"),
        ("tcp://127.0.0.1", "MASTER_PORT: is neither in the environment nor in init_method"),
        ("tcp://127.0.0.1:99999", "MASTER_PORT = 99999: must be a whole number, 1 to 65535"),
        ("tcp://127.0.0.1:many", "MASTER_PORT = many: must be a whole number, 1 to 65535"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(address, message, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        open_world(LAYOUTS[0], backend="gloo", init_method=address, rank=0)


def test_a_partition_with_a_rank_twice_is_refused():
    with pytest.raises(ValueError, match="odd has a rank in two groups"):
        open_world(LAYOUTS[0], backend="gloo", rank=0, more={"odd": [[0, 1], [1, 2]]})


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_partition_with_a_rank_beyond_the_world_is_refused(rank: int):
    with pytest.raises(ValueError, match=f"odd has rank {rank}, and the world has ranks 0 to 7"):
        open_world(LAYOUTS[0], backend="gloo", rank=0, more={"odd": [[0, rank]]})


@pytest.mark.parametrize("address", ["env://", "tcp://127.0.0.1:1", "redis://127.0.0.1:1/run"])
def test_a_world_size_in_the_environment_that_is_not_the_layouts_is_refused(address: str, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 7: is not the layout's 8"):
        open_world(LAYOUTS[0], backend="gloo", init_method=address)


def test_a_group_of_all_is_the_world(found):
    assert all(one["whole world"] for one in found)


def test_ranks_that_ask_for_different_things_are_named(redis_url: str, tmp_path: Path):
    said = launch(faults, 2, args=(with_run(redis_url, "faults"),), log_dir=tmp_path, env=LAZY)
    assert said[0] == said[1]
    degrees, layout, code = said[0]
    assert degrees.startswith("world size = 2: is not tp 1 x dp 4 x pp 1 = 4")
    assert "layout = tp 2, dp 1, pp 1: on rank 0, but tp 1, dp 2, pp 1 on rank 1" in layout
    assert "code = version 0: on rank 0, but version 1 on rank 1" in code


def test_a_world_of_another_size_than_the_layout_is_said_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    from netlayer.rendezvous import create_groups

    with pytest.raises(ConfigError, match="start as many ranks"):
        create_groups(LAYOUTS[0])
