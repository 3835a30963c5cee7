"""Compilation of kernels, and their cache.

Without numba's reference counts (`_nrt`), which would cost more than everything else: the tables are handed from kernel
to kernel, and no kernel makes an array. Kernels that call each other in a circle cannot be loaded from numba's cache.

A call that is not inlined is handed every array of the tables, some 300 words: what is called often is `inlined`.

numba looks only at the file of the function that it keeps, not at those of the kernels in it. So they are kept under a
digest of all of their sources, a law's from a file among them. Each kernel is kept as soon as it is compiled, inlined
ones too: compiling takes minutes on a busy machine, and a process that is killed meanwhile leaves those to the next.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, process_time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numba
from numba.core import event, types
from numba.core.dispatcher import Dispatcher

from netlayer.cache import cache_folder

if TYPE_CHECKING:
    from netlayer.progress import Stages

_njit: Any = partial(numba.njit, _nrt=False, error_model="numpy", no_cfunc_wrapper=True)
_new: list[Any] = []  # kernels that nothing is kept of yet
_WORTH_S = 0.5  # of a core: what takes less is not kept by itself


def kernel(function: Callable[..., Any]) -> Any:
    """Compile what kernels call.

    One whose first parameter is `s`, the tables, cannot be called by Python.
    """
    return _noted(_njit(no_cpython_wrapper=_takes_tables(function))(function))


def inlined(function: Callable[..., Any]) -> Any:
    """Compile what kernels call, as a part of each of them."""
    return _noted(_njit(forceinline=True, no_cpython_wrapper=_takes_tables(function))(function))


def entry(function: Callable[..., Any]) -> Any:
    """Compile what Python calls, without its lock.

    It is kept in XDG_CACHE_HOME or ~/.cache, netlayer/, if that can be, and so are the kernels made until now.
    """
    compiled = _njit(nogil=True)(function)
    _collect_seldom(compiled._compiler)
    kernels, _new[:] = [*_new, compiled], []
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return compiled
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)  # type: ignore[attr-defined]
    try:
        for each in kernels:
            each.enable_caching()
            _keep_what_can_be(each._cache, 0.0 if each is compiled else _WORTH_S)
    except RuntimeError:  # numba can write neither there nor anywhere else
        return compiled
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    _drop_parts_when_kept(compiled._cache, [each._cache for each in kernels[:-1]])
    return compiled


def _takes_tables(function: Callable[..., Any]) -> bool:
    """Whether only kernels call it: what would let Python do so takes sixty arrays apart, two thirds of compiling."""
    code = function.__code__
    return code.co_argcount > 0 and code.co_varnames[0] == "s"


def _collect_seldom(compiler: Any) -> None:
    """Look for garbage less often while it compiles: what it makes stays, and looking through took a tenth of it."""
    compile_ = compiler.compile

    def compile_seldom(arguments: Any, returned: Any) -> Any:
        before = gc.get_threshold()
        gc.set_threshold(100 * before[0], *before[1:])
        try:
            return compile_(arguments, returned)
        finally:
            gc.set_threshold(*before)

    compiler.compile = compile_seldom


def _noted(compiled: Any) -> Any:
    """A copy of a module's function with other globals has its name and place: numba would take one for the other."""
    function = compiled.py_func
    if function.__globals__ is getattr(sys.modules.get(function.__module__), "__dict__", None):
        _new.append(compiled)
    return compiled


def _keep_what_can_be(cache: Any, worth_s: float) -> None:
    """Save what can be saved: on a full disk a kernel is compiled again next time; numba would raise.

    One that is handed another kernel is never found again, for numba compares those as objects: it is not kept.
    """
    save, load = cache.save_overload, cache.load_overload
    began: dict[Any, float] = {}

    def can_be(signature: Any) -> bool:
        return not any(isinstance(each, types.Dispatcher) for each in _types(signature))

    def save_if_can(signature: Any, code: object) -> None:
        if can_be(signature) and process_time() - began[_types(signature)] >= worth_s:
            with contextlib.suppress(OSError):
                save(signature, code)

    def load_if_can(signature: Any, target: object) -> Any:
        kept = load(signature, target) if can_be(signature) else None
        began[_types(signature)] = process_time()  # else it is compiled now
        return kept

    cache.save_overload, cache.load_overload = save_if_can, load_if_can


