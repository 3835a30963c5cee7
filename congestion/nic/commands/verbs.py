"""`netlayer nic verbs`: what the RDMA NICs of this host do, to themselves, to one another, and to another host's.

`python -m congestion.nic.commands.verbs` is the same without the rest of netlayer, for a host with Debian's Python
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from netlayer.command import renamed_option
from netlayer.errors import ConfigError

_PATH = click.Path(path_type=Path)
_DEVICE = {"name": "device", "state": "state", "rate": "rate", "link_layer": "link", "netdev": "interface"}
_GID = {"gid": "GID", "address": "address", "kind": "kind"}
_BANDWIDTH = {
    "test": "test",
    "device": "from",
    "remote_device": "to",
    "memory": "memory",
    "bytes": "size",
    "messages": "messages",
    "median_bps": "median",
    "least_bps": "least",
    "median_us": "median us",
    "p99_us": "p99 us",
    "checked_bytes": "checked",
    "wrong_bytes": "wrong",
}
_PLAN = (
    click.option("--size", "sizes", multiple=True, default=("64K", "1M"), show_default=True, help="Repeatable."),
    click.option("--kind", "kinds", type=click.Choice(["write", "send"]), multiple=True, help="[default: both]"),
    click.option("--messages", type=click.IntRange(1), default=64, show_default=True, help="Of a bandwidth."),
    click.option("--window", type=click.IntRange(1, 128), default=16, show_default=True, help="On their way at once."),
    click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Bandwidths of each size."),
    click.option("--pings", type=click.IntRange(1), default=200, show_default=True, help="Messages of a latency."),
    click.option(
        "--qp-timeout",
        "timeout",
        type=click.IntRange(0, 31),
        default=14,
        show_default=True,
        help="T of 4.096 us * 2^T.",
    ),
    renamed_option("--timeout", "--qp-timeout", "timeout"),
    click.option(
        "--retry-cnt", type=click.IntRange(0, 7), default=7, show_default=True, help="Retries; rxe: 7 no end."
    ),
    click.option("--mtu", type=click.Choice(["256", "512", "1024", "2048", "4096"]), default="1024", show_default=True),
    click.option("--traffic-class", type=click.IntRange(0, 255), default=106, show_default=True, help="TOS byte."),
    click.option("--flow-label", type=click.IntRange(0, 0xFFFFF), default=0, show_default=True, help="For ECMP."),
    click.option("--udp-sport", type=click.IntRange(1, 65535), help="UDP source port; mlx5 alone can set it."),
    click.option("--gpu", type=click.IntRange(0), help="Send from this GPU's memory (GPUDirect)."),
    click.option("--json", "json_file", type=_PATH, help="Also write the record here; - is stdout."),
)


def _plan_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_PLAN):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def verbs() -> None:
    """Measure RDMA NICs with verbs: bandwidth, latency, and every byte checked.

    \b
    Examples:
      netlayer nic verbs list
      netlayer nic verbs pair                           the first device to itself
      netlayer nic verbs pair --device mlx5_0 --to mlx5_1 --size 1M --qp-timeout 18
      netlayer nic verbs serve --listen 10.0.0.2        there
      netlayer nic verbs run 10.0.0.2 --device mlx5_0   here
    """


@verbs.command("list")
def list_devices() -> None:
    """The RDMA devices of this host, and the addresses of their first ports. Exit 3: there are none.

    \b
    Examples:
      netlayer nic verbs list
    """
    from congestion.verbs.device import devices, find_device

    find_device()
    all_devices = devices()
    _print("devices", [{**vars(one), "netdev": one.netdev} for one in all_devices], _DEVICE)
    gids = [
        {"device": one.name, "gid": str(gid.index), "address": gid.ip, "kind": gid.kind}
        for one in all_devices
        for gid in one.gids
    ]
    _print("\naddresses", gids, {"device": "device", **_GID})


@verbs.command()
@click.option("--device", help="Sends [default: the first that is active].")
@click.option("--to", "target", help="Receives [default: the same device].")
@_plan_options
def pair(device: str | None, target: str | None, json_file: Path | None, gpu: int | None, **options: Any) -> None:
    """Measure from one device of this host to another, or to itself.

    A bandwidth is of windows of messages; a latency is from the post to its completion, one message at a time, a round
    trip. Exit 1: bytes arrived wrong, or a queue pair went to error; 3: no RDMA device, or no pyverbs.

    \b
    Examples:
      netlayer nic verbs pair
      netlayer nic verbs pair --device mlx5_0 --to mlx5_1 --size 1M --kind write
      netlayer nic verbs pair --device mlx5_0 --qp-timeout 18 --retry-cnt 7 --json pair.json
    """
    from congestion.verbs.measure import measure_pair

    started = _begin(json_file)
    rows = measure_pair(device, target, _plan(options), gpu=gpu)
    _keep(json_file, rows, started, {"device": device, "to": target, "gpu": gpu, **options})


@verbs.command()
@click.option("--listen", default="127.0.0.1", show_default=True, help="ADDRESS or ADDRESS:PORT.")
@click.option("--device", help="[default: the first that is active]")
@click.option("--clients", type=click.IntRange(1), help="End after so many [default: when interrupted].")
def serve(listen: str, device: str | None, clients: int | None) -> None:
    """Lend a queue pair to whoever connects, one client after another.

    No password: a client may write into a buffer that is made for it (256 MiB at most). Listen on an address of your
    own network, and end it when you are done.

    \b
    Examples:
      netlayer nic verbs serve --listen 10.0.0.2
      netlayer nic verbs serve --listen 10.0.0.2:9000 --device mlx5_0 --clients 1
    """
    from congestion.verbs.device import find_device, load_pyverbs
    from congestion.verbs.remote import serve as serve_clients
    from netlayer import log

    log.configure(0)
    name = find_device(device).name
    load_pyverbs()
    host, port = _address("--listen", listen)

    def say(used: int) -> None:
        click.echo(f"{name} waits for clients at {host}:{used}; Ctrl-C ends it", err=True)

    served = serve_clients(host, port, device, clients=clients, ready=say)
    click.echo(f"served: {served}", err=True)


@verbs.command()
@click.argument("server")
@click.option("--device", help="Sends [default: the first that is active].")
@_plan_options
def run(server: str, device: str | None, json_file: Path | None, gpu: int | None, **options: Any) -> None:
    """Measure from a device of this host to SERVER (ADDRESS or ADDRESS:PORT), where `verbs serve` runs.

    \b
    Examples:
      netlayer nic verbs run 10.0.0.2
      netlayer nic verbs run 10.0.0.2:9000 --device mlx5_0 --size 64K --size 8M --window 32
      netlayer nic verbs run [2001:db8::2]:9000 --flow-label 77 --json run.json
    """
    from congestion.verbs.remote import measure_remote

    started = _begin(json_file)
    host, port = _address("SERVER", server)
    rows = measure_remote(host, port, device, _plan(options), gpu=gpu)
    _keep(json_file, rows, started, {"server": server, "device": device, "gpu": gpu, **options})


def main() -> None:
    """Entry of `python -m congestion.nic.commands.verbs`."""
    from netlayer import cli

    cli.run(verbs, "python -m congestion.nic.commands.verbs")


def _plan(options: dict[str, Any]) -> Any:
    from congestion.verbs.measure import KINDS, Plan
    from congestion.verbs.queue_pair import QpSettings
    from netlayer.units import parse_size

    names = ("timeout", "retry_cnt", "traffic_class", "flow_label", "udp_sport")
    counts = ("messages", "window", "repeats", "pings")
    try:
        sizes = [parse_size(size) for size in options["sizes"]]
        settings = QpSettings(mtu=int(options["mtu"]), **{name: options[name] for name in names})
        kinds = options["kinds"] or KINDS
        return Plan(sizes=sizes, kinds=kinds, settings=settings, **{name: options[name] for name in counts})
    except ValueError as exc:
        raise ConfigError("options", None, str(exc), "see --help") from exc


def _address(field: str, text: str) -> tuple[str, int]:
    """ADDRESS, ADDRESS:PORT or [IPv6]:PORT."""
    from congestion.verbs.remote import DEFAULT_PORT

    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(field, text, "is no address", "give ADDRESS, ADDRESS:PORT or [IPv6]:PORT")
    return host, int(port)


def _begin(json_file: Path | None) -> str:
    from netlayer import log
    from netlayer.results import check_target, utc_now

    log.configure(0)
    check_target("--json", json_file)
    return utc_now()


def _keep(json_file: Path | None, rows: Sequence[dict[str, Any]], started: str, arguments: dict[str, Any]) -> None:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text

    if json_file:
        record = RunRecord(
            name="congestion.verbs",
            source="measured",
            rows=rows,
            started_utc=started,
            ended_utc=utc_now(),
            arguments=arguments,
            environment=snapshot(),
            devices=sorted({row["device"] for row in rows}),
        )
        write_text(json_file, record.to_json())
    if str(json_file) != "-":
        _print("measured", rows, _BANDWIDTH)


def _print(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> None:
    from netlayer.printing import print_rows

    print_rows(title, rows, columns)


if __name__ == "__main__":
    main()
