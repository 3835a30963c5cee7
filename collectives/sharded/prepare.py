"""Preparation of the first step: checks of what is supported, communicators, bucket order, the same start on all ranks.

Not covered: modules on several devices, and parameters that do not exist yet.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
import types
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from collectives.alike import first_difference
from collectives.arguments import as_device, as_dtype
from collectives.sharded.bucket import Bucket, BucketPlan, plan_buckets
from collectives.sharded.collectives import free_bytes
from collectives.sharded.float8 import Float8Bucket, Float8Weights, Quantiser
from collectives.sharded.gather import AllGather
from collectives.sharded.policies import MOST_OF_FREE
from collectives.transport.communicator import Communicator
from collectives.transport.nccl_options import nccl_options
from collectives.transport.windows import are_worth_it
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch, timeout_of
from netlayer.errors import ConfigError, RanksMissing
from netlayer.store.arrivals import await_all
from netlayer.workload.buckets import REDUCTIONS_IN_FLIGHT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store
else:
    from torch.distributed import PrefixStore  # which torch's own types do not show

_AGAIN_S = 5.0  # for a rank that has given a wrapper up to begin its next one
_LONGEST_WAIT = timedelta(minutes=5)  # for the other ranks, where their group does not say: torch's own for stores

Init = Callable[[str, Tensor], None]
"""Fills a parameter, in place, by its name."""


def check_arguments(unused: str, data_writes: str) -> None:
    """Raise ValueError for a value that a `ShardedDataParallel` does not take."""
    if unused not in ("skip", "zero"):
        raise ValueError(f'unused = {unused!r}: must be "skip" or "zero"')
    if data_writes not in ("sync_masters", "ignore", "adopt"):  # the last is the first's name until 0.2
        raise ValueError(f'data_writes = {data_writes!r}: must be "sync_masters" or "ignore"')


def check_reshards(stage: int, units: Sequence[nn.Module], windows: bool) -> None:
    """Raise ValueError for what does not go with parameters that come and go (ZeRO stage 3)."""
    if stage < 3:
        return
    if not units:
        raise ValueError(
            "stage = 3: needs units, whose parameters are freed after use and gathered before the next: give "
            "units=model.blocks, or reshard=Reshard(gradients=True)"
        )
    if windows:
        raise ValueError(
            "stage = 3: goes without windows=True: memory that comes and goes cannot stay registered; omit windows"
        )


def wire_dtype(
    module: nn.Module, reduce_dtype: torch.dtype | str | None, param_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype in which gradients are reduced: never narrower than float32 unless the caller says so.

    Each addition over ranks would round to that dtype.
    """
    if reduce_dtype is None:
        dtypes = (param_dtype or p.dtype for p in module.parameters() if p.requires_grad)
        reduce_dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return as_dtype(reduce_dtype, "reduce_dtype")


def check_module(module: nn.Module, init: Init | None = None) -> torch.device:
    """Return the device of a module that can be sharded; ValueError says why another cannot."""
    for name, parameter in module.named_parameters():
        has_init = init is not None and parameter.requires_grad
        if isinstance(parameter, nn.parameter.UninitializedParameter) or (parameter.is_meta and not has_init):
            raise ValueError(f"{name} has no values yet; initialise the module before wrapping it, or give init")
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor: parameters that another scheme has cut cannot be sharded here; take the tensor-"
                "parallel linears of this package, or torch's fully_shard"
            )
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


def move_replicated(module: nn.Module, where: torch.device, device: torch.device | str | None) -> torch.device:
    """Move frozen parameters and buffers of a module to the device of its buckets, which is returned.

    Args:
        where: its parameters are.
        device: of the buckets; None: the same.

    Raises:
        ValueError: they are on another device than that, and not on the CPU.
    """
    target = where if device is None else as_device(device)
    if target.type == "meta":
        raise ValueError("device = None: the module is on the meta device; say where it shall compute")
    if where == target:
        return target
    if where.type not in ("cpu", "meta"):
        raise ValueError(f"device = {target}: the module is on {where}; leave it on the CPU, or move it there")
    for _, tensor in _replicated(module):
        tensor.data = tensor.data.to(target)
    return target


