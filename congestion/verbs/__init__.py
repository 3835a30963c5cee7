"""Measurement of RDMA NICs with verbs."""
