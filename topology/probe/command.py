"""`netlayer topology probe`: write or send RoCEv2 probes, and read from the answers which paths flows take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions, run_options_without_config
from netlayer.errors import ConfigError
from topology.probe.options import address_of, members_of, routers_of, sweep_of, weights_of

if TYPE_CHECKING:  # `--help` needs no numpy
    from netlayer.output import Output
    from topology.probe.capture import Capture, Link
    from topology.probe.packets import Sweep

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(name="probe")
@click.option("--dst", help="IPv4 address to probe; with --read: only flows to it.")
@click.option("--src", help="IPv4 source address [default: that of --iface].")
@click.option("--ports", default="49152-49407", show_default=True, help="UDP source ports: A-B,C; one flow each.")
@click.option("--ttl", "ttls", default="1-6", show_default=True, help="TTLs: A-B,C; one hop each.")
@click.option("--rounds", type=int, default=1, show_default=True, help="Sweeps; more find flows that move.")
@click.option("--pcap", type=_FILE, help="Write the probes here (and the answers, with --iface).")
@click.option("--iface", help="Send from this interface; needs root.")
@click.option("--read", "read_file", type=_FILE, help="Parse this capture: pcap or pcapng.")
@click.option("--members", multiple=True, metavar="HOP=N", help="Next hops that lead to HOP [default: those seen].")
@click.option("--weight", "weights", multiple=True, metavar="ADDR=W", help="Weight of a next hop, where not 1.")
@click.option(
    "--linux",
    "routers",
    multiple=True,
    metavar="ADDR=SEED:HOP,HOP*W",
    help="A Linux router, its fib_multipath_hash_seed and next hops in its route's order: predict each flow.",
)
@click.option("--linux-policy", type=click.Choice(("0", "1")), default="1", show_default=True, help="Of --linux.")
@click.option("--qpn", type=int, default=0xFFFFF0, show_default=True, help="Destination queue pair; one not in use.")
@click.option("--tos", type=int, default=106, show_default=True, help="TOS byte; 106 is DSCP 26, ECN-capable.")
@click.option("--payload", type=int, default=16, show_default=True, help="Payload bytes, a multiple of 4.")
@click.option("--rate", type=click.FloatRange(min=1), default=1000, show_default=True, help="Probes a second.")
@click.option("--timeout", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Seconds to wait a try.")
@click.option("--tries", type=click.IntRange(min=1), default=3, show_default=True, help="Times to send a probe.")
@click.option("--src-mac", help="With --dst-mac: write Ethernet frames to --pcap, else raw IP.")
@click.option("--dst-mac", help="MAC address of the first hop.")
@run_options_without_config
def command(options: RunOptions, **params: Any) -> None:
    """Probe the paths of RoCEv2 flows: every TTL of every UDP source port.

    Writes the probes to a capture file (--pcap; sends nothing), sends them (--iface), or parses a capture (--read).
    Every router answers where a TTL ends; who answers for which port is the path of that flow. Shares of each ECMP
    choice are held against the expected ones (chi-square; uneven where p < 0.001), and with --linux every flow against
    the kernel's hash. Exit 2 where nothing can be sent or read, 1 where no router answered or one calls the target
    unreachable.

    \b
    Examples:
      netlayer topology probe --dst 10.1.0.9 --src 10.0.0.7 --ports 49152-49999 --ttl 1-5 --pcap probes.pcap
      sudo netlayer topology probe --dst 10.1.0.9 --iface eth0 --ports 49152-49999 --ttl 1-5 --pcap seen.pcap
      netlayer topology probe --read seen.pcap --members 2=32 --json spread.json
      netlayer topology probe --read seen.pcap --linux 10.0.1.2=7:10.0.2.2,10.0.3.2
    """
    from netlayer.output import open_output
    from netlayer.results import utc_now

    started = utc_now()
    if params["read_file"]:
        _refuse_both(params)
        from topology.probe.capture import read_pcap

        capture = read_pcap(params["read_file"])
        with open_output(options.out, "topology-probe") as out:
            _report(capture, started, options, params, out)
        return
    sweep = sweep_of(params)
    if not params["iface"] and not params["pcap"]:
        raise ConfigError("--dst", params["dst"], "says nothing of where to", "add --pcap FILE, --iface IF or both")
    with open_output(options.out, "topology-probe") as out:
        if params["iface"]:
            _report(_send(sweep, params), started, options, params, out)
        else:
            _write(sweep, started, options, params, out)


def _refuse_both(params: dict[str, Any]) -> None:
    for name in ("iface", "pcap"):
        if params[name]:
            raise ConfigError(f"--{name}", params[name], "goes not with --read", "give one of them")


def _write(sweep: Sweep, started: str, options: RunOptions, params: dict[str, Any], out: Output) -> None:
    """Write the probes; nothing is sent and nothing measured."""
    import time

    from topology.commands.records import keep
    from topology.probe.capture import write_pcap
    from topology.probe.choice import address
    from topology.probe.packets import build, with_ethernet

    packets = build(sweep)
    link: Link = "raw"
    if params["src_mac"] or params["dst_mac"]:
        try:
            packets, link = with_ethernet(packets, params["src_mac"] or "", params["dst_mac"] or ""), "ethernet"
        except ValueError as exc:
            raise ConfigError("--src-mac, --dst-mac", None, str(exc), "give both, or neither") from exc
    now = time.time_ns()
    count = write_pcap(params["pcap"], (row.tobytes() for row in packets), (now + i for i in range(len(packets))), link)
    row = {
        "src": address(sweep.src_ip),
        "dst": address(sweep.dst_ip),
        "probes": count,
        "flows": len(sweep.ports),
        "hops": len(sweep.ttls),
        "packet_bytes": sweep.packet_bytes,
    }
    if keep("probe", {"plan": [row]}, out, started, options, source="predicted", csv=False, **params):
        click.echo(f"{_describe(sweep)}: written to {params['pcap']} ({link}); nothing sent")


def _send(sweep: Sweep, params: dict[str, Any]) -> Capture:
    """Say what will be sent, send it, and keep both directions where --pcap names a file."""
    from topology.probe.capture import write_pcap
    from topology.probe.sending import send

    rate = params["rate"]
    click.echo(f"will send {_describe(sweep)}, from {params['iface']} at {rate:g} a second", err=True)
    exchange = send(sweep, params["iface"], rate_pps=rate, timeout_s=params["timeout"], tries=params["tries"])
    if params["pcap"]:
        stamps, packets = zip(*sorted(zip(exchange.time_ns, exchange.packets, strict=True)), strict=True)
        write_pcap(params["pcap"], packets, stamps, "raw")
    return exchange.capture()


def _report(capture: Capture, started: str, options: RunOptions, params: dict[str, Any], out: Output) -> None:
    """Report the path spread of every pair of addresses: records, a CSV of every flow, and tables.

    Raises:
        CheckFailed: no router answered, or one calls the target unreachable.
    """
    from topology.commands.records import keep, write_table
    from topology.probe import findings
    from topology.probe.tables import print_spread

    only = address_of("--dst", params["dst"]) if params["dst"] else None
    pairs = [pair for pair in findings.spreads(capture) if only in (None, pair.dst_ip)]
    known = members_of(params["members"]), weights_of(params["weights"])
    routers, by_ports = routers_of(params["routers"]), params["linux_policy"] == "1"
    results = [findings.of_pair(pair, *known, routers, 1 if by_ports else 0) for pair in pairs]
    flows = [row for pair in pairs for row in pair.flows()]
    write_table(out.part, "flows", flows)
    write_table(out.part, "forecast", [row for result in results for row in result.forecast])
    tables = findings.merged(results)
    prints_tables = keep("probe", tables, out, started, options, source="measured", csv=False, **params)
    if flows:
        click.echo(f"path of each flow: {out.folder / 'flows.csv'}", err=True)
    for pair, result in zip(pairs, results, strict=True):
        if prints_tables and pair.answered.any():
            print_spread(result)
    findings.check(pairs, capture)


def _describe(sweep: Sweep) -> str:
    from topology.probe.choice import address

    sizes = f"{len(sweep.ports)} ports x {len(sweep.ttls)} TTLs x {sweep.rounds}"
    ends = f"{address(sweep.src_ip)} to {address(sweep.dst_ip)}"
    return f"{len(sweep):,} RoCEv2 probes ({sizes}) of {sweep.packet_bytes} bytes, {ends}, queue pair {sweep.qpn:#x}"
