"""Placement of ranks on servers."""
