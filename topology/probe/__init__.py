"""Path probes: RoCEv2 packets out, ICMP answers in, and which way each source port took."""
