"""Settings for the end points of a fabric: a TOML file, checked against the documented ranges when it is loaded.

A profile says nothing about one vendor: `plan` turns it into what the NIC at hand takes. DCQCN's parameters, and keys
without a default, are left alone on the NIC where they are omitted here. The former keep the names that NICs give
them, so their units stand in `parameters` and not in the key. Not covered: addresses, firmware images, VLANs.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from congestion.nic.profile.parameters import PARAMETERS
from netlayer.config.file import parse_toml
from netlayer.config.tree import NcclConfig, Section
from netlayer.errors import ConfigError

# A DSCP is six bits (RFC 2474), an 802.1p priority three.
Dscp = Annotated[int, Field(ge=0, le=63)]
Priority = Annotated[int, Field(ge=0, le=7)]
Law = Literal["dcqcn", "rttcc", "timely", "dctcp", "swift", "hybrid", "none"]
# Files of mlx5's cc_params that are no keys of [dcqcn], and the key of the profile that sets each.
_ELSEWHERE = {
    "np_cnp_dscp": "cnp.dscp",
    "np_cnp_prio": "cnp.priority",
    "rtt_resp_dscp": "rtt_response_dscp",
    "np_cnp_prio_mode": "cnp.priority, which sets it",
}


class TrafficSection(Section):
    """Marking of RDMA packets."""

    dscp: Dscp = Field(26, description="DSCP of RDMA packets")
    priority: Priority = Field(3, description="priority, and traffic class, that the DSCP maps to")
    ecn: bool = Field(True, description="packets say that they understand marks: ECT(0)")

    @property
    def tos(self) -> int:
        """The whole byte, as cma_roce_tos and NCCL_IB_TC take it: DSCP 26 with ECT(0) is 106."""
        # The DSCP is the upper six bits of the byte; the lower two are ECN's, where ECT(0) is 0b10 (RFC 3168).
        return self.dscp << 2 | (2 if self.ecn else 0)


class PfcSection(Section):
    """Priority flow control of the NIC's port."""

    priorities: list[Priority] = Field(default=[3], description="lossless priorities; []: none, a lossy fabric")


class CnpSection(Section):
    """Congestion notification packets."""

    dscp: Dscp = Field(48, description="DSCP of CNPs")
    priority: Priority = Field(6, description="802.1p priority of CNPs, one that data never blocks")


class RetransmissionSection(Section):
    """Behaviour of a sender without an answer. The first two are the queue pair's: NCCL sets them, no NIC file does."""

    # Five bits of a queue pair (InfiniBand's Local ACK Timeout), where 0 would wait for ever.
    timeout: int = Field(18, ge=1, le=31, description="exponent T of 4.096 us x 2^T; NCCL_IB_TIMEOUT")
    # Three bits of a queue pair (InfiniBand's retry count).
    retry_cnt: int = Field(7, ge=0, le=7, description="retries; NCCL_IB_RETRY_CNT")
    adaptive: bool | None = Field(None, description="adaptive retransmission (roce_adp_retrans_en)")
    slow_restart: bool | None = Field(None, description="slow restart after a loss (roce_slow_restart_en)")
    slow_restart_idle: bool | None = Field(None, description="slow restart after idling (roce_slow_restart_idle_en)")
    tx_window: bool | None = Field(None, description="window per queue pair (roce_tx_window_en)")
    ack_floor: bool | None = Field(None, description="floor of the ACK timer, T = 16; false ends it")
    selective_repeat: bool | None = Field(None, description="resend only what is missing (selective_repeat_forced_en)")


class FirmwareSection(Section):
    """Settings that survive a reset."""

    persist: bool = Field(False, description="also write DCQCN's parameters into the firmware's configuration")
    user_programmable_cc: bool | None = Field(None, description="algorithms of one's own (USER_PROGRAMMABLE_CC)")
    pcc_int: bool | None = Field(None, description="programmable control by telemetry (PCC_INT_EN)")
    shaper: Literal["device", "destination", "queue-pair", "5-tuple"] | None = Field(
        None, description="which flows share a rate limiter (ROCE_CC_SHAPER_COALESCE); device: its default"
    )
    cnp_dscp_mode: Literal["device", "fixed", "copied"] | None = Field(
        None, description="DSCP of CNPs: cnp.dscp, or the marked packet's (CNP_DSCP_MODE)"
    )
    adaptive_routing: bool | None = Field(None, description="adaptive routing may be used (ROCE_ADAPTIVE_ROUTING_EN)")
    selective_repeat: bool | None = Field(None, description="it may be used (RDMA_SELECTIVE_REPEAT_EN)")


class PpccSection(Section):
    """A parameter of an algorithm of NVIDIA's programmable congestion control; the NIC itself gives its range."""

    # Bounds are the widths of the fields algo_slot and algo_param_index of the register PPCC, and of its value.
    slot: int = Field(ge=0, le=15, description="where the algorithm stands")
    parameter: int = Field(ge=0, le=2**16 - 1, description="which of its parameters, from 0")
    value: int = Field(ge=0, le=2**32 - 1, description="its value; outside of the NIC's range nothing is written")


