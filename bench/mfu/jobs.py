"""The jobs that `bench.mfu` compares, from its options: one for all systems, and ours with changes; whether they fit.

Not covered: what systems there are (`bench.mfu.systems`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bench.mfu.systems import OURS, PEERS, Entry, read_peers
from netlayer.command import RunOptions
from netlayer.config.file import read_override
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import ConfigError
from trainer.plan import fit_memory

logger = logging.getLogger(__name__)

_LAYOUT = re.compile(r"(tp|cp|pp|dp|vp)(\d+)")
_CHANGED = ("model", "optimizer", "overlap", "loop")
_TAKEN = (*_CHANGED, "nccl", "store")
_PARALLEL = ("parallel.balance", "parallel.zero")
"""What a layout does not say of the parallel section."""
_SAID = {
    "cluster": "give --layout: its ranks have a GPU each",
    "parallel": "give --layout",
    "batch": "give --micro, --micro-of or --micro-batches",
    "launch": "give --backend",
}
"""Options in place of sections that have no effect."""
_COUNT = re.compile(r"micro_batches=([1-9]\d*)")
"""Of a step and rank: the one change that is none of the configuration's."""


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse settings that no system would see.

    Raises:
        ConfigError: names the setting, and the option for it.
    """
    for override in overrides:
        key, _ = read_override(override, "model.compile=true")
        section = key.removeprefix("job.").partition(".")[0]
        if key.removeprefix("job.") in _PARALLEL:
            continue
        if section not in _TAKEN and (section in _SAID or section in JobConfig.model_fields):
            raise ConfigError("--set", override, "has no effect here", _SAID.get(section, "omit it"))


def read_layout(text: str) -> dict[str, int]:
    """Degrees of `tp2cp2pp2vp2dp1`.

    Raises:
        ConfigError: it says something else, or a degree of 0.
    """
    degrees = _LAYOUT.findall(text)
    if not degrees or "".join(name + number for name, number in degrees) != text or len(dict(degrees)) < len(degrees):
        raise ConfigError("--layout", text, "must be degrees such as tp2pp2vp2", "name each of tp, cp, pp, vp, dp once")
    named = {name: int(number) for name, number in degrees}
    if 0 in named.values():
        raise ConfigError("--layout", text, "has a degree of 0", "give each at least 1, or omit it")
    usual = {"tp": named.get("tp", 1), "pp": named.get("pp", 1), "dp": named.get("dp", 1), "vpp": named.get("vp", 1)}
    return usual | ({"cp": named["cp"]} if "cp" in named else {})


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Makes the job that every system does: no clipping, no warm-up of the learning rate, one bucket a block."""

    options: RunOptions
    model: str | None
    degrees: Mapping[str, int]
    micro: int
    micro_batches: int | None
    dtype: str = "float32"
    """Of the computation, where the options do not say it."""
    holds_channels: bool = False
    """Whether NCCL is held to a few channels, which hold no copy engine: then ours carry nothing, unless told."""

    def __call__(self, changes: Sequence[str] = (), micro: int | None = None) -> JobConfig:
        """The job with further overrides, or with the same sequences a step in micro-batches of another size.

        Args:
            changes: `micro_batches=N` among them makes the batch another one.
        """
        degrees = self.degrees
        ranks = math.prod(degrees.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
        count = self.micro_batches or (4 * degrees["pp"] if degrees["pp"] > 1 else 1)
        for match in filter(None, map(_COUNT.fullmatch, changes)):
            count = int(match[1])
        tree: dict[str, Any] = {
            "model": {"dtype": self.dtype},
            "batch": {"micro_batch_size": micro or self.micro, "global_batch_size": self.micro * count * degrees["dp"]},
            "optimizer": {"lr": 1e-4, "max_grad_norm": 0.0, "warmup_steps": 0},
            "overlap": {"bucket_mib": 0.0, "peer_memory": not self.holds_channels},
        }
        user_job = self._given([change for change in changes if not _COUNT.fullmatch(change)])
        for name in _TAKEN:
            section = getattr(user_job, name)
            tree[name] = {**tree.get(name, {}), **section.model_dump(include=section.model_fields_set)}
        names = {key.removeprefix("parallel.") for key in _PARALLEL}
        tree["parallel"] = {**degrees, **user_job.parallel.model_dump(include=names)}
        return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job

    @property
    def says_compile(self) -> bool:
        """Whether the options say what is compiled: it then holds for all systems."""
        return "compile" in self._given(()).model.model_fields_set

    def _given(self, changes: Sequence[str]) -> JobConfig:
        # First, so that the other overrides are checked against the preset's shape.
        named = self.model or ("" if self.options.config_path else "1m")
        first = [f"job.model.preset={named}"] if named else []
        first.append("job.optimizer.max_grad_norm=0")  # as in every job here: some settings cannot be had with clipping
        overrides = (*first, *self.options.overrides, *changes)
        return dataclasses.replace(self.options, overrides=overrides).load_config().job


def read_entries(
    build: Jobs,
    peers: str | None,
    also: Sequence[str],
    micro_of: Sequence[str],
    *,
    cumulative: bool = False,
    compiles: bool = False,
) -> tuple[Entry, ...]:
    """Return ours and the peers with the identical model, then ours with changes, each alone or on top of the last.

    Args:
        compiles: peers that are at their best with `job.model.compile` have it, unless the options say otherwise.
    """
    micros = _read_micros(micro_of)
    names = (OURS, *read_peers(peers, build()))
    unknown = next((name for name in micros if name not in names), None)
    if unknown is not None:
        raise ConfigError("--micro-of", unknown, f"is none of {', '.join(names)}", "name a system that runs")
    compiled = ["model.compile=true"] if compiles and not build.says_compile else []
    entries = [
        Entry(name, build(compiled if name in PEERS and PEERS[name].is_compiled else (), micros.get(name)))
        for name in names
    ]
    changes: list[str] = []
    for text in dict.fromkeys(also):
        changes = [*(changes if cumulative else []), *text.split(",")]
        for change in changes:
            key = change.removeprefix("job.").partition("=")[0]
            is_said = _COUNT.fullmatch(change) or key in _PARALLEL
            if not is_said and key.partition(".")[0] not in _CHANGED:
                rule = f"changes none of {', '.join((*_CHANGED, *_PARALLEL))}, micro_batches"
                raise ConfigError("--also", change, rule, "for example --also model.parallel_block=true")
        entries.append(Entry(OURS, build(changes, micros.get(OURS)), f"+ {text}" if cumulative else text))
    return tuple(entries)


def fit_room(entries: Sequence[Entry], backend: Literal["gloo", "nccl"]) -> tuple[Entry, ...]:
    """Return the rows as they run: our jobs with defaults stepped down to what fits, as `netlayer train` has them.

    Refuses what does not fit, before the first turn. On GPUs that is asked of ours alone: the estimate is of ours, a
    peer may hold less, and one that has no memory left is named while the others go on. On CPUs the kernel would end
    whom it likes.

    Raises:
        ConfigError: names the row, and what would fit.
    """
    return tuple(_fitted(each, backend) if each.system == OURS or backend == "gloo" else each for each in entries)


def _fitted(entry: Entry, backend: Literal["gloo", "nccl"]) -> Entry:
    named = entry.job.model_copy(update={"name": entry.name})
    try:
        fitted, message = fit_memory(named, entry.job.parallel.layout.world_size, backend)
    except ConfigError as exc:
        hints = {" (--micro here)": "job.batch.", " (--layout here)": "job.parallel."}
        options = "".join(hint for hint, section in hints.items() if section in exc.remedy)
        raise ConfigError(exc.field, exc.value, exc.rule, exc.remedy + options) from exc
    if entry.system != OURS:
        logger.info("%s: %s", entry.name, message)
        return entry
    # What was not asked for is said; the record has it in the row's job.
    logger.log(logging.INFO if fitted == named else logging.WARNING, "%s: %s", entry.name, message)
    return dataclasses.replace(entry, job=fitted.model_copy(update={"name": entry.job.name}))


def _read_micros(texts: Sequence[str]) -> dict[str, int]:
    """Sizes of micro-batches by system."""
    sizes: dict[str, int] = {}
    for text in texts:
        system, equals, number = text.partition("=")
        if not equals or not number.isdecimal() or int(number) < 1:
            raise ConfigError("--micro-of", text, "must read SYSTEM=N, N at least 1", "for example --micro-of mcore=2")
        sizes[system] = int(number)
    return sizes
