"""The options of `bench.convergence`: how each is read, and what all runs share by them.

Left out: which runs there are (`bench.convergence.run.plans`), and what joined ones are to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from bench.convergence.rows import Curve
from bench.convergence.run import KINDS, Asked, check_overrides, sizes_of
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
    """`300M`, `200000`, `1.5G`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbB]?)", text.strip())
    if not found:
        raise click.BadParameter(f"{text} is no number of tokens such as 300M or 200000")
    tokens = round(float(found[1]) * _PREFIXES[found[2].upper()])
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
    """NaN passes every range."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number")
    return value


def asked_of(options: RunOptions, given: Mapping[str, Any]) -> Asked:
    """What all runs share, out of options and configuration.

    Raises:
        ConfigError: an option or a setting has no effect, or does not fit the others.
        HardwareMissing: there are fewer GPUs than ranks.
    """
    if given["tokens"] is not None and given["minutes"] is not None:
        raise ConfigError("--minutes", given["minutes"], "is given beside --tokens", "give one of them")
    if not all(given["patterns"].split(",")):
        raise ConfigError("--patterns", given["patterns"], "has an empty pattern", "give some such as '*.md,*.txt'")
    check_overrides(_keys(options.overrides))  # before a rule between two of them says something else
    job = options.load_config().job
    overrides = {
        name: section.model_dump(include=section.model_fields_set)
        for name in job.model_fields_set
        if name != "name" and (section := getattr(job, name)).model_fields_set
    }
    check_overrides(overrides)
    ranks = given["ranks"] or len(environ.usable_gpus()) or 1
    sizes = sizes_of(given["model"])
    return Asked(
        model=given["model"],
        ranks=ranks,
        backend=environ.choose_backend(job.launch.backend, ranks),
        seed=options.seed,
        batch=given["batch"] or sizes.batch,
        micro=given["micro"],
        lr=given["lr"] or (sizes.lr,),
        lamb_lr=given["lamb_lr"] or (sizes.lamb_lr,),
        lamb_times=given["lamb_times"],
        warmup=given["warmup"],
        lamb_warmup=given["lamb_warmup"],
        window=given["window"] or 0,
        evaluations=given["evaluations"],
        checkpoints=given["checkpoints"],
        validation_tokens=given["validation_tokens"] or sizes.validation_tokens,
        overrides=overrides,
    )


def _keys(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `--set` names, by section of the job."""
    found: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, value = read_override(override, "model.compile=true")
        section, _, name = key.removeprefix("job.").partition(".")
        found.setdefault(section, {})[name] = value
    return found


def tokens_of(given: Mapping[str, Any], earlier: Sequence[Curve]) -> int | None:
    """Of a run; None: as many as fit into --minutes."""
    if earlier and given["minutes"] is not None:
        rule = "is given beside --join, whose runs say how many tokens"
        raise ConfigError("--minutes", given["minutes"], rule, "leave it out")
    if given["minutes"] is not None:
        return None
    if given["tokens"] is not None:
        return int(given["tokens"])
    if earlier:
        return earlier[0].job.optimizer.steps * earlier[0].tokens_per_step
    return sizes_of(given["model"]).tokens


def most_mib_of(given: float | None, tokens: int | None, joined: Sequence[Curve]) -> float:
    """What joined runs had; else no more than one epoch needs, for a run's tokens are drawn from all of it; of an
    unknown number all there is."""
    if given is not None:
        return given
    if joined and "most_mib" in joined[0].facts["text"]:
        return float(joined[0].facts["text"]["most_mib"])
    return _MOST_MIB if tokens is None else max(_LEAST_MIB, tokens * _BYTES_A_TOKEN / 2**20)
