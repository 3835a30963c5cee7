"""A law from somebody's file. One a process, entered before the engine is loaded, which is then compiled around it.

The file is a module as `dcqcn` and `swift` are: PARAMETERS and STATE (numpy's record types), `parameters(section,
host_bps, settings)` which gives a row of PARAMETERS, and the kernels `start`, `advance`, `on_ack` and `on_loss`; plain
functions are made kernels. `section` is what the file's own class `Section` makes of `congestion.entered`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from congestion.jit import kernel
from netlayer.errors import ConfigError

law: ModuleType | None = None
name = ""
source = b""

_CALLS = {"start": 3, "advance": 4, "on_ack": 7, "on_loss": 4}
_REMEDY = "see `netlayer arena --help` for what a law's file holds"


def enter(path: Path) -> str:
    """Load a law's file; the name that `simulate` knows it by, which is the file's without `.py`.

    Raises:
        ConfigError: the file cannot be run, or something of a law is missing from it.
        RuntimeError: the engine is loaded already, without this law.
    """
    global law, name, source
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise ConfigError("LAW", path, f"cannot be read ({exc})", "give a law's file") from exc
    if law is not None and text == source:
        return name
    if "congestion.engine.run" in sys.modules:
        raise RuntimeError("a law is entered before the engine is loaded")
    law, name, source = _load(path), path.stem, text
    return name


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"entered_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("LAW", path, "is no Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as exc:  # anything may be in it
        raise ConfigError("LAW", path, f"does not run ({type(exc).__name__}: {exc})", "mend it") from exc
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
    return module
