"""A roll call of ranks over a key-value store: who is asked writes its report there; who does not is silent.

Nothing is written or read until somebody asks. From `listen` on, one blocked command of the store waits for that, so
that a rank answers whatever its main thread does, as long as Python runs. Works on everything with torch's Store API
(RedisStore, TCPStore). Not covered: what a report says (`diagnosis`), and when to ask (`watchdog`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from collectives.watch.diagnosis import Answer, Final, Report
from netlayer.errors import NetlayerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

STORE_ERRORS = (RuntimeError, NetlayerError, OSError)
_LISTEN = timedelta(hours=1)  # then the wait is repeated
_POLLS_S = (0.02, 0.25)  # the first and the longest pause between two looks for answers
_CLOSE_S = 1.0
_VERDICT, _VERDICT_COMES = "watch/verdict", timedelta(seconds=2)


class RollCall:
    """One rank's part in the roll call.

    The store's own object is left alone, since a wait may hold it: every thread here uses a clone.

    Args:
        store: shared by all ranks; a prefix of its own (`PrefixStore`) for each further roll call.
        rank: of this process.
        write: makes the report of this rank, of the stamp given.
    """

    def __init__(self, store: Store, rank: int, write: Callable[[int], Report]) -> None:
        self._store, self._rank, self._write = store, rank, write
        self._listener: threading.Thread | None = None
        self._of_beats: Store | None = None
        self._closed = False

    def listen(self) -> None:
        """Answer whoever asks from now on; a second call does nothing."""
        if self._listener is None and not self._closed:
            self._listener = threading.Thread(target=self._listen, name="roll-call", daemon=True)
            self._listener.start()

    def beat(self) -> None:
        """Write this rank's report unasked.

        Raises:
            RuntimeError, NetlayerError, OSError: the store does not work (`STORE_ERRORS`).
        """
        if self._of_beats is None:
            self._of_beats = self._clone()
        self._publish(self._of_beats)

    def decide(self, verdict: str) -> str:
        """Write down who is to blame for the end of the run, unless somebody has; the verdict that holds.

        Raises:
            RuntimeError, NetlayerError, OSError: the store does not work (`STORE_ERRORS`).
        """
        store = self._clone()
        if not store.check([_VERDICT]) and store.add(f"{_VERDICT}s", 1) == 1:
            store.set(_VERDICT, verdict)
            return verdict
        store.wait([_VERDICT], _VERDICT_COMES)  # of another rank, between its two calls
        return store.get(_VERDICT).decode()

    def verdict(self) -> str | None:
        """Return the verdict that `decide` wrote, on whichever rank; None where there is none yet.

        Raises:
            RuntimeError, NetlayerError, OSError: the store does not work (`STORE_ERRORS`).
        """
        store = self._clone()
        return store.get(_VERDICT).decode() if store.check([_VERDICT]) else None

    def collect(
        self,
        ranks: Sequence[int],
        patience_s: float,
        final: Final,
        follow: Callable[[Report], Sequence[int]] = lambda _report: (),
    ) -> dict[int, Answer]:
        """Write this rank's report, ask `ranks` for theirs, and return when all have answered or patience is over.

        Args:
            ranks: to ask.
            patience_s: longest wait for answers, in seconds; the store may add its own timeout.
            final: of a report that is there already: its rank need not be asked.
            follow: further ranks to ask, by what one has answered.

        Returns:
            The last report of every rank that has ever written one.

        Raises:
            RuntimeError, NetlayerError, OSError: the store does not work (`STORE_ERRORS`).
        """
        store = self._clone()
        self._publish(store)
        answers: dict[int, Answer] = {}
        waiting: list[int] = []
        asked_ranks = {self._rank}

        def ask(more: Sequence[int]) -> None:
            for rank in (rank for rank in more if rank not in asked_ranks):
                asked_ranks.add(rank)
                report = _read(store, rank)
                if report is not None:
                    answers[rank] = Answer(report, final(report))
                if report is None or not answers[rank].fresh:
                    store.set(_ask_key(rank), "")
                    waiting.append(rank)

        ask(ranks)
        deadline, pause_s = time.monotonic() + patience_s, _POLLS_S[0]
        while waiting and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLLS_S[1])
            for rank in list(waiting):
                report = _read(store, rank)
                if report is not None and (rank not in answers or report.stamp != answers[rank].report.stamp):
                    answers[rank] = Answer(report, fresh=True)
                    waiting.remove(rank)
                    ask(follow(report))
        return answers

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._closed = True
        listener = self._listener
        if listener is None or not listener.is_alive():
            return
        # By asking itself: nothing else ends a wait. In a thread, for the store may be gone and block.
        asker = threading.Thread(target=self._ask_self, daemon=True)
        asker.start()
        for thread in (asker, listener):
            thread.join(_CLOSE_S)

    def _clone(self) -> Store:
        twin: Store = self._store.clone()  # type: ignore[attr-defined]
        return twin

    def _publish(self, store: Store) -> None:
        store.set(_report_key(self._rank), self._write(time.time_ns()).to_json())

    def _listen(self) -> None:
        try:
            store, key = self._clone(), _ask_key(self._rank)
            while not self._closed:
                if _wait(store, key):
                    store.delete_key(key)
                    self._publish(store)
        except STORE_ERRORS as exc:
            if not self._closed:  # the rank that hosts a TCPStore may leave first
                logger.info("rank %d no longer answers roll calls: %s", self._rank, exc)

    def _ask_self(self) -> None:
        try:
            self._clone().set(_ask_key(self._rank), "")
        except STORE_ERRORS as exc:
            logger.debug("the listener is left to end with the process: %s", exc)


def _wait(store: Store, key: str) -> bool:
    """Whether the key came; False after a long time without."""
    start = time.monotonic()
    try:
        store.wait([key], _LISTEN)
    except dist.DistStoreError:
        if time.monotonic() - start < _LISTEN.total_seconds() / 2:
            raise
        return False
    return True


def _read(store: Store, rank: int) -> Report | None:
    key = _report_key(rank)
    return Report.from_json(store.get(key)) if store.check([key]) else None


def _ask_key(rank: int) -> str:
    return f"watch/ask/{rank}"


def _report_key(rank: int) -> str:
    return f"watch/report/{rank}"
