"""Faults in runs of `netlayer run`, of real processes: found, blamed on the right node, repaired alone, and how fast.

`python -m bench.fault_matrix` injects them; `python -m bench.fault_matrix.scale` loads one driver with the heartbeats
of simulated executors. Not covered: GPUs, several hosts.
"""
