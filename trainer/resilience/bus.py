"""Messages of a run through its Redis: heartbeats to the driver, assignments and the driver's beacon to executors.

The store keeps nothing that is not sent again: a Redis that comes back empty costs one heartbeat. Whoever can write to
it may fill it, so a reader takes a bounded number of messages at a time, and the server itself passes over what is
larger than any message of ours. Calls are tried once and raise `StoreError` where no server answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

from netlayer.store.redis_link import RedisLinks
from trainer.resilience.messages import MAX_BYTES

_MAX_WAITING = 1 << 14  # heartbeats; older ones go
TAKE = 512
"""Most messages that one call takes."""
_ANSWER_S = 5.0
_LIFE_MS = 24 * 3600 * 1000  # of what nobody refreshes: a run that is gone leaves nothing for ever

# Takes up to ARGV[1] messages and returns their sizes, and all as one text without those above ARGV[2] bytes: a client
# in Python takes longer over many replies than over a long one.
_TAKE_SCRIPT = """
local sizes, taken = {}, {}
for _ = 1, tonumber(ARGV[1]) do
  local message = redis.call('LPOP', KEYS[1])
  if not message then break end
  sizes[#sizes + 1] = #message
  if #message <= tonumber(ARGV[2]) then taken[#taken + 1] = message end
end
return {table.concat(sizes, ' '), table.concat(taken)}
"""
_GET_SCRIPT = """
local got = {}
for i = 1, #KEYS do
  local size = redis.call('STRLEN', KEYS[i])
  got[i] = size > tonumber(ARGV[1]) and size or (redis.call('GET', KEYS[i]) or '')
end
return got
"""


class Bus:
    """One process's connection to the messages of a run; its keys begin with `netlayer:{RUN}:`.

    Args:
        url: as `RedisLinks` takes it.
        run: id of the run.
    """

    def __init__(self, url: str, run: str) -> None:
        self._links = RedisLinks(url, lambda _ask: None, _ANSWER_S)
        self._prefix = f"netlayer:{{{run}}}:"

    def send_heartbeat(self, data: bytes) -> None:
        inbox = self._prefix + "heartbeats"
        self._ask(
            [
                ("RPUSH", inbox, data),
                ("LTRIM", inbox, -_MAX_WAITING, -1),
                ("PEXPIRE", inbox, _LIFE_MS),
            ]
        )

    def take_heartbeats(self) -> tuple[list[bytes], int]:
        """Return what came since the last call, up to a bound, and how many messages were too large to be read."""
        [[sizes, data]] = self._ask([("EVAL", _TAKE_SCRIPT, 1, self._prefix + "heartbeats", TAKE, MAX_BYTES)])
        ends = [int(each) for each in sizes.split()]
        num = len(ends)
        ends = list(accumulate(size for size in ends if size <= MAX_BYTES))
        return [data[begin:end] for begin, end in pairwise([0, *ends])], num - len(ends)

    def send_orders(self, beacon: bytes, assignments: Mapping[str, bytes]) -> None:
        """Refresh the driver's beacon, and set the assignments of these nodes."""
        named: Iterable[tuple[str, bytes]] = [("beacon", beacon)]
        named = [*named, *((f"assignment:{node}", data) for node, data in assignments.items())]
        self._ask([("SET", self._prefix + name, data, "PX", _LIFE_MS) for name, data in named])

    def orders(self, node: str) -> tuple[bytes, bytes]:
        """Return the beacon and a node's assignment; empty: there is none, or it is too large."""
        keys = self._prefix + "beacon", self._prefix + f"assignment:{node}"
        [[beacon, assignment]] = self._ask([("EVAL", _GET_SCRIPT, 2, *keys, MAX_BYTES)])
        return (
            beacon if isinstance(beacon, bytes) else b"",
            assignment if isinstance(assignment, bytes) else b"",
        )

    def forget(self, nodes: Iterable[str]) -> None:
        """Remove what the run has left on the server."""
        names = ["heartbeats", "beacon", *(f"assignment:{node}" for node in nodes)]
        self._ask([("DEL", *(self._prefix + name for name in names))])

    def close(self) -> None:
        self._links.close()

    def _ask(self, commands: list[Any]) -> list[Any]:
        return self._links.ask(commands, time.monotonic() + _ANSWER_S, patient=False)
