"""What ends well, and what ends with one line: ranks with a RedisStore each, and a server that fails under them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from netlayer.errors import ConfigError, RanksMissing, StoreLost
from netlayer.store.arrivals import await_all
from netlayer.store.redis_server import EmbeddedRedis
from netlayer.store.redis_store import RedisStore

TIMEOUT = timedelta(seconds=60)
PATIENCE_S = 0.2


def _come(url: str, run: str, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> None:
    with RedisStore(url, run, timeout, rank=rank, world_size=world_size) as store:
        await_all(dist.PrefixStore("world", store), rank, world_size, timeout=timeout, patience_s=PATIENCE_S)


def _start(pool: ThreadPoolExecutor, url: str, run: str, ranks: list[int], world_size: int) -> list[Future[None]]:
    return [pool.submit(_come, url, run, rank, world_size) for rank in ranks]


def test_the_server_may_be_restarted_with_its_data_while_ranks_wait(redis_binary, short_dir):
    def server() -> EmbeddedRedis:
        return EmbeddedRedis(directory=short_dir / "redis", append_only=True, binary=redis_binary)

    with ThreadPoolExecutor(4) as pool:
        with server() as first:
            waiting = _start(pool, first.url, "restarted", [0, 1, 2], 4)
            time.sleep(3 * PATIENCE_S)  # some wait in their first slice, and write down who they are
        with server() as second:
            waiting += _start(pool, second.url, "restarted", [3], 4)
            for one in waiting:
                one.result(timeout=60)


def test_a_server_that_comes_back_empty_is_told_by_every_rank_that_waits(redis_binary, short_dir):
    def server() -> EmbeddedRedis:
        return EmbeddedRedis(directory=short_dir / "redis", binary=redis_binary)

    with ThreadPoolExecutor(3) as pool:
        with server() as first:
            waiting = _start(pool, first.url, "emptied", [0, 1, 2], 4)
            time.sleep(3 * PATIENCE_S)
        with server():
            for one in waiting:
                with pytest.raises(StoreLost, match="store lost its data"):
                    one.result(timeout=60)


def test_two_runs_share_one_server(redis_url):
    with ThreadPoolExecutor(8) as pool:
        waiting = _start(pool, redis_url, "one", [0, 1, 2, 3], 4) + _start(pool, redis_url, "other", [0, 1, 2, 3], 4)
        for one in waiting:
            one.result(timeout=60)


def test_a_run_that_was_killed_and_takes_its_old_name_is_told_so(redis_url):
    killed = RedisStore(redis_url, "again", TIMEOUT, rank=0, world_size=2)  # never closed: it is there for good
    with pytest.raises(ConfigError, match=r"rank 0 of this run is already there, or a killed run left it.*another id"):
        _come(redis_url, "again", 0, 2)
    killed.close()


def test_a_server_that_is_away_for_longer_than_a_look_is_waited_for(redis_binary, short_dir):
    def server() -> EmbeddedRedis:
        return EmbeddedRedis(directory=short_dir / "redis", append_only=True, binary=redis_binary)

    with ThreadPoolExecutor(4) as pool:
        with server() as first:
            waiting = _start(pool, first.url, "away", [0, 1, 2], 4)
            time.sleep(3 * PATIENCE_S)
        time.sleep(10 * PATIENCE_S)
        assert not any(one.done() for one in waiting)
        with server() as second:
            waiting += _start(pool, second.url, "away", [3], 4)
            for one in waiting:
                one.result(timeout=60)


def test_a_rank_that_came_and_gave_up_is_not_called_missing(redis_url):
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(_come, redis_url, "gave-up", 1, 3, timedelta(seconds=1))
        long = pool.submit(_come, redis_url, "gave-up", 0, 3, timedelta(seconds=30))
        for one in (short, long):
            with pytest.raises(RanksMissing, match="waiting for rank 2: 2 of 3 have come"):
                one.result(timeout=60)


@pytest.mark.slow
def test_a_rank_late_by_a_minute_is_waited_for(redis_url):
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(_come, redis_url, "late", rank, 4, timedelta(seconds=120)) for rank in range(3)]
        time.sleep(60)
        assert not any(one.done() for one in waiting)
        _come(redis_url, "late", 3, 4, timedelta(seconds=120))
        for one in waiting:
            one.result(timeout=10)


def test_too_few_connections_are_one_line(redis_binary: Path, start_redis: Callable[..., int]):
    port = start_redis(redis_binary, "--maxclients", "3")
    url = f"redis://127.0.0.1:{port}/0"
    with RedisStore(url, "few", TIMEOUT), RedisStore(url, "few", TIMEOUT), RedisStore(url, "few", TIMEOUT):  # noqa: SIM117
        with pytest.raises(
            ConfigError, match=r"maxclients: of the server at redis://127\.0\.0\.1.*CONFIG SET maxclients"
        ):
            RedisStore(url, "few", timedelta(seconds=1))
