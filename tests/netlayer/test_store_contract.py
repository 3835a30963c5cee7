"""One contract for RedisStore and TCPStore, measured on TCPStore."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netlayer.store.redis_store import RedisStore

from .conftest import keys_of

SHORT, LONG = timedelta(milliseconds=50), timedelta(seconds=60)
NUM_WAITERS, MANY = 64, 512
# torch's server asks DNS for the name of every client that connects; files are enough here, and do not stall.
ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


@pytest.fixture(params=["RedisStore", "TCPStore"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "TCPStore":
        yield emptied_tcp_store()
    else:
        url = request.getfixturevalue("redis_url")
        with RedisStore(url, request.getfixturevalue("run_id"), LONG) as redis_store:
            yield redis_store


tcp_stores: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def _closed_tcp_stores() -> Iterator[None]:
    """Their thousand sockets must not stay: who calls select() after these tests may have none above 1,023."""
    yield
    tcp_stores.clear()
    tcp_twins.cache_clear()


def emptied_tcp_store() -> Any:
    """One for all tests: torch looks up a name for every connection, and some name servers answer only so many."""
    if not tcp_stores or not is_up(tcp_stores[-1]):
        tcp_stores.append(dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False))
    store = tcp_stores[-1]
    for key in store.list_keys():
        store.delete_key(key)
    for queue in "abcq":
        while store.queue_len(queue):
            store.queue_pop(queue)
    store.set_timeout(LONG)
    return store


def is_up(store: Any) -> bool:
    """A test brings it down: `add` to what is no number."""
    try:
        return bool(store.num_keys() >= 0)
    except dist.DistNetworkError:
        return False


@functools.cache
def tcp_twins(store: Any, count: int) -> list[Any]:
    return [store.clone() for _ in range(count)]


def in_threads(store: Any, work: Callable[[Any, int], Any], count: int = NUM_WAITERS) -> list[Any]:
    """Run work(a clone of the store, n) in `count` threads at once."""
    twins = tcp_twins(store, count) if isinstance(store, dist.TCPStore) else [store.clone() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, twins, range(count)))


class TestContract:
    """What both stores do; measured on TCPStore."""

    @pytest.mark.parametrize("value", [b"", b"v", b"\x00\xff\x00", b"\r\n", bytes(range(256)) * 1000, "h\u00e9"])
    def test_set_then_get(self, store: Any, value: bytes | str) -> None:
        store.set("k\u00e9y with\nspace", value)
        assert store.get("k\u00e9y with\nspace") == (value.encode() if isinstance(value, str) else value)

    def test_set_again(self, store: Any) -> None:
        store.set("a", "1")
        store.set("a", "2")
        assert store.get("a") == b"2"
        assert store.num_keys() == 1

    def test_empty_key(self, store: Any) -> None:
        store.set("", "v")
        assert store.get("") == b"v"
        assert store.list_keys() == [""]

    @pytest.mark.parametrize("key", ["a", "/a", "a/b/", "{a}", "k:a", "keys", "epoch", "*"])
    def test_keys_do_not_meet(self, store: Any, key: str) -> None:
        store.set(key, "v")
        assert store.list_keys() == [key]
        assert not store.check([key + "x"])
        assert store.delete_key(key)
        assert store.num_keys() == 0

    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.get("no"),
            lambda store: store.wait(["no"]),
            lambda store: store.wait(["yes", "no", "never"]),
            lambda store: store.multi_get(["yes", "no"]),
            lambda store: store.queue_pop("no"),
        ],
    )
    def test_wait_ends_at_the_store_timeout(self, store: Any, call: Callable[[Any], object]) -> None:
        store.set("yes", "v")
        store.set_timeout(SHORT)
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 50ms, keys: .*no"):
            call(store)
        assert store.get("yes") == b"v"

    @pytest.mark.parametrize("milliseconds", [0, 1, 50])
    def test_wait_with_a_timeout(self, store: Any, milliseconds: int) -> None:
        timeout = timedelta(milliseconds=milliseconds)
        with pytest.raises(dist.DistStoreError, match=f"wait timeout after {milliseconds}ms"):
            store.wait(["no"], timeout)
        store.set("no", "v")
        store.wait(["no", "no"], LONG)

    def test_timeout_property(self, store: Any) -> None:
        assert store.timeout == LONG
        store.set_timeout(SHORT)
        assert store.timeout == SHORT
        assert store.clone().timeout == SHORT

    def test_add(self, store: Any) -> None:
        assert [store.add("n", amount) for amount in (5, -8, 0)] == [5, -3, -3]
        assert store.get("n") == b"-3"
        assert store.add("zero", 0) == 0
        assert store.check(["zero"])

    @pytest.mark.parametrize("text", ["41", "+41", "041", " 41", "41 apples", "41.9"])
    def test_add_to_a_value_that_was_set(self, store: Any, text: str) -> None:
        store.set("n", text)
        assert store.add("n", 1) == 42
        assert store.get("n") == b"42"

    def test_add_is_exact_to_64_bits(self, store: Any) -> None:
        assert store.add("n", 2**63 - 2) == 2**63 - 2
        assert store.add("n", 1) == 2**63 - 1
        assert store.add("m", -(2**63)) == -(2**63)
        assert store.add("m", 1) == 1 - 2**63
        assert store.get("n") == b"9223372036854775807"

    @pytest.mark.parametrize("text", ["", "apples", "99999999999999999999"])
    def test_add_to_what_is_no_number(self, store: Any, text: str) -> None:
        store.set("n", text)
        with pytest.raises(RuntimeError):
            store.add("n", 1)

    @pytest.mark.parametrize("amount", [2**63, -(2**63) - 1, 1.5, "1"])
    def test_add_what_is_no_amount(self, store: Any, amount: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            store.add("n", amount)
        assert not store.check(["n"])

    @pytest.mark.parametrize(
        ("held", "expected", "desired", "answer", "after"),
        [
            (None, b"", b"new", b"new", b"new"),
            (None, b"", b"", b"", b""),
            (None, b"old", b"new", b"old", None),
            (b"old", b"old", b"new\x00", b"new\x00", b"new\x00"),
            (b"old", b"older", b"new", b"old", b"old"),
            (b"old", b"", b"new", b"old", b"old"),
            (b"", b"", b"new", b"new", b"new"),
            (b"", b"old", b"new", b"", b""),
        ],
    )
    def test_compare_set(
        self, store: Any, held: bytes | None, expected: bytes, desired: bytes, answer: bytes, after: bytes | None
    ) -> None:
        if held is not None:
            store.set("a", held)
        assert store.compare_set("a", expected, desired) == answer
        assert (store.get("a") if store.check(["a"]) else None) == after

    def test_append(self, store: Any) -> None:
        store.append("a", "po")
        store.append("a", b"\x00tato")
        assert store.get("a") == b"po\x00tato"
        store.append("empty", "")
        assert store.check(["empty"])
        store.add("n", 3)
        store.append("n", "7")
        assert store.add("n", 1) == 38

    def test_delete(self, store: Any) -> None:
        store.add("a", 3)
        assert store.delete_key("a") is True
        assert store.delete_key("a") is False
        assert not store.check(["a"])
        assert store.add("a", 1) == 1

    def test_check(self, store: Any) -> None:
        store.set("a", "")
        store.set("b", "")
        assert store.check([])
        assert store.check(["a", "b", "a"])
        assert not store.check(["a", "no"])

    def test_multi(self, store: Any) -> None:
        store.multi_set(["a", "b", "a"], ["1", b"\x002", "3"])
        assert store.multi_get(["b", "a", "b"]) == [b"\x002", b"3", b"\x002"]
        store.multi_set([], [])
        assert store.multi_get([]) == []
        store.wait([])
        with pytest.raises((RuntimeError, ValueError)):
            store.multi_set(["a"], [])
        assert store.has_extended_api()

    def test_number_and_names_of_keys(self, store: Any) -> None:
        store.multi_set(["a", "b"], ["1", "2"])
        store.add("n", 1)
        assert store.num_keys() == 3
        assert sorted(store.list_keys()) == ["a", "b", "n"]

    def test_queue(self, store: Any) -> None:
        store.queue_push("q", "1")
        store.queue_push("q", b"")
        assert store.queue_len("q") == 2
        assert store.queue_pop("q") == b"1"
        assert store.queue_pop("q", False) == b""
        assert store.queue_len("q") == 0
        with pytest.raises(dist.QueueEmptyError):
            store.queue_pop("q", False)

    def test_queue_beside_keys(self, store: Any) -> None:
        store.queue_push("q", "1")
        assert store.check(["q"])
        store.wait(["q"])
        assert store.get("q") == b""
        assert store.num_keys() == 0
        assert store.list_keys() == []
        assert not store.delete_key("q")
        assert store.add("q", 1) == 1
        assert store.get("q") == b"1"
        assert store.delete_key("q")
        assert store.queue_pop("q") == b"1"
        assert not store.check(["q"])

    def test_values_and_keys_of_other_types(self, store: Any) -> None:
        store.set(b"a", bytearray(b"v"))
        assert store.get("a") == b"v"
        for call in (
            lambda: store.set("a", 5),
            lambda: store.set(5, "a"),
            lambda: store.set("a", None),
            lambda: store.wait("abc"),
            lambda: store.check("abc"),
        ):
            with pytest.raises(TypeError):
                call()

    def test_clone_sees_the_same_keys(self, store: Any) -> None:
        twin = store.clone()
        twin.set("a", "v")
        assert store.get("a") == b"v"

    def test_many_waiters_of_one_key(self, store: Any) -> None:
        ready = threading.Barrier(NUM_WAITERS)

        def wait_or_set(mine: Any, n: int) -> bytes:
            ready.wait()
            if n == NUM_WAITERS - 1:
                mine.set("late", b"\x00value")
            return bytes(mine.get("late"))

        assert in_threads(store, wait_or_set) == [b"\x00value"] * NUM_WAITERS

    def test_512_clients_at_once(self, store: Any) -> None:
        names = [f"rank{n}" for n in range(MANY)]
        ready = threading.Barrier(MANY)

        def meet(mine: Any, n: int) -> tuple[int, bytes, bytes]:
            ready.wait()
            mine.append("text", "x")
            count = mine.add("n", 1)
            mine.set(names[n], str(n))
            mine.wait([names[-1 - n]])
            if count == MANY:
                mine.set("all", "here")
            return count, bytes(mine.get("all")), bytes(mine.get(names[(n + 7) % MANY]))

        counts, last, others = zip(*in_threads(store, meet, MANY), strict=True)
        assert sorted(counts) == list(range(1, MANY + 1))
        assert set(last) == {b"here"}
        assert [int(other) for other in others] == [(n + 7) % MANY for n in range(MANY)]
        assert store.get("text") == b"x" * MANY

    def test_many_waiters_of_many_keys(self, store: Any) -> None:
        names = [f"rank{n}" for n in range(NUM_WAITERS)]

        def meet(mine: Any, n: int) -> list[bytes]:
            mine.set(names[n], str(n))
            return list(mine.multi_get(names))

        assert in_threads(store, meet) == [[str(n).encode() for n in range(NUM_WAITERS)]] * NUM_WAITERS

    def test_many_writers(self, store: Any) -> None:
        def write(mine: Any, n: int) -> tuple[int, bool]:
            mine.append("text", "x")
            return mine.add("n", 1), mine.compare_set("owner", "", str(n)) == str(n).encode()

        sums, owners = zip(*in_threads(store, write), strict=True)
        assert sorted(sums) == list(range(1, NUM_WAITERS + 1))
        assert sum(owners) == 1
        assert store.get("text") == b"x" * NUM_WAITERS

    def test_behind_a_prefix(self, store: Any) -> None:
        inner = dist.PrefixStore("in", dist.PrefixStore("out", store))
        inner.set("a", b"\x00")
        assert inner.get("a") == b"\x00"
        assert store.list_keys() == ["out/in/a"]
        assert inner.add("n", 2) == 2
        assert inner.compare_set("a", b"\x00", "new") == b"new"
        inner.append("a", "er")
        inner.multi_set(["b", "c"], ["1", b"\xff"])
        assert inner.multi_get(["a", "c"]) == [b"newer", b"\xff"]
        assert inner.check(["b"])
        assert inner.num_keys() == 4
        assert inner.delete_key("b")
        assert inner.has_extended_api()
        inner.wait(["a"], SHORT)
        inner.clone().set("d", "v")
        assert inner.get("d") == b"v"
        inner.set_timeout(SHORT)
        assert store.timeout == SHORT
        with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms"):
            inner.get("no")

    @pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="stores of this torch have no barrier")
    def test_barrier(self, store: Any) -> None:
        in_threads(store, lambda mine, n: dist.PrefixStore("p", mine).barrier("all", 8), 8)

    def test_gloo_groups(self, store: Any) -> None:
        def reduce(mine: Any, rank: int) -> float:
            group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", mine), rank, 4, LONG)
            tensor = torch.full((3,), float(rank))
            group.allreduce([tensor]).wait()
            group.barrier().wait()
            return float(tensor.sum())

        assert in_threads(store, reduce, 4) == [18.0] * 4


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from([b"", b"1", b"-7", b"\x00\xff", b"text"])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), NAMES, VALUES),
    st.tuples(st.just("append"), NAMES, VALUES),
    st.tuples(st.just("compare_set"), NAMES, VALUES, VALUES),
    st.tuples(st.just("add"), NAMES, st.integers(-(2**31), 2**31)),
    st.tuples(st.just("delete_key"), NAMES),
    st.tuples(st.just("check"), st.lists(NAMES)),
    st.tuples(st.just("multi_set"), st.lists(NAMES, min_size=2, max_size=2), st.lists(VALUES, min_size=2, max_size=2)),
    st.tuples(st.just("queue_push"), NAMES, VALUES),
    st.tuples(st.just("queue_pop"), NAMES, st.just(False)),
    st.tuples(st.just("queue_len"), NAMES),
)


class TestAgainstTcpStore:
    """The same random operations on both stores give the same answers."""

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(operations=st.lists(OPERATIONS, max_size=25))
    def test_same_answers(self, redis_url: str, operations: list[tuple[Any, ...]]) -> None:
        with RedisStore(redis_url, "property", LONG) as ours:
            theirs = emptied_tcp_store()
            for operation in operations:
                if operation[0] == "add" and not is_number(theirs, operation[1]):
                    continue  # there it would cost TCPStore its connection
                assert outcome(ours, operation) == outcome(theirs, operation), operation
                assert ours.list_keys() == sorted(theirs.list_keys())
                assert ours.num_keys() == theirs.num_keys()
            for name in "abc":
                assert ours.check([name]) == theirs.check([name])
                if theirs.check([name]):
                    assert ours.get(name) == theirs.get(name)
        assert keys_of(redis_url, "property") == []


def is_number(store: Any, name: str) -> bool:
    if name not in store.list_keys():
        return True
    try:
        return abs(int(store.get(name))) < 2**62
    except ValueError:
        return False


def outcome(store: Any, operation: tuple[Any, ...]) -> object:
    name, *arguments = operation
    try:
        return getattr(store, name)(*arguments)
    except dist.DistError as exc:
        return type(exc)
