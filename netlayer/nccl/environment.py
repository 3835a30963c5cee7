"""NCCL's environment for RoCE: what a job asks for, checked against its release, and never over what the user set.

A user's value may stand in the environment or in a file that NCCL reads itself (NCCL_CONF_FILE, ~/.nccl.conf,
/etc/nccl.conf), which an exported variable would override: both are kept. Releases and defaults were read from NCCL's
own tags, v2.3.7 to v2.30.7 (github.com/NVIDIA/nccl, src/transport/net_ib*, src/misc/param.cc), and from the libraries
of 2.31.2 and 2.32.3. Not covered: what picks an algorithm or a protocol.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from netlayer.config.tree import NcclConfig
from netlayer.errors import ConfigError
from netlayer.nccl.ack_timeout import least_timeout, nominal_s
from netlayer.nccl.variables import KNOWN, VARIABLES, Release, Variable, read_release

logger = logging.getLogger(__name__)

NEWEST = "2.32.3"  # the newest release that was read
PREFIX = "job.nccl"
Action = Literal["set", "kept", "omitted"]
Cost = Callable[[int, int], str]
"""Function that says what a timeout and a retry count cost on some NIC."""


@dataclass(frozen=True)
class Choice:
    """Choice for one variable: what becomes of it, and why."""

    name: str
    value: str | None
    action: Action
    why: str


def apply_to(
    environ: MutableMapping[str, str],
    settings: NcclConfig,
    release: str | None = None,
    conf_files: Iterable[Path] | None = None,
) -> list[Choice]:
    """Set what the job wants into `environ` (`os.environ` before NCCL starts), and log each choice.

    Returns the choices, for a record: `as_record`.

    Raises:
        ConfigError: see `choose`.
    """
    choices = choose(environ, settings, release or installed_nccl() or NEWEST, conf_files)
    environ.update(exports(choices))
    for choice in choices:
        logger.info("%s %s: %s", choice.name, describe(choice), choice.why)
    return choices


def for_ranks(
    backend: str, settings: NcclConfig | None = None, environ: Mapping[str, str] | None = None
) -> list[Choice]:
    """Return the choice for each variable of ranks that this process is about to start, or is; none on gloo.

    Args:
        backend: what carries their bytes.
        settings: of the job; the defaults, where there is none.
        environ: what they would inherit; this process's own.

    Raises:
        ConfigError: see `choose`.
    """
    if backend == "gloo":
        return []
    inherited = dict(os.environ if environ is None else environ)
    return apply_to(inherited, settings or NcclConfig())


def choose(
    environ: Mapping[str, str],
    settings: NcclConfig,
    release: str,
    conf_files: Iterable[Path] | None = None,
    cost: Cost | None = None,
) -> list[Choice]:
    """Return the choice for each variable, without setting any.

    Args:
        release: of the NCCL that will run: a variable that it lacks is omitted.
        conf_files: NCCL's own files; those it would read, where None.
        cost: of a timeout that a flap chose, for its reason.

    Raises:
        ConfigError: a value of the user's that NCCL would misread, or a release that is none.
    """
    number = parse_release("--nccl", release)
    users = {**_of_files(nccl_conf_files(environ) if conf_files is None else conf_files), **_of_environ(environ)}
    choices = [_choice(variable, users, settings, release, number, cost) for variable in VARIABLES]
    return [choice for choice in choices if choice is not None]


def exports(choices: Iterable[Choice]) -> dict[str, str]:
    """The variables to set, for the environment of ranks."""
    return {choice.name: choice.value for choice in choices if choice.action == "set" and choice.value is not None}


@contextlib.contextmanager
def exported(choices: Iterable[Choice]) -> Iterator[None]:
    """Set the variables in this process for the block; NCCL reads them when it first connects."""
    added = exports(choices)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:  # none of them was set before
            os.environ.pop(name, None)


def as_record(choices: Iterable[Choice]) -> list[dict[str, str | None]]:
    """The choices as rows."""
    return [asdict(choice) for choice in choices]


def describe(choice: Choice) -> str:
    """Return `= 18`, or what became of it in words."""
    return f"= {choice.value}" if choice.action == "set" else choice.action


def parse_release(field: str, text: str) -> Release:
    """Parse a release of NCCL 2, as `read_release`.

    Raises:
        ConfigError: it is no release of NCCL 2.
    """
    release = read_release(text)
    if release is None:
        raise ConfigError(field, text, "is no release of NCCL 2", "give one such as 2.32.3")
    return release


def installed_nccl() -> str | None:
    """The release installed with torch; None where torch is no CUDA build or is absent."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def nccl_conf_files(environ: Mapping[str, str]) -> list[Path]:
    """The files that NCCL reads itself; a variable of the environment goes before them, the first before the second."""
    own = environ.get("NCCL_CONF_FILE") or (f"{environ['HOME']}/.nccl.conf" if environ.get("HOME") else "")
    return [*([Path(own)] if own else []), Path("/etc/nccl.conf")]


