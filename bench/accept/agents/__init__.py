"""Agents and workers of an acceptance run, their connections, and injected faults."""
