"""Membership of a run in the Redis store: join, leave, cleanup, and detection of a server that lost its data.

The first connection of a process joins its run and reads the run's epoch, a random word stored with the keys; every
later connection compares it. The last member to leave removes the keys. Members have no lease, so the keys of a killed
run remain until `remove_run`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from netlayer.errors import ConfigError, NetlayerError, StoreLost
from netlayer.store import redis_scripts as scripts
from netlayer.store.redis_link import RedisLinks

__all__ = ["Membership", "clear", "namespace_of", "remove_run"]

logger = logging.getLogger(__name__)

_LEAVE_S = 5.0
_POLL_S = 0.05
_RUN_ID = re.compile(r"[^\s{}\x00-\x1f]{1,200}")


def namespace_of(run_id: str) -> bytes:
    """Return the prefix of all keys of the run."""
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError("run id", run_id, "must be 1 to 200 characters, none a space or a brace", "give another name")
    return f"netlayer:{{{run_id}}}:".encode()


def clear(links: RedisLinks, namespace: bytes, deadline: float, *, patient: bool = True) -> None:
    """Remove everything of a run, in parts."""
    command = ("EVAL", scripts.CLEAR.text, 1, namespace)
    while links.ask([command], deadline, patient=patient) != [0]:
        pass


def remove_run(url: str, run_id: str, timeout_s: float = 300.0) -> None:
    """Remove what a killed run left on the server. Nothing of the run may be alive any more.

    Raises:
        StoreUnreachable: no server answers within the timeout.
    """
    links = RedisLinks(url, lambda _: None, timeout_s)
    try:
        clear(links, namespace_of(run_id), time.monotonic() + timeout_s)
    finally:
        links.close()


class Membership:
    """Membership of this process in one run.

    Args:
        url: address of the server.
        run_id: name of the run.
        rank: rank of the member, None for one without; a second process of the same rank is refused.
        world_size: number of members that must leave before the last one removes the keys; 0: all that joined.
        timeout_s: longest time of one attempt to connect, in seconds.
    """

    def __init__(self, url: str, run_id: str, rank: int | None, world_size: int, timeout_s: float) -> None:
        self.run_id = run_id
        self.namespace = namespace_of(run_id)
        self.links = RedisLinks(url, self._admit, timeout_s)
        self._token = secrets.token_hex(8)
        self._member = self._token if rank is None else f"rank {rank}"
        self._world_size = world_size
        self._epoch: bytes | None = None
        self._pid = os.getpid()

    def join(self, deadline: float) -> None:
        """Connect for the first time; if this member has left the run before, wait until the others have too."""
        until_s = min(deadline, time.monotonic() + _LEAVE_S)
        while True:
            try:
                self.links.ask([], deadline)
                return
            except _HasLeft:
                if time.monotonic() >= until_s:
                    raise self._is_taken() from None
                time.sleep(_POLL_S)

    def leave(self, *, is_off: bool = False) -> None:
        """Leave the run, remove its keys if this is the last member, and close the connections.

        Args:
            is_off: the run never became complete, so the last of those that joined removes the keys.
        """
        if self.links.closed:
            return
        deadline = time.monotonic() + _LEAVE_S
        try:
            if os.getpid() == self._pid and self._is_last(deadline, is_off):  # a forked child is no member
                clear(self.links, self.namespace, deadline, patient=False)
        except NetlayerError as exc:
            logger.debug("could not leave run %s in order: %s", self.run_id, exc)
        finally:
            self.links.close()

    def _is_last(self, deadline: float, is_off: bool) -> bool:
        arguments = (self._member, self._epoch or b"", 0 if is_off else self._world_size)
        goodbye = ("EVAL", scripts.LEAVE.text, 1, self.namespace, *arguments)
        return self.links.ask([goodbye], deadline, patient=False) == [1]

    def _admit(self, ask: Callable[..., Any]) -> None:
        if self._epoch is None:
            arguments = (self._member, self._token, secrets.token_hex(8))
            try:
                epoch = ask("EVAL", scripts.JOIN.text, 1, self.namespace, *arguments)
            except ResponseError as exc:
                if scripts.EVICTS not in str(exc):
                    raise
                raise self._evicts(str(exc)) from exc
            if epoch == scripts.HAS_LEFT:
                raise _HasLeft
            if epoch is None:
                raise self._is_taken()
            self._epoch = epoch
        elif ask("GET", self.namespace + b"epoch") != self._epoch:
            raise StoreLost(
                f"store lost its data: the server at {self.links.address} has no keys of run {self.run_id} any more; "
                "start the run again (a server with appendonly yes keeps them over a restart)"
            )

    def _evicts(self, answer: str) -> ConfigError:
        policy, limit = answer.partition(f"{scripts.EVICTS} ")[2].split()[:2]
        return ConfigError(
            "maxmemory-policy",
            policy,
            f"the server at {self.links.address} drops keys of the run once it holds {limit} bytes (maxmemory)",
            "CONFIG SET maxmemory-policy noeviction there, or give the run a server of its own",
        )

    def _is_taken(self) -> ConfigError:
        return ConfigError(
            "run id",
            self.run_id,
            f"{self._member} of this run is already there, or a killed run left it",
            "give the run another id, or remove the old one: netlayer.store.redis_store.remove_run(url, run_id)",
        )


class _HasLeft(Exception):
    """Error: this member has left the run before, and others have not yet."""
