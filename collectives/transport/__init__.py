"""Communicators, streams, windows and peer memory that carry collectives."""
