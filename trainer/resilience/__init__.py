"""A run that survives: one driver, one executor a node, training processes under the executors.

The driver (`driver.py`) holds the state machine (`machine.py`, a table) and writes each transition down before it acts
(`journal.py`). Executors (`executor.py`) start and end processes, read their logs, and send heartbeats over the run's
Redis (`bus.py`, `messages.py`). `detect.py` makes findings of heartbeats, `policy.py` a decision of findings. Nothing
here imports torch but `self_check.py`, which runs in a process of its own.
"""
