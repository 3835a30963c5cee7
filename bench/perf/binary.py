"""The command that each `*_perf` binary is: nccl-tests' flags on a command line.

Ours alone: `--backend`, `--csv` and `--junit`. Not covered: what is done with them (`command`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.perf.options import BACKEND_NAMES, FLAGS, MIN_BW_VARIABLE, Flag, PerfOptions, Request
from netlayer import log
from netlayer.errors import EXIT_FAILED, ConfigError
from netlayer.launch.interrupt import held_interrupt
from netlayer.results import check_target
from netlayer.units import parse_size

if TYPE_CHECKING:
    from bench.perf.collectives.collective import Collective

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic in later releases of click alone

# By these nccl-tests cuts the ranks into groups that run side by side: ignored, another thing would be measured.
_SPLITS = ("NCCL_TESTS_SPLIT", "NCCL_TESTS_SPLIT_MASK")


def perf_command(collective: Collective) -> click.Command:
    """The command of `<collective>_perf`. Exit 0: good; 1: wrong data or too slow; 2: usage; 3: no GPU."""
    params: list[click.Parameter] = [_option(flag) for flag in FLAGS]
    params += [
        _path("-J", "--output_file", help="Also write nccl-tests' JSON here; an existing file gets a neighbour."),
        click.Option(
            ["--backend"],
            type=click.Choice(BACKEND_NAMES),
            help="[default: nccl with GPUs and CuPy, torch with GPUs alone, else gloo]",
        ),
        _path("--csv", "csv_file", help="Also write one line per size and kind of buffer here."),
        _path("--junit", "junit_file", help="Also write a JUnit test case per size and kind of buffer here."),
    ]
    return click.Command(
        f"{collective.name}_perf",
        params=params,
        callback=lambda **values: _run(collective, values),
        help=f"{collective.summary}\n\n{_HELP.format(name=f'{collective.name}_perf')}",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


_HELP = """\
Flags, table and JSON are those of nccl-tests. Flags that are not listed are known and refused.
Exit code 0: good; 1: wrong data, or mean bus bandwidth below 0.9 x NCCL_TESTS_MIN_BW; 2: usage; 3: no such hardware.

\b
Examples:
  {name} -g 2 --backend gloo -b 8 -e 16M -f 8     two ranks on CPUs
  {name} -g 8 -b 8 -e 8G -f 2                     eight GPUs of this machine
  {name} -g 8 -b 8 -e 8G -f 2 -R 2 -G 4           the same, symmetric windows, CUDA graphs
  torchrun --nnodes 2 --nproc-per-node 8 --no-python {name} -b 8 -e 8G -f 2
"""


def _option(flag: Flag) -> click.Option:
    hidden = bool(flag.refused)
    return click.Option(
        [flag.short, flag.long, flag.field],
        type=_Value(flag),
        # As text, so that a default takes the same way through `_Value` as what a user types.
        default=str(flag.default),
        show_default=not hidden,
        hidden=hidden,
        help=flag.help,
        metavar="NUMBER" if not flag.choices else "NAME",
    )


class _Value(_ParamType):
    """A value of a flag; what cannot be read is a ConfigError, one line as for every other error."""

    name = "value"

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        flag = self._flag
        read: Callable[[str], Any] = str if flag.choices else parse_size if flag.field.endswith("_bytes") else _whole
        # Flags have whole numbers; `PerfOptions.root` has -1 for every rank in turn.
        if flag.field == "root" and value == "all":
            value = "-1"
        try:
            result = read(value)
        except ValueError as exc:
            expected = "a size such as 8, 64K or 16M" if read is parse_size else "a whole number"
            raise ConfigError(flag.names, value, f"is not {expected}", f"the default is {flag.default}") from exc
        flag.check(result)
        return result


def _whole(text: str) -> int:
    """Read a whole number; 0x10 is 16, as in nccl-tests."""
    try:
        return int(text)
    except ValueError:
        # Second, for it refuses leading zeros, as scripts write them (08).
        return int(text, 0)


def _path(*names: str, help: str) -> click.Option:  # noqa: A002 - click's own word
    return click.Option(list(names), type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help)


def _run(collective: Collective, values: dict[str, Any]) -> int:
    log.configure(0)
    for name in _SPLITS:
        if name in os.environ:
            rule = "is not built: there is one group of all ranks"
            raise ConfigError(name, os.environ[name], rule, "unset it, and start the ranks of each group apart")
    chosen = {field.name: values[field.name] for field in fields(PerfOptions) if field.name in values}
    options = PerfOptions(**chosen, min_bw_gbs=_min_bw())
    files = (values["output_file"], values["csv_file"], values["junit_file"])
    # Before the measurement, which may take hours; -J makes its file before it (`command._json_place`).
    check_target("--csv", files[1])
    check_target("--junit", files[2])
    request = Request(options, values["ngpus"], values["backend"], *files)
    # torch is imported here and not above, so that `--help` and a bad flag answer at once.
    with held_interrupt():
        from bench.perf.command import run_command

    return 0 if run_command(collective, request) else EXIT_FAILED


def _min_bw() -> float | None:
    text = os.environ.get(MIN_BW_VARIABLE)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(MIN_BW_VARIABLE, text, "is not a number of GB/s", "unset it or give 100") from exc
