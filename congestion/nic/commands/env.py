"""`netlayer nic env`: the variables of NCCL that a job asks for, as lines for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netlayer.printing import printable

if TYPE_CHECKING:
    from netlayer.config.tree import NcclConfig
    from netlayer.nccl.environment import Choice

_PATH = click.Path(path_type=Path)
_SECTIONS = ("job.nccl.", "nccl.")


@click.command()
@click.option("--job", type=_PATH, help="TOML file of the job; its table [job.nccl] is read [default: the defaults].")
@click.option("--profile", type=_PATH, help="NIC profile: its DSCP and timers, where the job is silent.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One key of job.nccl; repeatable.")
@click.option("--nccl", help="Release of NCCL that will run [default: the one beside torch, else 2.32.3].")
@click.option("--json", "json_file", type=_PATH, help="Also write the choices here; - is stdout, without the exports.")
def env(
    job: Path | None, profile: Path | None, overrides: tuple[str, ...], nccl: str | None, json_file: Path | None
) -> None:
    """Print NCCL's variables for a job as export lines, each with its reason.

    What you have set, in the environment or in a file that NCCL reads, is kept, and a comment says so. What the
    release lacks is omitted, and a comment says so. A value that NCCL would misread is refused.

    \b
    Examples:
      netlayer nic env
      eval "$(netlayer nic env --job job.toml --profile examples/profiles/lossless-dcqcn.toml)"
      netlayer nic env --set flap_s=10 --set qps_per_connection=4 --nccl 2.21.5
      netlayer nic env --job job.toml --json -
    """
    import os

    from netlayer.nccl import environment as nccl_env
    from netlayer.results import check_target, write_text

    check_target("--json", json_file)
    known_release = nccl or nccl_env.installed_nccl()
    release = known_release or nccl_env.NEWEST
    if known_release is None:
        click.echo(f"note: no NCCL beside torch here: taken as {release}; --nccl says otherwise", err=True)
    settings = _settings(job, profile, overrides)
    choices = nccl_env.choose(os.environ, settings, release, cost=_detection)
    if json_file:
        write_text(json_file, _json(choices, settings, release))
    if str(json_file) != "-":
        for line in lines(choices):
            click.echo(line)


def lines(choices: Sequence[Choice]) -> list[str]:
    """`export NAME=VALUE` with its reason above; a comment alone for what is not set. Any shell of POSIX reads it."""
    output: list[str] = []
    for choice in choices:
        if choice.action == "set" and choice.value is not None:
            output += [f"# {_one_line(choice.why)}", f"export {choice.name}={shlex.quote(choice.value)}"]
        else:
            value = f" = {choice.value}" if choice.action == "kept" else ""
            output.append(f"# {choice.name}{_one_line(value)}: {choice.action}: {_one_line(choice.why)}")
    return output


def _detection(timeout: int, retry_cnt: int) -> str:
    """Return how long a ConnectX-6, as it was measured, takes to find that a path is dead."""
    from congestion.retransmit.timers import schedule

    return f"a ConnectX-6 finds a dead path after {schedule('connectx-6', timeout, retry_cnt).error_s:.1f} s"


def _one_line(text: str) -> str:
    """Return the text on one line, for a comment of the shell: a second line would be a command."""
    return printable(text, " ")


def _settings(job: Path | None, profile: Path | None, overrides: Sequence[str]) -> NcclConfig:
    from congestion.nic.profile.file import fill_nccl, load_profile
    from netlayer.config.file import load_config
    from netlayer.errors import ConfigError
    from netlayer.nccl.environment import PREFIX

    assignments = []
    for word in overrides:
        name = word.partition("=")[0]
        if "." in name and not name.startswith(_SECTIONS):
            raise ConfigError("--set", word, f"has no effect here: only {PREFIX} is read", "omit it")
        assignments.append(word if "." in name else f"{PREFIX}.{word}")
    settings = load_config(job, assignments, option="--job").job.nccl
    return fill_nccl(load_profile(profile), settings) if profile else settings


def _json(choices: Sequence[Choice], settings: NcclConfig, release: str) -> str:
    import json

    from netlayer.nccl.environment import as_record

    tree = {"nccl": release, "settings": settings.model_dump(mode="json"), "choices": as_record(choices)}
    return json.dumps(tree, indent=1) + "\n"
