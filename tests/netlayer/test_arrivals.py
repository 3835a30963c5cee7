"""Ranks as threads over one store: who waits for whom, what it costs, and who is named."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from netlayer.errors import ConfigError, RanksMissing, StoreUnreachable
from netlayer.store.arrivals import await_all
from netlayer.store.redis_store import RedisStore

PATIENCE_S = 0.2


class Counted(dist.Store):  # type: ignore[misc]
    """A HashStore that counts what it is asked, by thread."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self.asked: Counter[tuple[str, str]] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "set", "wait", "get", "check", "append", "compare_set"):
            self.asked[threading.current_thread().name, name] += 1
            return getattr(self._store, name)
        return super().__getattribute__(name)


def _come(
    ranks: list[int],
    world_size: int,
    *,
    store: Any = None,
    timeout_s: float = 60.0,
    late: Mapping[int, float] | None = None,
    same: Mapping[int, dict[str, str]] | None = None,
    sizes: Mapping[int, int] | None = None,
    patience_s: float = PATIENCE_S,
) -> list[BaseException | None]:
    """What each of the ranks that come ends with."""
    shared = store or dist.HashStore()

    def one(rank: int) -> BaseException | None:
        time.sleep((late or {}).get(rank, 0))
        size = (sizes or {}).get(rank, world_size)
        told = (same or {}).get(rank)
        try:
            await_all(shared, rank, size, same=told, timeout=timedelta(seconds=timeout_s), patience_s=patience_s)
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            return exc
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_go_on_after_two_operations_each():
    store = Counted()
    # Patience enough for a busy machine: who runs out of it asks again.
    assert _come(list(range(8)), 8, store=store, timeout_s=60, patience_s=60) == [None] * 8
    by_operation = Counter(dict.fromkeys(("add", "wait", "set", "compare_set"), 0))
    for (_, name), count in store.asked.items():
        by_operation[name] += count
    assert by_operation == {"add": 8, "wait": 7, "set": 1, "compare_set": 1}


def test_a_late_rank_is_waited_for(caplog):
    with caplog.at_level(logging.WARNING, "netlayer.store.arrivals"):
        assert _come([0, 1, 2, 3], 4, late={2: 3 * PATIENCE_S}) == [None] * 4
    said = [record.message for record in caplog.records]
    assert any("waiting for rank 2" in line and "3 of 4 have come" in line for line in said)


def test_one_that_never_comes_is_named_to_all():
    found = _come([0, 1, 3], 4, timeout_s=1.0)
    assert [type(error) for error in found] == [RanksMissing] * 3
    assert {str(error) for error in found} == {str(found[0])}
    assert "waiting for rank 2" in str(found[0])
    assert "3 of 4 have come" in str(found[0])
    assert isinstance(found[0], RanksMissing)
    assert found[0].missing == (2,)


def test_many_missing_are_counted():
    found = _come([0, 4], 40, timeout_s=0.5)
    assert "waiting for ranks 1, 2, 3, 5, 6, 7, 8, 9 and 30 more" in str(found[0])
    assert "2 of 40 have come" in str(found[0])


def test_the_host_of_a_missing_rank_is_that_of_its_neighbours(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert "waiting for rank 3 (of node7)" in str(_come([0, 1, 2], 4, timeout_s=0.5)[0])


@pytest.mark.parametrize(
    ("sizes", "same", "message"),
    [
        ({2: 5}, None, "world size = 5: on rank 2, but 4 on ranks 0, 1, 3"),
        (None, {rank: {"version": "b" if rank == 1 else "a"} for rank in range(4)}, "version = b: on rank 1, but a"),
    ],
)
def test_a_rank_of_another_kind_is_named_to_all(sizes, same, message):
    found = _come([0, 1, 2, 3], 4, sizes=sizes, same=same)
    assert [type(error) for error in found] == [ConfigError] * 4
    assert all(message in str(error) for error in found)


@pytest.mark.parametrize("size", [3, 4])
def test_who_comes_after_the_verdict_hears_it(size):
    """Also the last rank of the world, which waits for nobody."""
    store = dist.HashStore()
    _come([0, 1], 3, store=store, timeout_s=0.5)
    assert isinstance(_come([2], 3, store=store, sizes={2: size})[0], RanksMissing)


def test_a_rank_that_comes_after_the_verdict_is_told_that_the_others_gave_up():
    store = dist.HashStore()
    _come([0, 1], 3, store=store, timeout_s=0.5)
    [late] = _come([2], 3, store=store)
    told = "rank 2 came after the others had given up (waiting for rank 2: 2 of 3 have come)"
    assert str(late) == told


@pytest.mark.parametrize("ranks", [[0, 1, 1, 2], [0, 1, 1]])
def test_a_rank_that_comes_twice_is_named_to_all_as_is_who_is_missing(ranks):
    """Also where as many came as the world has."""
    found = _come(ranks, 4)
    assert [type(error) for error in found] == [ConfigError] * len(ranks)
    assert all("RANK = 1: is the rank of 2 processes" in str(error) for error in found)
    assert all(("and none is rank" in str(error)) and (str(error).partition(";")[0].endswith("3")) for error in found)


def test_who_comes_with_another_version_of_the_code_may_say_more_and_less():
    store = dist.HashStore()
    store.append("cards/0", json.dumps({"rank": 1, "values": {"torch": "3"}, "mood": "fine"}) + "\n")
    [found] = _come([0], 3, store=store)
    assert isinstance(found, ConfigError)
    assert "on rank" in str(found)


def test_a_world_that_ranks_of_another_kind_filled_is_refused():
    store = dist.HashStore()
    assert _come([0], 1, store=store) == [None]
    [found] = _come([0], 2, store=store, timeout_s=0.5)
    assert isinstance(found, ConfigError)
    assert "another world size" in str(found)


def test_more_ranks_than_the_world_has_are_refused():
    store = dist.HashStore()
    assert _come([0, 1], 2, store=store) == [None] * 2
    assert "run: has 3 ranks of 2" in str(_come([0], 2, store=store)[0])


def test_a_rank_beyond_the_world_is_refused():
    assert "rank = 7: must be below the world size 3" in str(_come([7], 3)[0])


def test_ranks_with_other_timeouts_hear_one_verdict():
    store, found = dist.HashStore(), []

    def one(rank: int, timeout_s: float) -> None:
        with pytest.raises(RanksMissing) as caught:
            await_all(store, rank, 4, timeout=timedelta(seconds=timeout_s), patience_s=PATIENCE_S)
        found.append(str(caught.value))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3), (1.0, 1.5, 2.0)))
    assert len(found) == 3
    assert len(set(found)) == 1


