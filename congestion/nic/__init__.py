"""The fabric's end points: what RDMA NICs a host has, what they are set to, and what they should be set to."""
