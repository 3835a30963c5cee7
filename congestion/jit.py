"""How kernels are compiled, and kept.

Without numba's reference counts (`_nrt`), which would cost more than everything else: the tables are handed from kernel
to kernel, and no kernel makes an array. Kernels that call each other in a circle cannot be loaded from numba's cache.

A call that is not inlined is handed every array of the tables, some 300 words: what is called often is `inlined`.

numba looks only at the file of the function that it keeps, not at those of the kernels in it. So they are kept under a
digest of all of their sources, a law's from a file among them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba

from netlayer.cache import cache_folder

_njit: Any = partial(numba.njit, _nrt=False, error_model="numpy")
kernel: Any = _njit()
inlined: Any = _njit(forceinline=True)


def entry(function: Callable[..., Any]) -> Any:
    """Compile what Python calls, without its lock; kept in XDG_CACHE_HOME or ~/.cache, netlayer/, if that can be."""
    compiled = _njit(nogil=True)(function)
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return compiled
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)  # type: ignore[attr-defined]
    try:
        compiled.enable_caching()
    except RuntimeError:  # numba can write neither there nor anywhere else
        return compiled
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    _keep_if_there_is_room(compiled._cache)
    return compiled


def _keep_if_there_is_room(cache: Any) -> None:
    """On a full disk a kernel is compiled again next time; numba would raise."""
    save = cache.save_overload

    def save_if_can(*signature_and_code: object) -> None:
        with contextlib.suppress(OSError):
            save(*signature_and_code)

    cache.save_overload = save_if_can


def are_kept() -> bool:
    """Whether the engine's kernels were compiled before, by this version and with this law."""
    try:
        return any(_folder().glob("engine_*/*.nbi"))
    except OSError:  # nowhere
        return False


def _folder() -> Path:
    """Raise OSError where this user has no home folder."""
    return cache_folder() / "kernels" / _digest()


def _digest() -> str:
    here = Path(__file__).parent
    engine = (
        file for file in here.glob("engine/**/*.py") if not file.name.startswith(("build", "__"))
    )  # no kernels there
    sources = [here / "jit.py", here / "machine.py", *engine, *here.glob("control/*.py")]
    from congestion.control.entered import source  # which needs this module

    digest = hashlib.sha256(numba.__version__.encode() + source)
    for file in sorted(sources):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
