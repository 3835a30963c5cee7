"""The sections `job.store` and `job.launch`: where ranks meet, and how they start and end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_serializer

from netlayer.config.section import Section
from netlayer.results import hide_passwords


class StoreConfig(Section):
    """Rendezvous store of the ranks."""

    url: str = Field(
        "",
        description="redis://, rediss:// or unix:// address; empty: an embedded Redis of this run. "
        "No effect on ranks of torchrun, srun or mpirun",
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="longest wait for other ranks to come, seconds (of torchrun, srun or mpirun at least "
        "job.parallel.distributed_timeout_s, which holds from then on)",
    )

    @field_serializer("url", when_used="json")
    def _without_password(self, url: str) -> str:
        return hide_passwords(url)


class LaunchConfig(Section):
    """Start and end of the ranks on this machine."""

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl where there are GPUs, else gloo")
    grace_s: float = Field(5.0, gt=0, description="seconds from asking ranks to end, when one failed, to SIGKILL")