def _types(signature: Any) -> tuple[Any, ...]:
    """numba asks with the arguments' types, and keeps with what comes out too."""
    return tuple(getattr(signature, "args", signature))


def _drop_parts_when_kept(cache: Any, parts: list[Any]) -> None:
    """Drop an entry's parts once it is kept: its own file has them; theirs (100 MB) are of use until then.

    A process that compiles another variant meanwhile loses what it would resume from if it were killed, and no more.
    """
    save = cache.save_overload

    def save_and_drop(signature: Any, code: object) -> None:
        save(signature, code)
        for part in parts:
            stem = part._cache_file._index_name.removesuffix(".nbi")
            for file in Path(part.cache_path).glob(f"{glob.escape(stem)}.*nb[ci]"):
                with contextlib.suppress(OSError):
                    file.unlink()

    cache.save_overload = save_and_drop


@contextmanager
def compile_progress(stages: Stages, name: str) -> Iterator[None]:
    """A stage that says which kernel of how many is compiled in the block; none is shown where that is soon over."""
    listener = _Listener()
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    try:
        with stages.wait(name, listener.progress):
            yield
    finally:
        event.unregister("numba:compile", listener)  # type: ignore[no-untyped-call]


class _Listener(event.Listener):
    """Kernels under way, each compiled on behalf of the one before it."""

    def __init__(self) -> None:
        self._under_way: list[Any] = []
        self._began = monotonic()

    def on_start(self, event: Any) -> None:
        self._under_way.append(event.data["dispatcher"])

    def on_end(self, event: Any) -> None:  # noqa: ARG002  (numba's signature)
        self._under_way.pop()

    def progress(self) -> tuple[int, int, str]:
        """Kernels that are ready, of how many, and words; (0, 0, words) between two kernels that Python calls."""
        seconds, stack = f"{monotonic() - self._began:.0f} s so far", self._under_way[:]
        ours = [each for each in stack if not each.py_func.__module__.startswith("numba.")]
        if not ours:
            return 0, 0, seconds
        done, total = count_kernels(ours[0])
        function = ours[-1].py_func
        where = f"{function.__module__}.{function.__name__}"
        return done, total, f"{where}, {done} of {total} kernels ready, {seconds}"


def count_kernels(compiled: Any) -> tuple[int, int]:
    """Count the kernels that one consists of, itself included: those that are compiled or were kept, and all.

    One that is ready may come twice, with arguments of other types: that is not counted.
    """
    ready: dict[int, bool] = {}
    waiting: list[tuple[Any, bool]] = [(compiled, False)]
    while waiting:
        each, within_ready = waiting.pop()
        is_ready = within_ready or bool(each.overloads)
        if ready.get(id(each), False) or (id(each) in ready and not is_ready):
            continue
        ready[id(each)] = is_ready
        waiting += [(called, is_ready) for called in _called(each.py_func)]
    return sum(ready.values()), len(ready)


def _called(function: Any) -> list[Any]:
    """Kernels that a function names, by itself or in a module that it names."""
    names = function.__code__.co_names
    known = [function.__globals__.get(name) for name in names]
    known += [getattr(each, name, None) for each in known if isinstance(each, ModuleType) for name in names]
    return [each for each in known if isinstance(each, Dispatcher)]


def _folder() -> Path:
    """Raise OSError where this user has no home folder."""
    return cache_folder() / "kernels" / _digest()


def _digest() -> str:
    here = Path(__file__).parent.parent
    engine = (
        file for file in here.glob("engine/**/*.py") if not file.name.startswith(("build", "__"))
    )  # no kernels there
    sources = [here / "kernels/jit.py", here / "kernels/machine.py", *engine, *here.glob("control/*.py")]
    from congestion.control.plugin import source  # which needs this module

    digest = hashlib.sha256(numba.__version__.encode() + source)
    for file in sorted(sources):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
