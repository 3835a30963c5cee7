"""Foundation of every netlayer package: configuration, layout, records, store, launch, report, command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.2.0"


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for the package's `__init__.py` (PEP 562), which imports a name's module on first use.

    So `from collectives.small import tune` works, and `import collectives.small.table` does not import the tuner with
    it, nor `netlayer --help` torch. Type checkers read the same names from imports under `TYPE_CHECKING`.

    Args:
        package: its `__name__`.
        homes: module of each public name, relative (`.tuner`) or absolute; a module of that name itself as `module:`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = import_module(home.removesuffix(":"), package)
        return module if home.endswith(":") else getattr(module, name)

    return get
