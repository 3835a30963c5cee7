"""The section `job.checkpoint`: when training is saved, where to, and how much of that stays."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from netlayer.config.parallel import Count
from netlayer.config.section import Section
from netlayer.errors import ConfigError


class CheckpointConfig(Section):
    """Checkpoints: when training is saved, and how many are kept."""

    every_steps: int = Field(
        0, ge=0, description="steps between two saves, and one after the last; 0: only where a signal stops the run"
    )
    keep: Count = Field(
        2, description="good checkpoints that stay, the newest; one that is not yet verified is kept in addition"
    )
    keep_every_steps: int = Field(
        0, ge=0, description="good checkpoints of every so many steps stay as well, for ever; 0: none"
    )
    asynchronous: bool = Field(
        True, description="copy the state to the host under the next step, and write it beside the training"
    )
    when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="what training does where a save is due and storage is not through with the one before: wait for "
        "it, or skip the save, which is said and counted (not one that keep_every_steps keeps, nor for a peer copy "
        "under way)",
    )
    copy_gbps: float = Field(
        0.0, ge=0, description="limit of a rank's copy to the host, GB/s, which spreads it over a step; 0: none"
    )
    write_gbps: float = Field(
        0.0,
        ge=0,
        description="limit of what a rank's process writes to storage beside the training, GB/s; 0: none. A save that "
        "training waits for, as the last one, has none",
    )
    direct_io: bool = Field(
        True, description="write past the page cache where the file system can (O_DIRECT), on a disk of this machine"
    )
    writer_nice: int = Field(
        5, ge=0, le=19, description="niceness of the processes that write, and of their disk accesses"
    )
    folder: str = Field(
        "", description="folder or URL (s3://, gs://, hdfs://) of the checkpoints; none: checkpoints/ of the output"
    )
    peer_copies: int = Field(
        0, ge=0, description="other machines whose memory gets a copy of what each machine's ranks save; 0: no copies"
    )
    peer_interval: int = Field(0, ge=0, description="steps between two peer copies; 0: as every_steps")
    peer_keep: Count = Field(1, description="newest peer copies that stay in memory, beside the one in the making")
    peer_memory_gib: float = Field(
        0.0, ge=0, description="limit of each machine's memory for peer copies, its own too; 0: as much as they take"
    )
    peer_hold_s: float = Field(
        1800.0, gt=0, description="peer copies stay so long in memory without a sign of life of their run"
    )
    peer_address: str = Field(
        "", description="at which other machines reach this one's peer copies; none: its address towards the first rank"
    )
    model_only: bool = Field(
        False, description="resume with the parameters of a checkpoint alone: from the first step, with new moments"
    )
    allow_dataset_change: bool = Field(
        False, description="resume from a checkpoint with other text, seed or (rotary) seq_len, in its own tokens"
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.when_busy == "skip" and not self.asynchronous:
            rule = "has no effect where training waits for each save"
            raise ConfigError("job.checkpoint.when_busy", self.when_busy, rule, "set asynchronous = true, or omit it")
        if self.peer_copies and not (self.peer_interval or self.every_steps):
            rule = "has no effect, for peer_interval and every_steps are 0"
            raise ConfigError("job.checkpoint.peer_copies", self.peer_copies, rule, "set peer_interval")
        if self.peer_copies and not self.asynchronous:
            rule = f"cannot be had with job.checkpoint.peer_copies = {self.peer_copies}"
            raise ConfigError("job.checkpoint.asynchronous", False, rule, "omit one of them")
        return self

    @property
    def copy_interval(self) -> int:
        """Return the steps between two peer copies; 0: there are none."""
        return (self.peer_interval or self.every_steps) if self.peer_copies else 0
