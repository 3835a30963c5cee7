"""Measures how well verdicts find slow ranks and causes: in traces made from measured noise, and in real runs."""
