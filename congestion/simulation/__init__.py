"""Simulation of flows over a fabric: settings, runs, samples and measures."""
