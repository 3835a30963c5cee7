"""Restart in the same process: a rank of `netlayer run` that outlives a fault of another rank, and its end of it.

`python -m trainer.inprocess MODULE ARGUMENTS` runs a module again and again; `on_failure` is for what that must give
back in between. Not covered: who is kept (`trainer.resilience.roster`), and the executor's end
(`trainer.resilience.processes`).
"""

from __future__ import annotations

from trainer.inprocess.process import LEAVE, LOG, Leave, active, failing, main, on_failure

__all__ = ["LEAVE", "LOG", "Leave", "active", "failing", "main", "on_failure"]
