"""A run that survives: one driver, one executor a node, training processes under the executors.

The driver (`driver.py`) holds the state machine (`machine.py`, a table) and writes each transition down before it acts
(`journal.py`). Executors (`executor.py`) start and end processes, read their logs, and send heartbeats over the run's
Redis (`bus.py`, `messages.py`). `detect.py` makes findings of heartbeats, `policy.py` a decision of findings. Nothing
here imports torch but `self_check.py`, which runs in a process of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from trainer.resilience.bus import Bus as Bus
    from trainer.resilience.driver import Driver as Driver
    from trainer.resilience.folder import RunFolder as RunFolder
    from trainer.resilience.folder import Spec as Spec
    from trainer.resilience.journal import last_entry as last_entry
    from trainer.resilience.machine import State as State
    from trainer.resilience.messages import Assignment as Assignment
    from trainer.resilience.messages import Heartbeat as Heartbeat
    from trainer.resilience.messages import RankStatus as RankStatus
    from trainer.resilience.messages import Refused as Refused
    from trainer.resilience.messages import collect_seldom as collect_seldom
    from trainer.resilience.messages import seal as seal
    from trainer.resilience.messages import unseal as unseal
    from trainer.resilience.store_host import directory_of as directory_of

__all__ = [
    "Assignment",
    "Bus",
    "Driver",
    "Heartbeat",
    "RankStatus",
    "Refused",
    "RunFolder",
    "Spec",
    "State",
    "collect_seldom",
    "directory_of",
    "last_entry",
    "seal",
    "unseal",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Assignment": ".messages",
        "Bus": ".bus",
        "Driver": ".driver",
        "Heartbeat": ".messages",
        "RankStatus": ".messages",
        "Refused": ".messages",
        "RunFolder": ".folder",
        "Spec": ".folder",
        "State": ".machine",
        "collect_seldom": ".messages",
        "directory_of": ".store_host",
        "last_entry": ".journal",
        "seal": ".messages",
        "unseal": ".messages",
    },
)
