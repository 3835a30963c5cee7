"""Decoupled send and receive between pipeline stages.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.pipeline.channel import PipelineChannel as PipelineChannel
    from collectives.pipeline.links import PipelineLinks as PipelineLinks
    from collectives.pipeline.links import open_link_groups as open_link_groups

_HOME = {
    "PipelineChannel": "channel",
    "PipelineLinks": "links",
    "open_link_groups": "links",
}
__all__ = ["PipelineChannel", "PipelineLinks", "open_link_groups"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
