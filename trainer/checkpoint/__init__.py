"""Checkpoints that any layout can resume from."""
