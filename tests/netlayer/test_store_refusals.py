"""Redis servers that are unsafe for a run, or that refuse it: each gets one error line with the remedy."""

from __future__ import annotations

import datetime
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from netlayer.errors import ConfigError, StoreError, StoreLost, StoreUnreachable
from netlayer.init_method import open_store
from netlayer.store.meeting import with_run
from netlayer.store.redis_server import EmbeddedRedis
from netlayer.store.redis_store import RedisStore
from tests.netlayer.conftest import connect_to
from tests.netlayer.test_store_tls import certify

SECOND = datetime.timedelta(seconds=1)
LONG = datetime.timedelta(seconds=60)
Start = Callable[..., int]


class TestEviction:
    @pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
    def test_server_that_would_drop_keys_is_refused(self, redis_binary: Path, run_id: str, policy: str) -> None:
        with EmbeddedRedis(binary=redis_binary) as server, connect_to(server.url) as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(
                ConfigError, match=rf"maxmemory-policy = {policy}: .*CONFIG SET maxmemory-policy noevic"
            ):
                RedisStore(server.url, run_id, LONG)
            assert client.dbsize() == 0

    @pytest.mark.parametrize(
        ("policy", "limit"), [("volatile-lru", "100mb"), ("noeviction", "100mb"), ("allkeys-lru", 0)]
    )
    def test_server_that_keeps_what_does_not_expire(
        self, redis_binary: Path, run_id: str, policy: str, limit: str
    ) -> None:
        with EmbeddedRedis(binary=redis_binary) as server, connect_to(server.url) as client:
            client.config_set("maxmemory", limit)
            client.config_set("maxmemory-policy", policy)
            RedisStore(server.url, run_id, LONG).close()

    @pytest.mark.parametrize("dropped", ["k:n", "keys", "epoch"])
    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.add("n", 1),
            lambda store: store.append("n", "x"),
            lambda store: store.compare_set("n", "5", "6"),
            lambda store: store.set("n", "7"),
            lambda store: store.multi_set(["other", "n"], ["1", "2"]),
            lambda store: store.delete_key("n"),
            lambda store: store.check(["n"]),
        ],
    )
    def test_every_call_fails_on_a_dropped_key(
        self, redis_url: str, run_id: str, call: Callable[[RedisStore], object], dropped: str
    ) -> None:
        store = RedisStore(redis_url, run_id, LONG)
        store.set("n", "5")
        with connect_to(redis_url) as client:
            client.delete(f"netlayer:{{{run_id}}}:{dropped}")
            with pytest.raises(StoreLost, match=r"store lost its data: the server at .* no longer holds"):
                call(store)
            store.close()
            client.flushdb()

    def test_get_of_a_dropped_key(self, redis_url: str, run_id: str) -> None:
        store = RedisStore(redis_url, run_id, LONG)
        store.set("n", "5")
        store.set_timeout(datetime.timedelta(milliseconds=20))
        with connect_to(redis_url) as client:
            client.delete(f"netlayer:{{{run_id}}}:k:n")
            with pytest.raises(StoreLost, match=r"no longer holds 'n' of this run"):
                store.get("n")
            store.close()
            client.flushdb()

    def test_full_server_that_evicts_nothing(self, redis_binary: Path, run_id: str) -> None:
        with EmbeddedRedis(binary=redis_binary) as server, connect_to(server.url) as client:
            store = RedisStore(server.url, run_id, LONG)
            client.config_set("maxmemory", 1)
            with pytest.raises(
                StoreError, match=r"refuses a command: .*; raise maxmemory there, or remove what killed"
            ):
                store.set("n", "5")
            client.config_set("maxmemory", 0)
            store.set("n", "5")
            store.close()


