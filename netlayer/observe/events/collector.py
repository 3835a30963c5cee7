"""Collector: takes messages of events from a server and keeps them as files that the reader, DuckDB and others read.

Messages are gathered for some seconds and written as one file, just as they came (`part-*.arrows.zst`); only when that
file is on the disk are they acknowledged, so a collector that is killed loses nothing and takes nothing twice. A second
process turns these files into parquet (`part-*.parquet`), at its own pace; until then the reader reads them as they
are. What never arrived is counted by the numbers of the messages, and a mark `dropped` says so in the same files.

[Note: exactly once] Files are numbered, and `collector.json` says which number the newest had and what was seen of each
stream by then. It is written beside the file before the file gets its name; after a crash between the two that version
counts which is of the newest file. What the server hands out again, or a sender sent twice, is dropped by the number
that it has in its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from netlayer.errors import FULL_DISK, ConfigError, NetlayerError
from netlayer.observe.events.schema import Mark, Origin
from netlayer.observe.events.transport import TOPIC, Message, encode, of_fields, redis_key

if TYPE_CHECKING:
    from netlayer.config.observe import ObserveConfig

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
FLUSH_BYTES = 64 << 20
SPOOL_SUFFIX = ".arrows.zst"
_STATE = "collector.json"
_GROUP, _CONSUMER = "netlayer", "collector"
_COUNT = 1000
_BLOCK_MS = 500
_ANSWER_S = 5.0
_ROW_GROUP = 1 << 18
_COLLECT_S = 60.0  # for what is left when the ranks have ended
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0

Position = tuple[int, ...]
NO_MESSAGE = Message("", 0, 0, 0, b"")
"""In place of one that is to be acknowledged and not kept."""


class Source(Protocol):
    """Server from which messages are taken."""

    def receive(self) -> Sequence[tuple[Position, Message]]:
        """Return what has come, after a short wait; empty: nothing."""

    def acknowledge(self, positions: Sequence[Position]) -> None:
        """Let the server forget messages, which are on the disk."""

    def close(self) -> None:
        """Hang up."""


@dataclass
class Tally:
    """Counts of a collector.

    Args:
        messages, events, num_bytes: that were kept; bytes as they came.
        lost_messages, lost_events: that never arrived, by their numbers.
        twice: messages that came again.
        damaged: that are none.
    """

    messages: int = 0
    events: int = 0
    num_bytes: int = 0
    lost_messages: int = 0
    lost_events: int = 0
    twice: int = 0
    damaged: int = 0
    streams: set[str] = field(default_factory=set)


class Keeper:
    """Writes messages to files, once each.

    Args:
        folder: of the files; made where it is missing.
        compacts: turn files into parquet, by a process beside this one.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, compacts: bool = True) -> None:
        self.folder, self.tally = folder, Tally()
        self._waiting: list[tuple[Position, Message]] = []
        self._marks: list[Mark] = []
        self._waiting_bytes, self._since_s = 0, time.monotonic()
        self._pool: ProcessPoolExecutor | None = None
        self._compacting: deque[Future[None]] = deque()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("part-*.pending"):
                path.unlink()
            spooled = sorted(folder.glob(f"part-*{SPOOL_SUFFIX}"))
        except OSError as exc:
            rule = f"cannot hold events ({exc.strerror or exc})"
            raise ConfigError("--out", folder, rule, "give a folder that can be written") from exc
        self._newest = max((_number_of(path) for path in [*spooled, *folder.glob("part-*.parquet")]), default=0)
        self._seen = _read_state(folder, self._newest)
        """By stream: number of its last message, and events up to then."""
        if compacts:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_ignore_interrupt)
            for path in spooled:
                self._compact(path)

    def add(self, position: Position, message: Message) -> bool:
        """Take a message; return whether it is new, and so part of the next file."""
        number, total = self._seen.get(message.stream, (0, 0))
        if not message.count or message.number <= number:
            self.tally.damaged += not message.count
            self.tally.twice += message.count > 0
            # Held all the same: it is acknowledged with the file that is to come, and writes nothing.
            self._waiting.append((position, NO_MESSAGE))
            return False
        lost = message.number - number - 1
        if lost:
            events = max(message.total - message.count - total, 0)
            self.tally.lost_messages += lost
            self.tally.lost_events += events
            self._marks.append(_dropped(message.stream, lost, events))
        self._seen[message.stream] = message.number, message.total
        self._waiting.append((position, message))
        self._waiting_bytes += len(message.payload)
        self.tally.messages += 1
        self.tally.events += message.count
        self.tally.num_bytes += len(message.payload)
        self.tally.streams.add(message.stream)
        return True

    @property
    def is_due(self) -> bool:
        """Whether a file should be written now."""
        is_old = time.monotonic() - self._since_s >= FLUSH_S
        return bool(self._waiting) and (is_old or self._waiting_bytes >= FLUSH_BYTES)

    def write(self) -> list[Position]:
        """Write what is held as a file; return the positions that may be acknowledged.

        Raises:
            OSError: there is no room; all is still held.
        """
        positions = [position for position, _ in self._waiting]
        payloads = [message.payload for _, message in self._waiting if message.count]
        if self._marks:
            payloads.append(encode(self._marks))
        if payloads:
            number = self._newest + 1
            name = f"part-{number:06d}"
            pending = self.folder / f"{name}.pending"
            with pending.open("wb") as file:
                file.writelines(payloads)
                file.flush()
                os.fsync(file.fileno())
            state = {"file": number, "streams": self._seen}
            waiting = self.folder / f"{_STATE}.pending"
            waiting.write_text(json.dumps(state))
            path = self.folder / f"{name}{SPOOL_SUFFIX}"
            pending.replace(path)
            waiting.replace(self.folder / _STATE)
            self._newest = number
            self._compact(path)
        self._waiting, self._marks, self._waiting_bytes, self._since_s = [], [], 0, time.monotonic()
        return positions

    def close(self) -> None:
        """Wait for the files that are being turned into parquet."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._reap()
            self._pool = None

    def _compact(self, path: Path) -> None:
        if self._pool is None:
            return
        self._reap()
        try:
            self._compacting.append(self._pool.submit(compact, path))
        except BrokenProcessPool:
            logger.warning("files stay as they came, no more parquet is written: the process that does it has ended")
            self._pool = None

    def _reap(self) -> None:
        while self._compacting and self._compacting[0].done():
            exc = self._compacting.popleft().exception()
            if exc is not None:
                logger.warning("a file stays as it came: %s", exc)


def collect(
    source: Source,
    keeper: Keeper,
    is_over: Callable[[], bool],
    on_progress: Callable[[Tally], None] = lambda _tally: None,
) -> Tally:
    """Take messages and keep them, until `is_over()` and nothing more comes. A server that is away is waited for.

    Args:
        is_over: asked after every look; when it is true the rest of what has come is still taken.
        on_progress: called with every file.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            messages = source.receive()
            for position, message in messages:
                keeper.add(position, message)
            over = is_over()
            if keeper.is_due or (over and not messages):
                source.acknowledge(keeper.write())
                on_progress(keeper.tally)
            pause_s = _FIRST_PAUSE_S
        except (NetlayerError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno in FULL_DISK:
                logger.warning("nothing is taken until there is room: %s", exc)
            else:
                logger.warning("trying again: %s", str(exc).splitlines()[0])
            if is_over():
                # Not acknowledged: a server that comes back hands it out again, and it is known by its numbers.
                with contextlib.suppress(OSError):
                    keeper.write()
                return keeper.tally
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            continue
        if over and not messages:
            return keeper.tally


class RedisSource:
    """Messages of a run's Redis stream, by a consumer group.

    Args:
        url: of the server, as `netlayer.store` takes it.
        run: name of the run.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, url: str, run: str) -> None:
        from netlayer.store.redis_link import RedisLinks

        self._links = RedisLinks(url, lambda _ask: None, _ANSWER_S)
        self._key = redis_key(run)
        self._has_group = False
        self._waiting: set[Position] = set()
        self._pending_from: str | None = "0"
        """Where to read on among what was handed out before and not acknowledged; None: read what is new."""
        self._last = "0"

    def receive(self) -> Sequence[tuple[Position, Message]]:
        if not self._has_group:
            self._make_group()
        after = self._pending_from
        command = ("XREADGROUP", "GROUP", _GROUP, _CONSUMER, "COUNT", _COUNT)
        if after is None:
            command = (*command, "BLOCK", _BLOCK_MS)  # type: ignore[assignment]
        try:
            [reply] = self._ask((*command, "STREAMS", self._key, after or ">"))
        except NetlayerError as exc:
            # What the server handed out with an answer that was lost is asked for again: it lies after what came.
            self._pending_from = self._last
            self._has_group = "NOGROUP" not in str(exc) and self._has_group
            raise
        entries = reply[0][1] if reply else []
        if after is not None:
            self._pending_from = entries[-1][0].decode() if entries else None
            if not entries:
                return self.receive()  # what is new
        return list(self._messages(entries))

    def acknowledge(self, positions: Sequence[Position]) -> None:
        ids = ["-".join(map(str, position)) for position in positions]
        for first in range(0, len(ids), _COUNT):
            some = ids[first : first + _COUNT]
            self._ask(("XACK", self._key, _GROUP, *some), ("XDEL", self._key, *some))
        self._waiting.difference_update(positions)

    def close(self) -> None:
        self._links.close()

    def _messages(self, entries: Sequence[Any]) -> Iterator[tuple[Position, Message]]:
        for name, fields in entries:
            self._last = name.decode()
            position = tuple(map(int, self._last.split("-")))
            if position in self._waiting:
                continue
            self._waiting.add(position)
            try:
                yield position, of_fields(fields or ())
            except ValueError as exc:  # of another program, or trimmed while it was pending
                logger.warning("message %s is skipped: %s", name.decode(), exc)
                yield position, NO_MESSAGE

    def _make_group(self) -> None:
        try:
            self._ask(("XGROUP", "CREATE", self._key, _GROUP, "0", "MKSTREAM"))
        except NetlayerError as exc:
            if "BUSYGROUP" not in str(exc):
                raise
        self._has_group = True

    def _ask(self, *commands: Any) -> list[Any]:
        return self._links.ask(commands, time.monotonic() + _ANSWER_S, patient=False)


class KafkaSource:
    """Messages of a Kafka topic, of one run or of all.

    Args:
        servers: `host:port,...`.
        run: name of the run; empty: all.
        topic: of all events.

    Raises:
        ConfigError: aiokafka is missing, or nobody answers there.
    """

    def __init__(self, servers: str, run: str = "", topic: str = TOPIC) -> None:
        try:
            from aiokafka import AIOKafkaConsumer
            from aiokafka.errors import KafkaError
        except ImportError as exc:
            raise ConfigError("--kafka", servers, "needs aiokafka", "pip install 'netlayer[kafka]'") from exc
        self._run, self._topic = run, topic
        self._loop = asyncio.new_event_loop()

        async def start() -> Any:
            consumer = AIOKafkaConsumer(
                topic,
                bootstrap_servers=servers.split(","),
                group_id=_GROUP,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
            )
            try:
                await consumer.start()
            except BaseException:
                await consumer.stop()
                raise
            return consumer

        try:
            self._consumer = self._loop.run_until_complete(start())
        except (KafkaError, OSError) as exc:
            self._loop.close()
            raise ConfigError(
                "--kafka", servers, f"does not answer ({exc})", "correct it, or start the broker"
            ) from exc

    def receive(self) -> Sequence[tuple[Position, Message]]:
        by_partition = self._loop.run_until_complete(self._consumer.getmany(timeout_ms=_BLOCK_MS, max_records=_COUNT))
        records = [record for of_partition in by_partition.values() for record in of_partition]
        return [(position, message) for record in records for position, message in self._message(record)]

    def acknowledge(self, positions: Sequence[Position]) -> None:
        from aiokafka import TopicPartition

        offsets: dict[int, int] = {}
        for offset, partition in positions:
            offsets[partition] = max(offsets.get(partition, 0), offset + 1)
        if offsets:
            commit = {TopicPartition(self._topic, partition): offset for partition, offset in offsets.items()}
            self._loop.run_until_complete(self._consumer.commit(commit))

    def close(self) -> None:
        self._loop.run_until_complete(self._consumer.stop())
        self._loop.close()

    def _message(self, record: Any) -> Iterator[tuple[Position, Message]]:
        position = (record.offset, record.partition)
        run, _, stream = (record.key or b"").decode("utf-8", "replace").partition("/")
        facts = dict(record.headers)
        if self._run and run != self._run:
            yield position, NO_MESSAGE
            return
        try:
            number, total, count = (int(facts[name]) for name in ("n", "t", "c"))
        except (KeyError, ValueError):
            logger.warning("message %d of partition %d is skipped: it is no event", *position)
            yield position, NO_MESSAGE
            return
        yield position, Message(stream, number, total, count, record.value)


@contextlib.contextmanager
def collecting(observe: ObserveConfig, run: str, server: str, out: Path) -> Iterator[None]:
    """Collect what the ranks send to a Redis of this run, until the block ends; for other transports do nothing.

    Args:
        observe: the section `job.observe`.
        run: name of the run.
        server: in which the ranks meet; job.observe.url goes before it.
        out: the output of the run.

    Raises:
        ConfigError: there is no such server.
    """
    if not observe.enabled or observe.transport != "redis":
        yield
        return
    url = observe.url or server
    if not url:
        rule, remedy = "is empty, and the ranks meet in no Redis", "give a redis:// address, or install redis-server"
        raise ConfigError("job.observe.url", None, rule, remedy)
    folder, log = out / observe.folder, out / "logs" / "collector.log"
    command = [sys.executable, "-m", "netlayer", "observe", "collect", "--run", run]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as logged:
        # The address by the environment, for it may have a password; and this pipe ends with us, however we end.
        collector = subprocess.Popen(
            [*command, "--out", str(folder), "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=logged,
            stderr=logged,
            env=os.environ | {"NETLAYER_OBSERVE_SERVER": url},
            start_new_session=True,  # Ctrl-C is ours: it still takes what the ranks send last
        )
    try:
        yield
    finally:
        assert collector.stdin is not None
        collector.stdin.close()
        try:
            code = collector.wait(_COLLECT_S)
        except subprocess.TimeoutExpired:
            collector.kill()
            code = collector.wait()
        if code:
            logger.warning("the collector of events ended with %d; see %s", code, log)


def compact(path: Path) -> None:
    """Turn a file of messages into parquet, and delete it; batch by batch, so in bounded memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from netlayer.observe.events.reader import EventReader
    from netlayer.observe.events.schema import arrow_schema

    target = path.with_name(path.name.removesuffix(SPOOL_SUFFIX) + ".parquet")
    pending = target.with_suffix(".pending")
    batches: list[Any] = []
    num_rows = 0

    def flush() -> None:
        nonlocal batches, num_rows
        table = pa.Table.from_batches(batches, arrow_schema())
        writer.write_table(table.unify_dictionaries())
        batches, num_rows = [], 0

    with pq.ParquetWriter(pending, arrow_schema(), compression="zstd") as writer:
        for batch in EventReader([path]).batches():
            batches.append(batch)
            num_rows += batch.num_rows
            if num_rows >= _ROW_GROUP:
                flush()
        flush()
    pending.replace(target)
    path.unlink()


def _dropped(stream: str, messages: int, events: int) -> Mark:
    name, _, attempt = stream.partition("/")
    rank = name.removeprefix("rank-")
    origin = Origin(
        "collector", rank=int(rank) if rank.isdigit() else None, attempt=int(attempt) if attempt.isdigit() else None
    )
    facts = {"where": "server or sender", "messages": messages, "stream": stream}
    return Mark(origin, "dropped", time.time_ns(), value=float(events), attributes=facts)


def _number_of(path: Path) -> int:
    number = path.name.split(".")[0].removeprefix("part-")
    return int(number) if number.isdigit() else 0


def _read_state(folder: Path, newest: int) -> dict[str, tuple[int, int]]:
    """Return what was seen of each stream by the file of a number: [Note: exactly once]."""
    for name in (_STATE, f"{_STATE}.pending"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            tree = json.loads((folder / name).read_text())
            if tree["file"] == newest:
                return {str(stream): (int(number), int(total)) for stream, (number, total) in tree["streams"].items()}
    return {}


def _ignore_interrupt() -> None:
    """Leave Ctrl-C to the process that collects, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
