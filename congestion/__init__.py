"""Congestion control: laws, their simulation, and what the NICs must be set to."""
