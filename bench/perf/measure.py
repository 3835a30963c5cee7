"""Start or join the ranks of a bench, and collect what they report into records.

Not covered: what the ranks do (`driver`), records and their forms (`table`), and the `*_perf` commands (`command`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.backends import choose_backend
from bench.perf.driver import Plan, list_cases, load_collective, run_first_rank, run_rank
from bench.perf.options import PerfOptions
from bench.perf.table import Collector, OnRow
from netlayer import environ
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext, RankEnv
from netlayer.nccl.environment import Choice, as_record, exported, exports, for_ranks
from netlayer.results import RunRecord
from netlayer.store.meeting import init_method_under, meeting_place


def measure(
    names: Sequence[str],
    options: PerfOptions,
    *,
    ranks: int,
    log_dir: Path,
    backend: str | None = None,
    init_method: str | None = None,
    on_start: Callable[[RunRecord], None] | None = None,
    on_row: OnRow | None = None,
) -> list[RunRecord]:
    """Measure collectives one after the other with `ranks` processes of this machine, started once for all.

    Args:
        names: collectives by module name, such as `all_gather`.
        options: sizes, types and so on, the same for all.
        log_dir: where the ranks' logs go.
        backend: `gloo`, `torch` or `nccl`; None takes what the machine has.
        init_method: where the ranks meet, a URL of torch.distributed or netlayer.init_method; None makes a place.
        on_start: called with each record, without rows, when its collective begins.
        on_row: called with each row once its data was checked, and its record as in `on_start`.

    Returns:
        One record a collective, in order; `bench.perf.table.format_table` shows one as nccl-tests does.

    Raises:
        ConfigError: something asked for cannot be done by this backend, or a variable that NCCL would misread is set.
        HardwareMissing: there is no GPU, or there are too few.
        RankFailed: a rank failed; its log says why.
    """
    chosen = choose_backend(backend)
    # Refused here, before any process starts and imports torch: one message instead of one a rank.
    for name in names:
        list_cases(load_collective(name), options, chosen, ranks)
    nccl = for_ranks(chosen)
    collector = Collector(options, on_start, on_row, _environment(nccl))
    with _meeting_url(init_method) as url:
        launch(
            run_first_rank,
            ranks,
            args=(Plan(tuple(names), options, chosen, url),),
            log_dir=log_dir,
            env=exports(nccl),  # NCCL reads its variables once in a process: the ranks must start with them
            on_message=lambda _rank, message: collector.receive(message),  # of rank 0 alone; see `run_first_rank`
        )
    return collector.finish()


def join(
    names: Sequence[str],
    options: PerfOptions,
    env: RankEnv,
    *,
    backend: str,
    on_start: Callable[[RunRecord], None] | None = None,
    on_row: OnRow | None = None,
) -> list[RunRecord]:
    """Measure as one of the ranks that torchrun, srun or mpirun started. All ranks get the records.

    Raises:
        ConfigError: MASTER_ADDR is needed and not set.
    """
    for name in names:
        list_cases(load_collective(name), options, backend, env.world_size)
    nccl = for_ranks(backend)
    collector = Collector(options, on_start, on_row, _environment(nccl))
    # This process is the rank, so the variables are set here, before NCCL is loaded and reads them.
    with exported(nccl):
        # No launcher of ours relays reports: each rank feeds a collector of its own, with the same rows.
        run_rank(RankContext(env, collector.receive), Plan(tuple(names), options, backend, init_method_under(env)))
    return collector.finish()


def _environment(nccl: Sequence[Choice]) -> Mapping[str, Any]:
    """The processes' environment for all records, and why NCCL's variables are as they are."""
    return environ.snapshot() | ({"nccl_settings": as_record(nccl)} if nccl else {})


@contextmanager
def _meeting_url(init_method: str | None) -> Iterator[str]:
    """The URL given, else that of a meeting place of this run."""
    if init_method is not None:
        # Whoever gave the URL runs the store behind it, and closes it.
        yield init_method
        return
    with meeting_place() as place:
        yield place.init_method("bench")
