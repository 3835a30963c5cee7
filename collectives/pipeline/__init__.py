"""Decoupled send and receive between pipeline stages.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.pipeline.channel import PipelineChannel as PipelineChannel
    from collectives.pipeline.links import PipelineLinks as PipelineLinks
    from collectives.pipeline.links import open_link_groups as open_link_groups

__all__ = ["PipelineChannel", "PipelineLinks", "open_link_groups"]

__getattr__ = lazy_names(
    __name__,
    {
        "PipelineChannel": ".channel",
        "PipelineLinks": ".links",
        "open_link_groups": ".links",
    },
)
