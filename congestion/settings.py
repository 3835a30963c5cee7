"""What a simulation is told besides fabric and flows: switch, NIC and control law, as named presets.

`ns3` and `ns3-paper` are HPCC's ns-3 simulator with two DCQCN parameter sets: fast timers, and those of the DCQCN paper
(Zhu et al., SIGCOMM 2015). Rates and ECN thresholds are given for a 200G link and scale with the rate of the link, as
in the runs that we compare with.
"""

from __future__ import annotations

from pydantic import Field, ValidationError

from netlayer.config import Section
from netlayer.errors import ConfigError

_PREFIX = "congestion."


class Settings(Section):
    """The `congestion` section."""

    mtu_bytes: int = Field(4_096, gt=0, le=65_536, description="Payload of a full packet.")
    header_bytes: int = Field(48, ge=0, le=512, description="Wire bytes of a data packet beyond its payload.")
    ack_bytes: int = Field(60, gt=0, le=512, description="Wire bytes of an ACK or NACK.")
    pfc_frame_bytes: int = Field(43, gt=0, le=512, description="Wire bytes of a pause or resume frame.")
    buffer_bytes: int = Field(64 * 2**20, gt=0, le=2**40, description="Shared buffer of a switch.")
    pfc: bool = Field(True, description="Lossless: pause the sender of an ingress; off, buffers have no limit.")
    reserve_bytes: int = Field(4_096, ge=0, description="Buffer that each ingress has to itself.")
    resume_offset_bytes: int = Field(3_072, ge=0, description="How far below its threshold an ingress resumes.")
    headroom_bdps: int = Field(3, ge=0, le=1_000, description="Headroom of an ingress, in rate x propagation delay.")
    ecn: bool = Field(True, description="Mark packets; only a control law that reads marks reacts.")
    kmin_bytes: int = Field(800_000, ge=0, description="Queue at which marking begins, at 200G.")
    kmax_bytes: int = Field(3_200_000, ge=0, description="Queue above which every packet is marked, at 200G.")
    pmax: float = Field(0.2, ge=0, le=1, description="Share of packets marked at kmax.")
    loss_rate: float = Field(
        0.0, ge=0, lt=1, description="Share of packets lost on each link; rates in topo.txt are not read."
    )
    nack_interval_us: float = Field(500.0, gt=0, description="How long a receiver waits to repeat a NACK.")
    alpha_us: float = Field(1.0, ge=0.1, description="DCQCN: period of alpha's update.")
    decrease_us: float = Field(4.0, ge=0.1, description="DCQCN: period in which a CNP cuts once.")
    increase_us: float = Field(300.0, ge=0.1, description="DCQCN: period of the rate's increase.")
    fast_recovery_steps: int = Field(1, ge=0, description="DCQCN: increases that only halve the way to the target.")
    rai_bps: int = Field(40_000_000, ge=0, description="DCQCN: additive increase, at 200G.")
    rhai_bps: int = Field(400_000_000, ge=0, description="DCQCN: hyper increase, at 200G.")
    min_rate_bps: int = Field(1_000_000_000, gt=0, description="DCQCN: lowest rate of a flow.")
    g: float = Field(1 / 256, gt=0, le=1, description="DCQCN: gain of alpha.")
    clamp_target: bool = Field(False, description="DCQCN: every cut lowers the target rate too.")


PRESETS: dict[str, Settings] = {
    "ns3": Settings(),
    "ns3-paper": Settings(alpha_us=50.0, decrease_us=50.0, increase_us=55.0),
}


def settings_of(preset: str, overrides: tuple[str, ...] = ()) -> Settings:
    """A preset with `congestion.name=value` overrides.

    Raises:
        ConfigError: the preset or a name is unknown, or a value breaks its rule.
    """
    if preset not in PRESETS:
        raise ConfigError("--preset", preset, "is unknown", f"give one of {', '.join(PRESETS)}")
    values = PRESETS[preset].model_dump()
    for override in overrides:
        name, equals, value = override.partition("=")
        key = name.removeprefix(_PREFIX)
        if not equals or not name.startswith(_PREFIX) or key not in values:
            raise ConfigError(
                "--set", override, "sets nothing that is known", f"congestion.x=y, x of {', '.join(values)}"
            )
        values[key] = value
    try:
        made = Settings.model_validate_strings({key: str(value) for key, value in values.items()})
    except ValidationError as exc:
        error = exc.errors()[0]
        where = ".".join(str(part) for part in error["loc"])
        raise ConfigError(f"{_PREFIX}{where}", error["input"], error["msg"], "give a value that fits") from exc
    if made.kmin_bytes > made.kmax_bytes:
        rule = f"is above congestion.kmax_bytes = {made.kmax_bytes}"
        raise ConfigError("congestion.kmin_bytes", made.kmin_bytes, rule, "lower it, or raise kmax_bytes")
    return made
