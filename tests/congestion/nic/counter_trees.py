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


# What other drivers have in hw_counters of a port: a part of it, by the names of their sources.
VENDORS = {
    "bnxt_re0": (
        "active_qps", "rx_pkts", "rx_bytes", "tx_pkts", "tx_bytes", "to_retransmits", "seq_err_naks_rcvd",
        "max_retry_exceeded", "rnr_naks_rcvd", "missing_resp", "oos_drop_count", "rx_out_of_buffer", "tx_cnp_pkts",
        "rx_cnp_pkts", "rx_ecn_marked_pkts",
    ),
    "irdma0": (
        "ip4InOctets", "ip4OutOctets", "ip6InOctets", "ip6OutOctets", "cnpHandled", "cnpIgnored", "cnpSent", "RxUDP",
        "RxECNMrkd", "RNR received", "Nak Sequence Error", "Nak Sequence Error Implied", "RTO",
        "Rcvd Out of order packets", "CRC errors",
    ),
    "ionic_0": (
        "tx_rdma_ucast_bytes", "rx_rdma_ucast_bytes", "rx_rdma_ucast_pkts", "tx_rdma_cnp_pkts", "rx_rdma_cnp_pkts",
        "rx_rdma_ecn_pkts", "req_rx_pkt_seq_err", "req_rx_impl_nak_seq_err", "req_tx_retry_excd_err",
        "tx_rdma_ack_timeout", "resp_rx_outouf_seq", "resp_rx_outof_buf", "req_rx_rnr_retry_err",
    ),
}  # fmt: skip


def write_vendor(root: Path, device: str) -> None:
    """A NIC of another driver, port 1, its counters at 1, 2, 3 ... in the order of VENDORS."""
    folder = root / f"sys/class/infiniband/{device}/ports/1/hw_counters"
    folder.mkdir(parents=True)
    for value, name in enumerate(VENDORS[device], 1):
        (folder / name).write_text(f"{value}\n")


def counter(root: Path, nic: int, name: str) -> Path:
    kind = "counters" if name in PORT_COUNTERS else "hw_counters"
    return root / f"sys/class/infiniband/mlx5_{nic}/ports/1" / kind / name
