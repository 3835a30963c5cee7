"""Key-value stores in which the ranks of a run meet: Redis and TCP.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netlayer.store.redis_run import remove_run as remove_run
    from netlayer.store.redis_store import RedisStore as RedisStore

_HOME = {
    "RedisStore": "redis_store",
    "remove_run": "redis_run",
}
__all__ = ["RedisStore", "remove_run"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
