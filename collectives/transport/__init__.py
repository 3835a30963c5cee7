"""Communicators, streams, windows and peer memory that carry collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.transport.communicator import Communicator as Communicator
    from collectives.transport.communicator import Work as Work
    from collectives.transport.libnccl import DATA_TYPES as DATA_TYPES
    from collectives.transport.libnccl import RED_OPS as RED_OPS
    from collectives.transport.libnccl import Libnccl as Libnccl
    from collectives.transport.libnccl import show_version as show_version
    from collectives.transport.nodes import virtual_node_environ as virtual_node_environ
    from collectives.transport.pair_link import Tap as Tap
    from collectives.transport.symmetric import why_unusable as why_unusable
    from collectives.transport.windows import are_worth_it as are_worth_it

__all__ = [
    "DATA_TYPES",
    "RED_OPS",
    "Communicator",
    "Libnccl",
    "Tap",
    "Work",
    "are_worth_it",
    "show_version",
    "virtual_node_environ",
    "why_unusable",
]

__getattr__ = lazy_names(
    __name__,
    {
        "DATA_TYPES": ".libnccl",
        "RED_OPS": ".libnccl",
        "Communicator": ".communicator",
        "Libnccl": ".libnccl",
        "Tap": ".pair_link",
        "Work": ".communicator",
        "are_worth_it": ".windows",
        "show_version": ".libnccl",
        "virtual_node_environ": ".nodes",
        "why_unusable": ".symmetric",
    },
)
