"""Events on their way: what is sent arrives once, a server that is away costs no step, and what is lost is counted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from netlayer.config.observe import ObserveConfig
from netlayer.errors import ConfigError, StoreUnreachable
from netlayer.observe.command import observe
from netlayer.observe.events import Event, Mark, Origin, Segment, read_events
from netlayer.observe.events import transport as transport_module
from netlayer.observe.events.collector import KafkaSource, Keeper, RedisSource, Tally, collect, collecting
from netlayer.observe.events.transport import (
    KafkaTransport,
    Message,
    RedisTransport,
    encode,
    of_fields,
    open_transport,
    redis_key,
    to_fields,
)
from netlayer.store.redis_server import EmbeddedRedis
from tests.netlayer.conftest import connect_to

HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;x\x07"
ORIGIN = Origin(run="r", rank=3, attempt=0, host=HOSTILE)


def events(*steps: int, origin: Origin = ORIGIN) -> list[Event]:
    return [Segment(origin, "forward", HOSTILE, step, step + 1, step=step) for step in steps]


def steps_in(folder: Path) -> list[int | None]:
    return [event.step for event in read_events(folder) if isinstance(event, Segment)]


@pytest.fixture
def server(redis_binary: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server


def take_all(url: str, folder: Path, *, compacts: bool = False) -> Tally:
    """Collect until nothing more comes."""
    source, keeper = RedisSource(url, "r"), Keeper(folder, compacts=compacts)
    try:
        return collect(source, keeper, lambda: True)
    finally:
        source.close()
        keeper.close()


@pytest.mark.parametrize("compacts", [False, True])
def test_what_is_sent_over_redis_arrives_once(server: EmbeddedRedis, tmp_path: Path, compacts: bool) -> None:
    transports = [RedisTransport(server.url, "r", Origin(run="r", rank=rank, attempt=0)) for rank in range(3)]
    for step in range(5):
        for transport in transports:
            assert transport.send(events(step)) == 0
    for transport in transports:
        transport.close()
    tally = take_all(server.url, tmp_path, compacts=compacts)
    assert (tally.messages, tally.events, tally.lost_messages, len(tally.streams)) == (15, 15, 0, 3)
    assert sorted(map(str, steps_in(tmp_path))) == sorted(str(step) for step in range(5) for _ in range(3))
    suffix = ".parquet" if compacts else ".arrows.zst"
    assert [path.name for path in tmp_path.glob("part-*")] == [f"part-000001{suffix}"]
    assert {event.name for event in read_events(tmp_path)} == {HOSTILE}
    with connect_to(server.url) as client:
        assert client.xlen(redis_key("r")) == 0, "what is on the disk goes from the server"
    assert take_all(server.url, tmp_path).messages == 0


def test_a_collector_that_is_killed_before_it_acknowledges_loses_nothing(server: EmbeddedRedis, tmp_path: Path) -> None:
    transport = RedisTransport(server.url, "r", ORIGIN)
    for step in range(4):
        transport.send(events(step))
    source, keeper = RedisSource(server.url, "r"), Keeper(tmp_path, compacts=False)
    for position, message in source.receive():
        keeper.add(position, message)
    keeper.write()  # the file is there, and the server does not know
    source.close()
    transport.send(events(4))
    transport.close()
    tally = take_all(server.url, tmp_path)
    assert (tally.messages, tally.twice, tally.lost_messages) == (1, 4, 0)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]


def test_a_collector_that_is_killed_before_it_writes_begins_again(server: EmbeddedRedis, tmp_path: Path) -> None:
    transport = RedisTransport(server.url, "r", ORIGIN)
    transport.send(events(1))
    transport.close()
    source = RedisSource(server.url, "r")
    while not source.receive():
        pass
    source.close()
    (tmp_path / "part-000001.pending").write_bytes(b"half")
    assert take_all(server.url, tmp_path).messages == 1
    assert steps_in(tmp_path) == [1]


def test_a_file_whose_state_was_not_renamed_yet_counts(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, compacts=False)
    keeper.add((1, 0), Message("rank-000003/0", 1, 1, 1, encode(events(1))))
    keeper.write()
    (tmp_path / "collector.json").rename(tmp_path / "collector.json.pending")
    again = Keeper(tmp_path, compacts=False)
    assert not again.add((1, 0), Message("rank-000003/0", 1, 1, 1, encode(events(1))))
    assert again.write() == [(1, 0)]
    assert steps_in(tmp_path) == [1]


def test_what_the_server_drops_is_counted_and_said(server: EmbeddedRedis, tmp_path: Path) -> None:
    transport = RedisTransport(server.url, "r", ORIGIN, max_messages=100)
    for step in range(1000):
        transport.send(events(step, step))
    transport.close()
    with connect_to(server.url) as client:
        assert client.xlen(redis_key("r")) < 300
    tally = take_all(server.url, tmp_path)
    assert tally.messages + tally.lost_messages == 1000
    assert tally.events + tally.lost_events == 2000
    assert tally.lost_messages > 700
    [mark] = [event for event in read_events(tmp_path) if isinstance(event, Mark)]
    assert (mark.name, mark.value, mark.origin.rank) == ("dropped", tally.lost_events, 3)


def test_a_server_that_is_lost_and_comes_back_gets_what_waited(
    redis_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE_S", 0.0)
    place = tmp_path / "redis"
    with EmbeddedRedis(directory=place, append_only=True, binary=redis_binary) as server:
        transport = RedisTransport(server.url, "r", ORIGIN)
        assert transport.send(events(0)) == 0
    for step in range(1, 4):
        assert transport.send(events(step)) == 0, "no step hears of it"
    assert len(transport._queue.waiting) == 3
    with EmbeddedRedis(directory=place, append_only=True, binary=redis_binary) as server:
        assert transport.send(events(4)) == 0
        assert not transport._queue.waiting
        transport.close()
        assert take_all(server.url, tmp_path / "events").lost_messages == 0
    assert steps_in(tmp_path / "events") == [0, 1, 2, 3, 4]


def test_the_sender_keeps_no_more_than_its_bound(server: EmbeddedRedis, tmp_path: Path) -> None:
    url = server.url
    server.close()
    transport = RedisTransport(url, "r", ORIGIN, max_pending_bytes=20_000)
    lost = sum(transport.send(events(step)) for step in range(50))
    queue = transport._queue
    assert sum(len(message.payload) for message in queue.waiting) <= 20_000
    assert lost + len(queue.waiting) == 50
    assert lost > 0
    assert queue.waiting[-1].number == 50, "the oldest go"
    transport.close()


def test_a_server_without_our_group_is_told_again(server: EmbeddedRedis, tmp_path: Path) -> None:
    """As after a restart of a Redis that keeps nothing."""
    source = RedisSource(server.url, "r")
    source.receive()
    with connect_to(server.url) as client:
        client.delete(redis_key("r"))
    transport = RedisTransport(server.url, "r", ORIGIN)
    transport.send(events(1))
    transport.close()
    keeper = Keeper(tmp_path, compacts=False)
    tally = collect(source, keeper, lambda: keeper.tally.messages > 0)
    assert tally.messages == 1
    source.close()


def test_entries_that_are_no_events_are_counted(server: EmbeddedRedis, tmp_path: Path) -> None:
    with connect_to(server.url) as client:
        client.xadd(redis_key("r"), {"x": "y"})
        client.xadd(redis_key("r"), {"s": "rank-1/0", "n": "x", "t": 1, "c": 1, "b": b""})
    tally = take_all(server.url, tmp_path)
    assert (tally.messages, tally.damaged) == (0, 2)


def test_fields_hold_a_message() -> None:
    message = Message("rank-000001/2", 5, 50, 10, b"x")
    flat = [str(part).encode() if not isinstance(part, bytes) else part for part in to_fields(message)]
    assert of_fields(flat) == message


def test_the_command_collects_until_its_input_ends(server: EmbeddedRedis, tmp_path: Path) -> None:
    config = ObserveConfig(transport="redis")
    with collecting(config, "r", server.url, tmp_path):
        transport = open_transport("redis", ORIGIN, folder=tmp_path, url=server.url)
        transport.send(events(1, 2))
        transport.close()
    assert steps_in(tmp_path / "events") == [1, 2]
    assert "2 events of 1 ranks in 1 messages" in (tmp_path / "logs" / "collector.log").read_text()


def test_files_need_no_collector(tmp_path: Path) -> None:
    with collecting(ObserveConfig(), "r", "", tmp_path):
        pass
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(ConfigError, match=r"job\.observe\.url"),
        collecting(ObserveConfig(transport="redis"), "r", "", tmp_path),
    ):
        pass


def test_the_command_says_what_was_lost(server: EmbeddedRedis, tmp_path: Path) -> None:
    with connect_to(server.url) as client:
        client.xadd(redis_key("r"), dict(zip("sntcb", ("rank-000001/0", 3, 30, 10, encode(events(7))), strict=True)))
    result = CliRunner().invoke(observe, ["collect", server.url, "--run", "r", "--out", str(tmp_path), "--for", "0"])
    assert result.exit_code == 1
    assert "lost 20 events in 2 messages" in result.stdout


def test_the_command_ends_at_sigterm_with_what_is_left(server: EmbeddedRedis, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netlayer", "observe", "collect", server.url, "--run", "r", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        transport = RedisTransport(server.url, "r", ORIGIN)
        transport.send(events(1))
        transport.close()
        with connect_to(server.url) as client:
            until(lambda: bool(client.exists(redis_key("r"))) and client.xinfo_groups(redis_key("r")))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert "1 events of 1 ranks" in out
    assert process.returncode == 0
    assert steps_in(tmp_path) == [1]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_addresses_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for kind, url in (("redis", ""), ("kafka", ""), ("redis", "http://x")):
        with pytest.raises(ConfigError, match=r"job\.observe\.url"):
            open_transport(kind, ORIGIN, folder=tmp_path, url=url)


def test_a_query_in_sql(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    keeper = Keeper(tmp_path, compacts=False)
    keeper.add((1, 0), Message("rank-000003/0", 1, 3, 3, encode(events(1, 2, 3))))
    keeper.write()
    result = CliRunner().invoke(observe, ["query", str(tmp_path), "select count(*) as n, max(step) s from events"])
    assert result.stdout.split() == ["n", "s", "3", "3"]
    result = CliRunner().invoke(observe, ["query", str(tmp_path), "select name from events limit 1"])
    assert "\x1b" not in result.stdout
    result = CliRunner().invoke(observe, ["query", str(tmp_path), "select step from events order by 1", "--csv"])
    assert result.stdout.split() == ["step", "1", "2", "3"]
    for wrong in ("select x from y", "copy events to '/tmp/never.csv'", "drop table events"):
        assert isinstance(CliRunner().invoke(observe, ["query", str(tmp_path), wrong]).exception, ConfigError)


class FakeBroker:
    """A topic of two partitions, in place of aiokafka's producer and consumer."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.is_up = True
        self.committed: dict[Any, int] = {}

    def module(self) -> dict[str, Any]:  # noqa: C901  (two classes of a few lines)
        broker = self

        class Producer:
            def __init__(self, **_: Any) -> None:
                pass

            async def start(self) -> None:
                if not broker.is_up:
                    raise OSError("no broker")

            async def stop(self) -> None:
                pass

            async def send(self, topic: str, value: bytes, key: bytes, headers: Sequence[tuple[str, bytes]]) -> Any:
                partition = len(key) % 2
                offset = sum(record.partition == partition for record in broker.records)
                broker.records.append(
                    SimpleNamespace(offset=offset, partition=partition, key=key, value=value, headers=headers)
                )

                async def sent() -> None:
                    if not broker.is_up:
                        raise OSError("no broker")

                return sent()

        class Consumer:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.next = 0

            async def start(self) -> None:
                if not broker.is_up:
                    raise OSError("no broker")

            async def stop(self) -> None:
                pass

            async def getmany(self, timeout_ms: int, max_records: int) -> dict[Any, list[Any]]:
                records, self.next = broker.records[self.next :], len(broker.records)
                return {0: records}

            async def commit(self, offsets: dict[Any, int]) -> None:
                broker.committed |= offsets

        return {"AIOKafkaProducer": Producer, "AIOKafkaConsumer": Consumer}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    aiokafka = pytest.importorskip("aiokafka")
    broker = FakeBroker()
    for name, value in broker.module().items():
        monkeypatch.setattr(aiokafka, name, value)
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE_S", 0.0)
    return broker


