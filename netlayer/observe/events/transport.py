"""Ways by which events leave a process: files, a Redis stream, Kafka. None of them ever makes the training wait.

A transport is called from the monitor's own thread. What it cannot hand on it keeps up to a bound, then drops the
oldest and counts it. A message on the wire is a batch: an Arrow IPC stream of the schema, as one zstd frame, so that
messages one after the other are again a file that zstd and Arrow read. Beside it stand the stream's name, the number of
the message and how many events the stream has sent so far: who collects them sees what was lost, and what came twice.

[Note: back-pressure] The server holds at most `max_messages` messages (`XADD ... MAXLEN ~`): where nobody collects
them, the oldest go. The sender holds at most `max_pending_bytes` for a server that is away; it tries once a call, for
`_ANSWER_S` at most, then less and less often, and never raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from netlayer.errors import ConfigError, NetlayerError
from netlayer.observe.events.schema import Event, Origin, arrow_schema, load_arrow, to_batch
from netlayer.observe.events.writer import MAX_FILE_BYTES, MAX_FILES, EventWriter, stream_name

logger = logging.getLogger(__name__)

MAX_MESSAGES = 200_000
"""Messages that a Redis stream holds: 16 s of 12,288 ranks."""
MAX_PENDING_BYTES = 8 << 20
TOPIC = "netlayer.events"
_ANSWER_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_AT_ONCE = 64  # messages a round trip


class Transport(Protocol):
    """Takes batches of events."""

    def send(self, events: Sequence[Event]) -> int:
        """Take a batch; return how many events were lost, now or since the last call."""

    def close(self) -> None:
        """Hand on what is left, within a few seconds. Twice is once."""


class FileTransport:
    """Files of one rank's stream; see `EventWriter`. A batch for which there is no room is lost.

    Args:
        folder, origin, max_file_bytes, max_files: as in `EventWriter`.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, origin: Origin, *, max_file_bytes: int = MAX_FILE_BYTES, max_files: int = MAX_FILES
    ) -> None:
        self._writer = EventWriter(folder, origin, max_file_bytes=max_file_bytes, max_files=max_files)
        self._has_warned = False

    def send(self, events: Sequence[Event]) -> int:
        try:
            self._writer.write(events)
        except OSError as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("events are lost: %s: %s", self._writer.folder, exc.strerror or exc)
            return len(events)
        self._has_warned = False
        return 0

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as exc:
            logger.warning("the last events may be lost: %s: %s", self._writer.folder, exc.strerror or exc)


@dataclass(frozen=True, slots=True)
class Message:
    """A batch on its way.

    Args:
        stream: name of the rank's stream in this start of the run: `rank-000003/0`.
        number: of the message in its stream, from 1.
        total: events of the stream so far, those of this message too; what the sender dropped is not counted.
        count: events in this message.
        payload: an Arrow IPC stream as one zstd frame.
    """

    stream: str
    number: int
    total: int
    count: int
    payload: bytes


def encode(events: Sequence[Event]) -> bytes:
    """Events as a payload. Needs pyarrow."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema()) as stream:
        stream.write_batch(to_batch(events))
    data: bytes = pa.compress(sink.getvalue(), codec="zstd", asbytes=True)
    return data


class _Queue:
    """Messages that wait for a server, up to a bound in bytes; the oldest go first."""

    def __init__(self, origin: Origin, max_bytes: int) -> None:
        self._stream = f"{stream_name(origin)}/{origin.attempt or 0}"
        self._max_bytes, self._bytes = max_bytes, 0
        self._number = self._total = 0
        self.waiting: deque[Message] = deque()

    def add(self, events: Sequence[Event]) -> int:
        """Append a message; return the events that had to go for it."""
        payload, lost = encode(events), 0
        self._number += 1
        self._total += len(events)
        self.waiting.append(Message(self._stream, self._number, self._total, len(events), payload))
        self._bytes += len(payload)
        while self._bytes > self._max_bytes and len(self.waiting) > 1:
            gone = self.waiting.popleft()
            self._bytes -= len(gone.payload)
            lost += gone.count
        return lost

    def take(self, number: int) -> None:
        """Forget the first messages, which have arrived."""
        for _ in range(number):
            self._bytes -= len(self.waiting.popleft().payload)


class _ServerTransport:
    """Messages to a server that may be away; a subclass knows how to deliver."""

    name = "server"
    has_server = True
    """Who sends at the same moment on all hosts should not."""

    def __init__(self, origin: Origin, max_pending_bytes: int) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            rule = "needs pyarrow, which is not installed"
            raise ConfigError(
                "job.observe.transport", self.name, rule, "pip install 'netlayer[observe]', or take files"
            )
        load_arrow()  # now, and not in the middle of a step
        self._queue = _Queue(origin, max_pending_bytes)
        self._due_s, self._pause_s, self._is_closed = 0.0, _FIRST_PAUSE_S, False

    def send(self, events: Sequence[Event]) -> int:
        lost = self._queue.add(events)
        if time.monotonic() >= self._due_s:
            self._deliver()
        return lost

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._queue.waiting:
            self._deliver()
        if left := sum(message.count for message in self._queue.waiting):
            logger.warning("the last %d events are lost: %s", left, self._describe())
        with contextlib.suppress(Exception):  # of a connection that is gone already
            self._disconnect()

    def _deliver(self) -> None:
        """Hand over what waits; after a failure the next try comes later."""
        try:
            while self._queue.waiting:
                messages = [self._queue.waiting[index] for index in range(min(_AT_ONCE, len(self._queue.waiting)))]
                self._hand_over(messages)
                self._queue.take(len(messages))
        except Exception as exc:  # noqa: BLE001 - a server's trouble, of whatever kind, must not reach the training
            if self._pause_s == _FIRST_PAUSE_S:
                logger.warning(
                    "events wait for %s: %s", self._describe(), str(exc).splitlines()[0] if str(exc) else exc
                )
            self._due_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._pause_s = _FIRST_PAUSE_S

    def _hand_over(self, messages: Sequence[Message]) -> None:
        raise NotImplementedError

    def _disconnect(self) -> None:
        raise NotImplementedError

    def _describe(self) -> str:
        raise NotImplementedError


def redis_key(run: str) -> str:
    """Key of the stream of a run; not among the keys of its rendezvous, which go when its ranks leave."""
    return f"netlayer:events:{{{run}}}"


class RedisTransport(_ServerTransport):
    """A Redis stream of the run, one for all ranks.

    Args:
        url: of the server, as `netlayer.store` takes it.
        run: name of the run.
        origin: whose events they are.
        max_messages: that the server holds, about.
        max_pending_bytes: held here while it is away.

    Raises:
        ConfigError: the address cannot be used, or pyarrow is missing.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        run: str,
        origin: Origin,
        *,
        max_messages: int = MAX_MESSAGES,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        from netlayer.store.redis_link import RedisLinks

        super().__init__(origin, max_pending_bytes)
        self._links = RedisLinks(url, lambda _ask: None, _ANSWER_S)
        self._key, self._max_messages = redis_key(run), max_messages

    def _hand_over(self, messages: Sequence[Message]) -> None:
        commands = [
            ("XADD", self._key, "MAXLEN", "~", self._max_messages, "*", *fields) for fields in map(to_fields, messages)
        ]
        # A message whose answer is lost is sent again, and whoever collects it drops the second one by its number.
        self._links.ask(commands, time.monotonic() + _ANSWER_S, patient=False)

    def _disconnect(self) -> None:
        self._links.close()

    def _describe(self) -> str:
        return f"the Redis at {self._links.address}"


