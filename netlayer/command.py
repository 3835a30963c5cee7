"""Common parts of all commands: shared options, output folder and records.

stdout is data, stderr is log and progress. Without `--out` a command writes to `./runs/<command>-<UTC>/`: `report.html`
and `records/*.json` there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netlayer import log
from netlayer.errors import ConfigError
from netlayer.launch import rank
from netlayer.launch.interrupt import uninterrupted
from netlayer.lock import LockBusy, claimed
from netlayer.results import check_target, hide_passwords

if TYPE_CHECKING:
    from netlayer.config.tree import Config

logger = logging.getLogger(__name__)

_PATH = click.Path(path_type=Path)
_OF_A_RUN = ("report.html", "metrics.jsonl", "validation.jsonl", "trace.json", "checkpoints", "tensorboard")
_LOCK = ".run.lock"
_LOGS = "logs"
"""Of a run that did nothing else, they do not keep the next one out: a refused checkpoint leaves them."""
_RUN_OPTIONS = (
    click.option("--config", "config_path", type=_PATH, help="TOML file; see examples/."),
    click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable."),
    click.option(
        "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of all randomness."
    ),
    click.option("--out", type=_PATH, help="Output folder [default: ./runs/<command>-<UTC>/]."),
    click.option("--json", "json_file", type=_PATH, help="Also write the record here; - is stdout."),
    click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all."),
)
# What the first of them are where a command does not have them.
_CONFIG: dict[str, Any] = {"config_path": None, "overrides": ()}


class FiniteRange(click.FloatRange):
    """A range of numbers without NaN, which click's own lets pass, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


@dataclass(frozen=True)
class RunOptions:
    """The options that every command has."""

    config_path: Path | None
    overrides: tuple[str, ...]
    seed: int
    out: Path | None
    json_file: Path | None

    def load_config(self, default: Path | None = None) -> Config:
        """The resolved tree; `default` is the file where no `--config` was given."""
        from netlayer.config.file import load_config

        return load_config(self.config_path or default, self.overrides)

    def arguments(self) -> dict[str, Any]:
        """Return the options as JSON values, for the record."""
        return {
            "config": str(self.config_path or ""),
            "set": [hide_passwords(override) for override in self.overrides],
            "seed": self.seed,
            "out": str(self.out or ""),
        }


_Command = TypeVar("_Command", bound=Callable[..., Any] | click.Command)  # as click.option has it


def renamed_option(old: str, new: str, name: str, *, multiple: bool = False) -> Callable[[_Command], _Command]:
    """Decorate a command so that an option's old name is still read, with a warning; help does not show it.

    Args:
        old, new: names, such as `--hosts` and `--host-names`.
        name: of the parameter that gets the value.
        multiple: the option is repeatable.
    """

    def forward(context: click.Context, _option: click.Parameter, value: Any) -> None:
        if value is None or value == ():
            return
        click.echo(f"warning: {old} is now called {new}; the old name is read until version 0.5", err=True)
        # As a default: the new name goes before it, and the option's own type converts it and finds what is wrong.
        context.default_map = {**(context.default_map or {}), name: value}

    hidden: dict[str, Any] = {"hidden": True, "is_eager": True, "expose_value": False, "callback": forward}
    return click.option(old, f"old_{name}", multiple=multiple, **hidden)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a click command `--config --set --seed --out --json -v`; it takes them as one `options` argument."""
    return _with_options(command, _RUN_OPTIONS)


def run_options_without_config(command: Callable[..., None]) -> Callable[..., None]:
    """`run_options` but `--config --set`, for a command that reads no configuration."""
    return _with_options(command, _RUN_OPTIONS[len(_CONFIG) :])


def _with_options(command: Callable[..., None], shared: Sequence[Callable[..., Any]]) -> Callable[..., None]:
    @functools.wraps(command)
    def with_options(verbose: int, **options_by_name: Any) -> None:
        log.configure(verbose, rank.number(os.environ))
        check_target("--json", options_by_name["json_file"])
        options_by_name = {**_CONFIG, **options_by_name}
        options = RunOptions(
            **{field.name: options_by_name.pop(field.name) for field in dataclasses.fields(RunOptions)}
        )
        command(options=options, **options_by_name)

    for option in reversed(shared):
        option(with_options)
    return with_options


def open_out(out: Path | None, command: str) -> Path:
    """The output folder, made and proved writable before any work starts.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    folder = out or _new_folder(Path("runs") / f"{command}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    try:
        (folder / "records").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise ConfigError("--out", folder, f"cannot be written ({exc.strerror})", "give a folder of yours") from exc
    return folder


@contextlib.contextmanager
def open_run(out: Path | None, command: str, *, continues: bool | None = None) -> Iterator[Path]:
    """Open the output folder of a long run, as `open_out`, in a context.

    If the run ends early, prints where its partial output is, or removes the folder if there is none.

    Args:
        continues: it may resume an earlier run in the folder; None: the command never resumes one.

    Raises:
        ConfigError: the folder cannot be created or written to, or holds another run, whose files would be mixed in.
    """
    earlier = next((name for name in _OF_A_RUN if (out / name).exists()), None) if out else None
    if out is not None and not continues and (earlier or _records_in(out)):
        rule, remedy = f"holds an earlier run ({earlier or 'records'})", "give a new folder, or remove that one"
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if continues is not None:
            remedy = "resume in it with --resume auto" + ", or give a new folder" * (not is_restart)
        elif is_restart:
            remedy = "a restart by torchrun cannot go on in it: start again, with a new folder"
        raise ConfigError("--out", out, rule, remedy)
    parent_or_out = out or Path("runs")
    made = [path for path in (parent_or_out, *parent_or_out.parents) if not path.exists()]
    folder, claim = None, contextlib.ExitStack()
    try:
        with uninterrupted():  # a Ctrl-C between these would leave a folder that nobody knows of
            opened = open_out(out, command)
            claim.enter_context(_claimed(opened))
            folder = opened
        yield folder
    except BaseException:
        inside = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()] if folder else []
        written = [path for path in inside if path != Path(_LOCK)]
        if folder and written:
            is_logs_alone = all(path.parts[0] == _LOGS for path in written)
            message = (
                f"its logs are in {folder / _LOGS}" if is_logs_alone else f"what was done until then is in {folder}"
            )
            click.echo(f"note: {message}", err=True)
        elif folder:
            claim.close()  # removes the lock file, so that the folder is empty
            _remove_empty([*(path for path in folder.rglob("*") if path.is_dir()), *({folder} - {out}), *made])
        raise
    finally:
        claim.close()


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Lock a folder for one run, so that two runs that start at the same time do not both write to it.

    The lock ends with the process. Some shared file systems have no locks; there the folder is used without one.
    """
    try:
        claim = contextlib.ExitStack()
        claim.enter_context(claimed(folder / _LOCK))
    except LockBusy as exc:
        raise ConfigError("--out", folder, f"holds a run that is under way ({exc})", "give a new folder") from exc
    except OSError as exc:
        logger.info("%s cannot be locked (%s): make sure that no other run uses it", folder, exc.strerror)
    with claim:
        yield


def _records_in(folder: Path) -> bool:
    return any((folder / "records").glob("*.json"))


def _remove_empty(folders: list[Path]) -> None:
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # somebody else has put something there
            folder.rmdir()


def _new_folder(path: Path) -> Path:
    """Make and return `path`, or `path-2` and so on where another run began in the same second."""
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as exc:
            raise ConfigError("--out", folder, f"cannot be written ({exc.strerror})", "give a folder of yours") from exc
        return folder
    raise AssertionError("unreachable: the counter has no end")
