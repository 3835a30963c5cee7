"""Conventional engines to compare our simulator with."""
