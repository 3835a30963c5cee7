"""The options of `bench.convergence`: how each is read, and what all runs share by them.

Not covered: which runs there are (`bench.convergence.run.plans`), and what joined ones are to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from bench.convergence.rows import Curve
from bench.convergence.run import KINDS, Settings, check_overrides, sizes_of
from netlayer import environ
from netlayer.command import RunOptions
from netlayer.config.file import read_override
from netlayer.errors import ConfigError

NONE = "none"
"""As --runs: nothing is trained."""
_BYTES_A_TOKEN = 5
_LEAST_MIB, _MOST_MIB = 4.0, 4096.0
_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def read_tokens(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Read a number of tokens such as `300M`, `200000`, `1.5G`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbB]?)", text.strip())
    if not match:
        raise click.BadParameter(f"{text} is no number of tokens such as 300M or 200000")
    tokens = round(float(match[1]) * _PREFIXES[match[2].upper()])
    if not tokens:
        raise click.BadParameter(f"{text}: it takes at least one token")
    return tokens


def read_rates(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError as exc:
        raise click.BadParameter(f"{text} is no learning rate, or several with commas between") from exc
    if not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
        raise click.BadParameter(f"{text}: learning rates are above 0, and each stands there once")
    return rates


def read_kinds(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    if text == NONE:
        return ()
    names = tuple(word.strip() for word in text.split(","))
    odd = [name for name in names if name not in KINDS]
    if odd or len(set(names)) < len(names):
        known = f"give {', '.join(KINDS)}, each once, with commas between, or {NONE}"
        raise click.BadParameter(f"{odd[0] if odd else text}: {known}")
    return tuple(kind for kind in KINDS if kind in names)


def read_number(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Reject NaN and infinity, which pass click's ranges."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number")
    return value


def read_settings(options: RunOptions, flags: Mapping[str, Any]) -> Settings:
    """Return the settings that all runs share, from options and configuration.

    Raises:
        ConfigError: an option or a setting has no effect, or does not fit the others.
        HardwareMissing: there are fewer GPUs than ranks.
    """
    if flags["tokens"] is not None and flags["minutes"] is not None:
        raise ConfigError("--minutes", flags["minutes"], "is given beside --tokens", "give one of them")
    if not all(flags["patterns"].split(",")):
        raise ConfigError("--patterns", flags["patterns"], "has an empty pattern", "give some such as '*.md,*.txt'")
    check_overrides(_overrides_by_section(options.overrides))  # before a rule between two of them says something else
    job = options.load_config().job
    overrides = {
        name: section.model_dump(include=section.model_fields_set)
        for name in job.model_fields_set
        if name != "name" and (section := getattr(job, name)).model_fields_set
    }
    check_overrides(overrides)
    ranks = flags["ranks"] or len(environ.usable_gpus()) or 1
    sizes = sizes_of(flags["model"])
    return Settings(
        model=flags["model"],
        ranks=ranks,
        backend=environ.choose_backend(job.launch.backend, ranks),
        seed=options.seed,
        batch=flags["batch"] or sizes.batch,
        micro=flags["micro"],
        lr=flags["lr"] or (sizes.lr,),
        lamb_lr=flags["lamb_lr"] or (sizes.lamb_lr,),
        lamb_times=flags["lamb_times"],
        warmup=flags["warmup"],
        lamb_warmup=flags["lamb_warmup"],
        window=flags["window"] or 0,
        evaluations=flags["evaluations"],
        checkpoints=flags["checkpoints"],
        validation_tokens=flags["validation_tokens"] or sizes.validation_tokens,
        overrides=overrides,
    )


def _overrides_by_section(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the overrides of `--set`, by section of the job and key."""
    by_section: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, value = read_override(override, "model.compile=true")
        section, _, name = key.removeprefix("job.").partition(".")
        by_section.setdefault(section, {})[name] = value
    return by_section


def tokens_of(flags: Mapping[str, Any], earlier: Sequence[Curve]) -> int | None:
    """Return the tokens of a run; None: as many as fit into --minutes."""
    if earlier and flags["minutes"] is not None:
        rule = "is given beside --join, whose runs say how many tokens"
        raise ConfigError("--minutes", flags["minutes"], rule, "omit it")
    if flags["minutes"] is not None:
        return None
    if flags["tokens"] is not None:
        return int(flags["tokens"])
    if earlier:
        return earlier[0].job.optimizer.steps * earlier[0].tokens_per_step
    return sizes_of(flags["model"]).tokens


def most_mib_of(option_mib: float | None, tokens: int | None, joined: Sequence[Curve]) -> float:
    """Return the text limit in MiB: the option, else that of joined runs, else the size of one epoch.

    A run's tokens are drawn from all of the text, so it need not be larger than one epoch. For an unknown number of
    tokens: `_MOST_MIB`.
    """
    if option_mib is not None:
        return option_mib
    if joined and "most_mib" in joined[0].facts["text"]:
        return float(joined[0].facts["text"]["most_mib"])
    return _MOST_MIB if tokens is None else max(_LEAST_MIB, tokens * _BYTES_A_TOKEN / 2**20)