class SwitchSection(Section):
    """Thresholds at which switches mark; plans for switches read it, plans for NICs do not."""

    kmin_bytes: int | None = Field(None, ge=0, le=2**30, description="queue at which marking begins")
    kmax_bytes: int | None = Field(None, ge=0, le=2**30, description="queue above which every packet is marked")
    pmax_percent: int | None = Field(None, ge=0, le=100, description="share of packets marked at kmax")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.kmin_bytes is not None and self.kmax_bytes is not None and self.kmin_bytes > self.kmax_bytes:
            rule = f"is above switch.kmax_bytes = {self.kmax_bytes}"
            raise ConfigError("switch.kmin_bytes", self.kmin_bytes, rule, "lower it, or raise kmax_bytes")
        return self


class Profile(Section):
    """The whole file."""

    # Neither blanks nor newlines: it is printed in messages of one line and in the titles of tables.
    name: str = Field("default", pattern=r"^[\w.+-]{1,64}$", description="what plans and journals call it")
    law: Law = Field("dcqcn", description="congestion control that the NIC shall run")
    fallback: Literal["", "dcqcn", "rttcc", "none"] = Field("", description="law where the NIC cannot run the first")
    rtt_response_dscp: Dscp | None = Field(None, description="DSCP of answers to RTT probes (rttcc)")
    # Off by default: a pause of the whole link would stop lossy priorities along with the lossless ones.
    link_pause: bool | None = Field(False, description="802.3x pause of the whole link")
    traffic: TrafficSection = Field(default_factory=TrafficSection, description="marking of RDMA packets")
    pfc: PfcSection = Field(default_factory=PfcSection, description="lossless priorities")
    cnp: CnpSection = Field(default_factory=CnpSection, description="marking of CNPs")
    dcqcn: dict[str, int] = Field(default_factory=dict, description="DCQCN's parameters by their names on mlx5")
    retransmission: RetransmissionSection = Field(default_factory=RetransmissionSection, description="lost packets")
    firmware: FirmwareSection = Field(default_factory=FirmwareSection, description="what survives a reset")
    ppcc: list[PpccSection] = Field(default_factory=list, description="parameters of programmable control (rttcc)")
    switch: SwitchSection = Field(default_factory=SwitchSection, description="where switches mark")

    @field_validator("dcqcn", mode="before")
    @classmethod
    def _in_range(cls, values: object) -> object:
        # No table at all: pydantic's own error names the field.
        if not isinstance(values, dict):
            return values
        # Before pydantic, whose strict `int` would refuse `true` where the parameter is a switch.
        return {name: _checked(name, value) for name, value in values.items()}

    @model_validator(mode="after")
    def _rules(self) -> Self:
        """Check the rules between keys; a ConfigError says both values and the remedy."""
        lossless, own = self.pfc.priorities, self.traffic.priority
        if len(set(lossless)) < len(lossless):
            raise ConfigError("pfc.priorities", lossless, "names a priority twice", "name each once")
        if lossless and own not in lossless:
            rule = f"omits traffic.priority = {own}, so that RDMA packets would be dropped"
            raise ConfigError("pfc.priorities", lossless, rule, "add it, or give [] for a lossy fabric")
        # A port has one of the two: 802.3x pause for all of it, or PFC for single priorities.
        if self.link_pause and lossless:
            rule = f"stops every priority, pfc.priorities = {lossless} some"
            raise ConfigError("link_pause", True, rule, "use one of both: set link_pause = false")
        # A fallback to DCQCN counts: NICs that cannot run the first law take these parameters.
        if self.dcqcn and "dcqcn" not in (self.law, self.fallback):
            rule = f"has no effect under law = {self.law}"
            raise ConfigError("dcqcn", ", ".join(self.dcqcn), rule, "omit it, or set law or fallback to dcqcn")
        if self.ppcc and "rttcc" not in (self.law, self.fallback):
            raise ConfigError("ppcc", None, f"has no effect under law = {self.law}", "omit it, or set law = rttcc")
        places = [(one.slot, one.parameter) for one in self.ppcc]
        # The plan has one row for each parameter (`plan._key`), so one of two values would vanish unseen.
        twice = next((one for one in places if places.count(one) > 1), None)
        if twice:
            raise ConfigError("ppcc", None, f"gives parameter {twice[1]} of slot {twice[0]} twice", "give it once")
        if self.firmware.user_programmable_cc and "dcqcn" in self.laws:
            rule = "has no effect under DCQCN, of which ROCE_CC_LEGACY_DCQCN allows no other beside"
            raise ConfigError("firmware.user_programmable_cc", True, rule, "omit it, or set law = rttcc alone")
        most, least = self.dcqcn.get("rp_max_rate", 0), self.dcqcn.get("rp_min_rate", 0)
        # 0 is the line's rate, which a profile does not know; the plan for a device compares with that.
        if most and least > most:
            raise ConfigError("dcqcn.rp_min_rate", least, f"is above rp_max_rate = {most}", "lower it")
        return self

    @property
    def laws(self) -> tuple[Law, ...]:
        """Return the laws in the order in which they are tried."""
        return (self.law, self.fallback) if self.fallback else (self.law,)


