"""The UDP source ports that queue pairs get, captured, beside those that `topology.ecmp.source_port` says.

Runs inside the virtual machine: `lab/run.sh python3 -m lab.ports /out/ports.json`. Each queue pair sends one WRITE;
half of them leave the flow label 0 as NCCL does, the others have one each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from congestion.nic.capture.pcap import read_pcap
from congestion.nic.capture.streams import analyse, summarise
from congestion.verbs.measure import QpSettings, connected
from lab.cable import capture
from netlayer.results import RunRecord, utc_now, write_text
from topology.ecmp.source_port import flow_label_source_port, udp_source_port

_BYTES = 4096


def main(path: Path, num_pairs: int = 32) -> int:
    """Capture, compare, write the record; exit code 1 where a port or a CRC is not the one expected."""
    started, file = utc_now(), Path("/tmp/ports.pcap")
    labels: dict[tuple[int, int], int] = {}
    with capture(file):
        for number in range(2 * num_pairs):
            label = 0 if number < num_pairs else number * 12_347 & 0xFFFFF
            with connected("rxe0", "rxe1", _BYTES, QpSettings(flow_label=label)) as (sender, receiver):
                sender.write(receiver.address, _BYTES, 0, 0)
                sender.wait(1, 30)
                labels[sender.address.qpn, receiver.address.qpn] = label
    packets = read_pcap(file)
    total = summarise(packets)
    rows = [_row(one, labels) for one in analyse(packets) if one["table"] == "stream" and one["requests"]]
    record = RunRecord("lab.ports", "measured", [total, *rows], started, utc_now(), devices=["rxe0", "rxe1"])
    write_text(path, record.to_json())
    right = sum(row["as_predicted"] for row in rows)
    sys.stdout.write(f"{right} of {len(rows)} source ports as predicted; {total['icrc_right']} CRCs right, ")
    sys.stdout.write(f"{total['icrc_wrong']} wrong, {total['icrc_unknown']} unknown\n")
    return int(not right == len(rows) == 2 * num_pairs or total["icrc_right"] != total["roce_packets"])


def _row(stream: dict[str, Any], labels: dict[tuple[int, int], int]) -> dict[str, Any]:
    local, remote = stream["sqpn"], stream["dqpn"]
    label = labels[local, remote]
    if label:
        predicted = flow_label_source_port(np.array([label]))
    else:
        predicted = udp_source_port(np.array([local]), np.array([remote]))
    return {
        "table": "port",
        "local_qpn": local,
        "remote_qpn": remote,
        "flow_label": label,
        "sports": stream["sports"],
        "predicted_sport": int(predicted[0]),
        "as_predicted": stream["sports"] == predicted.tolist(),
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:3])))