def as_groups(
    group: dist.ProcessGroup | DeviceMesh | None,
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the group that shards, and the one of the ranks that hold the same shard; None: there are no replicas.

    Args:
        group: as it is; or a mesh of one dimension, or of two: replicas, then shards.
    """
    if not isinstance(group, DeviceMesh):
        if not isinstance(group, dist.ProcessGroup | None):  # torch gives outsiders a number
            raise ValueError("this rank is not a member of the group")
        return group, None
    others = {"tp", "cp", "pp", "ep"}.intersection(group.mesh_dim_names or ())
    if group.ndim > 2 or (group.ndim == 2 and others):
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names or ''}: give the one that shards, "
            'such as mesh["dp"], or two, of replicas and of shards, such as mesh["dp_replicate", "dp_shard"]'
        )
    if group.ndim == 1:
        return group.get_group(), None
    return group.get_group(1), group.get_group(0) if group.size(0) > 1 else None


def open_replicas(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta | None,
    recorder: Recorder | None,
    watch: Watch | None,
) -> Communicator | None:
    """Open the communicator of the ranks that hold the same shard; None where there are no replicas."""
    if group is None:
        return None
    [replicas] = open_groups(group, device, ("replicas",), timeout)
    return Communicator("replicas", replicas, device, recorder, watch)


def open_groups(
    group: dist.ProcessGroup | None,
    device: torch.device,
    names: Sequence[str],
    timeout: timedelta | None = None,
    windows: bool = False,
) -> list[dist.ProcessGroup | None]:
    """New process groups of the ranks of `group` (None: all), one a name; None each where there is one rank.

    Every rank of `group` calls this. Where `group` is not the whole world, only its own ranks take part, and torch
    names such a group by its ranks and by the number of groups that each of them is in already: that number must be
    the same on all of them. Otherwise make the groups beforehand and pass them in. Where `init_process_group` was given
    a `device_id`, NCCL splits the world's communicator for each, and all ranks of the world take part at one place: the
    other ranks open groups of theirs there, or all of them wait.

    Args:
        group: the ranks; None: all.
        device: that the groups carry tensors of.
        names: one group each.
        timeout: of the new groups; None: that of `group`.
        windows: what they carry lies in windows: gathers then go by copy engines, where NCCL can (on one host).

    Raises:
        ValueError: this rank is not in `group`, or the group has no backend for the device.
        ConfigError: WORLD_SIZE names other ranks, and there is no process group yet.
    """
    if group is None and not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "WORLD_SIZE",
                os.environ["WORLD_SIZE"],
                "says that there are other ranks, and each would train alone",
                "call torch.distributed.init_process_group before wrapping",
            )
        return [None] * len(names)
    if not isinstance(group, dist.ProcessGroup | None):  # torch gives outsiders a number
        raise ValueError("this rank is not a member of the group")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == 1:
        return [None] * len(names)
    local = len(ranks) < dist.get_world_size()
    backend = _backend_of(group, device)
    timeout = timeout or timeout_of(group, device)
    return [
        dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=nccl_options(timeout, zero_ctas=True) if windows and backend == "nccl" else None,
            use_local_synchronization=local,
            group_desc=name,
        )
        for name in names
    ]


def open_communicators(
    group: dist.ProcessGroup | None,
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None,
    device: torch.device,
    timeout: timedelta | None,
    recorder: Recorder | None = None,
    watch: Watch | None = None,
    windows: bool = False,
) -> tuple[Communicator, Communicator]:
    """The communicators of gathers and of reductions; one and the same where `groups` holds one group twice."""
    gather_group, reduce_group = groups or open_groups(group, device, ("gather", "reduce"), timeout, windows)
    if gather_group is not None and gather_group is reduce_group:
        comm = Communicator("data", gather_group, device, recorder, watch)
        return comm, comm
    return (
        Communicator("gather", gather_group, device, recorder, watch),
        Communicator("reduce", reduce_group, device, recorder, watch),
    )


def plan_module(
    module: nn.Module,
    bucket_bytes: int | None,
    world_size: int,
    param_dtype: torch.dtype | None,
    order: Sequence[str] | None,
    units: Sequence[nn.Module] = (),
    align: int = 1,
    whole: Callable[[str, torch.Size], bool] | None = None,
    float8: Float8Weights | None = None,
) -> list[BucketPlan]:
    """Buckets of the trainable parameters, in `order` or else in order of registration; none spans two units.

    What lies beside weights in 8 bits in their units comes first, of all these units together: it is little, and stays
    in ZeRO stage 3. That is so whether weights travel in 8 bits or not, so that sums over ranks are the same.

    Args:
        align: shards are multiples of so many elements; the others as in `ShardedDataParallel`.
        float8: the weights that products read in 8 bits.

    Raises:
        ValueError: `order` names other parameters, or a unit is not a part of the module, or lies in another one; or
            whole parameters shall travel in 8 bits.
    """
    if whole is not None and float8 is not None and float8.quantiser is not None:
        raise ValueError("whole parameters do not travel in 8 bits: give `whole` or `precision.float8.quantiser`")
    unit_of = _units_of_parameters(module, units)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    names = list(parameters) if order is None else order
    if sorted(names) != sorted(parameters):
        odd = sorted(set(names) ^ set(parameters)) or "a name comes twice"
        raise ValueError(f"order must name every trainable parameter once: {odd}")
    beside = beside_float8(module, units, float8)
    names = sorted(names, key=lambda name: name not in beside)
    layout = [(name, parameters[name].shape, param_dtype or parameters[name].dtype) for name in names]
    units_of = [-2 if name in beside else unit_of.get(id(parameters[name]), -1) for name in names]
    is_whole = [] if whole is None else [bool(whole(name, shape)) for name, shape, _ in layout]
    is_float8 = [] if float8 is None else [float8.picks(name, shape) for name, shape, _ in layout]
    plans = plan_buckets(layout, bucket_bytes, world_size, units_of, align, is_whole, is_float8)
    travels = float8 is not None and float8.quantiser is not None and world_size > 1
    return [dataclasses.replace(plan, is_float8=plan.is_float8 and travels) for plan in plans]


def beside_float8(module: nn.Module, units: Sequence[nn.Module], float8: Float8Weights | None) -> frozenset[str]:
    """Return the names of the parameters that are not in 8 bits in products, of units that have some that are."""
    if float8 is None:
        return frozenset()
    unit_of = _units_of_parameters(module, units)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    picked = {name for name, parameter in parameters.items() if float8.picks(name, parameter.shape)}
    with_some = {unit_of.get(id(parameters[name])) for name in picked}
    return frozenset(
        name
        for name, parameter in parameters.items()
        if name not in picked and id(parameter) in unit_of and unit_of[id(parameter)] in with_some
    )


def check_communication(
    group: dist.ProcessGroup | None,
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None,
    comms: Sequence[Communicator] | None,
    device: torch.device,
    settings: Mapping[str, object],
) -> None:
    """Raise the same ValueError on all ranks if they differ in what their communicators are made by, before they are.

    A rank that makes groups waits for all others there, and one that was given its own would never come: so ranks
    compare over the store of `init_process_group`, which needs no group, in three operations each.

    Args:
        group, groups, comms: as in `ShardedDataParallel`.
        device: that the groups carry tensors of.
        settings: what else must be the same, by its name; it shows in the message.

    Raises:
        RanksMissing: not every rank of the group has come in the group's timeout.
    """
    # Of its own where there are none: the groups of a rank that differs are among the same ranks.
    shards = comms[1].group if comms else groups[1] if groups else group
    has_others = comms is None or comms[1].group is not None
    if not dist.is_initialized() or not has_others or not isinstance(shards, dist.ProcessGroup | None):
        return
    ranks = dist.get_process_group_ranks(shards or dist.group.WORLD)
    if len(ranks) == 1 or (groups is not None and groups[1] is None):
        return
    rank = dist.get_rank()
    opened = None if comms is None else [comm.group for comm in comms]
    values = {"groups": _describe(groups), "comms": _describe(opened), **settings}
    key = f"sharded/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]}"
    store = PrefixStore(key, dist.distributed_c10d._get_default_store())
    timeout = timeout_of(shards, device) or _LONGEST_WAIT
    try:
        while True:
            # A wrapper's own keys: every rank of these counts its wrappers, and makes them in one order.
            number = store.add(f"wrappers/{rank}", 1)
            try:
                await_all(
                    PrefixStore(f"{number}", store),
                    ranks.index(rank),
                    len(ranks),
                    same=values,
                    timeout=timeout,
                    serves=rank == 0,  # which as a rule serves the store of the world
                    names=ranks,
                )
                break
            except RanksMissing as exc:
                # Another rank tried this one in vain, without us, and is at a later one: ours is that.
                if rank not in exc.missing or not _has_gone_on(store, ranks, number):
                    raise
    except ConfigError as exc:
        if exc.field not in values:
            raise
        difference = f"{exc.field} = {exc.value} {exc.rule}"
        raise ValueError(
            f"ranks differ in the arguments of the wrapper: {difference}; give every rank the same"
        ) from None
    except RanksMissing as exc:
        rule = "every rank of the group makes a ShardedDataParallel, with the same arguments"
        raise RanksMissing(f"{exc}; {rule}", exc.missing) from None


def _has_gone_on(store: Store, ranks: Sequence[int], number: int) -> bool:
    """Whether a rank has begun a wrapper of a later number, or does so within some seconds."""
    until_s = time.monotonic() + _AGAIN_S
    while all(store.add(f"wrappers/{rank}", 0) <= number for rank in ranks):
        if time.monotonic() > until_s:
            return False
        time.sleep(_AGAIN_S / 10)
    return True


def _describe(groups: Sequence[dist.ProcessGroup | None] | None) -> str:
    """Return how many groups were made beforehand, and not which: their names may rightly differ from rank to rank."""
    if groups is None:
        return "not given"
    gather, reduce, *replicas = groups
    return ("one for both" if gather is reduce else "two") + (" and one of replicas" if replicas else "")


def check_same(
    comm: Communicator, module: nn.Module, plans: Sequence[BucketPlan], settings: Mapping[str, object]
) -> None:
    """Raise the same ValueError on all ranks if they differ, which would hang or mix up parameters later.

    Args:
        settings: what else must be the same, by its name; it shows in the message.
    """
    described = {name: str(value) for name, value in settings.items()}
    for plan in plans:
        for slot in plan.slots:
            cut = ("" if plan.whole_shard is None else ", whole") + ", gathered in 8 bits" * plan.is_float8
            described[f"parameter {slot.name}"] = f"{list(slot.shape)} {plan.dtype} in bucket {plan.index}{cut}"
    for name, tensor in _replicated(module):
        described[f"frozen parameter or buffer {name}"] = f"{list(tensor.shape)} {tensor.dtype}"
    # The order of the parameters counts, which a difference by name would not show.
    described["order"] = ", ".join(slot.name for plan in plans for slot in plan.slots)
    text = json.dumps(described)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if len({one for [one] in comm.all_gather_ints([digest], "arguments")}) == 1:
        return
    arguments = [json.loads(one) for one in comm.all_gather_text(text, "arguments")]
    raise ValueError(
        "ranks differ in the module's parameters or buffers, or in the arguments of the wrapper: "
        f"{first_difference(arguments, comm.ranks)}; give every rank the same"
    )


def build_buckets(
    module: nn.Module,
    plans: Sequence[BucketPlan],
    comm: Communicator,
    all_gather: AllGather,
    gradients: Mapping[int, Tensor] = types.MappingProxyType({}),
    reshards: Set[int] = frozenset(),
    init: Init | None = None,
    replicas: Communicator | None = None,
    quantiser: Quantiser | None = None,
) -> list[Bucket]:
    """Move the trainable parameters into buckets that hold rank 0's values.

    Args:
        module, plans, comm: as planned.
        all_gather: says where parameters lie.
        gradients: where reduced gradients lie, by the index of a bucket; of others in memory that is allocated here.
        reshards: indices of the buckets whose parameters come and go; they are freed as soon as they are built.
        init: fills a parameter that is on the meta device, by its name.
        replicas: of the ranks that hold the same shard, of which the first one has the values of all.
        quantiser: of the weights that travel in 8 bits.
    """
    parameters, buckets = dict(module.named_parameters()), list[Bucket]()
    names = {id(parameter): name for name, parameter in parameters.items()}
    for plan in plans:
        own = [parameters[slot.name] for slot in plan.slots]
        for parameter in (each for each in own if each.is_meta):
            # The parameter stays the one that the module and its user have; of its values nothing is there yet.
            swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
            swap(parameter, nn.Parameter(torch.empty_like(parameter, device=comm.device)))
            if init is not None and comm.rank == 0:
                init(names[id(parameter)], parameter.detach())
        flat_N = _values(plan, own, comm, replicas)
        memory, frees = (all_gather.allocate(plan), gradients.get(plan.index)), plan.index in reshards
        if plan.is_float8:
            assert quantiser is not None
            bucket: Bucket = Float8Bucket(plan, flat_N, own, comm.rank, quantiser, *memory, frees)
        else:
            bucket = Bucket(plan, flat_N, own, comm.rank, *memory, frees)
        del flat_N
        # Views of the functions that have built it are gone now: counted with them, they would hide as many aliases.
        bucket.note_holders()
        if frees:
            bucket.free()
        buckets.append(bucket)
    return buckets


def find_units(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the parts that a module repeats, such as its blocks: units where its user names none.

    They are the modules of lists (ModuleList, ModuleDict, Sequential) of one class, which have parts of their own, and
    together at least half of all that is trained; else none.
    """
    units: list[nn.Module] = []
    waiting = [module]
    while waiting:
        parent = waiting.pop(0)
        parts = list(parent.children())
        is_list = isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(parts) > 1
        are_alike = len({type(part) for part in parts}) == 1 and len(parts) == len(parent._modules)
        if is_list and are_alike and all(_is_unit(part) for part in parts):
            units += [part for part in parts if part not in units]
        else:
            waiting += parts
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    most = sum(parameter.numel() for parameter in trained if id(parameter) in inside)
    overlaps = sum(len(list(unit.modules())) for unit in units) > len({part for u in units for part in u.modules()})
    return () if overlaps or 2 * most < sum(parameter.numel() for parameter in trained) else tuple(units)


def _is_unit(part: nn.Module) -> bool:
    is_list = isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    has_parts = next(part.children(), None) is not None
    return has_parts and not is_list and any(parameter.requires_grad for parameter in part.parameters())


def shard_ranks(
    group: dist.ProcessGroup | None,
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None,
    comms: Sequence[Communicator] | None,
) -> int:
    """Return how many ranks share the shards: of the communicators, of groups made beforehand, or of `group`."""
    if comms is not None:
        return comms[1].world_size
    if groups is not None:
        return 1 if groups[1] is None else dist.get_world_size(groups[1])
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def usual_bytes(plans: Sequence[BucketPlan], dtype: torch.dtype) -> int:
    """Return the bytes of a usual bucket's gradients on the wire: a few are larger, such as token tables."""
    sizes = sorted((plan.padded_numel * dtype.itemsize for plan in plans), reverse=True)
    return sizes[min(REDUCTIONS_IN_FLIGHT, len(sizes) - 1)] if sizes else 0


def resolve_windows(
    windows: bool | Literal["auto"], group: dist.ProcessGroup | None, device: torch.device, num_bytes: int, stage: int
) -> bool:
    """Return whether the ranks of `group` (None: all) shall have windows: the same on all of them, who all call it.

    Args:
        windows: what the caller wants.
        num_bytes: of the buffers that are held for it.
        stage: of ZeRO.
    """
    # Asked without a collective: what has no NCCL gets its own error, or goes without. Outsiders have a number here.
    is_member = isinstance(group, dist.ProcessGroup | None)
    if not is_member or not dist.is_initialized() or dist.get_world_size(group) == 1 or not _has_nccl(group, device):
        return windows is True
    ranks = group or dist.group.WORLD
    # All ranks want the same, and are in the same stage: `check_communication`.
    if windows != "auto":
        return windows
    # On the caller's own group: how the wrapper's are made depends on the answer.
    comm = Communicator("windows", ranks, device)
    free = free_bytes(device)
    has_room = free is not None and num_bytes <= MOST_OF_FREE * free
    return stage < 3 and are_worth_it(ranks, comm, has_room=has_room)


def _has_nccl(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a group exchanges what lies on a device by NCCL."""
    return device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group)


def find_resharding(
    module: nn.Module,
    plans: Sequence[BucketPlan],
    units: Sequence[nn.Module],
    float8: Float8Weights | None = None,
) -> frozenset[int]:
    """Return the indices of the buckets that hold parameters of units: in ZeRO stage 3 these come and go.

    Not what lies beside weights in 8 bits (`plan_module`).
    """
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    names = {name for name, parameter in module.named_parameters() if id(parameter) in inside}
    names -= beside_float8(module, units, float8)
    # A bucket ends where a unit does, so that its first parameter stands for all.
    return frozenset(plan.index for plan in plans if plan.slots[0].name in names)


def master_dtypes(module: nn.Module, plans: Sequence[BucketPlan]) -> list[torch.dtype]:
    """Return the dtype of each bucket's masters."""
    parameters = dict(module.named_parameters())
    return [_master_dtype(parameters[plan.slots[0].name]) for plan in plans]


def same_start(module: nn.Module, comms: Sequence[Communicator], param_dtype: torch.dtype | None) -> list[nn.Parameter]:
    """Give frozen parameters and buffers rank 0's values; frozen ones are cast to `param_dtype`, and returned."""
    frozen: list[nn.Parameter] = []
    for _, tensor in _replicated(module):
        values = tensor.detach().contiguous()
        for comm in comms:
            comm.broadcast(values)
        tensor.detach().copy_(values)
        if isinstance(tensor, nn.Parameter):
            frozen.append(tensor)
            if param_dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(param_dtype)
    return frozen


@torch.no_grad()
def send_buffers(module: nn.Module, comms: Sequence[Communicator]) -> None:
    """Broadcast rank 0's values into the buffers of every rank, a broadcast a dtype and communicator, and wait."""
    device = comms[0].device
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.device.type == device.type and buffer.layout == torch.strided and buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        values = torch.cat([buffer.reshape(-1) for buffer in buffers])
        for comm in comms:
            comm.broadcast(values.view(torch.uint8))  # backends lack some dtypes
        if any(comm.rank != 0 for comm in comms):
            parts = torch.split(values, [buffer.numel() for buffer in buffers])
            for buffer, own in zip(buffers, parts, strict=True):
                buffer.copy_(own.view(buffer.shape))


def find_owners(
    module: nn.Module, buckets: Sequence[Bucket], units: Sequence[nn.Module] = ()
) -> dict[nn.Module, list[int]]:
    """Return the modules whose forward must wait, and the buckets that each needs.

    A unit needs all that is inside it; every other module outside the units, what it holds itself.
    """
    index_of = {id(parameter): bucket.plan.index for bucket in buckets for parameter in bucket.parameters}
    inside = {child for unit in units for child in unit.modules()}
    owners: dict[nn.Module, list[int]] = {}
    for child in module.modules():
        is_unit = any(child is unit for unit in units)
        if child in inside and not is_unit:
            continue
        own = {index_of[id(p)] for p in child.parameters(recurse=is_unit) if id(p) in index_of}
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


def _units_of_parameters(module: nn.Module, units: Sequence[nn.Module]) -> dict[int, int]:
    """Return the unit that each parameter is in, by the parameter's id; the first one for a parameter of several."""
    parts, seen = set(module.modules()), set[nn.Module]()
    unit_of: dict[int, int] = {}
    for number, unit in enumerate(units):
        inside = set(unit.modules())
        if not inside <= parts or inside & seen:
            where = "is no part of the module" if not inside <= parts else "lies in another unit, or holds one"
            raise ValueError(f"units[{number}] ({type(unit).__name__}) {where}: give parts that do not overlap")
        seen |= inside
        for parameter in unit.parameters():
            unit_of.setdefault(id(parameter), number)
    return unit_of


def _replicated(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors that every rank holds whole: frozen parameters and buffers."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return [*frozen, *module.named_buffers()]


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


@torch.no_grad()
def _values(
    plan: BucketPlan, parameters: Sequence[nn.Parameter], comm: Communicator, replicas: Communicator | None
) -> Tensor:
    """Return the values of one bucket's parameters, [N], those of rank 0 on all ranks."""
    flat_N = torch.zeros(plan.padded_numel, dtype=_master_dtype(parameters[0]), device=comm.device)
    for view, parameter in zip(plan.views(flat_N), parameters, strict=True):
        view.copy_(parameter)
    if replicas is not None:
        replicas.broadcast(flat_N)
    comm.broadcast(flat_N)
    return flat_N


def _backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backends = dict(entry.split(":") for entry in config.split(","))
    if device.type not in backends:
        raise ValueError(f"the process group has no backend for {device.type} (it has {config}); move the module first")
    return backends[device.type]