class TestOtherServers:
    def test_replica(self, redis_binary: Path, start_redis: Start, run_id: str) -> None:
        primary = start_redis(redis_binary)
        replica = start_redis(redis_binary, "--replicaof", "127.0.0.1", str(primary))
        with pytest.raises(ConfigError, match=r"replica of another .*; give the address that INFO replication shows"):
            RedisStore(f"redis://127.0.0.1:{replica}", run_id, LONG)

    def test_user_without_rights(self, redis_binary: Path, start_redis: Start, run_id: str) -> None:
        port = start_redis(redis_binary)
        with connect_to(f"redis://127.0.0.1:{port}") as client:
            client.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~other:*", "+@all")
            with pytest.raises(ConfigError, match=r"allowed what the store does.*ACL SETUSER NAME ~netlayer") as raised:
                RedisStore(f"redis://worker:pw@127.0.0.1:{port}", run_id, LONG)
            # The remedy, to the letter, lets the store work.
            rules = str(raised.value).partition("ACL SETUSER NAME ")[2].split()
            client.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">pw", *rules)
        with RedisStore(f"redis://worker:pw@127.0.0.1:{port}", run_id, LONG) as store:
            store.set("a", "1")
            store.append("a", "2")
            assert store.add("n", 3) == 3
            assert store.compare_set("a", "12", "b") == b"b"
            assert store.multi_get(["a", "n"]) == [b"b", b"3"]
            store.queue_push("q", "x")
            assert store.queue_pop("q") == b"x"
            assert store.check(["a"])
            assert store.num_keys() == 2
            assert store.delete_key("a")

    def test_user_who_may_not_read_the_policy(self, redis_binary: Path, start_redis: Start, run_id: str) -> None:
        port = start_redis(redis_binary)
        with connect_to(f"redis://127.0.0.1:{port}") as client:
            client.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~*", "+@all", "-info")
        RedisStore(f"redis://worker:pw@127.0.0.1:{port}", run_id, LONG).close()

    def test_tls_to_a_server_without(self, redis_binary: Path, start_redis: Start, run_id: str) -> None:
        port = start_redis(redis_binary)
        with pytest.raises(StoreUnreachable, match=r"\(or write redis://, without TLS\)"):
            RedisStore(f"rediss://127.0.0.1:{port}", run_id, SECOND)

    @pytest.mark.parametrize(
        ("host", "valid_days", "message"),
        [
            ("127.0.0.2", (-1, 1), r"IP address mismatch.*; write the host name that it was made for"),
            ("localhost", (-2, -1), r"certificate has expired\); renew it on the server"),
            ("localhost", (1, 2), r"not yet valid\); correct this machine's clock"),
        ],
    )
    def test_certificate(
        self,
        short_dir: Path,
        start_redis: Start,
        run_id: str,
        host: str,
        valid_days: tuple[int, int],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        start, end = (datetime.timedelta(days=day) for day in valid_days)
        before, after = x509.CertificateBuilder.not_valid_before, x509.CertificateBuilder.not_valid_after
        now = datetime.datetime.now(datetime.UTC)
        monkeypatch.setattr(x509.CertificateBuilder, "not_valid_before", lambda self, _: before(self, now + start))
        monkeypatch.setattr(x509.CertificateBuilder, "not_valid_after", lambda self, _: after(self, now + end))
        certify(short_dir)
        files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
        options = [word for option, name in files.items() for word in (f"--tls-{option}-file", str(short_dir / name))]
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        probe = [str(binary), *options, "--port", "none"]
        if binary is None or b"'port" not in subprocess.run(probe, capture_output=True, check=False).stderr:
            pytest.skip("needs a redis-server with TLS on the PATH")
        port = start_redis(
            Path(binary),
            *options,
            "--tls-auth-clients",
            "no",
            "--bind",
            "127.0.0.1",
            "127.0.0.2",
            port_option="--tls-port",
        )
        with pytest.raises(ConfigError, match=message):
            RedisStore(f"rediss://{host}:{port}?ssl_ca_certs={short_dir}/ca.pem", run_id, SECOND)


class TestAddress:
    @pytest.mark.parametrize(
        "url",
        [
            "redis://user:pa/s3cret@host:6379/0",
            "redis://:1/s3cret@host:6379/0",
            "redis://:pa?s3cret@host:6379/0",
            "rediss://:12#s3cret@host/0",
        ],
    )
    @pytest.mark.parametrize(
        "use",
        [
            lambda url: RedisStore(url, "run"),
            lambda url: open_store(url, rank=0, world_size=1),
            lambda url: with_run(url, "run"),
        ],
    )
    def test_password_that_ends_the_host_is_not_printed(self, url: str, use: Callable[[str], object]) -> None:
        with pytest.raises(ConfigError, match=r"an @ behind its first /.*percent-encode") as raised:
            use(url)
        assert "s3cret" not in str(raised.value)


def test_store_says_that_it_cannot_be_pickled(redis_url: str, run_id: str) -> None:
    with RedisStore(redis_url, run_id, LONG) as store, pytest.raises(TypeError, match=r"cannot pickle 'RedisStore'"):
        pickle.dumps(store)
