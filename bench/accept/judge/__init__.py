"""Judgement of log files: bounds, expectations, peers and hosts."""
