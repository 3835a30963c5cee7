"""Several "nodes" on one host: the environment in which NCCL takes ranks of one machine for ranks of many.

With a host identity of its own a rank cannot be reached through peer memory or shared memory, so NCCL goes through its
network path: sockets on the loopback interface. That path, its timeouts and its error reports are the real ones; its
speed is not (a few GB/s). Not covered: RDMA, and a network that loses packets.
"""

from __future__ import annotations

import os
import socket

from netlayer.environ import boot_id


def virtual_node_environ(node: int, num_threads: int = 1, num_sockets: int = 1) -> dict[str, str]:
    """Return variables for a rank on virtual node `node`, to set before the process makes its first communicator.

    Ranks of one node are apart too: everything between two ranks goes through the network path.

    Args:
        node: number of the node; ranks of different nodes need different ones.
        num_threads: helper threads of NCCL that move a connection's bytes, at most 16.
        num_sockets: sockets of each thread; at most 64 of a connection in all. 4 x 4 carries about three times as much
            as 1 x 1 where cores are free.

    Raises:
        ValueError: a number is out of range.
    """
    if node < 0 or not 1 <= num_threads <= 16 or num_sockets < 1 or num_threads * num_sockets > 64:
        raise ValueError(
            f"node, num_threads, num_sockets = {node}, {num_threads}, {num_sockets}: must be at least 0, 1 and 1, "
            "with at most 16 threads and 64 sockets in all"
        )
    return {
        "NCCL_HOSTID": f"virtual-node-{node}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": str(num_threads),
        "NCCL_NSOCKS_PERTHREAD": str(num_sockets),
    }


def host_id() -> str:
    """Return an id of the host as NCCL tells hosts apart: by NCCL_HOSTID, else by container and kernel."""
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot_id()}"
