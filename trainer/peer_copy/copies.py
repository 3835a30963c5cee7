"""Peer copies of a running job: its ranks agree on the machines, start their stores, and say what that takes.

[Note: ring] Machines stand in the order of their first ranks, and each copies to the next `copies` of them. So a
machine's store holds the files of its own ranks and those of the `copies` machines before it, of every copy that is
kept and of the one in the making.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from netlayer import environ
from netlayer.config.checkpoint import CheckpointConfig
from netlayer.errors import ConfigError, NetlayerError
from netlayer.units import format_size
from trainer.checkpoint.names import as_location, step_of
from trainer.parallel import ParallelModel
from trainer.peer_copy.client import StoreClient
from trainer.peer_copy.hosts import (
    FOLDER,
    Keeper,
    Ring,
    address_towards,
    location_of,
    machine_name,
    run_token,
    start_store,
    stop_store,
    store_urls,
    write_ring,
)

logger = logging.getLogger(__name__)

_SMALL_BYTES = 64 << 20  # `.metadata` and `meta.json` of a checkpoint of many ranks, and the tokenizer


class PeerCopies:
    """Part of a rank in keeping the stores of a run. Every rank calls the same methods in the same order.

    Args:
        model: this rank's part.
        out: folder of the run, which all machines see.
        own_bytes: of this rank's file.
        steps_done: before this start: copies of later steps are of a past that is not gone on with.

    Raises:
        ConfigError: job.checkpoint.peer_memory_gib cannot hold the copies; on all ranks alike.
    """

    def __init__(self, model: ParallelModel, out: Path, own_bytes: int, steps_done: int) -> None:
        self._model, self._out, self._config = model, out, model.job.checkpoint
        self._machine = machine_name()
        self._keeper: Keeper | None = None
        rows = self._gather([self._machine, environ.boot_id(), own_bytes])
        machines = list(dict.fromkeys(machine for machine, _, _ in rows))
        self._first = {machine: [row[0] for row in rows].index(machine) for machine in machines}
        self.ring = Ring(machines, min(self._config.peer_copies, len(machines) - 1))
        sizes = {each: sum(size for machine, _, size in rows if machine == each) for each in machines}
        self.needed_bytes = _needed(self.ring, sizes, self._config.peer_keep)
        self.limit_bytes = _limit(self._config, self.needed_bytes)
        self.location = location_of(out)
        self.lines = _doubts(self._config, self.ring, {machine: boot for machine, boot, _ in rows})
        """For the user, on all ranks alike."""
        problem = self._start(steps_done)
        self.is_ready = not problem
        if problem:
            self.lines = [f"there are no copies in the memory of machines: {problem}"]
        elif model.world.rank == 0:
            template = "copies of every %d steps in the memory of %d machines, each on %d more: up to %s a machine"
            needed = format_size(max(self.needed_bytes.values()))
            logger.info(template, self._config.copy_interval, len(machines), self.ring.copies, needed)

    def revive(self) -> None:
        """Start this machine's store again where it has ended; for after a copy that failed."""
        if self._is_first:
            try:
                self._start_own()
            except NetlayerError as exc:
                logger.warning("%s", exc)

    def leave(self) -> None:
        """Leave the stores as they are: the training has failed, and the next one asks for its copies."""
        self._close_keeper()

    def close(self) -> None:
        """End the stores: the run has ended well, and nobody will ask for its copies."""
        self._close_keeper()
        if self._is_first:
            with contextlib.suppress(OSError, NetlayerError):
                stop_store(self._out, self._machine)

    @property
    def _is_first(self) -> bool:
        """Whether this rank is the first one of its machine."""
        return self._first[self._machine] == self._model.world.rank

    def _start(self, steps_done: int) -> str:
        """Start the stores; return what is wrong, on all ranks alike."""
        with _Problem() as problem:
            if self._is_first:
                self._start_own()
        if text := self._any(problem.text):
            return text
        with _Problem() as problem:
            if self._is_first:
                self._reach_targets()
            if self._model.world.rank == 0:
                write_ring(self._out, self.ring)
                self._remove_later(steps_done)
        return self._any(problem.text)

    def _start_own(self) -> None:
        """Start this machine's store, or set the limit of the one that is there.

        Raises:
            ConfigError: it cannot be started, or there is not as much memory.
        """
        address = self._config.peer_address or address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        limit = self.limit_bytes[self._machine]
        url = start_store(self._out, self._machine, address=address, hold_s=self._config.peer_hold_s)
        store = StoreClient(url, run_token(self._out))
        used = sum(store.listing()["files"].values())
        free = environ.available_memory_bytes()
        if 0 < free < self.needed_bytes[self._machine] - used:
            needed = format_size(self.needed_bytes[self._machine])
            rule = f"needs {needed} on {self._machine}, {format_size(free)} are free"
            raise ConfigError("job.checkpoint.peer_copies", self._config.peer_copies, rule, "lower it, or peer_keep")
        store.set_limit(limit)
        store.close()
        self._close_keeper()
        self._keeper = Keeper(url, run_token(self._out), self._config.peer_hold_s)

    def _reach_targets(self) -> None:
        """Raise ConfigError where this machine cannot reach one that it copies to."""
        urls, token = store_urls(self._out), run_token(self._out)
        for machine in self.ring.targets(self._machine):
            url = urls.get(machine, "(no address)")
            try:
                StoreClient(url, token).listing()
            except (OSError, ValueError) as exc:
                rule = f"is where {self._machine} looks for the store of {machine}, and cannot reach it ({exc})"
                remedy = "set job.checkpoint.peer_address there to an address that others reach"
                raise ConfigError("job.checkpoint.peer_address", url, rule, remedy) from exc

    def _remove_later(self, steps_done: int) -> None:
        """Remove copies of steps that will be taken again, and addresses of stores that are gone with their machine."""
        root: Any = as_location(self.location)
        for name in root.fs.ls(root.path, detail=False):
            path = Path(name)
            if path.name.startswith("step-") and step_of(path) > steps_done:
                root.fs.rm(name, recursive=True)
        token = run_token(self._out)
        for machine, url in store_urls(self._out).items():
            if machine in self.ring.machines:
                continue
            try:
                StoreClient(url, token).listing()
            except OSError:
                (self._out / FOLDER / f"{machine}.json").unlink(missing_ok=True)

    def _any(self, text: str) -> str:
        return next(filter(None, self._gather(text)), "")

    def _gather(self, value: Any) -> list[Any]:
        texts: list[str] = self._model.world.all_gather_text(json.dumps(value), "checkpoint")
        return [json.loads(text) for text in texts]

    def _close_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


