"""Key-value stores in which the ranks of a run meet: Redis and TCP.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.store.redis_run import remove_run as remove_run
    from netlayer.store.redis_store import RedisStore as RedisStore

__all__ = ["RedisStore", "remove_run"]

__getattr__ = lazy_names(
    __name__,
    {
        "RedisStore": ".redis_store",
        "remove_run": ".redis_run",
    },
)
