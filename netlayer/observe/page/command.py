"""`netlayer observe serve` and `page`: a run to look at, served as it goes on or as one file."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netlayer.printing import printable

if TYPE_CHECKING:
    from types import FrameType

    from netlayer.observe.page.server import Actions, PageServer
    from netlayer.observe.page.source import PageSource

_PATH = click.Path(path_type=Path)
_PROGRESS_S = 2.0
_RUN = click.argument("run", nargs=-1, required=True, type=_PATH)
_LINK = click.option(
    "--link-gbps", type=click.FloatRange(0, min_open=True), help="Rate of a rank's link, each direction."
)


@click.command()
@_RUN
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8642, show_default=True, help="0: a free one.")
@_LINK
def serve(run: tuple[Path, ...], host: str, port: int, link_gbps: float | None) -> None:
    """Serve a page of RUN: heat map, timeline, 3D-parallel view, counters, the job's life.

    RUN is as that of `observe report`: a run's folder, of a run that goes on or is over, or evidence of other programs.
    Files that change are read again, and the page follows. It changes nothing, and listens on loopback; from another
    machine: ssh -L 8642:localhost:8642 HOST. Open the whole address that is printed: its token keeps other users of the
    machine out. `netlayer run serve` shows a run that `netlayer run` keeps, with its nodes.

    Exit 0: ended by Ctrl-C or SIGTERM; 2: nothing can be read, the port is taken, or the page was not built.

    \b
    Examples:
      netlayer observe serve runs/a
      netlayer observe serve /tmp/nccl_trace_rank_*
      netlayer observe serve kineto/ --port 0
    """
    serve_until_signal(run, host, port, link_gbps)


@click.command()
@_RUN
@click.option("--out", type=_PATH, required=True, help="Folder for page.html.")
@click.option("--max-mib", type=click.FloatRange(0.1), default=16.0, show_default=True, help="Of data in the file.")
@_LINK
def page(run: tuple[Path, ...], out: Path, max_mib: float, link_gbps: float | None) -> None:
    """Write the page of RUN as one HTML file, to keep or to send.

    It fetches nothing. It has the heat maps, and the timelines, flows and counters of the ranks that verdicts name, as
    far as they fit; `observe serve` has all of it.

    \b
    Examples:
      netlayer observe page runs/a --out runs/a/observe
      netlayer observe page dumps/ --out page --max-mib 4
    """
    from netlayer.observe.page.export import export_page
    from netlayer.observe.page.server import front_end

    front_end()  # before minutes of reading: it may not be built
    source = _open(run, link_gbps)
    exported = export_page(source, out, round(max_mib * 2**20))
    left = f"; {exported.num_omitted} parts did not fit" if exported.num_omitted else ""
    click.echo(
        f"page: {exported.path} ({exported.num_bytes / 2**20:.1f} MiB, {exported.num_payloads} parts{left})", err=True
    )


@click.command()
@click.argument("run", nargs=-1, type=_PATH)
@click.option("--perfetto", type=_PATH, help="Write a trace for ui.perfetto.dev here.")
@click.option("--steps", help="Of the trace: 7, or 3-5 [default: the last whole one].")
@click.option("--ranks", help="Of the trace: 0:64:1, or 3,5,9 [default: all].")
@click.option("--prometheus", type=_PATH, help="Write the run's state as Prometheus metrics here; - is stdout.")
@click.option("--grafana", type=_PATH, help="Write a Grafana dashboard here; needs no RUN.")
def export(
    run: tuple[Path, ...],
    perfetto: Path | None,
    steps: str | None,
    ranks: str | None,
    prometheus: Path | None,
    grafana: Path | None,
) -> None:
    """Write what RUN holds for other programs: a trace for Perfetto, metrics for Prometheus, a dashboard for Grafana.

    RUN is as that of `observe report`. The metrics are those that `observe serve` has at /metrics, for a textfile
    collector. The dashboard shows them beside the gauges of job.metrics.prometheus_port.

    \b
    Examples:
      netlayer observe export runs/a --perfetto trace.json --steps 3-5
      netlayer observe export dumps/ --prometheus /var/lib/node_exporter/run.prom
      netlayer observe export --grafana netlayer.json
    """
    from netlayer.errors import ConfigError
    from netlayer.observe.page.perfetto import export_trace
    from netlayer.observe.page.prometheus import metrics_text, write_dashboard
    from netlayer.results import write_text

    if not (perfetto or prometheus or grafana):
        raise ConfigError("export", None, "has nothing to write", "give --perfetto, --prometheus or --grafana")
    if (perfetto or prometheus) and not run:
        raise ConfigError("RUN", None, "is needed", "give a run's folder, or files of evidence")
    if grafana:
        write_dashboard(grafana)
        click.echo(f"dashboard: {grafana}", err=True)
    if not run:
        return
    source = _open(run, None)
    if prometheus:
        write_text(prometheus, metrics_text(source.view))
    if perfetto:
        count = export_trace(perfetto, source.view, steps, ranks)
        click.echo(f"trace: {perfetto} ({count:,} events)", err=True)


def serve_until_signal(
    run: tuple[Path, ...], host: str, port: int, link_gbps: float | None, actions: Actions | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        actions: what the page may change; None: nothing.

    Raises:
        ConfigError: nothing can be read, the address cannot be listened on, or the page was not built.
    """
    from netlayer.observe.page.prometheus import metrics_text
    from netlayer.observe.page.server import PageServer, bind, front_end

    front_end()  # or it says that it is not built, before minutes of reading
    bound = bind(host, port)
    source = _open(run, link_gbps)
    server = PageServer(source, host, port, actions, lambda: metrics_text(source.view).encode(), bound)
    _ending_at_signals(server)
    click.echo(server.url)
    click.echo("Ctrl-C ends it", err=True)
    try:
        server.serve()
    finally:
        server.ending.set()
        server.server_close()


def _ending_at_signals(server: PageServer) -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        server.end()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _open(run: tuple[Path, ...], link_gbps: float | None) -> PageSource:
    from netlayer.observe.page.source import PageSource

    source = PageSource(run, link_gbps, _reporting())
    for note in [*source.view.columns.notes, *source.view.run.notes][:20]:
        click.echo(f"note: {printable(note)}", err=True)
    return source


def _reporting() -> Callable[[int, int], None]:
    """Print how far reading has come, every few seconds."""
    last_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _PROGRESS_S:
            last_s = time.monotonic()
            click.echo(f"read {done:,} of {total:,} files", err=True)

    return report
