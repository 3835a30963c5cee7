"""The monitor of a training run: opened with the ranks, closed with them; `job.observe` says what it does.

Every rank writes its stream; what the streams have in common (which start of the run it is, rank 0's clock) comes from
rank 0 once, before the first step. Not covered: the monitor itself (`collectives.watch.monitor`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from collectives.watch.align import ClockClient, ClockServer, Reference, same_host
from collectives.watch.monitor import Monitor
from collectives.watch.nic import NicCounters
from collectives.watch.nvml import Nvml, uuid_of
from collectives.watch.sampler import Sampler, Source
from netlayer.environ import boot_id
from netlayer.errors import ConfigError
from netlayer.observe.events.clocks import RankClock
from netlayer.observe.events.schema import Counter, Mark, Origin
from netlayer.observe.events.transport import Transport, open_transport
from netlayer.store.meeting import SCHEMES
from netlayer.workload.flops import step_flops
from netlayer.workload.model_size import num_parameters
from netlayer.workload.peaks import peak_flops
from trainer.peer_copy.hosts import NODE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from netlayer.launch.rank import RankContext
    from trainer.loop import RankInfo
    from trainer.plan import Plan

logger = logging.getLogger(__name__)

_ATTEMPT = "attempt"
"""File in the folder of the streams: how often the run was started."""


@dataclass(frozen=True)
class _Common:
    """Facts of rank 0 that all ranks need."""

    attempt: int
    reference: Reference


@contextlib.contextmanager
def monitored(context: RankContext, plan: Plan, place: RankInfo, steps_done: int) -> Iterator[Monitor | None]:
    """Monitor this rank until the block ends; every rank enters it. None where the job wants no events.

    Args:
        steps_done: by the checkpoint that the run resumes from.

    A folder that cannot be written costs the events of this rank, and a warning.
    """
    observe, layout = plan.job.observe, plan.job.parallel.layout
    if not observe.enabled:
        yield None
        return
    folder = plan.out / observe.folder
    clock = RankClock(is_reference=place.rank == 0)
    with contextlib.ExitStack() as stack:
        common = _agree(context, place, clock, folder, stack)
        at = layout.coordinates(place.rank)
        origin = Origin(
            run=plan.job.name,
            attempt=common.attempt,
            host=socket.gethostname(),
            rank=place.rank,
            tp=at.tp,
            pp=at.pp,
            dp=layout.data_rank(at),
            cp=at.cp,
        )
        try:
            transport = _transport(plan, folder, origin)
        except ConfigError as exc:
            logger.warning("this rank records no events: %s", exc)
            yield None
            return
        monitor = Monitor(
            transport,
            origin,
            device=place.device,
            capacity=observe.max_events,
            interval_s=observe.interval_s,
            clock=clock,
        )
        if place.rank > 0 and not same_host(clock, common.reference) and common.reference.port:
            client = ClockClient(clock, common.reference, observe.clock_every_s)
            monitor.samplers.append(lambda: _compared(client, monitor))
        monitor.mark("run_start", step=steps_done, **_facts(plan, place))
        if common.attempt:
            monitor.mark("restart", step=steps_done, count=common.attempt, from_step=steps_done)
        try:
            with _counters(monitor, context, plan, place):
                yield monitor
        except BaseException as exc:
            monitor.mark("failure", f"{type(exc).__name__}: {exc}")
            raise
        else:
            monitor.mark("run_end")
        finally:
            monitor.close()


def _counters(
    monitor: Monitor, context: RankContext, plan: Plan, place: RankInfo
) -> contextlib.AbstractContextManager[object]:
    """Have the counters of the rank's GPU sampled, and by the first rank of a host those of its NICs."""
    opens: list[Callable[[], Source]] = []
    if place.device.type == "cuda":
        index = place.device.index if place.device.index is not None else torch.cuda.current_device()
        opens.append(lambda: Nvml(uuid_of(index), f"GPU {index}"))
    if context.env.local_rank == 0:
        opens.append(NicCounters)
    every_s = plan.job.observe.counters_every_s
    return Sampler(monitor, opens, every_s) if opens and every_s else contextlib.nullcontext()


def _agree(
    context: RankContext, place: RankInfo, clock: RankClock, folder: Path, stack: contextlib.ExitStack
) -> _Common:
    """Have all ranks know what rank 0 knows: which start of the run this is, and where its clock is asked."""
    common: list[_Common | None] = [None]
    if place.rank == 0:
        reference = Reference(boot_id(), clock.anchor_ns)
        if context.env.local_world_size < place.world_size:  # else all ranks have one clock
            try:
                reference = stack.enter_context(ClockServer(clock)).reference
            except OSError as exc:
                logger.warning("clocks of other hosts are not compared: no UDP port can be had (%s)", exc)
        common = [_Common(_count_attempt(folder), reference)]
    if place.world_size > 1:
        device = place.device if place.device.type == "cuda" else None
        dist.broadcast_object_list(common, src=0, device=device)
    assert common[0] is not None
    return common[0]


def _count_attempt(folder: Path) -> int:
    """Return how often the run was started before, and count this start."""
    file = folder / _ATTEMPT
    try:
        text = file.read_text()
        attempt = int(text) if text.strip().isdigit() else 0
    except (OSError, ValueError):
        attempt = 0
    with contextlib.suppress(OSError):  # who writes streams there says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
        pending = file.with_suffix(".pending")
        pending.write_text(f"{attempt + 1}\n")
        pending.replace(file)
    return attempt


def _transport(plan: Plan, folder: Path, origin: Origin) -> Transport:
    observe, url = plan.job.observe, plan.job.observe.url
    if observe.transport == "redis" and not url and plan.init_method.partition("://")[0] in SCHEMES:
        from netlayer.init_method import server_of

        url = server_of(plan.init_method)
    size = observe.max_file_mib << 20
    return open_transport(
        observe.transport, origin, folder=folder, url=url, max_file_bytes=size, max_files=observe.max_files
    )


def _compared(client: ClockClient, monitor: Monitor) -> Iterable[Counter | Mark]:
    """Compare the clocks where that is due, and say what came of it."""
    sample = client.compare_if_due()
    if sample is None:
        return
    facts: dict[str, Any] = {
        "offset_ns": sample.offset_ns,
        "error_ns": sample.error_ns,
        "round_trip_ns": sample.round_trip_ns,
        "drift_ppm": monitor.clock.drift_ppm,
        "method": "round trips to rank 0",
    }
    yield Mark(monitor.origin, "clock", sample.at_ns, attributes=facts)


def _facts(plan: Plan, place: RankInfo) -> dict[str, Any]:
    """Return what a reader of the streams needs to know of the job."""
    job, layout = plan.job, plan.job.parallel.layout
    flops = step_flops(job.model, job.batch.global_batch_size)
    return {
        "job": job.name,
        "world_size": place.world_size,
        "layout": {name: getattr(layout, name) for name in ("tp", "pp", "dp", "vpp", "cp", "dp_replicate")},
        "device": place.device_name,
        "backend": plan.backend,
        "pid": os.getpid(),
        "node": os.environ.get(NODE),
        "torch": torch.__version__,
        "parameters": num_parameters(job.model),
        "sequences_per_step": job.batch.global_batch_size,
        "tokens_per_step": job.batch.global_batch_size * job.model.seq_len,
        "flops_per_step_full": flops.full,
        "flops_per_step_causal": flops.causal,
        "peak_flops": peak_flops(place.device_name, job.model.dtype),
        "steps": job.optimizer.steps,
    }
