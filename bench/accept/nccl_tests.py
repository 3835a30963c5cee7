"""`--runner nccl-tests`: run NVIDIA's binaries on every host and judge their output like `netlayer accept judge`.

Each host runs all its GPUs in one process; hosts are compared with each other. Runs over several hosts are not
supported, since nccl-tests needs MPI for them: start those with mpirun and give their logs to `netlayer accept judge`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import Link
from bench.accept.agents.wire import Message
from bench.accept.evidence.log import Log, Text
from bench.accept.evidence.nccl_run import RUN
from bench.accept.evidence.recognise import parse
from bench.accept.judge.bounds import judge_bounds
from bench.accept.judge.expectations import load
from bench.accept.judge.logs import judge_expectations
from bench.accept.judge.peers import Measured, judge_peers
from bench.accept.phases.trial import Trial
from bench.accept.run import Result, Settings, flag_late, interrupt_run
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.progress import Stages
from netlayer.remote.connection import NO_ADDRESS
from netlayer.verdict import Finding

BINARIES = ("all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "alltoall_perf", "sendrecv_perf")
_SIZES = ("-b", "64M", "-e", "1G", "-f", "4", "-n", "20")
_LIMIT_S = 300.0


def find_binaries(folder: Path | None) -> dict[str, Path]:
    """Find the binaries of nccl-tests; only compiled programs count, since our own scripts have the same names.

    Raises:
        HardwareMissing: no binary is found.
    """
    binaries = {}
    for name in BINARIES:
        place = folder / name if folder else shutil.which(name)
        if place is not None and _is_compiled(Path(place)):
            binaries[name] = Path(place).absolute()
    if not binaries:
        where = f"in {folder}" if folder else "on the PATH"
        raise HardwareMissing(
            f"--runner nccl-tests: no compiled {BINARIES[0]} {where}; build github.com/NVIDIA/nccl-tests with make, "
            "then give --nccl-tests its build folder"
        )
    return binaries


def run_nccl_tests(settings: Settings, links: Sequence[Link], folder: Path | None) -> Result:
    """Run every binary on every host, one after the other. The caller ends the agents."""
    binaries = find_binaries(folder)
    fleet = Fleet(links)
    trial = Trial(fleet, settings.members, settings.work, [member.rank for member in settings.members])
    result = Result(trial)
    hosts = {link.host: sum(len(one.ranks) for one in links if one.host == link.host) for link in links}
    with Stages() as stages:
        try:
            for name, binary in binaries.items():
                with stages.open(name):
                    _run_one(trial, name, binary, hosts, links)
                result.done.append(name)
        except KeyboardInterrupt:
            interrupt_run(result, stages)
    return result


def run_binary(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a program in an agent; return its output, exit code and error."""
    try:
        done = subprocess.run(list(command), capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as exc:
        text = (exc.stdout or b"").decode(errors="replace")
        return {"text": text, "code": None, "error": f"did not end within {limit_s:g} s"}
    except OSError as exc:
        return {"text": "", "code": None, "error": f"cannot be run ({exc.strerror})"}
    error = " ".join(done.stderr.decode(errors="replace").split())[-300:]
    return {"text": done.stdout.decode(errors="replace"), "code": done.returncode, "error": error}


def _run_one(trial: Trial, name: str, binary: Path, hosts: dict[str, int], links: Sequence[Link]) -> None:
    """Run one binary on every host; a host whose name has no address is dropped from `hosts`."""
    logs: dict[str, Log] = {}
    errors: dict[str, str] = {}
    for host, gpus in list(hosts.items()):
        answer = trial.fleet.execute(host, [str(binary), *_SIZES, "-g", str(gpus)], _LIMIT_S)
        nameless = [link for link in links if link.host == host and answer is None and link.failure() is NO_ADDRESS]
        if nameless:
            flag_late(trial, nameless[0])
            del hosts[host]
            continue
        if answer is None or answer["code"] is None or not answer["text"]:
            _fail(trial, name, binary, host, _reason(answer), "runs")
            continue
        trial.rows.append({"phase": name, "host": host, "text": answer["text"], "code": answer["code"]})
        try:
            logs[host] = parse(Text(host, answer["text"]))
        except ConfigError as exc:
            _fail(trial, name, binary, host, answer["error"] or str(exc), "a table")
        if answer["code"] and answer["error"]:
            errors[host] = answer["error"]
    for host, finding in _findings(logs):
        if finding.check == RUN and host in errors:
            finding = replace(finding, figure=f"{finding.figure}: {errors[host]}")
        trial.flag(name, "part", trial.ranks_of([host]), replace(finding, file=name, line=0), label=host)


def _fail(trial: Trial, name: str, binary: Path, host: str, figure: str, expected: str) -> None:
    finding = Finding("FAIL", host, name, figure, expected, f"run {binary} on {host} by hand", name)
    trial.flag(name, "part", trial.ranks_of([host]), finding, label=host)


def _reason(answer: Message | None) -> str:
    """Return the reason for missing output."""
    if answer is None:
        return "the host was lost"
    ended = "" if answer["code"] is None else f"ended with code {answer['code']}, no output"
    return ": ".join(part for part in (ended, answer["error"]) if part)


def _findings(logs: dict[str, Log]) -> Iterator[tuple[str, Finding]]:
    """Yield the findings with their hosts as subjects."""
    for host, log in logs.items():
        for finding in (
            *log.findings,
            *judge_bounds(host, log.figures, {}),
            *judge_expectations(host, log.figures, load(), {}),
        ):
            yield host, replace(finding, subject=host)
    measured = [
        Measured(host, log.kind, replace(figure, subject=host)) for host, log in logs.items() for figure in log.figures
    ]
    yield from ((finding.file, finding) for finding in judge_peers(measured))


def _is_compiled(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