def test_where_the_one_that_reads_dies_the_others_name_who_is_missing():
    store = dist.HashStore()
    store.add("readers", 1)  # it read, and is gone
    found = _come([1, 2], 4, store=store, timeout_s=0.5)
    assert {str(error) for error in found} == {"waiting for ranks 0, 3: 2 of 4 have come"}


def test_on_a_tcp_store():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(3)]

    def one(rank: int) -> str:
        with pytest.raises(RanksMissing) as caught:
            await_all(clients[rank], rank, 4, timeout=timedelta(seconds=0.5), patience_s=PATIENCE_S)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        said = set(pool.map(one, range(3)))
    assert len(said) == 1
    assert "waiting for rank 3" in said.pop()


def test_a_long_wait_at_a_tcp_store_makes_torch_log_one_wait_at_the_most(capfd):
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    [found] = _come([0], 2, store=server, timeout_s=2.0)
    assert "waiting for rank 1" in str(found)
    assert capfd.readouterr().err.count("timed out after") <= 1


def test_where_the_store_of_rank_0_ends_the_others_are_told_in_one_line():
    servers = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", servers[0].port, None, False, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_come, [1], 3, store=client)
        while not servers[0].check(["cards/0"]):
            time.sleep(0.01)
        servers.clear()
        [found] = waiting.result(timeout=60)
    assert isinstance(found, StoreUnreachable)
    assert str(found).startswith("the store was interrupted while ranks were awaited (")
    assert "rank 0" in str(found)
    assert "\n" not in str(found)


LONG_WAIT = """
import logging, sys
from datetime import timedelta
import torch.distributed as dist
from netlayer.store.arrivals import await_all
logging.basicConfig()
server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
server.add("readers", int(sys.argv[1]))
print("up", flush=True)
await_all(server, 0, 2, timeout=timedelta(hours=1), patience_s=0.1)
"""


@pytest.mark.parametrize("num_readers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ctrl_c_ends_a_long_wait_at_a_tcp_store(num_readers):
    """Of the one that reads, and of one that waits for it."""
    command = [sys.executable, "-c", LONG_WAIT, str(num_readers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(1.0)  # into the long wait; a moment earlier would do as well
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_who_serves_the_store_stays_until_the_others_have_heard():
    """As in a job whose rank 0 is the TCPStore: the others would see a broken connection."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    heard: list[float] = []

    def one(store: Any, rank: int, timeout_s: float) -> str:
        with pytest.raises(RanksMissing) as caught:
            await_all(store, rank, 3, timeout=timedelta(seconds=timeout_s), patience_s=PATIENCE_S, serves=rank == 0)
        heard.append(time.monotonic())
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        said = set(pool.map(one, (server, client), range(2), (0.5, 60.0)))
    assert said == {"waiting for rank 2: 2 of 3 have come"}
    assert server.add("heard", 0) == 2


def test_on_redis(redis_url):
    with RedisStore(redis_url, "arrivals") as store:
        prefixed = dist.PrefixStore("world", store)
        assert _come([0, 1, 2, 3], 4, store=prefixed) == [None] * 4
        found = _come([0, 2, 3], 4, store=dist.PrefixStore("again", store), timeout_s=0.5)
    assert "waiting for rank 1" in str(found[0])
