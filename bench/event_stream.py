"""`python -m bench.event_stream`: do the event batches of many ranks get through one Redis, a batch a second each?

Every simulated rank has a TCP connection of its own to one Redis on loopback and sends its batch once a second, at a
moment of its own; a few processes hold the connections. A collector takes the batches and writes them, as
`netlayer observe collect` does. What is counted: batches that were sent, that arrived, that were lost; the processor
time of Redis, of the collector and of the senders, as shares of one core; how long the slowest answers took. The batch
is encoded once, for in a run each rank encodes its own on its own host; `encode_ms` says what that costs. Turning the
files into parquet is timed apart. Not covered: a network between the hosts.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import psutil

from bench.init_time import traffic
from bench.init_time.server import check_files, server
from bench.init_time.traffic import Way
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options_without_config
from netlayer.errors import CheckFailed
from netlayer.observe.events.collector import Keeper, RedisSource, Tally, collect, compact
from netlayer.observe.events.schema import Event, Origin, Segment
from netlayer.observe.events.transport import MAX_MESSAGES, Message, encode, redis_key, to_fields
from netlayer.percentile import percentile
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text

_RUN = "flood"
_LATE_S = 120.0  # for what was sent to be answered and collected
_LOOK_EVERY = 64  # sends without a look at answers
_TOGETHER_S = 1e-3
_DIGITS = 12
_CONNECT_PAUSE = 256  # connections after which the listener's queue may drain


@dataclass(frozen=True)
class Sent:
    """Result of one process of senders: see `Row`."""

    batches: int
    skipped: int
    answers_ms: Sequence[float]
    cpu_s: float


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        ranks, seconds, events_per_batch, batch_bytes: as sent; bytes of a payload.
        sent, arrived, lost: batches. skipped: that were not sent, for the answer to the one before had not come.
        elapsed_s: from the first batch to the last answer.
        redis_us, collector_us, senders_us: processor time for a batch, the collector's for those that arrived.
        redis_cpu, collector_cpu, senders_cpu: the same as shares of one core, had each rank sent its batch a second: on
            a busy machine fewer were sent.
        answer_p50_ms, answer_p99_ms, answer_max_ms: from sending a batch to Redis' answer.
        backlog: batches that Redis still held when the collector had ended.
        encode_ms: processor time of a rank for a batch.
        parquet_s: processor time to turn a second's files of all ranks into parquet.
        cores: of this machine.
    """

    ranks: int
    seconds: float
    events_per_batch: int
    batch_bytes: int
    sent: int
    arrived: int
    lost: int
    skipped: int
    elapsed_s: float
    redis_us: float
    collector_us: float
    senders_us: float
    redis_cpu: float
    collector_cpu: float
    senders_cpu: float
    answer_p50_ms: float
    answer_p99_ms: float
    answer_max_ms: float
    backlog: int
    encode_ms: float
    parquet_s: float
    cores: int


