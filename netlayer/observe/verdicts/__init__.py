"""Verdicts on a run from its events: stragglers, slow links, drift, what-if replay, effective training time."""
