"""All ranks of a run wait here until every rank has arrived; an error names the ranks that have not.

[Note: two operations a rank] A rank that arrives adds one to a counter and waits for a key that the last one sets. If
all arrive within seconds, these are O(n) operations over all ranks, whatever the store. The counter's name holds a
digest of the values that all ranks must share, so a rank with another world size or version is not counted. A rank
that has waited for some seconds also writes its card (rank, host, values) to the store, and then waits for the verdict
alone. The first of these ranks reads the cards, logs every ten seconds which ranks are missing, and writes the verdict
at its deadline. If it dies, the next one takes over. At a TCPStore a rank polls every half second in place of the
store's own wait, which Ctrl-C does not interrupt, and of which torch logs each one that times out.

[Note: a rank that arrives twice] The counter's upper bits add up a mark of each rank. The rank that completes the count
compares this sum with that of all ranks. If they differ, all ranks write their cards, and the error names both hosts.

[Note: one verdict] The outcome (all have arrived, or why not) is one key that is set once (`compare_set`), so a rank
that arrives later, even the last of the world, gets the same outcome as the others.

Not covered: a server that is stopped and keeps its connections; TCPStore's client waits for it without end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from netlayer.errors import ConfigError, RanksMissing, StoreError, StoreUnreachable
from netlayer.store.tcp_store import first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, TCPStore  # which torch's own types do not show

__all__ = ["await_all"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # after it a rank writes its card
_SLICE_S = 2.0  # between two reads of the cards
_LOOK_S = 0.5  # between two polls of a TCPStore
_MOST_IN_TURN = 3  # slices after its deadline, a rank at the most takes over from a reader that died
_LOG_EVERY_S = 10.0
_INFORMED_S = 5.0  # longest that the rank which serves the store stays for the others to read a failure
_POLL_S = 0.05
_SHORTEST_S = 0.01
_CHUNK = 64  # ranks that write to one key
_MOST_NAMED = 8
_WORLD_SIZE = "world size"
_COUNT_BITS = 24  # of the counter; the marks of all ranks add up above it, and stay below 2^63
_MARK_BITS = 20
_VERDICT, _INFORMED, _READERS = "verdict", "heard", "readers"


def await_all(
    store: Store,
    rank: int,
    world_size: int,
    *,
    same: Mapping[str, object] | None = None,
    timeout: timedelta,
    patience_s: float = _PATIENCE_S,
    serves: bool = False,
    names: Sequence[int] | None = None,
) -> None:
    """Return when all ranks have called this with the same values.

    Each call needs keys of its own: pass a PrefixStore.

    Args:
        same: values by name that must be equal on all ranks, besides the world size.
        timeout: longest wait of the rank that arrived first; later ones wait as long as it does, and a few seconds
            longer for its verdict.
        patience_s: seconds after which a rank writes its card; at most half of `timeout`.
        serves: the store ends with this process, so it stays a moment for the others to read a failure.
        names: numbers by which errors name the ranks, those of another world, in rank order; None: `rank` itself.

    Raises:
        RanksMissing: not all came in time.
        ConfigError: ranks came with other values, one came twice, or more than the world has; on every rank that waits.
        StoreUnreachable: the process that serves the store has gone.
        StoreError: the store failed.
    """
    if not 0 <= rank < world_size:
        raise ConfigError("rank", rank, f"must be below the world size {world_size}", "correct RANK or WORLD_SIZE")
    values = {_WORLD_SIZE: str(world_size), **{name: str(value) for name, value in (same or {}).items()}}
    waiting = _Waiting(store, rank, world_size, values, timeout.total_seconds(), patience_s, names)
    timeout_before: timedelta = store.timeout  # type: ignore[attr-defined] # not in torch's types
    try:
        waiting.wait()
    except (RanksMissing, ConfigError):
        with contextlib.suppress(dist.DistError, StoreError):  # what is known already matters more
            waiting.acknowledge(stays=serves)
        raise
    except dist.DistNetworkError as exc:
        whose = "rank 0, or whoever else serves it, has ended or given up; see its log"
        raise StoreUnreachable(
            f"the store was interrupted while ranks were awaited ({first_line(exc)}): {whose}"
        ) from exc
    except dist.DistError as exc:
        raise StoreError(f"the store failed while ranks were awaited: {first_line(exc)}") from exc
    finally:
        store.set_timeout(timeout_before)


@dataclass(frozen=True)
class _Card:
    """A rank that has arrived, as it writes itself to the store."""

    rank: int
    host: str
    local_world_size: int
    values: dict[str, str]

    @classmethod
    def read(cls, line: bytes) -> _Card:
        """Parse a card, also one of another version, which has more or fewer fields."""
        fields = json.loads(line)
        local_world_size = fields.get("local_world_size", 1)
        return cls(fields["rank"], fields.get("host", "?"), local_world_size, fields.get("values", {}))


class _Waiting:
    """One rank's wait for the others; see the notes above."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        values: dict[str, str],
        timeout_s: float,
        patience_s: float,
        names: Sequence[int] | None = None,
    ) -> None:
        self._names = range(world_size) if names is None else names
        self._store, self._rank, self._world_size, self._values = store, rank, world_size, values
        self._patience_s = min(patience_s, timeout_s / 2)
        self._digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        self._count, self._all_here = f"count/{self._digest}", f"all/{self._digest}"
        self._deadline_s = time.monotonic() + timeout_s
        self._is_tcp = isinstance(_bottom(store), TCPStore)

    def wait(self) -> None:
        """Count this rank, and wait until all are counted or the verdict says why not."""
        self._limit()
        come, marks = self._arrive(1 + (_mark(self._rank) << _COUNT_BITS))
        if come > self._world_size:
            rule = f"has {come} ranks of {self._world_size}"
            raise ConfigError("run", None, rule, "a rank came twice, or the store holds an older run: take another id")
        if come == self._world_size:
            if marks == sum(map(_mark, range(self._world_size))):
                self._decide({"all": self._digest})
                self._store.set(self._all_here, "")
            else:
                self._wait_long()  # the others write down who they are soon
        elif not self._waits_for(self._all_here, self._patience_s):
            self._wait_long()

    def acknowledge(self, stays: bool) -> None:
        """Count this rank as informed; if it `stays`, return when every rank that left a card is."""
        num_informed, until_s = self._store.add(_INFORMED, 1), time.monotonic() + _INFORMED_S
        while stays and num_informed < len(self._cards()) and time.monotonic() < until_s:
            num_informed = self._store.add(_INFORMED, 0)
            time.sleep(_POLL_S)

    def _arrive(self, amount: int) -> tuple[int, int]:
        """Add `amount` to the counter, and return how many ranks have arrived and the sum of their marks."""
        total = self._store.add(self._count, amount)
        return total & ((1 << _COUNT_BITS) - 1), total >> _COUNT_BITS

    def _limit(self) -> None:
        """Limit how long requests wait for a store that is away to the time left until the deadline."""
        self._store.set_timeout(timedelta(seconds=max(self._deadline_s - time.monotonic(), _SHORTEST_S)))

    def _wait_long(self) -> None:
        """Write this rank's card, and wait for the verdict, or find it if no other rank does."""
        self._limit()
        card = _Card(self._rank, socket.gethostname(), _local_world_size(), self._values)
        append: Any = self._store.append  # type: ignore[attr-defined] # not in torch's types
        append(f"cards/{card.rank // _CHUNK}", json.dumps(asdict(card)) + "\n")
        turn = min(self._store.add(_READERS, 1) - 1, _MOST_IN_TURN)
        grace_s = turn * min(_SLICE_S, self._patience_s)  # for the reader's verdict; without one the reader has died
        if not turn or not self._waits_for(_VERDICT, self._deadline_s + grace_s - time.monotonic()):
            self._read_until_decided()
        self._apply(self._store.get(_VERDICT))

    def _read_until_decided(self) -> None:
        """Read the cards of waiting ranks again and again, until this rank or another has written the verdict."""
        log_s = time.monotonic()
        while not self._waits_for(_VERDICT, min(_SLICE_S, self._patience_s)):
            self._limit()
            cards, now_s = self._cards(), time.monotonic()
            self._refuse_differing(cards)
            self._refuse_twice(cards)
            # A rank that has just arrived has no card yet, and must not be called missing.
            have_written = len(cards) >= self._arrive(0)[0]
            if now_s >= self._deadline_s and (have_written or now_s >= self._deadline_s + self._patience_s):
                self._give_up(cards)
            if now_s >= log_s:
                log_s += _LOG_EVERY_S
                logger.warning("%s; giving up in %.0f s", self._describe(cards), max(self._deadline_s - now_s, 0))

    def _waits_for(self, key: str, seconds: float) -> bool:
        """Return True if the key is set within `seconds`; a store that is away is waited for up to the deadline."""
        until_s = time.monotonic() + seconds
        if self._is_tcp and key == _VERDICT:
            while not self._store.check([key]):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                time.sleep(min(left_s, _LOOK_S))
            return True
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, _SHORTEST_S)))
        except dist.DistStoreError:  # in time; a broken connection is another error
            return False
        except StoreUnreachable:
            if time.monotonic() >= self._deadline_s:
                raise
            return False
        return True

    def _decide(self, verdict: dict[str, Any]) -> None:
        """Write the verdict unless there is one, and raise what it says unless all have arrived."""
        self._apply(self._store.compare_set(_VERDICT, "", json.dumps(verdict)))

    def _apply(self, verdict_json: bytes) -> None:
        """Raise the error that a verdict names; return if all have arrived."""
        verdict = json.loads(verdict_json)
        if "missing" in verdict:
            missing, message = tuple(self._names[rank] for rank in verdict["missing"]), verdict["said"]
            if self._rank in verdict["missing"]:
                message = f"rank {self._names[self._rank]:,} came after the others had given up ({message})"
            raise RanksMissing(message, missing)
        if "field" in verdict:
            raise ConfigError(verdict["field"], verdict["value"], verdict["rule"], "start every rank of the run alike")
        if verdict["all"] != self._digest:
            rule = "is full of ranks that came with another world size, layout or version"
            raise ConfigError("run", None, rule, "start every rank of the run alike")

    def _give_up(self, cards: list[_Card]) -> None:
        self._decide({"missing": self._missing(cards), "said": self._describe(cards)})

    def _refuse_differing(self, cards: Iterable[_Card]) -> None:
        by_name: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        names = dict.fromkeys(name for card in cards for name in card.values)
        for card in cards:
            for name in names:
                by_name[name][card.values.get(name, "not given")].append(card.rank)
        for name, by_value in by_name.items():
            if len(by_value) > 1:
                fewest = min(by_value, key=lambda value: len(by_value[value]))
                others = [f"{value} on {self._named(ranks)}" for value, ranks in by_value.items() if value != fewest]
                rule = f"on {self._named(by_value[fewest])}, but {', '.join(others)}"
                self._decide({"field": name, "value": fewest, "rule": rule})

    def _refuse_twice(self, cards: list[_Card]) -> None:
        hosts: dict[int, list[str]] = defaultdict(list)
        for card in cards:
            hosts[card.rank].append(card.host)
        twice = [rank for rank in hosts if len(hosts[rank]) > 1]
        if twice:
            places = ", ".join(dict.fromkeys(hosts[twice[0]]))
            missing = self._missing(cards)
            rule = f"is the rank of {len(hosts[twice[0]])} processes (of {places})"
            rule += f", and none is {self._named(missing)}" if missing else ""
            self._decide({"field": "RANK", "value": self._names[twice[0]], "rule": rule})

    def _cards(self) -> list[_Card]:
        """Return the cards that were written, in rank order."""
        last = (self._world_size - 1) // _CHUNK
        keys = [f"cards/{chunk}" for chunk in range(last + 1)]
        lines = [line for key in keys if self._store.check([key]) for line in self._store.get(key).splitlines()]
        return sorted(map(_Card.read, lines), key=lambda card: card.rank)

    def _missing(self, cards: Iterable[_Card]) -> list[int]:
        return sorted(set(range(self._world_size)) - {card.rank for card in cards})

    def _describe(self, cards: list[_Card]) -> str:
        """Return which ranks are missing, of which hosts, and how many have arrived."""
        missing = self._missing(cards)
        # Ranks are numbered host by host, so a card tells the host of its neighbours too.
        hosts = {
            rank: card.host
            for card in cards
            for first in [card.rank - card.rank % card.local_world_size]
            for rank in range(first, first + card.local_world_size)
        }
        known = list(dict.fromkeys(hosts[rank] for rank in missing if rank in hosts))
        where = f" (of {', '.join(known[:_MOST_NAMED])})" if known else ""
        come = self._world_size - len(missing)
        return f"waiting for {self._named(missing)}{where}: {come:,} of {self._world_size:,} have come"

    def _named(self, ranks: list[int]) -> str:
        numbers = ", ".join(f"{self._names[rank]:,}" for rank in ranks[:_MOST_NAMED])
        more = f" and {len(ranks) - _MOST_NAMED:,} more" if len(ranks) > _MOST_NAMED else ""
        return f"rank{'s' * (len(ranks) > 1)} {numbers}{more}"


def _local_world_size() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) else 1


def _mark(rank: int) -> int:
    """Return a number of the rank that is unrelated to those of its neighbours, so that sums tell ranks apart."""
    return int.from_bytes(hashlib.blake2b(str(rank).encode(), digest_size=4).digest()) >> (32 - _MARK_BITS)


def _bottom(store: Store) -> Store:
    """Return the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