def load_profile(path: Path) -> Profile:
    """Read a profile; `-` is stdin.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, a value is out of its range.
    """
    return parse_profile(read_profile(path), path)


def read_profile(path: Path) -> str:
    """The text of a profile; `-` is stdin.

    Raises:
        ConfigError: the file is missing or cannot be read.
    """
    try:
        # stdin is how `--hosts` hands the profile to the command on each host.
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError("--profile", path, "there is no such file", "examples/profiles/ has some") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--profile", path, f"cannot be read ({exc})", "give a readable TOML file in UTF-8") from exc


def parse_profile(text: str, path: Path) -> Profile:
    """A profile from its text; errors as `load_profile`, which name `path`."""
    try:
        tree = parse_toml(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError("--profile", path, f"is not TOML ({exc})", "correct that line") from exc
    return build_profile(tree)


def build_profile(tree: Mapping[str, Any]) -> Profile:
    """A profile from plain nested dictionaries; errors as `load_profile`."""
    try:
        return Profile.model_validate(tree)
    except ValidationError as exc:
        # The first one alone, for an error is one line: the next run shows the next.
        raise _translate(exc.errors()[0]) from exc


def fill_nccl(profile: Profile, settings: NcclConfig) -> NcclConfig:
    """Fill a job's settings of NCCL: what the job says, and where it is silent what the profile says."""
    own, fields_set = profile.retransmission, settings.model_fields_set
    filled: dict[str, Any] = {
        name: getattr(own, name) for name in ("timeout", "retry_cnt") if name in own.model_fields_set
    }
    if "traffic" in profile.model_fields_set:
        filled["traffic_class"] = profile.traffic.tos
    if "flap_s" in fields_set:
        filled.pop("timeout", None)
    return settings.model_copy(update={name: value for name, value in filled.items() if name not in fields_set})


def _checked(name: object, value: object) -> object:
    """A value of a known parameter within its range; the rest is left to pydantic."""
    field = f"dcqcn.{name}"
    known = PARAMETERS.get(str(name))
    if known is None:
        raise ConfigError(field, None, "unknown key", _nearest(str(name), [*PARAMETERS, *_ELSEWHERE]))
    if known.unit == "bool" and isinstance(value, bool):
        return int(value)
    # bool is a subclass of int: `true` would pass as a rate of 1.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(field, value, "must be a whole number", f"give {known.range_text}")
    if not known.low <= value <= known.high:
        raise ConfigError(field, value, f"must be {known.range_text}", f"the NIC's default is {known.default}")
    return value


def _translate(error: ErrorDetails) -> ConfigError:
    names = [str(part) for part in error["loc"]]
    field = ".".join(names)
    if error["type"] == "extra_forbidden":
        section: type[BaseModel] = Profile
        for name in (name for name in names[:-1] if not name.isdigit()):  # a number is a place in a list
            below = section.model_fields[name].annotation
            # ppcc is a list: the section is the class of its elements.
            inner = next(iter(get_args(below)), below)
            assert isinstance(inner, type)
            section = inner
        return ConfigError(field, None, "unknown key", _nearest(names[-1], list(section.model_fields)))
    message = error["msg"].replace("Input should be ", "must be ").replace("String should ", "must ")
    message = message.replace("a valid dictionary or instance of", "a table of keys:").replace(
        "dictionary", "table of keys"
    )
    return ConfigError(field, error["input"], message, "correct the value")


def _nearest(name: str, known: list[str]) -> str:
    """Suggest the key that was meant: one of the same section, else one of another section."""
    if name in _ELSEWHERE:
        return f"it is {_ELSEWHERE[name]} here"
    same = [path for path in _paths(Profile) if path.rpartition(".")[2] == name]
    if same:
        return f"did you mean {' or '.join(same)}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {_ELSEWHERE.get(close[0], close[0])}?"
    # Stricter than among the keys of this section (0.6, not 0.5): a key of another one is less likely meant.
    elsewhere = {path.rpartition(".")[2]: path for path in _paths(Profile)}
    close = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.6)
    return f"did you mean {elsewhere[close[0]]}?" if close else f"known keys here: {', '.join(known)}"


def _paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{prefix}{name}.")
        elif name == "dcqcn":
            yield from (f"dcqcn.{parameter}" for parameter in PARAMETERS)
        else:
            yield f"{prefix}{name}"
