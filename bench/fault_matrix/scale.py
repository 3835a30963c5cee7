"""`python -m bench.fault_matrix.scale`: the load of one driver whose executors are simulated.

A driver as `netlayer run` has it, one Redis, and a process that sends what so many executors would: signed heartbeats
of all their ranks, in turn, over the interval. Measured is the driver's own CPU time in RUN, as a share of one core.
Simulated are the executors, and nothing else: no process of theirs exists.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.resilience import ResilienceConfig
from netlayer.errors import CheckFailed
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.redis_server import EmbeddedRedis
from trainer.resilience.bus import Bus
from trainer.resilience.driver import Driver
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.machine import State
from trainer.resilience.messages import (
    Assignment,
    Beacon,
    CheckResult,
    Heartbeat,
    RankStatus,
    RankTable,
    Refused,
    collect_seldom,
    seal,
    unseal,
)

_STEP_S = 12.0
_RAMP_S = 180.0
_CHECKS = tuple(
    CheckResult(name=name, passed=True, detail="what was read is what was written", seconds=0.05)
    for name in ("disk", "memory", "clock", "gemm", "copy", "nic_loopback", "all_reduce", "all_to_all", "kernel_log")
)
# Of so many hosts: with local nodes the driver would not look at their traffic.
_SETTINGS = ResilienceConfig(backend="ssh")


class _Nothing:
    """Backend of executors that are simulated elsewhere."""

    comes_s = 120.0

    def name(self, number: int) -> str:
        return f"node-{number}"

    def launch(self, node: str) -> None:
        """Do nothing: the node is there from the start."""

    def ensure(self, node: str) -> None:
        """Do nothing: the node is there from the start."""

    def remove(self, node: str, pid: int) -> None:
        """Do nothing: no process runs on it."""

    def has_died(self, _node: str) -> bool:
        return False

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:
        """There are no machines."""

    def close(self) -> None:
        """Nothing is open."""


@click.command()
@run_options_without_config
@click.option("--executors", type=click.IntRange(2), default=1536, show_default=True, help="Simulated executors.")
@click.option("--ranks", type=click.IntRange(1, 128), default=8, show_default=True, help="Ranks of each.")
@click.option("--interval", type=float, default=10.0, show_default=True, help="Seconds between two heartbeats.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Time in RUN that is measured.")
def main(options: RunOptions, executors: int, ranks: int, interval: float, seconds: float) -> None:
    """Measure the share of a core that a driver takes for the heartbeats of so many executors.

    \b
    Examples:
      python -m bench.fault_matrix.scale
      python -m bench.fault_matrix.scale --executors 128 --seconds 20
    """
    started = utc_now()
    with tempfile.TemporaryDirectory(prefix="nl-") as temporary, EmbeddedRedis() as server:
        folder = RunFolder(Path(temporary))
        spec = Spec(secrets.token_hex(8), "scale", ("none",), executors, ranks, 1, interval, {}, _SETTINGS)
        folder.create(spec, "")
        folder.set_store_url(server.url)
        command = [sys.executable, "-m", "bench.fault_matrix.scale", "--fleet", temporary]
        fleet = subprocess.Popen([*command, str(executors)], start_new_session=True)
        try:
            row = _measure(folder, executors, ranks, interval, seconds)
        finally:
            fleet.kill()
            fleet.wait()
    record = RunRecord(
        name="bench.fault_matrix.scale",
        source="measured",
        rows=[row],
        started_utc=started,
        ended_utc=utc_now(),
        arguments=options.arguments() | {"executors": executors, "ranks": ranks, "interval": interval},
        environment=environ.snapshot(options.seed),
        devices=["CPU"],
    )
    if options.out:
        record.save(options.out / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    click.echo(
        f"{executors} simulated executors of {ranks} ranks, {row['heartbeats']} heartbeats in {row['seconds']:.0f} s: "
        f"driver {row['driver_core_share']:.2%} of a core, {row['us_per_heartbeat']:.0f} us a heartbeat",
        err=str(options.json_file) == "-",
    )
    if row["incidents"]:
        raise CheckFailed(f"{row['incidents']} incidents in a fleet without faults")


def _measure(folder: RunFolder, executors: int, ranks: int, interval: float, seconds: float) -> dict[str, float]:
    """Bring a fleet to RUN, and take the driver's CPU time over so many seconds there."""
    collect_seldom()  # as the command does
    driver = Driver(folder, _Nothing(), 10**9, owns_store=False)
    begin_s = time.monotonic()
    while driver.facts.state is not State.RUN:
        driver.round()
        if time.monotonic() - begin_s > _RAMP_S:
            raise CheckFailed(f"still in state {driver.facts.state} after {_RAMP_S:g} s")
        time.sleep(0.2)
    period_s = min(interval / 8, 1.0)
    end_s = time.monotonic() + interval  # until every executor has been heard of in RUN

    def go_on() -> None:
        while time.monotonic() < end_s:
            driver.round()
            driver.write_status()
            time.sleep(period_s)

    go_on()
    seen = sum(view.heartbeat.seq for view in driver.view.nodes.values())
    begin_s, cpu_s = time.monotonic(), time.process_time()
    end_s = begin_s + seconds
    go_on()
    cpu_s, taken_s = time.process_time() - cpu_s, time.monotonic() - begin_s
    count = sum(view.heartbeat.seq for view in driver.view.nodes.values()) - seen
    driver.close()
    return {
        "executors": executors,
        "ranks": executors * ranks,
        "seconds": taken_s,
        "heartbeats": count,
        "driver_cpu_s": cpu_s,
        "driver_core_share": cpu_s / taken_s,
        "us_per_heartbeat": 1e6 * cpu_s / max(count, 1),
        "incidents": len(driver.facts.incidents),
        "refused": driver.link.refused,
    }