def test_over_kafka_by_a_stand_in_for_the_broker(broker: FakeBroker, tmp_path: Path) -> None:
    """Not against a broker: what it shows is the order of calls, and what is kept, dropped and acknowledged."""
    broker.is_up = False
    transport = KafkaTransport("127.0.0.1:9092", "r", ORIGIN)
    transport.send(events(1))
    assert len(transport._queue.waiting) == 1
    broker.is_up = True
    transport.send(events(2))
    other = KafkaTransport("127.0.0.1:9092", "other", ORIGIN)
    other.send(events(9))
    other.close()
    transport.close()
    source, keeper = KafkaSource("127.0.0.1:9092", "r"), Keeper(tmp_path, compacts=False)
    tally = collect(source, keeper, lambda: True)
    source.close()
    assert (tally.messages, tally.lost_messages) == (2, 0)
    assert steps_in(tmp_path) == [1, 2]
    assert sum(broker.committed.values()) == 3
    broker.is_up = False
    with pytest.raises(ConfigError, match="does not answer"):
        KafkaSource("127.0.0.1:9092", "r")


def test_no_server_is_an_error_of_its_own_kind(tmp_path: Path) -> None:
    source = RedisSource(f"unix://{tmp_path}/none.sock", "r")
    with pytest.raises(StoreUnreachable):
        source.receive()
    keeper = Keeper(tmp_path / "x", compacts=False)
    assert collect(source, keeper, lambda: True).messages == 0
    assert not list((tmp_path / "x").iterdir())
