"""A law from somebody's file. One a process, entered before the engine is loaded, which is then compiled around it.

The file is a module as `dcqcn` and `swift` are: PARAMETERS and STATE (numpy's record types), `parameters(section,
host_bps, settings)` which gives a row of PARAMETERS, and the kernels `start`, `advance`, `on_ack` and `on_loss`; plain
functions are made kernels. `section` is what the file's own class `Section` makes of `congestion.plugin`. What a law
does with its flow is checked before it is compiled (`law_source`) and again as it runs (`laws`).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from congestion.control.law_source import check_fields
from congestion.engine.tables import LAW_SETS, VIEW
from congestion.kernels.jit import kernel
from netlayer.errors import ConfigError

law: ModuleType | None = None
name = ""
source = b""
path: Path | None = None

BOUND = frozenset({"congestion.control.laws", "congestion.engine.run"})
"""Modules whose kernels are made around `law`."""
_CALLS = {"start": 3, "advance": 4, "on_ack": 7, "on_loss": 4}
_REMEDY = "see `netlayer arena --help` for what a law's file holds"


def enter(file: Path) -> str:
    """Load a law's file; the name that `simulate` knows it by, which is the file's without `.py`.

    Raises:
        ConfigError: the file cannot be run, or something of a law is missing from it.
        RuntimeError: the engine is loaded already, without this law.
    """
    global law, name, source, path
    try:
        text = file.read_bytes()
    except OSError as exc:
        raise ConfigError("LAW", file, f"cannot be read ({exc})", "give a law's file") from exc
    if law is not None and text == source:
        return name
    if not BOUND.isdisjoint(sys.modules):
        raise RuntimeError("a law is entered before the engine is loaded: it would run without the law")
    if law is not None:
        rule = f"is the second law's file, and {path} is entered already"
        raise ConfigError("LAW", file, rule, "run one law from a file at a time")
    law, name, source, path = _load(file, text), file.stem, text, file
    return name


def parameters_of(settings: Any, host_bps: int) -> Any:
    """The row of PARAMETERS that the law's file makes of `congestion.plugin`.

    Raises:
        ConfigError: the file has no such setting, or does not make such a row.
    """
    assert law is not None
    made_by = getattr(law, "Section", None)
    if made_by is None and settings.plugin:
        key, value = next(iter(settings.plugin.items()))
        raise ConfigError(f"congestion.plugin.{key}", value, f"sets nothing: {path} has no Section", "omit it")
    try:
        section = made_by(**settings.plugin) if made_by else None
    except Exception as exc:  # whatever the file's class does
        raise _of_section(exc) from exc
    for key, value in settings.plugin.items():
        if not hasattr(section, key):
            known = ", ".join(getattr(made_by, "model_fields", {})) or "none"
            raise ConfigError(f"congestion.plugin.{key}", value, f"sets nothing in {path}", f"known: {known}")
    try:
        made = law.parameters(section, host_bps, settings)
    except Exception as exc:  # anything may be in it
        raise ConfigError("LAW", path, f"its parameters() fails ({type(exc).__name__}: {exc})", "correct it") from exc
    if not (isinstance(made, np.ndarray) and made.dtype == law.PARAMETERS and made.shape == (1,)):
        shape = f"{type(made).__name__} of {getattr(made, 'shape', 'no')} shape"
        raise ConfigError("LAW", path, f"its parameters() gives {shape}", "return one row of PARAMETERS, shape (1,)")
    return made


def _of_section(exc: Exception) -> ConfigError:
    errors = getattr(exc, "errors", None)
    if callable(errors):  # pydantic's
        first = errors()[0]
        where = ".".join(map(str, first["loc"]))
        return ConfigError(f"congestion.plugin.{where}", first["input"], first["msg"], "give a value that fits")
    return ConfigError("LAW", path, f"its Section fails ({type(exc).__name__}: {exc})", "correct it")


def not_compiled(exc: Exception) -> ConfigError:
    """numba's many lines about the law's file as one: what is wrong, and where in the file."""
    text = str(exc)
    lines = re.findall(rf'File "[^"]*{re.escape(path.name)}", line (\d+)', text) if path else []
    messages = [line.strip() for line in text.splitlines()]
    what = [
        line
        for line in messages
        if re.match(r"(Unknown attribute|NameError|No implementation|Cannot|Invalid|Untyped)", line)
    ]
    reason = (
        what or [line for line in messages if line and not line.startswith(("Failed in", "During", "File"))] or [""]
    )[0]
    signature = next((line.removeprefix(">>> ") for line in messages if line.startswith(">>> ")), "")
    reason = f"{reason} {signature}" if signature and reason.endswith(":") else reason
    where = f"LAW {path}, line {lines[-1]}" if lines else f"LAW {path}"
    return ConfigError(where, None, f"cannot be compiled ({reason})", "use numbers and the record's fields alone")


def _load(path: Path, text: bytes) -> ModuleType:
    """Import a law from a file, and compile its functions.

    Raises:
        ConfigError: it is no Python, does not run, or lacks a record type or a function of the interface.
    """
    spec = importlib.util.spec_from_file_location(f"entered_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("LAW", path, "is no Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as exc:  # anything may be in it
        raise ConfigError("LAW", path, f"does not run ({type(exc).__name__}: {exc})", "correct it") from exc
    for record in ("PARAMETERS", "STATE"):
        if not (isinstance(getattr(module, record, None), np.dtype) and getattr(module, record).names):
            raise ConfigError("LAW", path, f"has no record type {record}", _REMEDY)
    for call, count in {"parameters": 3, **_CALLS}.items():
        function: Any = getattr(module, call, None)
        plain = getattr(function, "py_func", function)
        if not callable(plain) or plain.__code__.co_argcount != count:
            raise ConfigError("LAW", path, f"has no {call} of {count} arguments", _REMEDY)
        if plain is function and call in _CALLS:
            setattr(module, call, kernel(function))
    records = {"p": module.PARAMETERS, "own": module.STATE, "flow": VIEW}
    fields = {name: tuple(kind.names or ()) for name, kind in records.items()}
    check_fields(path, text.decode(errors="replace"), fields, LAW_SETS)
    return module