def simulate_fleet(out: str, executors: int) -> None:
    """Send the heartbeats of all executors, each in its turn, until this process is killed."""
    folder = RunFolder(Path(out))
    spec, token = folder.spec(), folder.token()
    bus = Bus(folder.store_url(), spec.run)
    boots = [secrets.token_hex(8) for _ in range(executors)]
    followed, heard_of = [(0, 0)] * executors, [(0, 0)] * executors
    incarnations, seqs, checks_of = [0] * executors, [0] * executors, [0] * executors
    anchor_ns = time.time_ns() - time.monotonic_ns()
    begin_s, sent = time.monotonic(), 0
    trains_since_s = 0.0
    while True:
        index = sent % executors
        due_s = begin_s + sent * spec.heartbeat_s / executors
        time.sleep(max(0.0, due_s - time.monotonic()))
        name = f"node-{index}"
        beacon_data, data = bus.orders(name)
        try:
            beacon = unseal(beacon_data, token, Beacon, spec.run, "*")
            heard_of[index] = (beacon.epoch, beacon.seq)
            order = unseal(data, token, Assignment, spec.run, name)
            followed[index] = (order.epoch, order.seq)
            incarnations[index] = order.incarnation if order.action == "train" else 0
            if order.action == "check":
                checks_of[index] = order.check
            if order.action == "train":
                trains_since_s = trains_since_s or time.monotonic()
        except Refused:
            pass
        seqs[index] += 1
        step = int((time.monotonic() - trains_since_s) / _STEP_S) + 1 if incarnations[index] else 0
        first = index * spec.ranks_per_node
        rows = tuple(
            RankStatus(
                rank=first + local, pid=1000 + local, state="running", step=step, step_ms=_STEP_S * 1e3 + 0.123,
                exposed=round(0.05 + local / 999, 4), loss=2.0123000144958496, quiet_s=round(1 + local / 7, 2),
            )
            for local in range(spec.ranks_per_node)
        )  # fmt: skip
        heartbeat = Heartbeat(
            run=spec.run,
            node=name,
            boot=boots[index],
            seq=seqs[index],
            boots=1,
            at_ns=time.time_ns(),
            machine=f"{index:032x}",
            anchor_ns=anchor_ns,
            beacon=heard_of[index],
            beacon_ns=time.time_ns(),
            address=f"10.{index >> 8}.{index & 255}.1",
            pod=f"trainer-{index}",
            host=f"host-{index}",
            pid=os.getpid(),
            hardware="x86_64, 96 cores, 2048 GiB",
            assignment=followed[index],
            phase="training" if incarnations[index] else "idle",
            incarnation=incarnations[index],
            port=29500,
            table=RankTable.of(rows if incarnations[index] else ()),
            lines=tuple(f"rank {first}: step {step}, loss 2.000, 40,000 tokens/s, MFU 0.55" for _ in range(6)),
            checks_of=checks_of[index],
            checks=_CHECKS if checks_of[index] else (),
            tx_bytes=sent * 10**6,
            rx_bytes=sent * 10**6,
            code="0123456789abcdef" if incarnations[index] else "",
        )
        bus.send_heartbeat(seal(heartbeat, token))
        sent += 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fleet"]:
        simulate_fleet(sys.argv[2], json.loads(sys.argv[3]))
    else:
        from netlayer.cli import run

        run(main, "python -m bench.fault_matrix.scale")
