"""A profile: the settings that a search found, as a TOML file that people, NIC plans and switch plans read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from congestion.arena.run import Contender
from netlayer.config.file import parse_toml
from netlayer.errors import ConfigError
from netlayer.results import write_text

_PREFIX = "congestion."


def write_profile(path: Path, contender: Contender, comments: Sequence[str]) -> None:
    """The settings as TOML, with `comments`."""
    document = tomlkit.document()
    for line in comments:
        document.add(tomlkit.comment(line))
    document.add("law", tomlkit.item(contender.law))
    document.add("preset", tomlkit.item(contender.preset))
    tree: dict[str, Any] = {}
    for override in contender.overrides:
        path_, _, text = override.partition("=")
        *sections, name = path_.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = tomllib.loads(f"x = {text}")["x"]
    document.update(tree)
    write_text(path, tomlkit.dumps(document))


def read_profile(path: Path) -> Contender:
    """The law with the settings of a profile.

    Raises:
        ConfigError: the file cannot be read, is no profile, or sets what is unknown.
    """
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
        law, preset, settings = str(tree["law"]), str(tree["preset"]), tree["congestion"]
    except (OSError, ValueError, KeyError) as exc:
        remedy = "give a file that `netlayer arena --tune` or `netlayer sweep --optimise` wrote"
        raise ConfigError("--tuned", path, f"is no profile ({exc})", remedy) from exc
    contender = Contender(law, law, preset, tuple(f"{name}={value}" for name, value in _flat(settings, _PREFIX)))
    contender.settings()
    return contender


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in tree.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs
