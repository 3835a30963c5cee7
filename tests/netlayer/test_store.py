"""RedisStore beyond the contract of stores (test_store_contract.py)."""

from __future__ import annotations

import os
import re
import signal
import socket
import socketserver
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch.distributed as dist

from netlayer.errors import ConfigError, StoreError, StoreLost, StoreUnreachable
from netlayer.store.redis_link import RedisLinks
from netlayer.store.redis_server import EmbeddedRedis
from netlayer.store.redis_store import RedisStore, remove_run

from .conftest import connect_to, keys_of, num_blocked, server_info, until

SHORT, LONG = timedelta(milliseconds=50), timedelta(seconds=60)
NUM_WAITERS = 64
Open = Callable[..., RedisStore]


@pytest.fixture
def open_store(redis_url: str, run_id: str) -> Iterator[Open]:
    """Opens RedisStores of one run, and closes them."""
    opened: list[RedisStore] = []

    def open_one(url: str = redis_url, run: str = run_id, timeout: timedelta = LONG, **kwargs: Any) -> RedisStore:
        opened.append(RedisStore(url, run, timeout, **kwargs))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


class TestWaiting:
    def test_is_one_command_of_the_server(self, redis_binary: Path, open_store: Open) -> None:
        with EmbeddedRedis(binary=redis_binary) as server:
            store = open_store(server.url)
            with ThreadPoolExecutor(NUM_WAITERS) as pool:
                waits = [pool.submit(store.get, "late") for _ in range(NUM_WAITERS)]
                until(lambda: num_blocked(server.url) == NUM_WAITERS)
                store.set("late", "v")
                assert [wait.result() for wait in waits] == [b"v"] * NUM_WAITERS
            commands: Any = server_info(server.url, "commandstats")
            assert commands["cmdstat_blmove"]["calls"] <= 2 * NUM_WAITERS  # a server may count one again as it wakes
            store.close()

    @pytest.mark.parametrize("wrap", [lambda store: store, lambda store: dist.PrefixStore("p", store)])
    def test_lets_other_threads_of_python_run(self, open_store: Open, wrap: Callable[[Any], Any]) -> None:
        waiting, other = wrap(open_store()), wrap(open_store())
        counted = 0

        def count() -> None:
            nonlocal counted
            while counted < 100_000:
                counted += 1
            other.set("counted", "")

        thread = threading.Thread(target=count)
        thread.start()
        waiting.wait(["counted"])
        thread.join()
        assert counted == 100_000

    def test_takes_no_connection_from_another_thread(self, redis_binary: Path, open_store: Open) -> None:
        with EmbeddedRedis(binary=redis_binary) as server:
            store = open_store(server.url)
            with ThreadPoolExecutor(1) as pool:
                wait = pool.submit(store.get, "late")
                until(lambda: num_blocked(server.url) == 1)
                assert store.add("n", 1) == 1
                assert not store.check(["late"])
                store.set("late", "v")
                assert wait.result() == b"v"
            assert num_connections(server.url) == 2
            store.close()

    def test_for_an_element_of_a_queue(self, open_store: Open) -> None:
        def pop_or_push(store: RedisStore, n: int) -> bytes | None:
            return store.queue_pop("q") if n % 2 else store.queue_push("q", str(n))

        store = open_store()
        with ThreadPoolExecutor(NUM_WAITERS) as pool:
            popped = list(pool.map(lambda n: pop_or_push(store, n), range(NUM_WAITERS)))[1::2]
        assert sorted(int(value) for value in popped) == list(range(0, NUM_WAITERS, 2))

    def test_for_nothing(self, open_store: Open) -> None:
        store = open_store()
        store.set("a", "v")
        store.wait(["a"], timedelta(0))  # TCPStore sometimes gives up before it has read the answer

    def test_without_end(self, open_store: Open) -> None:
        store = open_store(timeout=timedelta(seconds=-1))
        with ThreadPoolExecutor(1) as pool:
            wait = pool.submit(store.get, "late")
            store.set("late", "v")
            assert wait.result() == b"v"

    def test_very_long(self, open_store: Open) -> None:
        store = open_store(timeout=timedelta.max)
        store.set("a", "v")
        assert store.get("a") == b"v"


