"""Commands `netlayer accept judge` and `netlayer accept publish`, from options to exit code."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.accept.judge import output
from bench.accept.judge.bounds import nics_gbs
from bench.accept.judge.expectations import load, load_user
from bench.accept.judge.explain import explain
from bench.accept.judge.logs import Judgement, judge_files
from bench.accept.judge.publish import check, publish
from netlayer.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError
from netlayer.results import check_target, utc_now, write_text


@dataclass(frozen=True)
class JudgeOptions:
    """Options of `netlayer accept judge`."""

    files: tuple[Path, ...]
    nvls: str | None
    nics: str | None
    expect_file: Path | None
    explain: bool
    strict: bool
    json_file: Path | None
    junit_file: Path | None
    html_file: Path | None


def judge_command(options: JudgeOptions) -> int:
    """Judge the files, print the result and write the requested reports; return the exit code."""
    started, clock = utc_now(), time.monotonic()
    for option, target in (
        ("--json", options.json_file),
        ("--junit", options.junit_file),
        ("--html", options.html_file),
    ):
        check_target(option, target)
    user_facts = _facts(options.nvls, options.nics)
    entries = (*(load_user(options.expect_file) if options.expect_file else ()), *load())
    judgement = judge_files(options.files, user_facts, entries)
    if "-" not in (str(options.json_file), str(options.junit_file), str(options.html_file)):
        width = shutil.get_terminal_size((output.WIDTH, 24)).columns
        click.echo("\n".join(_format_lines(judgement, options, width, entries, user_facts)))
    if options.json_file or options.html_file:
        from netlayer import environ

        environment = environ.snapshot()
        arguments: dict[str, Any] = {
            "files": [str(file) for file in options.files],
            "nvls": options.nvls or "",
            "nics": options.nics or "",
        }
        arguments |= {"expect": str(options.expect_file or ""), "strict": options.strict}
        if options.json_file:
            record = output.record(judgement, arguments, environment, started, utc_now())
            write_text(options.json_file, record.to_json())
        if options.html_file:
            write_text(options.html_file, output.page(judgement, environment["commit"]))
    if options.junit_file:
        write_text(options.junit_file, output.junit(judgement, started=started, seconds=time.monotonic() - clock))
    for line in judgement.damaged:
        click.echo(f"error: {line}", err=True)
    return _exit_code(judgement, options.strict)


def publish_command(
    files: Sequence[Path], nvls: str | None, nics: str | None, address: str, out_file: Path | None
) -> int:
    """Print the registry entry, write it if requested, and summarise it on stderr; return the exit code."""
    check_target("--out", out_file)
    user_facts = _facts(nvls, nics)
    text = publish(judge_files(files, user_facts), user_facts, address)
    with tempfile.TemporaryDirectory() as folder:
        entries = check(text, Path(folder) / "entry.toml")
    click.echo(text, nl=False)
    if out_file:
        write_text(out_file, text)
    keys = ", ".join(key for key in entries[0].keys if key != "quantity")
    click.echo(f"{len(entries)} sizes; facts in it: {keys}; no host, serial number, bus id or address", err=True)
    if not address:
        click.echo("note: without --address others cannot read how it was measured", err=True)
    return EXIT_OK


def _facts(nvls: str | None, nics: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {} if nvls is None else {"nvls": nvls == "on"}
    if nics is not None:
        if not nics_gbs({"nics": nics}):
            raise ConfigError("--nics", nics, "must be COUNTxGBPS, the NICs of one host", "write it as 8x400")
        facts["nics"] = nics
    return facts


def _format_lines(
    judgement: Judgement, options: JudgeOptions, width: int, entries: Sequence[Any], user_facts: dict[str, Any]
) -> list[str]:
    """Return the lines of output: table, nodes, explanation; the verdict is the last line."""
    *table, last = output.format_table(judgement, width=width)
    nodes = list(output.format_nodes(judgement, width))
    reasons = list(explain(judgement, entries, user_facts)) if options.explain else []
    lines = table + (["", "nodes:", *nodes] if nodes else []) + (["", "why:", *reasons] if reasons else [])
    return [*lines, *([""] if nodes or reasons else []), last]


def _exit_code(judgement: Judgement, strict: bool) -> int:
    if judgement.damaged:
        return EXIT_USAGE
    failing = ("FAIL", "WARN", "NO VERDICT") if strict else ("FAIL",)
    return EXIT_FAILED if judgement.verdict in failing else EXIT_OK