def _choice(
    variable: Variable,
    users: Mapping[str, tuple[str, str]],
    settings: NcclConfig,
    release: str,
    number: Release,
    cost: Cost | None,
) -> Choice | None:
    """Choose for one variable: set it, keep the user's value, or omit it; None where nothing asks for it."""
    name, lacks = variable.name, number < variable.since
    value, why = _value_of(variable, settings, release, number, cost)
    since = ".".join(map(str, variable.since))
    if name in users:
        text, where = users[name]
        _check_users(variable, text, where, number)
        if lacks:
            return Choice(
                name, text, "kept", f"set in {where}; without effect: NCCL {release} lacks it (since {since})"
            )
        other = f"; the job would set {value}" if value not in (None, text) else ""
        if number < variable.zero_is_unset_before and _c_number(text) == 0:
            other = f"; without effect: NCCL {release} takes 0 for unset{other}"
        return Choice(name, text, "kept", f"set in {where}{other}")
    if value is None:
        return None
    if lacks:
        return Choice(name, None, "omitted", f"NCCL {release} lacks it (since {since}); the job wants {value}")
    if number < variable.zero_is_unset_before and value == "0":
        until = ".".join(map(str, variable.zero_is_unset_before))
        return Choice(name, None, "omitted", f"NCCL {release} takes 0 for unset (until {until}); the job wants 0")
    return Choice(name, value, "set", why)


def _value_of(
    variable: Variable, settings: NcclConfig, release: str, number: Release, cost: Cost | None
) -> tuple[str | None, str]:
    """The job's value as NCCL reads it, and the reason; None where the job says nothing."""
    value = getattr(settings, variable.field)
    preset = variable.preset(number)
    beside = f"NCCL {release} by itself: {preset}" if preset is not None else "NCCL chooses by itself"
    if number[:2] > (read_release(NEWEST) or number)[:2]:  # of 2.33 nothing is known yet
        beside += f", if it is as {NEWEST}, the newest that was read"
    if variable.field == "timeout" and value is None:
        if not settings.retry_cnt:
            rule = "with retry_cnt = 0 nothing is sent again: no timeout outlives a flap"
            raise ConfigError(f"{PREFIX}.timeout", None, rule, "give a timeout, or retry_cnt = 7")
        return _solved(settings, beside, cost)
    if variable.field == "gid_index" and value == -1 and number < (2, 21, 5):
        rule = f"NCCL {release} does not look for a GID (since 2.21.5)"
        raise ConfigError(f"{PREFIX}.gid_index", value, rule, "give the index of the RoCE v2 GID: often 3")
    if value is None:
        return None, ""
    return str(int(value)) if isinstance(value, bool | int) else value, f"{variable.meaning}; {beside}"


def _solved(settings: NcclConfig, beside: str, cost: Cost | None) -> tuple[str, str]:
    try:
        timeout = least_timeout(settings.flap_s, settings.retry_cnt)
    except ValueError as exc:
        remedy = "give a shorter flap or more retries"
        raise ConfigError(f"{PREFIX}.flap_s", settings.flap_s, f"no timeout outlives it ({exc})", remedy) from exc
    lower_s = settings.retry_cnt * nominal_s(timeout)
    costs = [cost(timeout, settings.retry_cnt)] if cost else []
    reason = f"outlives a flap of {settings.flap_s:g} s, {lower_s:.1f} s on any NIC"
    return str(timeout), "; ".join([reason, *costs, beside])


def _check_users(variable: Variable, text: str, where: str, release: Release) -> None:
    """A user's number as NCCL takes it; what follows a number it ignores in silence."""
    if variable.low is None or variable.high is None:
        return
    value = _c_number(text)
    if value is None:
        rule = f"in {where} is no whole number, which NCCL would misread"
        raise ConfigError(variable.name, text, rule, variable.rule)
    if not variable.low <= value <= variable.high and not variable.takes_besides(value, release):
        rule = f"in {where} is out of {variable.low}..{variable.high}: {variable.rule}"
        raise ConfigError(variable.name, text, rule, "correct or unset it")


def _c_number(text: str) -> int | None:
    """Convert a whole text as strtoll does: decimal, 0x, or octal after a 0; None where it would stop earlier."""
    match = re.fullmatch(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9]\d{0,18})\s*", text, re.ASCII)
    if match is None:
        return None
    sign, digits = match.groups()
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    return int(sign + digits, base)


def _of_environ(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (environ[name], "the environment") for name in KNOWN if environ.get(name)}


def _of_files(files: Iterable[Path]) -> dict[str, tuple[str, str]]:
    variables: dict[str, tuple[str, str]] = {}
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # NCCL passes over a file that it cannot read, too
            continue
        for name, equals, value in (line.partition("=") for line in lines):
            if equals and name in KNOWN and value:
                variables.setdefault(name, (value, str(path)))
    return variables
