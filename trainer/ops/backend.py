"""Choice of a tensor's operators: Triton's kernels, or torch's own, which torch.compile fuses; and of its products.

Not covered: what the kernels compute (`norm`, `activation`, `loss`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from collectives.triton_support import HAS_TRITON, IS_INTERPRETED
from netlayer.errors import ConfigError

Operators = Literal["auto", "torch", "triton"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_triton(operators: Operators, tensor: Tensor) -> bool:
    """Whether the kernels compute on `tensor`.

    `auto` leaves what torch.compile sees to the compiler, which fuses norms and activations with what is around them;
    a kernel of ours would be a wall to it. float64 has no kernel.
    """
    if operators == "torch" or not HAS_TRITON or tensor.dtype not in _DTYPES:
        return False
    if operators == "auto" and torch.compiler.is_compiling():
        return False
    return tensor.is_cuda or (IS_INTERPRETED and tensor.device.type == "cpu")


def autotunes_gemms(operators: Operators) -> bool:
    """Whether the algorithm of a product is chosen by measuring (`collectives.tensor.autotuned_gemm`), or by torch."""
    return operators == "auto"


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operator that torch.compile knows by its name, and all others call as it is.

    Torch's dispatch of a custom operator in Python takes 10 to 16 us of the host: longer than to launch a kernel. As
    with torch's own operators, `register_fake` takes a function of its outputs' shapes.
    """

    def make(function: Callable[..., Any]) -> Any:
        known = torch.library.custom_op(name, mutates_args=())(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return known(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        call.register_fake = known.register_fake  # type: ignore[attr-defined]
        return call

    return make


def check_operators(operators: Operators, device: torch.device) -> None:
    """Refuse kernels that were asked for by name where they cannot run.

    Raises:
        ConfigError: no Triton, or no GPU.
    """
    if operators != "triton" or device.type == "meta":
        return
    rule = "is not installed" if not HAS_TRITON else f"does not run on {device.type}"
    if not HAS_TRITON or (device.type != "cuda" and not IS_INTERPRETED):
        raise ConfigError("job.model.operators", operators, rule, "set auto, or give a GPU and a CUDA build of torch")


def sums_narrowly(tensor: Tensor) -> bool:
    """Whether torch's own backward would add up rows of gradients in the dtype of `tensor`, and lose most of them.

    So it does on a CPU in bfloat16: of thousands of rows, the sums for a norm or for a token are off by half.
    """
    return tensor.device.type == "cpu" and tensor.dtype.itemsize < 4 and not torch.compiler.is_compiling()


def num_programs(tensor: Tensor, num_rows: int, each: int) -> int:
    """Programs of a kernel that loops over rows: `each` a multiprocessor, and no more than there are rows."""
    if not tensor.is_cuda:
        return min(num_rows, 3)  # interpreted: more than one, and fewer than the rows
    return min(num_rows, each * torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def take_amax(tensor: Tensor, amax: Tensor | None) -> None:
    """Set a scalar to the largest magnitude of a tensor, by torch's operators, where one is given."""
    if amax is not None:
        amax.copy_(tensor.detach().abs().amax())


def as_rows(tensor: Tensor) -> Tensor:
    """[M, N] with the last dimension dense: a view where there is one (a slice of a wider product has one)."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
