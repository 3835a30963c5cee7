"""A tuning profile: one TOML file of settings, each with its evidence, its expected gain and what that rests on.

Versioned; `diff` compares two, `explain` tells of one key. Not covered: how values are found (`planner`), and what
consumers take (`export`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tomlkit
from pydantic import Field

from netlayer.config.file import parse_toml
from netlayer.config.section import Section
from netlayer.config.tree import build_section
from netlayer.errors import ConfigError
from netlayer.results import write_text

VERSION = 1
Evidence = Literal["measured", "simulated", "formula", "none"]
"""measured: on hardware, by a record; simulated: packets, rates or failures, event by event; formula: a closed form or
the step's estimate; none: nothing here speaks for another value than the consumer's own."""
Area = Literal["nccl", "congestion", "retransmission", "collectives", "placement", "loader", "checkpoint"]
AREAS: tuple[Area, ...] = get_args(Area)
Value = bool | int | float | str
CANNOT_TELL = "cannot tell"


class Gain(Section):
    """Expected gain over the consumer's own value, as a share; negative where it costs."""

    of: Literal["step time", "effective training time"] = Field(
        description="share of the step that is saved, or of the time that trains in addition"
    )
    share: float = Field(description="middle")
    low: float = Field(description="lower end of the interval, 90% unless the evidence says otherwise")
    high: float = Field(description="upper end")
    evidence: Literal["measured", "simulated", "formula"] = Field(description="what the gain itself rests on")

    @property
    def text(self) -> str:
        """Return `+1.2% (0.8 to 1.9) of step time, formula`."""
        unit = "step time" if self.of == "step time" else "effective training time"
        return f"{self.share:+.2%} ({self.low:+.2%} to {self.high:+.2%}) of {unit}, {self.evidence}"


class Setting(Section):
    """One value for one consumer."""

    area: Area = Field(description="part of the profile")
    value: Value = Field(description="planned")
    default: Value | None = Field(None, description="what runs where nobody sets it; none: it is not set")
    consumer: str = Field(description="what reads the value")
    evidence: Evidence = Field(description="kind of what the value rests on")
    source: str = Field(description="where the value comes from")
    rests_on: str = Field("", description="what must hold for value and gain")
    gain: Gain | None = Field(None, description="over the default; none: cannot tell")
    no_gain: str = Field("", description="why there is no figure")

    @property
    def is_changed(self) -> bool:
        return self.value != self.default

    @property
    def gain_text(self) -> str:
        """Return the gain as text, or that it cannot be told."""
        if self.gain is not None:
            return self.gain.text
        head = CANNOT_TELL if self.is_changed else "none"
        return f"{head}: {self.no_gain}" if self.no_gain else head


class Profile(Section):
    """The whole file."""

    version: int = Field(VERSION, description="of the file's form")
    job: str = Field("", description="job that it was made for")
    cluster: str = Field("", description="its cluster")
    gpus: int = Field(1, ge=1, description="ranks of the job")
    device: str = Field("", description="GPU that steps were estimated for")
    nccl: str = Field("", description="release of NCCL whose defaults count")
    created_utc: str = Field("", description="when")
    step_s: float | None = Field(None, description="predicted step with the defaults, seconds")
    gain: Gain | None = Field(None, description="of all settings of the step that are estimated, together")
    tuner_rows: tuple[str, ...] = Field((), strict=False, description="rows for NCCL's example tuner, measured")
    settings: dict[str, Setting] = Field(default_factory=dict, description="by key")

    def to_toml(self) -> str:
        """Return the file's text, which `read_profile` reads back to the same."""
        document = tomlkit.document()
        document.add(tomlkit.comment("netlayer tune plan: what to set, why, and what it is expected to bring."))
        tree = self.model_dump(mode="json", exclude_none=True)
        settings = tree.pop("settings")
        for key, value in tree.items():
            document.add(key, tomlkit.item(value))
        tables = tomlkit.table(is_super_table=True)
        for key, setting in settings.items():
            table = tomlkit.table()
            table.update(setting)
            tables.add(key, table)
        document.add("settings", tables)
        return tomlkit.dumps(document)

    def save(self, path: Path) -> None:
        """Write the file; a ConfigError where that cannot be."""
        write_text(path, self.to_toml())

    def explain(self, key: str) -> Setting:
        """Return the setting of a key.

        Raises:
            ConfigError: there is none.
        """
        if key in self.settings:
            return self.settings[key]
        near = difflib.get_close_matches(key, self.settings, n=1, cutoff=0.4)
        ends = [name for name in self.settings if name.rpartition(".")[2] == key]
        remedy = f"did you mean {(ends or near)[0]}?" if ends or near else "tune plan lists them"
        raise ConfigError("KEY", key, "is no key of this profile", remedy)


def read_profile(path: Path, argument: str = "PROFILE") -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, is no TOML, of a later version, or a value breaks a rule.
    """
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(argument, path, "there is no such file", "give one that `netlayer tune plan` wrote") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(argument, path, f"cannot be read ({exc})", "give a readable TOML file in UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(argument, path, f"is not TOML ({exc})", "fix that line") from exc
    version = tree.get("version")
    if version != VERSION:
        rule = f"has version = {version!r}, and this program reads {VERSION}"
        raise ConfigError(argument, path, rule, "give a file that `netlayer tune plan` of this release wrote")
    return build_section(Profile, tree, f"{path.name}: ")


class Difference(Section):
    """One key in two profiles; None where a profile lacks it."""

    key: str
    first: Value | None
    second: Value | None
    why: str


def diff(first: Profile, second: Profile) -> Sequence[Difference]:
    """Return the keys whose value or evidence differs, in the order of the files."""
    differences = []
    keys: Mapping[str, Any] = dict.fromkeys([*first.settings, *second.settings])
    for key in keys:
        one, other = first.settings.get(key), second.settings.get(key)
        if one is None or other is None:
            side = "second" if one is None else "first"
            differences.append(
                Difference(
                    key=key,
                    first=None if one is None else one.value,
                    second=None if other is None else other.value,
                    why=f"in the {side} alone",
                )
            )
        elif one.value != other.value:
            why = f"{one.source}; {other.source}" if one.source != other.source else "same source, other inputs"
            differences.append(Difference(key=key, first=one.value, second=other.value, why=why))
        elif one.evidence != other.evidence:
            why = f"evidence: {one.evidence}; {other.evidence}"
            differences.append(Difference(key=key, first=one.value, second=other.value, why=why))
    return differences