@click.command()
@run_options_without_config
@click.option("--ranks", type=click.IntRange(1, 16_000), default=12_288, show_default=True, help="Connections.")
@click.option("--seconds", type=click.IntRange(1), default=20, show_default=True, help="Batches of each rank.")
@click.option("--events", type=click.IntRange(1), default=100, show_default=True, help="Events of a batch.")
@click.option("--senders", type=click.IntRange(1), default=2, show_default=True, help="Processes that send.")
def command(options: RunOptions, ranks: int, seconds: int, events: int, senders: int) -> None:
    """Send the event batches of many ranks through one Redis, and count what arrives.

    Exit 0: every batch arrived, and each was sent in its second; 1: some were lost or skipped.

    \b
    Examples:
      python -m bench.event_stream
      python -m bench.event_stream --ranks 512 --seconds 5
    """
    check_files(ranks)
    started = utc_now()
    with Stages() as stages, stages.open("sending") as bar:
        row = measure(ranks, seconds, events, senders, bar)
    record = RunRecord(
        name="bench.event_stream",
        source="measured",
        rows=[asdict(row)],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "ranks": ranks, "seconds": seconds, "events": events, "senders": senders},
        environment=environ.snapshot(options.seed),
    )
    if options.out:
        record.save(open_out(options.out, "event-stream") / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo(describe(row))
    if row.lost or row.skipped:
        raise CheckFailed(f"{row.lost:,} batches were lost, and {row.skipped:,} were not sent in their second")


def describe(row: Row) -> str:
    """A row in words."""
    return "\n".join(
        [
            f"{row.ranks:,} ranks, a batch of {row.events_per_batch} events ({row.batch_bytes:,} bytes) a second each,"
            f" {row.seconds:g} s: sent {row.sent:,}, arrived {row.arrived:,}, lost {row.lost:,},"
            f" skipped {row.skipped:,}, in {row.elapsed_s:.1f} s",
            f"a batch takes of a processor: Redis {row.redis_us:.1f} us, collector {row.collector_us:.1f}, senders"
            f" {row.senders_us:.1f}; of a core at {row.ranks:,} a second: Redis {row.redis_cpu:.0%}, collector"
            f" {row.collector_cpu:.0%}, senders {row.senders_cpu:.0%} ({row.cores} cores here)",
            f"Redis held {row.backlog:,} at the end",
            f"answers: median {row.answer_p50_ms:.1f} ms, 99% {row.answer_p99_ms:.1f}, last {row.answer_max_ms:.1f}",
            f"a rank's encoding: {row.encode_ms:.2f} ms a batch; parquet: {row.parquet_s:.1f} core-seconds for a second"
            " of all ranks",
        ]
    )


def measure(
    ranks: int,
    seconds: int,
    num_events: int,
    senders: int,
    on_second: Callable[[int, int], None] = lambda _done, _total: None,
) -> Row:
    """Send and collect; every process is gone afterwards. `on_second` hears of the seconds."""
    payload, encode_ms = _payload(num_events)
    with server(Way("ours", "redis"), ranks) as (port, redis), tempfile.TemporaryDirectory() as folder:
        url, context = f"redis://127.0.0.1:{port}", multiprocessing.get_context("spawn")
        over = context.Event()
        ours, theirs = context.Pipe()
        collector = context.Process(target=_collect, args=(url, folder, over, theirs), daemon=True)
        collector.start()
        begin, links, processes = context.Barrier(senders + 1), list[Connection](), list[Any]()
        for number in range(senders):
            end, other = context.Pipe()
            share = range(number, ranks, senders)
            arguments = (port, list(share), ranks, seconds, num_events, payload, begin, other)
            processes.append(context.Process(target=_send, args=arguments, daemon=True))
            processes[-1].start()
            links.append(end)
        try:
            begin.wait(_LATE_S)
            before, begun_s = _cpu_s(redis), time.monotonic()
            for second in range(seconds):
                time.sleep(1)
                on_second(second + 1, seconds)
            sent = [_receive(link) for link in links]
            elapsed_s = time.monotonic() - begun_s
            over.set()
            tally, collector_cpu_s = _receive(ours)
            redis_cpu_s = _cpu_s(redis) - before  # what it gave to the collector, too
            backlog = _length(url)
        finally:
            for process in [collector, *processes]:
                process.kill()
                process.join()
        parquet_s = _parquet_s(Path(folder), seconds)
    answers = sorted(answer for each in sent for answer in each.answers_ms)
    num_sent = sum(each.batches for each in sent)
    cpu_s = redis_cpu_s, collector_cpu_s, sum(each.cpu_s for each in sent)
    batch_us = [
        1e6 * part / count for part, count in zip(cpu_s, (num_sent, max(tally.messages, 1), num_sent), strict=True)
    ]
    return Row(
        ranks=ranks,
        seconds=seconds,
        events_per_batch=num_events,
        batch_bytes=len(payload),
        sent=num_sent,
        arrived=tally.messages,
        lost=num_sent - tally.messages,
        skipped=sum(each.skipped for each in sent),
        elapsed_s=elapsed_s,
        redis_us=batch_us[0],
        collector_us=batch_us[1],
        senders_us=batch_us[2],
        redis_cpu=batch_us[0] * ranks / 1e6,
        collector_cpu=batch_us[1] * ranks / 1e6,
        senders_cpu=batch_us[2] * ranks / 1e6,
        answer_p50_ms=percentile(answers, 50),
        answer_p99_ms=percentile(answers, 99),
        answer_max_ms=max(answers, default=math.nan),
        backlog=backlog,
        encode_ms=encode_ms,
        parquet_s=parquet_s,
        cores=psutil.cpu_count() or 1,
    )


def _payload(num_events: int) -> tuple[bytes, float]:
    """A batch like a rank's, and the processor time in ms that encoding one takes."""
    origin = Origin(run=_RUN, attempt=0, host="host-0001", rank=1, tp=1, pp=0, dp=0, cp=0)
    now_ns = time.time_ns()
    events: list[Event] = [
        Segment(
            origin,
            "collective",
            ("all_gather", "reduce_scatter")[index % 2],
            now_ns + index * 1_234_567,
            now_ns + index * 1_234_567 + (index * 7919) % 900_000,
            step=index // 50,
            timing="device",
            lane="gather",
            group="gather",
            group_ranks="1:12288:8",
            seq=index,
            bytes=(index * 104_729) % 2**26,
            clock_offset_ns=-1234,
            clock_error_ns=23_456,
        )
        for index in range(num_events)
    ]
    payload, tries = encode(events), 20
    begun_s = time.process_time()
    for _ in range(tries):
        encode(events)
    return payload, (time.process_time() - begun_s) / tries * 1e3


def _send(
    port: int,
    ranks: Sequence[int],
    num_ranks: int,
    seconds: int,
    num_events: int,
    payload: bytes,
    begin: Any,
    link: Connection,
) -> None:
    """Hold the connections of some ranks, and send each one's batch once a second."""
    try:
        link.send(_Senders(port, ranks, num_ranks, num_events, payload).run(seconds, begin))
    except BaseException as exc:
        link.send(exc)
        raise


class _Senders:
    """Connections of some ranks, without blocking.

    They share the machine with what is measured, so a batch costs them little more than its two system calls: its
    command is made up from parts that stay, and connections are looked at together.
    """

    def __init__(self, port: int, ranks: Sequence[int], num_ranks: int, num_events: int, payload: bytes) -> None:
        check_files(len(ranks))
        self._ranks, self._num_ranks, self._num_events = ranks, num_ranks, num_events
        self._links: list[socket.socket] = []
        self._commands = [_command_parts(rank, num_events, payload) for rank in ranks]
        self._selector = selectors.DefaultSelector()
        for place in range(len(ranks)):
            link = socket.create_connection(("127.0.0.1", port), timeout=30)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
            self._links.append(link)
            self._selector.register(link, selectors.EVENT_READ, place)
            if place % _CONNECT_PAUSE == _CONNECT_PAUSE - 1:
                time.sleep(0.01)
        self._sent_s: dict[int, float] = {}
        """By place among the ranks: when the batch was sent whose answer has not come."""
        self._numbers = [0] * len(ranks)
        self._answers_ms: list[float] = []

    def run(self, seconds: int, begin: Any) -> Sent:
        """Send for so many seconds, and wait for all answers."""
        begin.wait(_LATE_S)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        batches = skipped = 0
        for second in range(seconds):
            due = [begun_s + second + rank / self._num_ranks for rank in self._ranks]
            place = 0
            while place < len(due):
                now_s = time.monotonic()
                if due[place] > now_s:
                    # Later than to the moment: those of a few ranks are sent, and their answers taken, together.
                    time.sleep(max(due[place] - now_s, _TOGETHER_S))
                    now_s = time.monotonic()
                first = place
                while place < len(due) and due[place] <= now_s and place - first < _LOOK_EVERY:
                    # A second that is over cannot be sent in; before that, an answer that is late may still come.
                    while place in self._sent_s and time.monotonic() < due[place] + 1:
                        self._read(0.01)
                    if place in self._sent_s:
                        skipped += 1
                    else:
                        self._send(place)
                        batches += 1
                    place += 1
                self._read(0)
        late_s = time.monotonic() + _LATE_S
        while self._sent_s and time.monotonic() < late_s:
            self._read(0.1)
        for link in self._links:
            link.close()
        return Sent(batches, skipped, self._answers_ms, time.process_time() - cpu_s)

    def _send(self, place: int) -> None:
        number = self._numbers[place] = self._numbers[place] + 1
        before, between, after = self._commands[place]
        data = memoryview(
            b"%b%0*d%b%0*d%b" % (before, _DIGITS, number, between, _DIGITS, number * self._num_events, after)
        )
        self._sent_s[place] = time.monotonic()
        while data:
            try:
                data = data[self._links[place].send(data) :]
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                    raise
                self._read(0.001)

    def _read(self, timeout_s: float) -> None:
        """Take the answers that have come, after so long at most."""
        for key, _ in self._selector.select(timeout_s):
            answer = key.fileobj.recv(4096)  # type: ignore[union-attr]
            if not answer.startswith(b"$"):
                raise CheckFailed(f"Redis answered {answer[:100]!r}")
            self._answers_ms.append((time.monotonic() - self._sent_s.pop(key.data)) * 1e3)


def _command_parts(rank: int, num_events: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what stands before, between and after the number of a message and its total, of `_DIGITS` digits each."""
    number, total = b"1" * _DIGITS, b"2" * _DIGITS
    message = Message(f"rank-{rank:06d}/0", int(number), int(total), num_events, payload)
    parts = ["XADD", redis_key(_RUN), "MAXLEN", "~", MAX_MESSAGES, "*", *to_fields(message)]
    command = traffic.command(*(part if isinstance(part, bytes) else str(part).encode() for part in parts))
    before, _, rest = command.partition(number)
    between, _, after = rest.partition(total)
    return before, between, after


def _collect(url: str, folder: str, over: Any, link: Connection) -> None:
    source, keeper = RedisSource(url, _RUN), Keeper(Path(folder), compacts=False)
    begun_s = time.process_time()
    tally: Tally = collect(source, keeper, over.is_set)
    source.close()
    link.send((tally, time.process_time() - begun_s))


def _receive(link: Connection) -> Any:
    if not link.poll(_LATE_S):
        raise CheckFailed(f"a process of the measurement gave no result within {_LATE_S:g} s")
    result = link.recv()
    if isinstance(result, BaseException):
        raise result
    return result


def _length(url: str) -> int:
    from netlayer.store.redis_link import RedisLinks

    links = RedisLinks(url, lambda _ask: None, 5.0)
    try:
        return int(links.ask([("XLEN", redis_key(_RUN))], time.monotonic() + 5.0)[0])
    finally:
        links.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _parquet_s(folder: Path, seconds: int) -> float:
    """Processor time of turning the files into parquet, for a second of all ranks; measured on the smallest file."""
    files = sorted(folder.glob("part-*.arrows.zst"), key=lambda path: path.stat().st_size)
    if not files:
        return math.nan
    total = sum(path.stat().st_size for path in files)
    size, begun_s = files[0].stat().st_size, time.process_time()
    compact(files[0])
    return (time.process_time() - begun_s) * total / size / seconds


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.event_stream")