class _Problem:
    """A block whose error is kept as a text: the other ranks go on, and are told."""

    text = ""

    def __enter__(self) -> _Problem:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> bool:
        if isinstance(exc, NetlayerError | OSError):
            self.text = str(exc)
            return True
        return False


def _needed(ring: Ring, sizes: Mapping[str, int], keep: int) -> dict[str, int]:
    """Return the bytes that each machine's store will hold at most: [Note: ring]."""
    needed = dict.fromkeys(ring.machines, 0)
    for machine, size in sizes.items():
        for target in ring.targets(machine):
            needed[target] += size
    # Further items, trailers and headers of files are a small part of a large one.
    return {machine: (keep + 1) * (size + size // 64 + _SMALL_BYTES) for machine, size in needed.items()}


def _limit(config: CheckpointConfig, needed: Mapping[str, int]) -> dict[str, int]:
    if not config.peer_memory_gib:
        return dict(needed)
    limit = round(config.peer_memory_gib * 2**30)
    machine, most = max(needed.items(), key=lambda item: item[1])
    if limit < most:
        rule = f"is less than the {format_size(most)} of the copies on {machine} (peer_keep = {config.peer_keep})"
        raise ConfigError("job.checkpoint.peer_memory_gib", config.peer_memory_gib, rule, "raise it, or set it to 0")
    return dict.fromkeys(needed, limit)


def _doubts(config: CheckpointConfig, ring: Ring, boots: Mapping[str, str]) -> list[str]:
    """Return what the user should know of how much the copies are worth."""
    lines = []
    if len(ring.machines) == 1:
        lines.append(
            "job.checkpoint.peer_copies: all ranks are on one machine; a copy in its memory outlives processes, not it"
        )
    elif ring.copies < config.peer_copies:
        rule = f"there are {ring.copies} other machines, which get one each"
        lines.append(f"job.checkpoint.peer_copies = {config.peer_copies}: {rule}")
    shared: dict[str, list[str]] = {}
    for machine in ring.machines:
        shared.setdefault(boots[machine], []).append(machine)
    lines += [
        f"job.checkpoint.peer_copies: {_listed(machines)} are one machine; copies of one another do not outlive it"
        for machines in shared.values()
        if len(machines) > 1
    ]
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"
