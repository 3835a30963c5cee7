"""Sections and page of `netlayer topology report`."""
