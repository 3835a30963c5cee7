"""The section `job.observe`: what the monitor of a training run records, and where that goes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_serializer

from netlayer.config.section import Section
from netlayer.results import hide_passwords


class ObserveConfig(Section):
    """Events of every rank: segments of each step, marks and counters; see `netlayer.observe.events`."""

    enabled: bool = Field(True, description="record what every rank does, by events of the device, without waiting")
    folder: str = Field(
        "events", min_length=1, description="of the ranks' streams, in the output of the run or absolute"
    )
    transport: Literal["files", "redis", "kafka"] = Field(
        "files",
        description="files: one stream a rank in the folder; redis, kafka: to a server, from where `netlayer observe "
        "collect` takes them",
    )
    url: str = Field(
        "",
        description="of the server: redis://, rediss:// or unix://, for kafka host:port,...; empty: the Redis in which "
        "the ranks meet",
    )
    interval_s: float = Field(1.0, ge=0.05, le=60, description="seconds between two batches of a rank")
    max_events: int = Field(
        1 << 16, ge=256, description="events of a rank that wait for the device or the transport; the oldest go first"
    )
    max_file_mib: int = Field(16, ge=1, description="size after which a rank's next file begins")
    max_files: int = Field(16, ge=2, description="files of a rank; the oldest go first, and what is lost is counted")
    counters_every_s: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="seconds between two readings of the GPU's (power, clock, throttling, NVLink) and the host's NICs' "
        "counters; 0: none are read",
    )
    clock_every_s: float = Field(
        30.0, ge=1, description="seconds between two comparisons of a rank's clock with rank 0's"
    )

    @field_serializer("url", when_used="json")
    def _without_password(self, url: str) -> str:
        return hide_passwords(url)
