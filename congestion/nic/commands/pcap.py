"""`netlayer nic pcap`: what became of every queue pair in a capture of RoCEv2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from netlayer.errors import CheckFailed
from netlayer.launch.interrupt import held_interrupt

_PATH = click.Path(path_type=Path)
_CAPTURE = {
    "roce_packets": "packets",
    "skipped_frames": "other frames",
    "damaged_packets": "damaged",
    "span_s": "over",
    "payload_bytes": "payload",
    "source_ports": "source ports",
    "ce_packets": "CE",
    "cnps": "CNPs",
    "icrc_right": "ICRC right",
    "icrc_wrong": "wrong",
    "icrc_unknown": "unknown",
}
_STREAM = {
    "stream": "stream",
    "transport": "",
    "src": "from",
    "dst": "to",
    "dqpn": "QP",
    "sqpn": "from QP",
    "packets": "packets",
    "payload_bytes": "payload",
    "ce_packets": "CE",
    "cnps_received": "CNPs in",
    "acks": "ACKs in",
    "naks": "NAKs in",
    "rnr_naks": "RNR",
    "retransmitted": "sent again",
    "timeouts": "timeouts",
    "out_of_order": "out of order",
    "rtt_median_us": "RTT us",
    "rtt_p99_us": "p99",
}
_RUN = {
    "stream": "stream",
    "time_s": "at",
    "psn": "from PSN",
    "packets": "packets",
    "waited_s": "after",
    "cause": "cause",
}


@click.command()
@click.argument("file", type=_PATH)
@click.option("--json", "json_file", type=_PATH, help="Also write all rows as a record here; - is stdout.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Rows shown of each table.")
@click.option("--icrc/--no-icrc", default=True, show_default=True, help="Check the invariant CRC of every packet.")
@click.option(
    "--reorder-us",
    type=click.FloatRange(0, 1e9),
    default=1000.0,
    show_default=True,
    help="A packet this late behind later ones was overtaken; a later one was sent again.",
)
def pcap(file: Path, json_file: Path | None, top: int, icrc: bool, reorder_us: float) -> None:
    """Read a capture of RoCEv2 (pcap or pcapng, gzipped or not) and say what became of every queue pair.

    Streams with most packets come first; `in` counts what came back to the sender. A retransmission is a run of packets
    that were sent before, and its cause what had asked for it since: `nak` (it was missing), `rnr` (the receiver had no
    buffer), else `timeout`. Round trips are from a request to its ACK, at the place of the capture.

    Frames in VXLAN, GENEVE, GRE, ERSPAN, MPLS, RoCE v1, IP fragments and the like are not read: they are counted by
    kind, in a warning and in the record.

    Exit 0; 1: no RoCEv2 in the file, or a packet with a wrong CRC (zeros are `unknown`: the NIC had yet to write it);
    2: the file cannot be read or is damaged.

    \b
    Examples:
      tcpdump -i eth0 -s 0 -w roce.pcap udp port 4791
      netlayer nic pcap roce.pcap
      netlayer nic pcap roce.pcapng.gz --json - --no-icrc
    """
    from netlayer.results import check_target, utc_now

    check_target("--json", json_file)
    with held_interrupt():
        from congestion.nic.capture.pcap import read_pcap
        from congestion.nic.capture.streams import analyse, summarise
    started = utc_now()
    packets = read_pcap(file, check_icrc=icrc)
    if packets.cut:
        click.echo(f"warning: {file} ends inside frame {packets.num_frames + 1}: those before it are read", err=True)
    unread = ", ".join(f"{num} in {name}" for name, num in packets.unread.items())
    if not len(packets):
        beside = f"; not read: {unread}" if unread else ""
        if packets.num_damaged:
            beside += f"; {packets.num_damaged} to that port too short for a packet, its headers and its ICRC"
        raise CheckFailed(f"{file}: no RoCEv2 packet (UDP port 4791) among {packets.num_frames} frames{beside}")
    if unread:
        click.echo(f"warning: frames that may carry RoCE and are not read, so are in no table: {unread}", err=True)
    total = summarise(packets)
    rows = [total, *analyse(packets, reorder_ns=round(reorder_us * 1e3))]
    if json_file:
        _keep(json_file, rows, started, {"file": str(file), "icrc": icrc, "reorder_us": reorder_us})
    if str(json_file) != "-":
        _print(rows, top)
    if total["icrc_wrong"]:
        raise CheckFailed(f"{file}: {total['icrc_wrong']} of {total['roce_packets']} packets have a wrong ICRC")


def _keep(json_file: Path, rows: Sequence[dict[str, Any]], started: str, arguments: dict[str, Any]) -> None:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text

    record = RunRecord(
        name="congestion.nic.capture.pcap",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments=arguments,
        environment=snapshot(),
    )
    write_text(json_file, record.to_json())


def _print(rows: Sequence[dict[str, Any]], top: int) -> None:
    from netlayer.printing import print_rows

    print_rows("capture", rows[:1], _CAPTURE)
    streams = sorted((row for row in rows if row["table"] == "stream"), key=lambda row: -row["packets"])
    print_rows(_title("streams", streams, top), streams[:top], _STREAM)
    runs = [row for row in rows if row["table"] == "retransmission"]
    if runs:
        begin = min(row["first_s"] for row in streams)
        first_runs = [{**row, "time_s": row["time_s"] - begin} for row in runs[:top]]
        print_rows(_title("retransmissions", runs, top), first_runs, _RUN)


def _title(name: str, rows: Sequence[Any], top: int) -> str:
    return f"\n{name}" if len(rows) <= top else f"\n{name}: {top} of {len(rows)}"
