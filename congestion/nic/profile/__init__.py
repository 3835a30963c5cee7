"""Profiles of NIC settings: plans, their application, journal and rollback, and timers."""
