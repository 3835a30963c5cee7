"""Made-up /sys of RDMA NICs, whose counters tests set."""

from __future__ import annotations

from pathlib import Path

PORT_COUNTERS = ("port_xmit_data", "port_rcv_data", "port_rcv_packets", "port_xmit_packets", "link_downed")
HW_COUNTERS = (
    "np_ecn_marked_roce_packets",
    "np_cnp_sent",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "duplicate_request",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
    "req_transport_retries_exceeded",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
)


def write_tree(root: Path, num_nics: int = 2) -> None:
    """NICs mlx5_0 and so on, every counter at 1000."""
    for nic in range(num_nics):
        port = root / f"sys/class/infiniband/mlx5_{nic}/ports/1"
        for kind, names in (("counters", PORT_COUNTERS), ("hw_counters", (*HW_COUNTERS, "lifespan"))):
            (port / kind).mkdir(parents=True)
            for name in names:
                (port / kind / name).write_text("1000\n")


def counter(root: Path, nic: int, name: str) -> Path:
    kind = "counters" if name in PORT_COUNTERS else "hw_counters"
    return root / f"sys/class/infiniband/mlx5_{nic}/ports/1" / kind / name
