"""Names under which drivers count the bytes of an RDMA port in sysfs, and what one count is worth.

`port_xmit_data` and `port_rcv_data` count four bytes at a time (InfiniBand Architecture, volume 1, 16.1.3.5).
"""

SYSFS = "sys/class/infiniband"
BYTE_COUNTERS = {
    "port_xmit_data": ("xmit_bytes", 4),
    "port_rcv_data": ("rcv_bytes", 4),
    "tx_bytes": ("xmit_bytes", 1),  # bnxt_re and mana
    "rx_bytes": ("rcv_bytes", 1),
    "tx_rdma_ucast_bytes": ("xmit_bytes", 1),  # ionic
    "rx_rdma_ucast_bytes": ("rcv_bytes", 1),
}
"""By the driver's name: the common one, and the bytes of a count."""
