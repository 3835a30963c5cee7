"""Retransmit timers of RDMA NICs, and what a link flap costs under them."""
