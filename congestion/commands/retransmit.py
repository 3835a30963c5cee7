"""`netlayer retransmit`: what a link flap costs under which retransmit timers, and which of them outlive it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from congestion.retransmit.nics import NICS
from netlayer.command import RunOptions, renamed_option, run_options_without_config

if TYPE_CHECKING:  # `--help` needs no numpy
    from congestion.retransmit.rows import Recovery, Row, Setting
    from netlayer.output import Output
    from netlayer.results import Source

_NICS = tuple(NICS)
_SCALES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_FLAPS = ("10us", "100us", "1ms", "10ms", "100ms", "300ms", "1s", "3s", "5s", "10s")
_TIMEOUTS = (14, 17, 18, 19, 20)
_RING_FLAPS_S = (1e-3, 0.1, 1.0, 5.0)
_WHERE = ("out", "json_file", "verbose")
_ADVICE = {
    "flap_s": "flap",
    "timeout": "T on any NIC",
    "nic": "NIC",
    "nic_timeout": "T there",
    "recovery_s": "recovers after",
    "error_s": "a dead path is found after",
}
_RING = {
    "nic": "NIC",
    "timeout": "T",
    "retry_cnt": "R",
    "adaptive": "adaptive",
    "flap_s": "flap",
    "delay_s": "late by",
    "predicted_s": "closed form",
    "failed": "QPs in error",
    "stuck": "ranks stuck",
}


def parse_duration(text: str) -> float:
    """10us, 1.5ms, 3s or plain seconds, as seconds.

    Raises:
        click.BadParameter: the text is none of them, or out of range.
    """
    match = re.fullmatch(r"(\d+\.?\d*(?:e-?\d+)?) ?(us|ms|s|)", text.strip())
    seconds = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not 1e-6 <= seconds <= 1e4:
        raise click.BadParameter(f"{text!r} is no time from 1us to 10000s, such as 10us, 1.5ms or 3s")
    return seconds


def _durations(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(map(parse_duration, texts))


@click.command()
@click.option("--nic", "nics", type=click.Choice(_NICS), multiple=True, help="Repeatable [default: connectx-6].")
@click.option(
    "--qp-timeout",
    "timeouts",
    type=click.IntRange(1, 31),
    multiple=True,
    help="Exponent T of 4.096 us * 2^T; repeatable [default: 14, 17, 18, 19, 20].",
)
@renamed_option("--timeout", "--qp-timeout", "timeouts", multiple=True)
@click.option("--retry-cnt", "retry_cnts", type=click.IntRange(0, 7), multiple=True, help="Repeatable [default: 3, 7].")
@click.option(
    "--adaptive",
    type=click.Choice(["on", "off", "both"]),
    default="both",
    show_default=True,
    help="The NIC's adaptive retransmission; off was measured on connectx-5 alone.",
)
@click.option("--no-floor", is_flag=True, help="Also min_ack_timeout_limit_disabled = 1, where the NIC has it.")
@click.option(
    "--flap",
    "flaps_s",
    multiple=True,
    callback=_durations,
    help=f"Time that the link is down; repeatable [default: {', '.join(_FLAPS)}].",
)
@click.option("--longest-flap", default="5s", show_default=True, help="Advise a timeout that outlives this.")
@click.option("--nccl", default="2.30.7", show_default=True, help="Release of NCCL whose defaults are judged.")
@click.option(
    "--ring/--no-ring",
    default=True,
    show_default=True,
    help="Run a ring all-reduce through flaps: first NIC, most retries.",
)
@run_options_without_config
def retransmit(
    options: RunOptions,
    nics: tuple[str, ...],
    timeouts: tuple[int, ...],
    retry_cnts: tuple[int, ...],
    adaptive: str,
    no_floor: bool,
    flaps_s: tuple[float, ...],
    longest_flap: str,
    nccl: str,
    ring: bool,
) -> None:
    """Say how long a queue pair needs to recover from a link flap, or that it goes to error, for each setting.

    The timers are those that were measured on real NICs, not 4.096 us * 2^T alone (that is the NIC `infiniband`).
    Into the output folder: report.html, recoveries.csv, advices.csv, ring.csv and parquet, and a record of each
    source. The ring all-reduce is simulated packet by packet; the rest is a closed form.

    \b
    Examples:
      netlayer retransmit
      netlayer retransmit --longest-flap 10s --nccl 2.21.5
      netlayer retransmit --qp-timeout 14 --qp-timeout 22 --retry-cnt 7 --adaptive on --flap 20ms --flap 2s
      netlayer retransmit --nic connectx-6 --nic rxe --retry-cnt 6 --no-ring --json -
      netlayer retransmit --qp-timeout 8 --qp-timeout 14 --no-floor --flap 1ms --flap 100ms
    """
    from congestion.kernels.compile import waiting
    from congestion.retransmit.page import Findings, build_page
    from congestion.retransmit.rows import advices, of_one_nic, recoveries, ring_rows
    from congestion.retransmit.timers import NCCL_RETRY_CNT, nccl_timeout
    from netlayer.errors import ConfigError
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.records import refuse_without_effect, was_given

    nics = nics or _NICS[:1]
    plain = not any(NICS[nic].has_floor for nic in nics)
    reason = f"on {', '.join(nics)}, without floor and adaptive phase"
    refuse_without_effect(
        [("--adaptive", plain and was_given("adaptive"), reason), ("--no-floor", plain and no_floor, reason)]
    )
    try:
        nccl_timeout(nccl)
    except ValueError as exc:
        raise ConfigError("--nccl", nccl, "is no release", "give one such as 2.30.7") from exc
    started, longest_s = utc_now(), parse_duration(longest_flap)
    settings = _settings(nics, timeouts or _TIMEOUTS, retry_cnts or (3, 7), adaptive, no_floor)
    flaps = sorted(set(flaps_s or map(parse_duration, _FLAPS)))
    advised = [*(flap for flap in flaps if flap < longest_s), longest_s]
    with open_output(options.out, "retransmit") as out, Stages() as stages:
        predicted, advice_rows = recoveries(settings, flaps), advices(advised, settings[0].nic, NCCL_RETRY_CNT)
        ring_table: list[Row] = []
        if ring:
            with stages.open("ring") as bar:
                downs = flaps if flaps_s else _RING_FLAPS_S
                ring_table = ring_rows(of_one_nic(settings), downs, options.seed, bar, waiting(stages))
        with stages.open("page"):
            parts = predicted, advice_rows, ring_table
            findings = Findings(settings, flaps, *parts, longest_s=longest_s, nccl=nccl, command=_command_line())
            build_page(findings).write(out.part)
        tables = {
            "recoveries": [row.to_row() for row in predicted],
            "advices": [row.to_row() for row in advice_rows],
            "ring": ring_table,
        }
        _keep(out, tables, started, options, _command_line())
    if str(options.json_file) != "-":
        _print(predicted, tables)
    click.echo(f"report: {out.folder / 'report.html'}", err=True)


def _settings(
    nics: tuple[str, ...], timeouts: tuple[int, ...], retry_cnts: tuple[int, ...], adaptive: str, no_floor: bool
) -> list[Setting]:
    """Return all combinations that differ: a NIC without floor and adaptive phase comes once."""
    from congestion.retransmit.rows import Setting

    modes = [(chosen == "on", True) for chosen in ("on", "off") if adaptive in (chosen, "both")]
    modes += [(False, False)] * no_floor
    return [
        Setting(nic, timeout, retry_cnt, *mode)
        for nic in dict.fromkeys(nics)
        for mode in (modes if NICS[nic].has_floor else [(True, True)])
        for retry_cnt in sorted(set(retry_cnts))
        for timeout in sorted(set(timeouts))
    ]


def _command_line() -> str:
    """The command line again, without where its output goes."""
    context = click.get_current_context()
    parts = ["netlayer retransmit"]
    # A value that came by an option's old name is a default by its source, and stands here under the new one.
    sources = {ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP}
    for option in context.command.params:
        if option.name in _WHERE or not option.expose_value:
            continue
        value = context.params[str(option.name)]
        if context.get_parameter_source(str(option.name)) not in sources:
            continue
        if isinstance(value, bool):
            parts.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            parts += [f"{option.opts[0]} {one}" for one in (value if isinstance(value, tuple) else [value])]
    return " ".join(parts)


def _keep(out: Output, tables: Mapping[str, Sequence[Row]], started: str, options: RunOptions, command: str) -> None:
    """Tables as CSV and parquet, and a record of each source; all rows into the file that `--json` names."""
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text
    from topology.commands.records import write_table

    rows = [{"table": table, **row} for table, part in tables.items() for row in part]
    whole = RunRecord(
        name="congestion.retransmit",
        source="predicted",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "command": command},
        environment=snapshot(options.seed),
    )
    sources: tuple[Source, ...] = ("predicted", "simulated")
    for source in sources:
        own_rows = [row for row in rows if row["source"] == source]
        if own_rows:
            replace(whole, source=source, rows=own_rows).save(out.part / "records")
    for table, part in tables.items():
        write_table(out.part, table, part)
    for path in out.publish():
        click.echo(f"record: {path}", err=True)
    if options.json_file:
        write_text(options.json_file, whole.to_json())


def _print(predicted: Sequence[Recovery], tables: Mapping[str, Sequence[Row]]) -> None:
    from congestion.retransmit.page import wide
    from netlayer.printing import print_rows, print_table

    table = wide(predicted)
    lines = [[str(cell) for cell in line] for line in table.itertuples(index=False)]
    print_table("predicted: from the link's going down to the send that passes", list(map(str, table)), lines)
    print_rows("predicted: the least timeout that outlives a flap, with a fifth to spare", tables["advices"], _ADVICE)
    if tables["ring"]:
        print_rows("simulated: a ring all-reduce with one host cut off half-way", tables["ring"], _RING)