def num_connections(url: str) -> int:
    with connect_to(url) as client:
        return len(client.client_list()) - 1


def test_forked_child_opens_its_own_connection(open_store: Open, run_id: str, redis_url: str) -> None:
    store = open_store()
    store.set("a", "v")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, since Python 3.12
        child = os.fork()
    if child == 0:
        failed = 1
        try:
            failed = int(store.get("a") != b"v" or store.add("n", 1) != 1)
            store.close()
        finally:
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    assert store.add("n", 1) == 2
    assert keys_of(redis_url, run_id)


class TestRestart:
    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
    def test_waiters_go_on_when_the_data_is_back(
        self, redis_binary: Path, short_dir: Path, open_store: Open, end: signal.Signals
    ) -> None:
        with EmbeddedRedis(binary=redis_binary, directory=short_dir, append_only=True) as server:
            store = open_store(server.url)
            store.multi_set(["a", "n"], ["before", "41"])
            pool = ThreadPoolExecutor(12)
            waits = [pool.submit(store.multi_get, ["a", "late"]) for _ in range(8)]
            waits += [pool.submit(store.get, "late") for _ in range(4)]
            until(lambda: num_blocked(server.url) == 12)
            kill(server.url, end)
        with EmbeddedRedis(binary=redis_binary, directory=short_dir, append_only=True) as server:
            assert store.add("n", 1) == 42
            until(lambda: num_blocked(server.url) == 12)
            assert not any(wait.done() for wait in waits)
            store.set("late", "after")
            assert [wait.result() for wait in waits] == [[b"before", b"after"]] * 8 + [b"after"] * 4
            pool.shutdown()
            store.close()
            assert keys_of(server.url, "") == []

    def test_waiters_fail_when_the_data_is_gone(self, redis_binary: Path, short_dir: Path, open_store: Open) -> None:
        with EmbeddedRedis(binary=redis_binary, directory=short_dir) as server:
            store = open_store(server.url)
            pool = ThreadPoolExecutor(12)
            waits = [pool.submit(store.get, "late") for _ in range(12)]
            until(lambda: num_blocked(server.url) == 12)
        with EmbeddedRedis(binary=redis_binary, directory=short_dir) as server:
            for wait in waits:
                with pytest.raises(StoreLost, match="store lost its data"):
                    wait.result()
            pool.shutdown()
            with pytest.raises(StoreLost, match="store lost its data"):
                dist.PrefixStore("p", store).set("a", "v")
            store.close()
            assert keys_of(server.url, "") == []

    def test_waiters_fail_when_the_server_stays_away(self, redis_binary: Path, open_store: Open) -> None:
        with EmbeddedRedis(binary=redis_binary) as server:
            store = open_store(server.url)
        with pytest.raises(StoreUnreachable, match=r"^no store answers at unix://"):
            store.wait(["late"], SHORT)

    def test_a_server_that_stays_away_is_tried_for_the_timeout_and_not_for_that_of_an_answer(
        self, redis_binary: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("netlayer.store.redis_store._ANSWER_S", 600.0)
        with EmbeddedRedis(binary=redis_binary) as server:
            store = open_store(server.url, timeout=timedelta(seconds=1))
        for call in (lambda: store.set("a", "v"), lambda: store.check(["a"])):
            with pytest.raises(StoreUnreachable, match=r"^no store answers at unix://"):
                call()
        assert "trying for another 1 s" in caplog.text

    def test_a_write_whose_answer_was_lost_happens_once(
        self, redis_url: str, open_store: Open, short_dir: Path
    ) -> None:
        with LosingProxy(urlsplit(redis_url).path, str(short_dir / "proxy")) as proxy:
            store = open_store(f"unix://{short_dir}/proxy")
            store.queue_push("q", "first")
            for call, answer in [
                (lambda: store.add("n", 1), 1),
                (lambda: store.append("text", "x"), None),
                (lambda: store.compare_set("a", "", "mine"), b"mine"),
                (lambda: store.delete_key("a"), True),
                (lambda: store.queue_push("q", "second"), None),
                (lambda: store.queue_pop("q", False), b"first"),
            ]:
                proxy.answers_to_lose = 1
                assert call() == answer
                assert proxy.answers_to_lose == 0
            assert store.get("n") == b"1"
            assert store.get("text") == b"x"
            assert store.queue_len("q") == 1
            store.close()


def kill(url: str, with_signal: signal.Signals) -> None:
    os.kill(int(str(server_info(url, "server")["process_id"])), with_signal)


class LosingProxy(socketserver.ThreadingUnixStreamServer):
    """Stands before a server and, when told so, breaks the connection in place of handing on an answer to a script."""

    daemon_threads = True
    answers_to_lose = 0

    def __init__(self, server: str, path: str) -> None:
        self.server_path = server
        super().__init__(path, _ProxyHandler)
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)


