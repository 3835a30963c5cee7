"""Phases of an acceptance run: measurements and the statistics that judge them."""
