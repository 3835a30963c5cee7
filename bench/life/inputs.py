"""Inputs of the model of a run's life: failures by kind, checkpoints, recovery, replicas; each number as a range.

A number that is known is one value; one that is not is a range, with its source or with the reason for the range. A
range is either of the run (one unknown value, drawn once) or of the event (it differs from failure to failure, and
averages out). Not covered: where the numbers come from (`cases.toml`, `defaults.toml`, the user's file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from netlayer.config.file import parse_toml
from netlayer.config.section import Section
from netlayer.config.tree import build_section
from netlayer.errors import ConfigError

DAY_S = 86400.0
MINUTE_S = 60.0
DEFAULTS_FILE = Path(__file__).with_name("defaults.toml")


class Range(Section):
    """A number between two bounds, uniform."""

    low: float = Field(ge=0, description="lower bound")
    high: float = Field(ge=0, description="upper bound")
    per: Literal["run", "event"] = Field("run", description="drawn once a run, or anew at each failure")
    source: str = Field("", description="where it is published")
    reason: str = Field("", description="why these bounds, where it is not published")

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        return self

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def is_uncertain(self) -> bool:
        """True if a run has one value of it, which is not known."""
        return self.per == "run" and self.high > self.low


def exactly(value: float, source: str = "") -> Range:
    """Return the range of one value."""
    return Range(low=float(value), high=float(value), source=source)


def _as_range(value: object) -> object:
    """Take a plain number for a range of one value, and two for a lower and an upper bound."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"low": float(value), "high": float(value)}
    if isinstance(value, list) and len(value) == 2:
        return {"low": value[0], "high": value[1]}
    return value


Numbers = Annotated[Range, BeforeValidator(_as_range)]
NONE = Range(low=0.0, high=0.0)


class FailureKind(Section):
    """One kind of interruption: how often, and how long until the recovery can start.

    The rate is one of three: of a server (it grows with the cluster, and a recovery can fail too), or as somebody
    counted it over a whole run (a count, or a day's), where what happens within a recovery is one interruption with it.
    """

    name: str = Field(min_length=1, description="what reports call it")
    per_1000_server_days: Numbers | None = Field(None, description="failures of 1,000 servers in a day of training")
    count: Numbers | None = Field(None, description="interruptions counted in the run's days")
    per_day: Numbers | None = Field(None, description="interruptions of the whole job counted a day")
    detect_s: Numbers = Field(NONE, description="seconds in which nothing trains, until it is noticed")
    diagnose_s: Numbers = Field(NONE, description="seconds until it is known which servers have to go")
    servers: int = Field(1, ge=0, description="servers that are replaced; 0: restart on the same ones")
    is_switch: bool = Field(False, description="all servers under one switch are lost at once")
    planned: bool = Field(False, description="announced: a checkpoint is taken first, no work is lost")
    slowdown: float = Field(
        0.0, ge=0, lt=1, description="share of the speed lost until it is noticed, in place of a stop (fail-slow)"
    )
    source: str = Field("", description="where the kind is published")

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        rates = [name for name in ("per_1000_server_days", "count", "per_day") if getattr(self, name) is not None]
        if len(rates) != 1:
            raise ValueError(f"needs one rate of per_1000_server_days, count and per_day, has {len(rates)}")
        return self

    @property
    def is_counted(self) -> bool:
        return self.per_1000_server_days is None


class Checkpoints(Section):
    """Interval and cost of saves."""

    every_s: Numbers = Field(description="seconds of training between two saves")
    stall_s: Numbers = Field(NONE, description="seconds in which training waits for a save")
    durable_s: Numbers = Field(NONE, description="seconds from the stall until a restart can load it")

    @model_validator(mode="after")
    def _above_zero(self) -> Self:
        if self.every_s.low <= 0:
            raise ValueError("every_s must be above 0")
        return self


