"""Counters of RDMA NICs: reading, logs, signals and what is wrong."""