class _ProxyHandler(socketserver.BaseRequestHandler):
    server: LosingProxy

    def handle(self) -> None:
        with closing(socket.socket(socket.AF_UNIX)) as upstream:
            upstream.connect(self.server.server_path)
            while request := self.request.recv(1 << 20):
                upstream.sendall(request)
                answer = upstream.recv(1 << 20)
                if self.server.answers_to_lose and b"EVAL" in request and not answer.startswith(b"-NOSCRIPT"):
                    self.server.answers_to_lose -= 1
                    return
                self.request.sendall(answer)


class TestMembership:
    def test_keys_go_with_the_last_of_the_world(self, redis_url: str, run_id: str, open_store: Open) -> None:
        bystander = open_store(run=run_id + "x")
        bystander.set("a", "v")
        first = open_store(rank=0, world_size=2)
        first.set("a", "v")
        first.queue_push("q", "1")
        first.close()
        assert keys_of(redis_url, run_id + "}")
        second = open_store(rank=1, world_size=2)
        assert second.get("a") == b"v"
        second.close()
        second.close()
        assert keys_of(redis_url, run_id + "}") == []
        assert bystander.get("a") == b"v"

    def test_keys_go_with_the_last_that_is_open(self, redis_url: str, run_id: str, open_store: Open) -> None:
        first, second = open_store(), open_store()
        first.set("a", "v")
        first.close()
        assert second.get("a") == b"v"
        second.close()
        assert keys_of(redis_url, run_id + "}") == []

    def test_keys_of_a_run_that_is_off_go_with_the_last_who_joined(
        self, redis_url: str, run_id: str, open_store: Open
    ) -> None:
        first, second = (open_store(rank=rank, world_size=3) for rank in range(2))
        first.set("a", "v")
        first.close(is_off=True)
        assert second.get("a") == b"v"
        second.close(is_off=True)
        assert keys_of(redis_url, run_id + "}") == []

    def test_who_comes_back_waits_until_the_others_have_left(self, run_id: str, open_store: Open) -> None:
        first, second = (open_store(rank=rank, world_size=3) for rank in range(2))
        first.set("a", "stale")
        first.close(is_off=True)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(open_store, rank=0, world_size=3)
            second.close(is_off=True)
            assert not again.result(timeout=60).check(["a"])

    def test_who_comes_back_is_refused_where_the_others_stay(
        self, run_id: str, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("netlayer.store.redis_run._LEAVE_S", 0.2)
        first, _ = (open_store(rank=rank, world_size=2) for rank in range(2))
        first.close()
        with pytest.raises(ConfigError, match="rank 0 of this run is already there"):
            open_store(rank=0, world_size=2)

    def test_many_keys_go(self, redis_url: str, run_id: str, open_store: Open) -> None:
        store = open_store()
        store.multi_set([f"key{n}" for n in range(2500)], ["v"] * 2500)
        store.close()
        assert keys_of(redis_url, run_id + "}") == []

    def test_a_rank_is_there_once(self, redis_url: str, run_id: str, open_store: Open) -> None:
        open_store(rank=0, world_size=2).set("a", "stale")
        with pytest.raises(ConfigError, match=r"rank 0 of this run is already there.*remove_run"):
            RedisStore(redis_url, run_id, LONG, rank=0, world_size=2)
        remove_run(redis_url, run_id)
        assert keys_of(redis_url, run_id + "}") == []
        assert not open_store(rank=0, world_size=2).check(["a"])

    def test_a_closed_store_says_so(self, open_store: Open) -> None:
        store = open_store()
        twin = store.clone()
        store.close()
        for closed in (store, twin):
            with pytest.raises(StoreError, match="is closed"):
                closed.set("a", "v")

    def test_lives_where_only_torch_holds_it(self, redis_url: str, run_id: str) -> None:
        prefix = dist.PrefixStore("p", RedisStore(redis_url, run_id, LONG))
        prefix.set("a", "v")
        twin = prefix.clone()
        assert twin.get("a") == b"v"
        twin.underlying_store.close()
        assert keys_of(redis_url, run_id + "}") == []

    @pytest.mark.parametrize("run", ["", "a b", "a{b", "x" * 201, "a\n"])
    def test_run_id_must_be_a_word(self, redis_url: str, run: str) -> None:
        with pytest.raises(ConfigError, match="run id"):
            RedisStore(redis_url, run)


class TestAddress:
    def test_unreachable(self, run_id: str) -> None:
        with pytest.raises(StoreUnreachable) as raised:
            RedisStore("redis://user:secret@127.0.0.1:1/3", run_id, SHORT)
        message = str(raised.value)
        assert message.startswith("no store answers at redis://127.0.0.1:1/3 (")
        assert message.endswith("or correct the store's URL (or write rediss://, where it speaks TLS)")
        assert "secret" not in message
        assert "\n" not in message

    def test_password(
        self,
        redis_binary: Path,
        run_id: str,
        start_redis: Callable[..., int],
        open_store: Open,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        port = start_redis(redis_binary, "--requirepass", "s3cret")
        store = open_store(f"redis://:s3cret@127.0.0.1:{port}/2")
        store.set("a", "v")
        assert store.get("a") == b"v"
        for user in (":wr0ng@", "nobody:wr0ng@", ""):
            with pytest.raises(ConfigError) as raised:
                RedisStore(f"redis://{user}127.0.0.1:{port}/2", run_id, LONG)
            assert "the server must let us in" in str(raised.value)
            assert "wr0ng" not in str(raised.value) + caplog.text
        assert "s3cret" not in repr(store) + caplog.text
        store.close()

    @pytest.mark.parametrize(
        "url",
        ["http://host", "host:6379", "", "redis://host:pass:word/0", "redis://host/?db=x", "redis://host/?no_option=1"],
    )
    def test_no_address_of_a_store(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"store url: must be redis://.*; correct the store's URL"):
            RedisStore(url, "run")

    def test_database_that_is_not_there(self, redis_url: str, run_id: str) -> None:
        with pytest.raises(ConfigError, match="database number"):
            RedisStore(f"{redis_url}?db=999", run_id)

    def test_authority_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"ssl_ca_certs = /no/ca.pem: the file must exist"):
            RedisStore("rediss://localhost?ssl_ca_certs=/no/ca.pem", "run")

    def test_connection_that_the_server_closed(
        self, redis_binary: Path, open_store: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        with EmbeddedRedis(binary=redis_binary) as server, connect_to(server.url) as client:
            store = open_store(server.url)
            client.client_kill_filter(_type="normal", skipme=True)
            assert store.add("n", 1) == 1
            assert caplog.text == ""
            store.close()

    def test_server_that_is_full(self, redis_binary: Path, run_id: str) -> None:
        with EmbeddedRedis(binary=redis_binary) as server, connect_to(server.url) as client:
            client.config_set("maxclients", 1)
            with pytest.raises(ConfigError, match=r"maxclients: of the server at unix:.*CONFIG SET maxclients"):
                RedisStore(server.url, run_id, timedelta(seconds=1))
            client.config_set("maxclients", 100)
            RedisStore(server.url, run_id, LONG).close()

    def test_server_that_hung_up_before_it_was_asked_is_heard(self, short_dir: Path) -> None:
        hung_up = threading.Event()

        def refuse(server: socket.socket) -> None:
            with server.accept()[0] as opened:
                opened.sendall(b"-ERR max number of clients reached\r\n")
            hung_up.set()

        def admit(ask: Callable[..., Any]) -> None:
            assert hung_up.wait(30)
            ask("PING")  # into a broken pipe

        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(short_dir / "full.sock"))
            server.listen()
            refusal = threading.Thread(target=refuse, args=(server,))
            refusal.start()
            links = RedisLinks(f"unix://{short_dir}/full.sock", admit, 30.0)
            with pytest.raises(ConfigError, match="maxclients: of the server at unix:") as raised:
                links.ask([], 0.0)
            refusal.join()
        assert "Broken pipe" in str(raised.value.__cause__.__cause__)

    def test_answers_stay_in_step_after_an_error(self, redis_url: str, run_id: str, open_store: Open) -> None:
        store = open_store()
        store.multi_set(["a", "b"], ["1", "2"])
        with connect_to(redis_url) as client:
            client.set(f"netlayer:{{{run_id}}}:k:broken", "no list")
        with pytest.raises(StoreError, match="refuses a command: WRONGTYPE"):
            store.multi_get(["broken", "a", "b"])
        assert store.multi_get(["b", "a"]) == [b"2", b"1"]

    def test_a_refused_command(self, redis_binary: Path, open_store: Open) -> None:
        with EmbeddedRedis(binary=redis_binary) as server:
            store = open_store(server.url)
            with connect_to(server.url) as client:
                client.config_set("maxmemory", "1")
                with pytest.raises(StoreError, match=r"refuses a command: .*maxmemory"):
                    store.set("a", "v")
                client.config_set("maxmemory", "0")
            store.set("a", "v")
            store.close()


def test_close_ends_a_wait_that_another_thread_is_in(redis_url: str) -> None:
    store = RedisStore(redis_url, f"closing-{os.getpid()}", timeout=timedelta(minutes=30))
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never")
        except StoreError as exc:
            failed.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: num_blocked(redis_url) > 0)
    store.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (5, timedelta(seconds=5)),
        (0.5, timedelta(milliseconds=500)),
        (float("inf"), timedelta(seconds=-1)),
        (SHORT, SHORT),
    ],
)
def test_timeout_is_a_timedelta_or_seconds(open_store: Open, given: float | timedelta, stored: timedelta) -> None:
    assert open_store(timeout=given).timeout == stored


def test_a_timeout_of_zero_still_connects(redis_binary: Path, run_id: str, start_redis: Callable[..., int]) -> None:
    with RedisStore(f"redis://127.0.0.1:{start_redis(redis_binary)}/0", run_id, 0) as store:
        store.set("a", "v")
        assert store.get("a") == b"v"


@pytest.mark.parametrize("given", ["5", None, True, float("nan")])
def test_a_timeout_that_is_neither_is_refused_in_our_words(redis_url: str, run_id: str, given: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be a timedelta or a number of seconds, got"):
        RedisStore(redis_url, run_id, given)


def test_while_no_server_answers_it_says_how_long_it_tries(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("netlayer.store.redis_link._LOG_EVERY_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(StoreUnreachable):
            RedisStore(f"redis://127.0.0.1:{free.getsockname()[1]}", run_id, 2.6)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) >= 2
    left_s = [int(match[1]) for line in messages if (match := re.search(r"trying for another (\d+) s", line))]
    assert left_s[0] == 3
    assert left_s[-1] < 3
    assert left_s == sorted(left_s, reverse=True)