class Recovery(Section):
    """Steps of a recovery once it is known which servers have to go."""

    restart_s: Numbers = Field(description="seconds from servers in place to the first step: processes, groups, load")
    standbys: int = Field(0, ge=0, le=4096, description="servers that wait, checked and with their environment ready")
    standby_s: Numbers = Field(NONE, description="seconds to put a standby in place")
    reschedule_s: Numbers = Field(NONE, description="seconds to get a server where no standby is ready")
    replenish_s: Numbers = Field(NONE, description="seconds until a used standby is replaced by another")


class Replicas(Section):
    """Data-parallel replicas as units of failure: the others go on without the one that failed (FT-HSDP)."""

    number: int = Field(1, ge=1, le=1024, description="replicas; 1: a failure stops the whole job")
    stall_s: Numbers = Field(NONE, description="seconds in which all wait after a failure: timeout, new groups, step")
    rejoin_stall_s: Numbers = Field(NONE, description="seconds in which all wait when a replica comes back")


class Life(Section):
    """All that the model knows of a run."""

    name: str = Field("run", description="what reports call it")
    servers: int = Field(1, ge=1, description="servers that train")
    gpus_per_server: int = Field(8, ge=1, description="GPUs a server")
    servers_per_switch: int = Field(32, ge=1, description="servers that one switch takes down")
    days: float = Field(30.0, gt=0, le=3650, description="days of the run")
    slow_share: Numbers = Field(NONE, description="share of the speed that stragglers cost for as long as it runs")
    failures: tuple[FailureKind, ...] = Field((), description="kinds of interruptions", strict=False)
    checkpoints: Checkpoints = Field(description="saves")
    recovery: Recovery = Field(description="restarts")
    replicas: Replicas = Field(Replicas(), description="replicas that fail one by one")

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.recovery.standbys > self.servers:
            raise ValueError(f"recovery.standbys = {self.recovery.standbys} is above servers = {self.servers}")
        if self.replicas.number > self.servers:
            raise ValueError(f"replicas.number = {self.replicas.number} is above servers = {self.servers}")
        if self.slow_share.high >= 1:
            raise ValueError("slow_share must be below 1")
        if len({kind.is_counted for kind in self.failures}) > 1:
            raise ValueError("rates of servers and counted ones cannot be mixed")
        names = [kind.name for kind in self.failures]
        if len(set(names)) < len(names):
            raise ValueError("two kinds have one name")
        return self

    @property
    def is_counted(self) -> bool:
        """True if rates are interruptions that somebody counted, which come one at a time."""
        return bool(self.failures) and self.failures[0].is_counted

    def servers_lost(self, kind: FailureKind) -> int:
        """Return how many servers a failure of this kind takes."""
        return min(self.servers, self.servers_per_switch if kind.is_switch else kind.servers)

    def ranges(self) -> Iterator[tuple[str, Range]]:
        """Yield every range with its path, such as `recovery.restart_s` or `failures.gpu.detect_s`."""
        yield "slow_share", self.slow_share
        for section in ("checkpoints", "recovery", "replicas"):
            for name, value in getattr(self, section):
                if isinstance(value, Range):
                    yield f"{section}.{name}", value
        for kind in self.failures:
            for name, value in kind:
                if isinstance(value, Range):
                    yield f"failures.{kind.name}.{name}", value


def read_life(path: Path, option: str, **replaced: Any) -> Life:
    """Read a life from a TOML file; `replaced` are top-level keys that go before the file's.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or a value breaks a rule.
    """
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(option, path, "there is no such file", f"copy {DEFAULTS_FILE.name} of bench/life") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(option, path, f"cannot be read ({exc})", "give a readable TOML file in UTF-8") from exc
    except ValueError as exc:  # tomllib's error is one
        raise ConfigError(option, path, f"is not TOML ({exc})", "fix that line") from exc
    return build_life({**tree, **replaced}, f"{path.name}: ")


def build_life(tree: Mapping[str, Any], prefix: str = "") -> Life:
    """Build a life from nested dictionaries.

    Raises:
        ConfigError: a key is unknown, a value breaks a rule.
    """
    return build_section(Life, tree, prefix)
