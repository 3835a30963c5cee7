"""RedisStore: torch.distributed's key-value store on a Redis server, with the semantics of TCPStore.

Why not TCPStore: one waiter is one blocked command of the server (no polling on either side), the server may be
restarted with its data under thousands of waiting ranks, and it is no part of rank 0. Waiting holds no GIL, a
connection is never shared between threads or across a fork, and each operation is one round trip. Where we leave
TCPStore: a sum beyond 64 bits is an error (there it wraps around), and `add` on a value that is no number does not cost
the connection.
"""

from __future__ import annotations

import atexit
import math
import operator
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from netlayer.store import redis_scripts as scripts
from netlayer.store.redis_link import Command, Script
from netlayer.store.redis_run import Membership, remove_run

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store  # which torch's own types do not show

__all__ = ["RedisStore", "remove_run"]

DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch's own for stores
_ANSWER_S = 10.0  # a server that is there gets at least this long to answer, however short the store's timeout is
_MOST_NAMES = 8  # of keys in an error message
_INT64 = range(-(2**63), 2**63)


class RedisStore(Store):
    """A `torch.distributed.Store` on Redis 6.2 or later or Valkey, for `init_process_group(store=...)` and by itself.

    The keys lie under the name of the run. They are removed when the last member leaves: when all who opened the run,
    and at least `world_size` of them, have closed it (`is_off`: however few came); a process closes its stores when it
    exits, and who comes back while the others are leaving waits for them. A run that was killed
    leaves its keys behind; `remove_run` removes them, and a rank that finds itself there already says so.

    A store lives until `close()`, also where only torch holds it. torch's PrefixStore forwards neither `queue_push`,
    `queue_pop`, `queue_len` nor `list_keys` to a store written in Python: call those on the RedisStore itself. An
    element that `queue_pop` waits for is lost if the connection breaks in the instant that it arrives; every other
    operation happens exactly once, also across a restart of the server.

    Args:
        url: `redis://[user:password@]host:port/db`, `rediss://...?ssl_ca_certs=/path/ca.pem` or `unix:///path`, with
            the options of redis-py.
        run_id: the name of the run, the same on every rank, different for every run that a server sees.
        timeout: the longest wait for a key, and for a server that does not answer, as a timedelta or in seconds; below
            zero: without end.
        rank: this process in the run; a second process of the same rank is refused.
        world_size: how many members must have left before the keys are removed.

    Raises:
        StoreUnreachable: no server answers within the timeout.
        StoreLost: the server came back without the data of the run, or has dropped a part of it.
        ConfigError: the URL, the password or a certificate is wrong, the rank is taken, or the server may not be
            written to or would evict keys.
        ValueError: `timeout` is neither a timedelta nor a number.
        torch.distributed.DistStoreError: a key was not there in time, as in TCPStore.
    """

    timeout: timedelta  # torch's property: its C++ sets it too

    def __init__(
        self,
        url: str,
        run_id: str,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(timeout, timedelta):
            timeout = _as_timedelta(timeout)
        self.set_timeout(timeout)
        self._run = Membership(url, run_id, rank, world_size or 0, _seconds(timeout))
        self._namespace, self._links = self._run.namespace, self._run.links
        self._run.join(_deadline(timeout))
        _open.setdefault(self._run, []).append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._change(scripts.SET, key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._held([key], self.timeout)[0]

    def add(self, key: str, value: int) -> int:
        amount = operator.index(value)
        if amount not in _INT64:
            raise ValueError(f"value must fit into 64 bits with a sign, got {amount}")
        answer = self._change(scripts.ADD, key, amount)
        if answer.startswith(b"!"):
            raise dist.DistStoreError(f"add({key!r}, {amount}): {answer[1:].decode()}")
        return int(answer[1:])

    def append(self, key: str, value: str | bytes) -> None:
        self._change(scripts.APPEND, key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set where the value is `expected_value` (or the key is missing and that is empty); the value afterwards."""
        return self._change(scripts.COMPARE_SET, key, _bytes(expected_value), _bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        return self._change(scripts.DELETE, key) == b"1"

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"keys and values must be of one length, got {len(keys)} and {len(values)}")
        pairs = [item for key, value in zip(keys, values, strict=True) for item in (_bytes(key), _bytes(value))]
        self._write(scripts.SET, *pairs)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._held(keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when every key is there; without `timeout`, the store's own."""
        self._held(keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        names = _names(keys)
        return not names or self._ask("EVAL", scripts.CHECK.text, 1, self._namespace, *names) == 1

    def num_keys(self) -> int:
        return int(self._ask("SCARD", self._namespace + b"keys"))

    def list_keys(self) -> list[str]:
        return sorted(name.decode() for name in self._ask("SMEMBERS", self._namespace + b"keys"))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._change(scripts.PUSH, key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """The oldest element; without `block`, QueueEmptyError where there is none."""
        if not block:
            answer = self._change(scripts.POP, key)
            if answer == b"!":
                raise dist.QueueEmptyError(f"queue {key!r} is empty")
            return answer[1:]
        queue, tidy = self._queue(key), ("EVAL", scripts.TIDY.text, 1, self._namespace, _bytes(key))
        replies = self._links.block(lambda left: [("BLPOP", queue, left), tidy], _deadline(self.timeout))
        if replies is None:
            raise _wait_timeout(self.timeout, [_bytes(key)])
        return bytes(replies[0][1])

    def queue_len(self, key: str) -> int:
        return int(self._ask("LLEN", self._queue(key)))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RedisStore:
        """Another store of the same run, with a timeout of its own and the same connections: close() closes both."""
        twin = RedisStore.__new__(RedisStore)
        Store.__init__(twin)
        twin.set_timeout(self.timeout)
        twin._run, twin._namespace, twin._links = self._run, self._namespace, self._links
        _open.setdefault(self._run, []).append(twin)
        return twin

    # What torch's C++ looks for under other names than its Python has.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def close(self, *, is_off: bool = False) -> None:
        """Leave the run; the last to leave removes its keys. Safe to call twice; clones are closed too.

        A wait that another thread is in fails with StoreError.

        Args:
            is_off: the run never came together; its keys go with the last of those who have joined it.
        """
        self._run.leave(is_off=is_off)
        _open.pop(self._run, None)

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "cannot pickle 'RedisStore' object (no store of torch can be): open another one of the same url and run_id"
        )

    def __repr__(self) -> str:
        return f"RedisStore({self._links.address!r}, {self._run.run_id!r})"

    def _queue(self, key: str) -> bytes:
        return scripts.queue(self._namespace, _bytes(key))

    def _held(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """The values of all keys, as soon as all are there."""
        names = _names(keys)
        slots = [scripts.slot(self._namespace, name) for name in names]
        values: list[Any] | None
        if not slots:
            return []
        if not timeout:  # the server takes zero for "without end"
            until = _deadline(timeout)
            commands: list[Command] = [("LINDEX", slot, 0) for slot in slots]
            values = self._links.ask(commands, _answer_deadline(until), reconnect_until=until)
        else:
            # A list moved onto itself is its value, for every client that waits for it.
            values = self._links.block(
                lambda left: [("BLMOVE", slot, slot, "LEFT", "LEFT", left) for slot in slots], _deadline(timeout)
            )
        if values is None or None in values:
            self.check(keys)  # raises where the server has dropped one of them
            raise _wait_timeout(timeout, names)
        return values

    def _change(self, script: Script, key: str, *arguments: bytes | int) -> bytes:
        return self._write(script, _bytes(key), *arguments)

    def _write(self, script: Script, *arguments: bytes | int) -> bytes:
        until = _deadline(self.timeout)
        return bytes(self._links.run(script, self._namespace, arguments, _answer_deadline(until), until))

    def _ask(self, *command: str | bytes | int) -> Any:
        until = _deadline(self.timeout)
        return self._links.ask([command], _answer_deadline(until), reconnect_until=until)[0]


# torch's C++ keeps only its own half of a store written in Python alive; this keeps the other, until close().
_open: dict[Membership, list[RedisStore]] = {}


@atexit.register
def _close_all() -> None:
    for run in list(_open):
        run.leave()


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise TypeError(f"keys and values must be str or bytes, got {value!r}")


def _names(keys: Sequence[str]) -> list[bytes]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys must be a list of strings, got {keys!r}")
    return [_bytes(key) for key in keys]


def _as_timedelta(seconds: object) -> timedelta:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
        raise ValueError(f"timeout must be a timedelta or a number of seconds, got {seconds!r}")
    return timedelta(seconds=seconds) if math.isfinite(seconds) else timedelta(seconds=-1)


def _seconds(timeout: timedelta) -> float:
    return timeout.total_seconds() if timeout >= timedelta(0) else math.inf


def _deadline(timeout: timedelta) -> float:
    return time.monotonic() + _seconds(timeout)


def _answer_deadline(until: float) -> float:
    return max(until, time.monotonic() + _ANSWER_S)


def _wait_timeout(timeout: timedelta, names: list[bytes]) -> dist.DistStoreError:
    """Return the timeout error with the message of TCPStore."""
    keys_text = ", ".join(name.decode(errors="replace") for name in names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        keys_text += f" and {len(names) - _MOST_NAMES} more"
    return dist.DistStoreError(f"wait timeout after {timeout // timedelta(milliseconds=1)}ms, keys: {keys_text}")
