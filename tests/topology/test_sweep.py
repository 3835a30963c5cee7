import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from netlayer.errors import ConfigError
from tests.topology.jobs import small
from topology.fabric.clos import Clos
from topology.failures.faults import Failure, single_failures
from topology.sweep import Case, cases, run_case, run_sweep, worst

CONFIG = small()
FABRIC = Clos.build(CONFIG.cluster)
POINTS = cases([0, 1], ["given", "paper"], [(), *((one,) for one in single_failures(FABRIC, "spine", 4, 0))])


def test_all_combinations_come_in_order() -> None:
    rows = run_sweep(CONFIG, POINTS, processes=1)
    assert [(row["seed"], row["placement"]) for row in rows] == [(case.seed, case.placement) for case in POINTS]
    assert rows[0]["slowdown"] == 1
    assert rows[0]["kind"] == "none"


def test_processes_give_the_same_rows() -> None:
    seen: list[int] = []
    rows = run_sweep(CONFIG, POINTS, processes=2, progress=lambda done, *_: seen.append(done))
    assert rows == run_sweep(CONFIG, POINTS, processes=1)
    assert seen[-1] == len(POINTS)


def test_a_dead_tor_stops_flows_and_a_dead_uplink_none() -> None:
    tor = run_case(CONFIG, Case(failures=(Failure("tor", 0),)))
    assert tor["stopped_flows"] > 0
    assert tor["unreachable_pairs"] > 0
    assert (tor["stops"], tor["slowdown"], tor["flow_slowdown"], tor["time_bound_s"]) == (True, None, None, None)
    (row,) = worst([tor])
    assert (row["stops_share"], row["slowdown_max"], row["slowdown_median"]) == (1.0, None, None)
    link = run_case(CONFIG, Case(failures=(Failure("tor-link", 0),)))
    assert (link["stopped_flows"], link["unreachable_pairs"]) == (0, 0)
    assert link["lost_bps"] == FABRIC.design.tor_uplink_bps


def test_fewer_spines_slow_the_job_down() -> None:
    lost = tuple(Failure("spine", number) for number in range(FABRIC.design.spines_per_pod - 1))
    row = run_case(CONFIG, Case(failures=lost))
    assert row["slowdown"] > 1.2
    assert row["flow_slowdown"] > 1.2


def test_of_several_seeds_the_spread_is_told_each_against_its_own_healthy_run() -> None:
    rows = run_sweep(CONFIG, cases(range(6), ["given"], [(Failure("spine", 0),)]), processes=1)
    (row,) = worst(rows)
    found = [one["slowdown"] for one in rows]
    assert (row["slowdown_min"], row["slowdown_max"]) == (min(found), max(found))
    assert row["slowdown_min"] < row["slowdown_median"] < row["slowdown_max"]
    # Over all flows one draw says nearly what six do; over the slowest flow it does not.
    spread = {key: row[f"{key}_max"] - row[f"{key}_min"] for key in ("slowdown", "flow_slowdown")}
    assert spread["flow_slowdown"] < 0.5 * spread["slowdown"]
    whole = [run_case(CONFIG, Case(seed=seed))["time_bound_s"] for seed in range(6)]
    assert [one["time_bound_s"] / time_s for one, time_s in zip(rows, whole, strict=True)] == found


def test_the_worst_of_each_kind() -> None:
    rows = run_sweep(CONFIG, POINTS, processes=1)
    found = {(row["placement"], row["kind"]): row for row in worst(rows)}
    assert found["given", "spine"]["cases"] == 8
    assert found["paper", "none"]["slowdown_max"] == 1


@pytest.mark.filterwarnings("default")  # distributed's own, of closing loops
def test_dask_gives_the_same_rows() -> None:
    distributed = pytest.importorskip("distributed", reason="needs dask[distributed]")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, host="127.0.0.1", protocol="tcp://"
    ) as local:
        assert run_sweep(CONFIG, POINTS[:10], dask=local.scheduler_address) == run_sweep(
            CONFIG, POINTS[:10], processes=1
        )


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("nonsense", "is no address of a scheduler; write tcp://HOST:PORT"),
        ("nonsense://here", "is no address of a scheduler"),
        ("tcp://127.0.0.1:99999", "is no address of a scheduler"),
        ("tcp://127.0.0.1:1", "no scheduler answers"),
    ],
)
def test_no_scheduler_is_one_line_at_once(address: str, rule: str) -> None:
    pytest.importorskip("distributed", reason="needs dask[distributed]")
    with pytest.raises(ConfigError, match=f"--dask = {address}: {rule}"):
        run_sweep(CONFIG, POINTS[:1], dask=address)


_ENDLESS = """
import sys
from tests.topology.test_sweep import CONFIG, POINTS
from topology.sweep import run_sweep
if __name__ == "__main__":
    run_sweep(CONFIG, POINTS * 2000, processes=2, progress=lambda *_: print("going", flush=True))
"""


# Ctrl-C of a command with workers is in test_interrupted.
@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_worker_outlives_a_sweep_that_is_ended(how: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"going\n"
    workers = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, how)
    run.wait(timeout=60)
    run.stdout.close()
    until = time.monotonic() + 60
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < until, "workers are left"
        time.sleep(0.05)
