"""Parameters that are read while their gather is under way: whoever reads or writes one in Python waits for it first.

Between an optimiser's step and the end of a bucket's all-gather, its memory holds old and new values. In that time its
parameters are of a subclass whose `__torch_function__` has the bucket made current, gives the parameter its own class
back, and only then does what was asked for: operators, `.data`, `torch._foreach_*`, numpy, copies, pickles, printing.
Shape, dtype and the like do not wait. A forward pass meets parameters of their own class: its hooks have waited.

[Note: aliases] What was made of a parameter before (`.data`, `.detach()`, a value of a `state_dict`) is a plain tensor
over the same memory. Every parameter has a storage of its own, so that one can tell that there is such a tensor: the
gather is then waited for as soon as it is launched (`has_aliases`).

Not covered: code that is handed the bare pointer of a tensor, or reads it in C++ without asking for
`__torch_function__`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


class Waiter(Protocol):
    """Makes the parameters of a bucket current."""

    def before_access(self, index: int) -> None:
        """Wait for bucket `index`; where it is current, its parameters have their own class back afterwards."""


# Beside the parameters, and not an attribute of theirs: that would be saved with them.
_waiters: MutableMapping[Tensor, tuple[weakref.ref[Waiter], int]] = WeakTensorKeyDictionary()


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}  # not every torch has all


@functools.cache
def _needs_no_values() -> frozenset[Any]:
    """Return the functions that read nothing of a tensor's values; its gradient is another tensor."""
    getters = _getters("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "grad_fn", "_version")
    getters |= _getters("itemsize", "nbytes", "names", "output_nr", "grad")
    getters |= _getters("_backward_hooks", "_post_accumulate_grad_hooks")
    getters |= _getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla")
    getters |= _getters("is_mps", "is_xpu", "retains_grad", "is_sparse_csr")
    grad: Any = Tensor.grad
    requires_grad: Any = Tensor.requires_grad
    setters = {grad.__set__, grad.__delete__, requires_grad.__set__}
    methods = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size}
    methods |= {Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__}
    methods |= {Tensor.storage_offset, Tensor.ndimension, Tensor.__len__, Tensor.register_hook, Tensor.requires_grad_}
    methods |= {Tensor.register_post_accumulate_grad_hook, Tensor.is_shared, Tensor.is_signed, Tensor.is_inference}
    functions = {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
    return frozenset(getters | setters | methods | functions)


def own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own: saved alone it is as large as it looks."""
    return dlpack.from_dlpack(torch._C._to_dlpack(view)).view(view.shape) if view.numel() else view


def num_holders(parameter: Tensor) -> int:
    """Count the holders of the parameter's storage: one more with each other tensor over it."""
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


def watch_access(parameters: Iterable[nn.Parameter], waiter: Waiter, index: int) -> None:
    """Have accesses to these parameters of bucket `index` ask `waiter`, which is held weakly."""
    for parameter in parameters:
        # Weakly, for the waiter holds the parameters: a wrapper that nobody uses any more must go with them.
        _waiters[parameter] = weakref.ref(waiter), index


def mark_pending(parameters: Iterable[nn.Parameter]) -> None:
    """Make every read or write of these parameters wait for their gather first."""
    for parameter in parameters:
        own: Any = type(parameter)
        # Marked already where a bucket is stepped and then gathered; Python makes no class (_Pending, subclass of it).
        if not issubclass(own, _Pending):
            parameter.__class__ = _pending_of(own)


def mark_current(parameters: Iterable[nn.Parameter]) -> None:
    """Let these parameters be read without a wait again: their gather was waited for."""
    for parameter in parameters:
        pending: Any = type(parameter)
        if issubclass(pending, _Pending):
            parameter.__class__ = _own_of(pending)


class CompanionHook:
    """A hook on a module that stays behind where that is copied or pickled: a copy is a module as any other.

    What travels in its place does nothing, and is of the standard library: a pickle loads without this package.

    Args:
        function: the hook; a compiler does not look into it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        if "__call__" not in vars(CompanionHook):  # a compiler comes with the first hook, not with the import
            disable: Any = torch.compiler.disable
            type.__setattr__(CompanionHook, "__call__", disable(CompanionHook._call))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, returns None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Unsharded(nn.Module):
    """Copy or pickle of a wrapper: its module, under the same names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Pending:
    """Mixed into the class of a parameter whose bucket is not current."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for all pending parameters among the arguments, unless `func` needs no values, and call it."""
        kwargs = kwargs or {}
        if func not in _needs_no_values():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Pending):
                    _wait_for(leaf)
            if not any(isinstance(leaf, _Pending) for leaf in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)  # with the own `__torch_function__` of a subclass
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # A parameter copies and pickles itself without asking for `__torch_function__`, and by its class.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _own_class(self) as parameter:
            return parameter.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _own_class(self) as parameter:
            return parameter.__reduce_ex__(protocol)

    def __dlpack__(self, **options: Any) -> Any:
        with _own_class(self) as parameter:
            return parameter.__dlpack__(**options)


@contextlib.contextmanager
def _own_class(parameter: Any) -> Iterator[Any]:
    """Wait for a parameter, and give it its own class, without the mark of a pending one, in the block."""
    _wait_for(parameter)
    pending: Any = type(parameter)
    if not isinstance(parameter, _Pending):
        yield parameter
        return
    parameter.__class__ = _own_of(pending)  # its shards are about to change, but have not
    try:
        yield parameter
    finally:
        parameter.__class__ = pending


def _wait_for(parameter: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        reference, index = _waiters.get(parameter, (None, 0))
        waiter = None if reference is None else reference()
        if waiter is None:  # the wrapper is gone, and so is all that was under way
            own: Any = type(parameter)
            parameter.__class__ = _own_of(own)
        else:
            waiter.before_access(index)


@functools.cache
def _pending_of(own: Any) -> Any:
    return type(own.__name__, (_Pending, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


@functools.cache
def _own_of(pending: Any) -> Any:
    return pending.__mro__[pending.__mro__.index(_Pending) + 1]
