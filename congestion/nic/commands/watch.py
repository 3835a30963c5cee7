"""`netlayer nic watch`: sample the NICs' counters into a log, and say what goes wrong while it does; or read a log."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from congestion.nic.counters.catalogue import Port
    from congestion.nic.counters.detect import Detector, Event, Thresholds
    from congestion.nic.counters.log import Log
    from congestion.nic.counters.reader import Ints, Reader

_MOST_ROWS = 20_000  # of a log, for its page: 33 a point of a curve
_PATH = click.Path(path_type=Path)
_COLUMNS = {
    "after_s": "after",
    "port": "port",
    "kind": "alarm",
    "samples": "told after readings",
    "lasted_s": "lasted",
    "figure": "worst",
    "limit": "limit",
    "unit": "unit",
}


@click.command()
@click.option(
    "--root", type=_PATH, default=Path("/"), show_default=True, help="Folder that holds sys/; / is this host."
)
@click.option(
    "--period-ms", type=click.FloatRange(1, 60_000), default=100.0, show_default=True, help="Between two samples."
)
@click.option("--device", "devices", multiple=True, metavar="NAME", help="Only this RDMA device; repeatable.")
@click.option("--all-counters", is_flag=True, help="Log every counter of sysfs, not only those that alarms use.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="End after so long [default: Ctrl-C].")
@click.option("--prometheus", metavar="[ADDRESS:]PORT", help="Serve the last sample there; the address is loopback.")
@click.option("--set", "overrides", multiple=True, metavar="LIMIT=VALUE", help="Another limit of an alarm; repeatable.")
@click.option(
    "--source", type=click.Choice(["measured", "simulated"]), help="[default: measured at /, else simulated]."
)
@click.option("--replay", type=_PATH, metavar="LOG", help="Look at a kept log in place of NICs.")
@click.option("--out", type=_PATH, help="Folder for log, record and report [default: ./runs/nic-watch-<UTC>/].")
@click.option("--json", "json_file", type=_PATH, help="Also write the record here; - is stdout.")
def watch(**options: Any) -> None:
    """Watch the counters of all RDMA NICs: storms of PFC and ECN, link flaps, retransmissions, silent and slow NICs.

    Every RDMA device is named, with what no counter of it tells. Alarms go to stderr as they are told. Ctrl-C ends it
    and keeps what was sampled. Exit 1 where there was an alarm.
    With a period below 200 ms, alarms and the slower counters are looked at each 200 ms, or in every 20th sample.

    \b
    Examples:
      netlayer nic watch
      netlayer nic watch --period-ms 10 --seconds 60 --out runs/watch
      netlayer nic watch --prometheus 9400 --set pause_share=0.3 --device mlx5_0
      netlayer nic watch --replay runs/watch
    """
    from netlayer.command import open_run
    from netlayer.results import check_target, utc_now

    check_target("--json", options["json_file"])
    limits = _limits(options["overrides"])
    _refuse_without_effect(options)
    started = utc_now()
    if options["replay"]:
        log, detector = _replay(options["replay"], limits)
        with _output(options["out"]) as folder:
            _finish(log, detector, limits, folder, started, options, {})
    else:
        with open_run(options["out"], "nic-watch") as folder:
            log, detector, done = _sample(options, limits, folder)
            _finish(log, detector, limits, folder, started, options, done)
    _judge(detector.events)


def _replay(path: Path, limits: Thresholds) -> tuple[Log, Detector]:
    """Run a log through the detector, file by file; return the rows that alarms look at, and the detector."""
    from congestion.nic.counters.detect import Detector
    from congestion.nic.counters.log import load_log, log_parts
    from congestion.nic.counters.sampler import slow_every

    detector: Detector | None = None
    step, before = 1, 0
    for part in log_parts(path):
        if detector is None:
            detector = Detector(part.columns, limits)
            period_ms = part.about.get("period_ms")
            if isinstance(period_ms, int | float) and 0 < period_ms <= 60_000:
                step = slow_every(max(1, round(period_ms * 1e6)))
        places = _looked_at(part, before, step)
        for time_ns, values in zip(part.time_ns[places].tolist(), part.values[places], strict=True):
            detector.update(time_ns, values)
        before += len(part.time_ns)
    assert detector is not None  # a log has a file
    return load_log(path, most_rows=_MOST_ROWS, step=step), detector


def _looked_at(part: Log, before: int, step: int) -> Ints:
    """The samples of a part of a log at which the slow counters were due or read, as alarms look at them live.

    Args:
        before: samples of the parts before it.
    """
    import numpy as np

    from congestion.nic.counters.catalogue import FAST, MISSING

    slow = [column.rpartition("/")[2] not in FAST for column in part.columns]
    due = (np.arange(len(part.time_ns)) + before) % step == 0
    return np.flatnonzero(due | (part.values[:, slow] != MISSING).any(axis=1))


def _sample(options: dict[str, Any], limits: Thresholds, folder: Path) -> tuple[Log, Detector, dict[str, Any]]:
    """Sample until the end that was asked for, or until somebody stops it."""
    from congestion.nic.counters import catalogue as counters
    from congestion.nic.counters.detect import Detector
    from congestion.nic.counters.log import LogWriter, load_log
    from congestion.nic.counters.reader import Reader
    from congestion.nic.counters.sampler import Sampled, sample, slow_every

    root, period_ms = options["root"], options["period_ms"]
    nic_counters = counters.find_counters(root, options["devices"], everything=options["all_counters"])
    source = options["source"] or ("measured" if root.resolve() == Path("/") else "simulated")
    period_ns = round(period_ms * 1e6)
    num = None if options["seconds"] is None else max(2, round(options["seconds"] * 1e9 / period_ns) + 1)
    done = Sampled()
    with (
        Reader(nic_counters, counters.find_ethtool(root, options["devices"])) as reader,
        contextlib.ExitStack() as stack,
    ):
        detector = Detector(reader.columns, limits)
        serve = _server(options["prometheus"], detector, reader, stack)
        about = {"source": source, "period_ms": period_ms, "host": socket.gethostname()}
        writer = LogWriter(folder / "log", reader.columns, about)
        stack.callback(writer.close)
        every = slow_every(period_ns)
        covered = _coverage(counters.find_ports(root, options["devices"]), reader, detector)
        _say_begin(reader, covered, root)

        def take(time_ns: Ints, values: Ints, is_whole: bool) -> None:
            writer.add(time_ns, values)
            if is_whole:
                for event in detector.update(int(time_ns[-1]), values[-1]):
                    click.echo(_line(event), err=True)
                serve(values[-1])

        stopped = stack.enter_context(_stopped())
        sample(reader, take, period_ns, num_samples=num, sampled=done, stopped=stopped.is_set)
    log = load_log(folder / "log", most_rows=_MOST_ROWS, step=every)
    late_s = {f"late_p{round(100 * share)}_s": done.late_at(share) for share in (0.5, 0.99)}
    left = {row["port"]: row["not_read"] for row in covered if row["not_read"]}
    figures = {
        "devices": [row["port"] for row in covered],
        "not_read": left,
        "samples": done.num_samples,
        "skipped": done.skipped,
        "cpu_share": round(done.cpu_share, 5),
        **late_s,
    }
    summary = f"{done.num_samples} samples, {done.skipped} omitted, {done.cpu_share:.2%} of a core"
    click.echo(f"{summary}; log: {folder / 'log'}", err=True)
    return log, detector, figures


def _server(text: str | None, detector: Detector, reader: Reader, stack: contextlib.ExitStack) -> Any:
    if text is None:
        return lambda _values: None
    from congestion.nic.counters.export import Exporter, parse_address

    exporter = Exporter(detector, reader.columns)
    address, port = parse_address(text)
    port, stop = exporter.serve(address, port)
    stack.callback(stop)
    click.echo(f"serving http://{f'[{address}]' if ':' in address else address}:{port}/metrics", err=True)
    return exporter.update


@contextlib.contextmanager
def _stopped() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, in the middle of nothing: what was read is whole."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, lambda *_: event.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(
    log: Log,
    detector: Detector,
    limits: Thresholds,
    folder: Path | None,
    started: str,
    options: dict[str, Any],
    figures: dict[str, Any],
) -> None:
    """Record, page and table."""
    from netlayer.environ import snapshot
    from netlayer.printing import print_rows
    from netlayer.results import RunRecord, utc_now, write_text

    start = int(log.time_ns[0])
    events = detector.events
    rows = [{"after_s": (event.begin_ns - start) / 1e9, **event.to_row()} for event in events]
    record = RunRecord(
        name="congestion.nic.watch",
        source="measured" if log.about.get("source") == "measured" else "simulated",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **{key: str(options[key] or "") for key in ("root", "replay", "out")},
            "period_ms": log.about.get("period_ms"),
            "limits": limits.model_dump(mode="json"),
            "step_s": detector.step_s,
            "ports": detector.ports,
            "num_samples": log.num_samples,
            **figures,
        },
        environment=snapshot(),
    )
    if folder and len(log.time_ns) > 1:
        from congestion.nic.counters.page import build_page

        record.save(folder / "records")
        click.echo(f"report: {build_page(log, events, limits, detector.step_s).write(folder)}", err=True)
    if options["json_file"]:
        write_text(options["json_file"], record.to_json())
    if str(options["json_file"]) != "-":
        print_rows(f"{record.source}: alarms in {log.num_samples} samples", rows, _COLUMNS)


def _judge(events: Sequence[Event]) -> None:
    from netlayer.errors import CheckFailed

    if events:
        alarms = ", ".join(dict.fromkeys(f"{event.kind} on {event.port}" for event in events))
        raise CheckFailed(f"{len(events)} alarm{'s' * (len(events) > 1)}: {alarms}")


@contextlib.contextmanager
def _output(out: Path | None) -> Iterator[Path | None]:
    """A replay writes only where it is asked to."""
    if out is None:
        yield None
        return
    from netlayer.command import open_run

    with open_run(out, "nic-watch") as folder:
        yield folder


def _limits(overrides: Sequence[str]) -> Thresholds:
    from congestion.nic.counters.detect import Thresholds
    from netlayer.config.file import read_override
    from netlayer.config.tree import build_section

    return build_section(Thresholds, dict(read_override(word, "pause_share=0.3") for word in overrides), "--set ")


def _refuse_without_effect(options: dict[str, Any]) -> None:
    from topology.commands.records import refuse_without_effect, was_given

    live = ("root", "period_ms", "devices", "all_counters", "seconds", "prometheus", "source")
    names = {"devices": "device"}
    refuse_without_effect(
        (f"--{names.get(name, name).replace('_', '-')}", bool(options["replay"]) and was_given(name), "on a kept log")
        for name in live
    )


def _coverage(ports: Sequence[Port], reader: Reader, detector: Detector) -> list[dict[str, Any]]:
    """A row for every RDMA port: how many counters of it are read, and what of it cannot be."""
    rows = []
    for port in ports:
        own = [column for column in reader.columns if column.rpartition("/")[0] == port.name]
        missing = detector.signals.missing(port.name)
        if port.link_layer == "InfiniBand":  # which has neither
            missing = [what for what in missing if what not in ("ECN marks", "PFC pauses")]
        bad = [
            f"{column.rpartition('/')[2]} ({reader.unreadable[column]})"
            for column in own
            if column in reader.unreadable
        ]
        rows.append({"port": port.name, "driver": port.driver, "counters": len(own), "not_read": [*missing, *bad]})
    return rows


def _say_begin(reader: Reader, covered: Sequence[dict[str, Any]], root: Path) -> None:
    ports = ", ".join(row["port"] for row in covered if row["counters"])
    click.echo(f"watching {len(reader.columns)} counters of {ports}; Ctrl-C ends it", err=True)
    for row in covered:
        driver = f" ({row['driver']})" if row["driver"] else ""
        if not row["counters"]:
            click.echo(f"note: {row['port']}{driver}: its driver has no counters in sysfs: it is not watched", err=True)
        elif row["not_read"]:
            click.echo(f"note: {row['port']}{driver}: cannot be told: {', '.join(row['not_read'])}", err=True)
    if root.resolve() != Path("/"):
        click.echo("note: PFC counters of ethtool come from the kernel: none below another --root", err=True)


def _line(event: Event) -> str:
    return f"alarm: {event.kind} on {event.port}: {event.figure:.4g} {event.unit} (limit {event.limit:g})"
