"""Captures of RoCEv2 packets: frames, queue pairs and retransmissions."""
