"""Reading and writing of the configuration tree: defaults < TOML file < `--set a.b=value`, and back to TOML.

Not covered: which sections and keys there are, and their rules (`netlayer.config.tree`).
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomlkit

from netlayer.commands.example_files import examples_folder
from netlayer.config.renamed import RENAMED, with_new_keys
from netlayer.config.tree import Config, Section, build_config
from netlayer.errors import ConfigError
from netlayer.workload.presets import MODELS

logger = logging.getLogger(__name__)


def load_config(path: Path | None = None, overrides: Iterable[str] = (), *, option: str = "--config") -> Config:
    """Return the resolved tree: defaults, then the TOML file, then each `a.b=value`.

    Args:
        option: what gave the path, for errors.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, a value breaks a rule.
    """
    # Before the overrides: one of them may give by its new name what the file has by the old one.
    tree = with_new_keys(_read_toml(path, option), warn=True) if path else {}
    of_file = dict(_model_of(tree))
    for override in overrides:
        _apply_override(tree, override)
    _warn_of_preset(of_file, _model_of(tree))
    # Once, when all is in: a rule between two fields must not see one of them before its override.
    return build_config(tree)


def read_override(override: str, example: str) -> tuple[str, object]:
    """Return key and value of `a.b=value`.

    Raises:
        ConfigError: it has no key or no equals sign.
    """
    key, equals, text = override.partition("=")
    # `.a` and `a..b` have an empty part, which would become a key of that name.
    if not equals or not all(key.strip().split(".")):
        raise ConfigError("--set", override, "must read a.b=value", f"for example --set {example}")
    return key.strip(), _parse_value(text.strip())


def example(name: str) -> Path:
    """Return the path of a file of `examples/`, in a checkout or in the installed package."""
    path = examples_folder() / f"{name}.toml"
    if path.is_file():
        return path
    raise ConfigError("example", name, f"is not in {path.parent}", "name a file of examples/")


def to_toml(config: Config, *, describe: bool = False) -> str:
    """Format the tree as TOML that `load_config` reads back; `describe` adds each key's description."""
    document = tomlkit.document()
    _fill(document, config, describe)
    return tomlkit.dumps(document)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tree of a TOML document.

    Raises:
        tomllib.TOMLDecodeError: it is not TOML, or beyond Python's limits: nested too deep, or a number with thousands
            of digits.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # A ValueError as well, which the last branch would take for one of Python's own limits.
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deep") from None
    except ValueError as exc:
        # The end of Python's message is advice to the programmer, not to the user.
        raise tomllib.TOMLDecodeError(str(exc).partition(";")[0]) from None


def _read_toml(path: Path, option: str) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(option, path, "there is no such file", "give a TOML file; examples/ has some") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(option, path, f"cannot be read ({exc})", "give a readable TOML file in UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(option, path, f"is not TOML ({exc})", "fix that line") from exc


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, value = read_override(override, "job.optimizer.steps=50")
    *parents, last = _resolve(key.split("."))
    if parents and (new := RENAMED.get((parents[-1], last))):
        logger.warning("--set %s: %s is now called %s; the old name is read until version 0.5", override, last, new)
        last = new
    for name in parents:
        # The file may skip a table that the override goes into.
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError("--set", override, f"{name} is a value in the file, not a table", "fix the file")
        tree = below
    tree[last] = value


def _model_of(tree: dict[str, Any]) -> dict[str, Any]:
    job = tree.get("job")
    model = job.get("model") if isinstance(job, dict) else None
    return model if isinstance(model, dict) else {}


def _warn_of_preset(of_file: dict[str, Any], model: dict[str, Any]) -> None:
    """Warn where `--set model.preset` names a model, and sizes of the file make it another one."""
    name = model.get("preset")
    if name == of_file.get("preset") or not isinstance(name, str) or name not in MODELS:
        return
    sizes = MODELS[name]
    kept = [key for key in sizes if key in of_file and model[key] == of_file[key] != sizes[key]]
    if kept:
        values = ", ".join(f"{key} = {model[key]}" for key in kept)
        logger.warning(
            "--set model.preset=%s: the file's %s stay, for keys go before a preset; to have the preset's, take them "
            "out of the file, or --set them too",
            name,
            values,
        )


def _resolve(path: list[str]) -> list[str]:
    """Complete a short key: `overlap.dp` is `job.overlap.dp`, since only one section has `overlap`."""
    if path[0] in Config.model_fields:
        return path
    owners = [
        name
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, Section)
        and path[0] in field.annotation.model_fields
    ]
    # Where no section has it, or several, it stays as it is: `build_config` then refuses it as an unknown key.
    return [owners[0], *path] if len(owners) == 1 else path


def _parse_value(text: str) -> object:
    """Parse a value as TOML (numbers, booleans, lists, quoted text); anything else is text: `200G`, `adamw`, a path."""
    try:
        # tomllib reads documents only, so the value is put into one.
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _fill(table: Any, section: Section, describe: bool) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            table[name] = below = tomlkit.table()
            if describe:
                below.comment(field.description or "")
            _fill(below, value, describe)
        elif isinstance(value, dict):
            table[name] = below = tomlkit.table()
            if describe:
                below.comment(field.description or "")
            for key, each in value.items():
                if isinstance(each, Section):
                    below[key] = inner = tomlkit.table()
                    _fill(inner, each, describe)
                else:
                    below[key] = each
        elif value is not None:  # TOML has no word for it: what is optional and not given stays out
            item = tomlkit.item(value)
            table[name] = item.comment(field.description or "") if describe else item