def to_fields(message: Message) -> tuple[str | int | bytes, ...]:
    """Fields of a message in a Redis stream."""
    return ("s", message.stream, "n", message.number, "t", message.total, "c", message.count, "b", message.payload)


def of_fields(fields: Sequence[bytes]) -> Message:
    """The message of the fields.

    Raises:
        ValueError: they are not of one.
    """
    by_name = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        stream, payload = by_name[b"s"].decode(), by_name[b"b"]
        return Message(stream, int(by_name[b"n"]), int(by_name[b"t"]), int(by_name[b"c"]), payload)
    except KeyError as exc:
        raise ValueError(f"the field {exc} is missing") from exc


class KafkaTransport(_ServerTransport):
    """A Kafka topic for all runs; the key of a message is the run and the stream, so a rank's stay in order.

    Args:
        servers: `host:port,...`.
        run, origin, max_pending_bytes: as in `RedisTransport`.
        topic: of all events.

    Raises:
        ConfigError: aiokafka or pyarrow is missing.
    """

    name = "kafka"

    def __init__(
        self,
        servers: str,
        run: str,
        origin: Origin,
        *,
        topic: str = TOPIC,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        super().__init__(origin, max_pending_bytes)
        if importlib.util.find_spec("aiokafka") is None:
            rule = "needs aiokafka, which is not installed"
            raise ConfigError("job.observe.transport", "kafka", rule, "pip install 'netlayer[kafka]'")
        self._servers, self._run, self._topic = servers, run, topic
        self._loop = asyncio.new_event_loop()  # run from the monitor's thread alone, a delivery at a time
        self._producer: Any = None

    def _hand_over(self, messages: Sequence[Message]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(self._produce(messages), 5 * _ANSWER_S))

    async def _produce(self, messages: Sequence[Message]) -> None:
        """Send messages and wait for the broker; the producer is opened with the first ones."""
        from aiokafka import AIOKafkaProducer

        if self._producer is None:
            producer = AIOKafkaProducer(
                bootstrap_servers=self._servers.split(","), acks=1, request_timeout_ms=int(2000 * _ANSWER_S)
            )
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            self._producer = producer
        sent = [
            await self._producer.send(
                self._topic,
                message.payload,
                key=f"{self._run}/{message.stream}".encode(),
                headers=[
                    ("n", str(message.number).encode()),
                    ("t", str(message.total).encode()),
                    ("c", str(message.count).encode()),
                ],
            )
            for message in messages
        ]
        await asyncio.gather(*sent)

    def _disconnect(self) -> None:
        if self._producer is not None:
            self._loop.run_until_complete(asyncio.wait_for(self._producer.stop(), _ANSWER_S))
        self._loop.close()

    def _describe(self) -> str:
        return f"Kafka at {self._servers}"


def open_transport(
    kind: str,
    origin: Origin,
    *,
    folder: Path,
    url: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    max_files: int = MAX_FILES,
) -> Transport:
    """Open the transport of a kind: `files`, `redis`, `kafka`; arguments as there.

    Raises:
        ConfigError: it cannot be used.
    """
    if kind == "files":
        return FileTransport(folder, origin, max_file_bytes=max_file_bytes, max_files=max_files)
    if not url:
        rule = f"is empty, and {kind} needs a server"
        raise ConfigError("job.observe.url", None, rule, "give its address, or set job.observe.transport to files")
    if kind == "kafka":
        return KafkaTransport(url, origin.run or "", origin)
    try:
        return RedisTransport(url, origin.run or "", origin)
    except NetlayerError as exc:
        raise ConfigError("job.observe.url", None, str(exc), "correct the address of the Redis server") from exc
