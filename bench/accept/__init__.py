"""Acceptance of nodes: which of them is bad, and what to do about it."""
