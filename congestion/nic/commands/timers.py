"""`netlayer nic timers`: the retransmit timers for a link flap, the trade-off around them, and NCCL's variables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from congestion.commands.retransmit import parse_duration
from congestion.retransmit.nics import NICS
from netlayer.nccl.ack_timeout import MARGIN

if TYPE_CHECKING:
    from congestion.nic.profile.timers import Row, Solution

_PATH = click.Path(path_type=Path)
_TABLE = {
    "timeout": "T",
    "behaviour": "NIC",
    "survives": "outlives it",
    "recovery_s": "a send passes after",
    "error_s": "a dead path is found after",
    "chosen": "chosen",
}


def _duration(_context: click.Context, _option: click.Parameter, text: str) -> float:
    return parse_duration(text)


@click.command()
@click.option(
    "--flap", "flap_s", default="5s", show_default=True, callback=_duration, help="Flap to outlive: 5, 300ms."
)
@click.option("--nccl", help="Release of NCCL [default: the one beside torch, else 2.32.3].")
@click.option(
    "--nic",
    type=click.Choice(tuple(NICS)),
    default="connectx-6",
    show_default=True,
    help="Whose measured behaviour the upper bound is.",
)
@click.option("--retry-cnt", type=click.IntRange(1, 7), default=7, show_default=True, help="R.")
@click.option("--margin", type=click.FloatRange(0, 10), default=MARGIN, show_default=True, help="Share to spare.")
@click.option("--out", type=_PATH, help="Also write report.html, with plots, into this folder.")
@click.option("--json", "json_file", type=_PATH, help="Also write the record here; - is stdout.")
def timers(
    flap_s: float, nccl: str | None, nic: str, retry_cnt: int, margin: float, out: Path | None, json_file: Path | None
) -> None:
    """Find the least NCCL_IB_TIMEOUT that outlives a link flap, and say what it costs.

    Lower bound: 4.096 us * 2^T * R, which any NIC keeps. Upper bound, the time to find that a path is dead: as that NIC
    was measured. Beside them: without the adaptive phase, a ConnectX-5, and Linux' rxe.

    \b
    Examples:
      netlayer nic timers --flap 5
      netlayer nic timers --flap 10s --nccl 2.21.5 --json timers.json
      netlayer nic timers --flap 300ms --retry-cnt 4 --out runs/timers
    """
    from congestion.nic.profile import timers as solver
    from netlayer.errors import ConfigError
    from netlayer.nccl import environment
    from netlayer.results import check_target, utc_now, write_text

    check_target("--json", json_file)
    started = utc_now()
    release = nccl or environment.installed_nccl() or environment.NEWEST
    environment.parse_release("--nccl", release)
    try:
        solution = solver.solve(flap_s, release, nic, retry_cnt, margin)
    except ValueError as exc:
        remedy = "give a shorter flap, more retries or a smaller margin"
        raise ConfigError("--flap", flap_s, f"no timeout outlives it ({exc})", remedy) from exc
    rows = solver.trade_off(solution)
    if out:
        _write_page(out, solution, release)
    if json_file:
        write_text(json_file, _record(solution, rows, started))
    if str(json_file) != "-":
        _print(solution, rows)


def _record(solution: Solution, rows: Sequence[Row], started: str) -> str:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    tables = [{"table": "solution", **solution.to_row()}, *({"table": "trade_off", **row} for row in rows)]
    return RunRecord(
        name="congestion.nic.timers",
        source="predicted",
        rows=tables,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={"flap_s": solution.flap_s, "nccl": solution.nccl, "nic": solution.nic, "margin": solution.margin},
        environment=snapshot(),
    ).to_json()


def _print(solution: Solution, rows: Sequence[Row]) -> None:
    from netlayer.printing import duration, print_rows

    advice = solution.advice
    print_rows(f"predicted: R = {advice.retry_cnt}, a flap of {duration(solution.flap_s)}", rows, _TABLE)
    detection = "never (it does not give up)" if solution.to_row()["error_s"] is None else duration(advice.error_s)
    click.echo(
        f"T = {advice.timeout}: outlives {duration(advice.lower_s)} on any NIC; {solution.nic} finds a dead path"
    )
    click.echo(f"after: {detection}. As {solution.nic} was measured, T = {advice.nic_timeout} is enough.")
    verdict = "is enough too, and slower to find a dead path" if solution.preset > advice.timeout else "is the same"
    if solution.preset < advice.timeout:
        verdict = "is not enough on every NIC with that margin"
    click.echo(f"NCCL {solution.nccl} by itself: T = {solution.preset}, which {verdict}.\n")
    click.echo(f"export NCCL_IB_TIMEOUT={advice.timeout}")
    click.echo(f"export NCCL_IB_RETRY_CNT={advice.retry_cnt}")


def _write_page(out: Path, solution: Solution, release: str) -> None:
    from congestion.retransmit.page import Findings, build_page
    from congestion.retransmit.rows import Setting, advices, recoveries

    near = sorted({solution.preset, *(solution.advice.timeout + step for step in (-2, -1, 0, 1))})
    settings = [
        Setting(solution.nic, timeout, solution.advice.retry_cnt, adaptive)
        for adaptive in (True, False)
        for timeout in near
        if 1 <= timeout <= 31
    ]
    flaps = sorted({*(solution.flap_s * share for share in (0.01, 0.1, 0.5, 1.0, 2.0)), solution.flap_s})
    findings = Findings(
        settings,
        flaps,
        recoveries(settings, flaps),
        advices([*(one for one in flaps if one < solution.flap_s), solution.flap_s], solution.nic, 7),
        [],
        longest_s=solution.flap_s,
        nccl=release,
    )
    click.echo(f"report: {build_page(findings).write(out)}", err=True)
