"""Fabrics as arrays: CLOS networks and graphs, their design, cables, addresses and pictures."""
