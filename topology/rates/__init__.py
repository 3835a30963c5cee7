"""Rates of flows that share links."""
