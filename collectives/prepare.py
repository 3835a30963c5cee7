"""Before the first step: what is supported, communicators, which order, and the same start on every rank.

Left out: modules on several devices, and parameters that do not exist yet.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.bucket import Bucket, BucketPlan, plan_buckets
from collectives.lane import Lane


def check_module(module: nn.Module) -> torch.device:
    """The device of a module that can be sharded; ValueError says why another cannot."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"{name} has no values yet; initialise the module before wrapping it")
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: only floating-point parameters can be sharded")
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(f"{name} has sparse gradients, which cannot be scattered; build it with sparse=False")
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1:
        raise ValueError(f"the module needs parameters on one device, found {sorted(map(str, devices)) or 'none'}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("no parameter of the module requires a gradient")
    return devices.pop()


def open_groups(
    group: dist.ProcessGroup | None, device: torch.device, names: Sequence[str], timeout: timedelta | None = None
) -> list[dist.ProcessGroup | None]:
    """New process groups of the ranks of `group` (None: all), one a name; None each where there is one rank.

    Every rank of `group` calls this. Where `group` is not the whole world, only its own ranks take part, and torch
    names such a group by its ranks and by the number of groups that each of them is in already: that number must be
    the same on all of them. Otherwise make the groups beforehand and pass them in.

    Raises:
        ValueError: this rank is not in `group`, or the group has no backend for the device.
    """
    if group is None and not dist.is_initialized():
        return [None] * len(names)
    if not isinstance(group, dist.ProcessGroup | None):  # torch gives outsiders a number
        raise ValueError("this rank is not a member of the group")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == 1:
        return [None] * len(names)
    local = len(ranks) < dist.get_world_size()
    backend = _backend_of(group, device)
    return [
        dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=local, group_desc=name)
        for name in names
    ]


def plan_module(
    module: nn.Module, bucket_bytes: int, world_size: int, param_dtype: torch.dtype | None, order: Sequence[str] | None
) -> list[BucketPlan]:
    """Buckets of the trainable parameters, in `order` or else in order of registration.

    Raises:
        ValueError: `order` names other parameters.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    names = list(parameters) if order is None else order
    if sorted(names) != sorted(parameters):
        odd = sorted(set(names) ^ set(parameters)) or "a name comes twice"
        raise ValueError(f"order must name every trainable parameter once: {odd}")
    layout = [(name, parameters[name].shape, param_dtype or parameters[name].dtype) for name in names]
    return plan_buckets(layout, bucket_bytes, world_size)


def check_same(lane: Lane, module: nn.Module, settings: object) -> None:
    """Ranks that differ would hang or mix up parameters later: the same ValueError on all of them now."""
    description = repr((settings, [(name, tensor.shape, tensor.dtype) for name, tensor in _replicated(module)]))
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=lane.device)
    lane.all_reduce(extremes, dist.ReduceOp.MAX)
    highest, negative_lowest = extremes.tolist()
    if highest != -negative_lowest:
        raise ValueError("ranks differ in the module's parameters or buffers, or in the arguments of the wrapper")


def build_buckets(module: nn.Module, plans: Sequence[BucketPlan], lane: Lane) -> list[Bucket]:
    """Move the trainable parameters into buckets that hold rank 0's values."""
    parameters = dict(module.named_parameters())
    return [_build(plan, [parameters[slot.name] for slot in plan.slots], lane) for plan in plans]


def same_start(module: nn.Module, lane: Lane, param_dtype: torch.dtype | None) -> list[nn.Parameter]:
    """Give frozen parameters and buffers rank 0's values; frozen ones are cast to `param_dtype`, and returned."""
    frozen: list[nn.Parameter] = []
    for _, tensor in _replicated(module):
        values = tensor.detach().contiguous()
        lane.broadcast(values)
        tensor.detach().copy_(values)
        if isinstance(tensor, nn.Parameter):
            frozen.append(tensor)
            if param_dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(param_dtype)
    return frozen


def find_owners(module: nn.Module, buckets: Sequence[Bucket]) -> dict[nn.Module, list[int]]:
    """Modules that hold trainable parameters themselves, and the buckets that these lie in."""
    index_of = {id(parameter): bucket.plan.index for bucket in buckets for parameter in bucket.parameters}
    owners: dict[nn.Module, list[int]] = {}
    for child in module.modules():
        own = {index_of[id(p)] for p in child.parameters(recurse=False) if id(p) in index_of}
        if own:
            owners[child] = sorted(own)
    return owners


def execution_order(module: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Names of trainable parameters in the order in which `module(*args, **kwargs)` calls their owners; then the rest.

    Run on the module before wrapping, without gradients; pass it as `order` where modules are registered in another
    order than they run. Buffers that a forward updates (batch norm) are updated.
    """
    names: dict[str, None] = {}

    def note(prefix: str, owner: nn.Module, _args: object) -> None:
        own = owner.named_parameters(prefix, recurse=False)
        names.update((name, None) for name, parameter in own if parameter.requires_grad)

    handles = [
        owner.register_forward_pre_hook(functools.partial(note, prefix)) for prefix, owner in module.named_modules()
    ]
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    rest = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
    return list(dict.fromkeys((*names, *rest)))


def _replicated(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What every rank holds whole: frozen parameters and buffers."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return [*frozen, *module.named_buffers()]


@torch.no_grad()
def _build(plan: BucketPlan, parameters: Sequence[nn.Parameter], lane: Lane) -> Bucket:
    master_dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    flat_N = torch.zeros(plan.padded_numel, dtype=master_dtype, device=lane.device)
    for view, parameter in zip(plan.views(flat_N), parameters, strict=True):
        view.copy_(parameter)
    lane.broadcast(flat_N)
    return Bucket(plan, flat_N, parameters, lane.rank)


def _backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backends = dict(entry.split(":") for entry in config.split(","))
    if device.type not in backends:
        raise ValueError(f"the process group has no backend for {device.type} (it has {config}); move the module first")
    return backends[device.type]
