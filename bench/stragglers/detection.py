"""`python -m bench.stragglers.detection`: the smallest straggler that `observe report` finds at 1,536 hosts.

The noise is measured: own times of ranks by step, from traces of production jobs (parquet, ByteDance's straggler
traces), from records of this project (`each_ms`: one step time after another), or from event streams of a run. What is
common to all ranks in a step is taken out; a host of the made trace gets blocks of consecutive steps of a random
measured rank, so that long tails and correlation stay, and a lasting offset as measured ranks differ. Then a few hosts
are slowed, and the detector and the null model (mean above the median + k MAD) say whom they suspect. The smallest
slowdown is the least of the grid with precision and recall of at least 0.99 over all trials, there and above.

The result is *simulated*: measured noise, made faults. Not covered: several hosts that fail together; noise that many
hosts share, such as a slow switch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from netlayer.command import RunOptions, open_out, renamed_option, run_options_without_config
from netlayer.environ import snapshot
from netlayer.errors import ConfigError
from netlayer.observe.verdicts.straggler import detect, null_model
from netlayer.results import RunRecord, utc_now, write_text

Times = np.ndarray[Any, np.dtype[np.float64]]

GRID = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5)
STEPS = (5, 10, 20, 50, 100)
_NULL_K = (3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)
_BLOCK = 8  # consecutive steps of a measured rank that stay together
_LEAST = 0.99
_FAULTY = 0.05  # a measured rank beyond this offset is a straggler itself, and no noise


@dataclass(frozen=True)
class Noise:
    """Measured noise of healthy ranks, relative to their peers.

    Args:
        name: where it was measured.
        series: for each rank its steps' deviations from its own median.
        offset_sigma: standard deviation of the ranks' medians, from their MAD.
    """

    name: str
    series: Sequence[Times]
    offset_sigma: float

    @property
    def sigma(self) -> float:
        """Robust standard deviation of a rank's steps."""
        return float(1.4826 * np.median(np.abs(np.concatenate(list(self.series)))))

    def draw(self, rng: np.random.Generator, num_steps: int, num_hosts: int) -> Times:
        """Own times of healthy hosts, [step, host], around 1."""
        lengths = np.array([len(series) for series in self.series])
        table = np.full((lengths.max(), len(lengths)), np.nan)
        for column, series in enumerate(self.series):
            table[: len(series), column] = series
        ranks = rng.integers(len(lengths), size=num_hosts)
        num_blocks = -(-num_steps // _BLOCK)
        begins = rng.integers(1 << 30, size=(num_blocks, num_hosts)) % lengths[ranks]
        rows = (begins[:, None, :] + np.arange(_BLOCK)[None, :, None]) % lengths[ranks]
        noise = table[rows.reshape(-1, num_hosts)[:num_steps], ranks]
        return np.asarray((1 + noise) * (1 + rng.normal(0, self.offset_sigma, num_hosts)))


@dataclass(frozen=True)
class Row:
    """Smallest slowdown found in one setting; None where none of the grid is."""

    noise: str
    num_ranks_measured: int
    sigma_percent: float
    offset_sigma_percent: float
    begins: str
    steps_slow: int
    smallest_percent: float | None
    smallest_null_percent: float | None
    null_k: float | None
    smallest_null_k3_percent: float | None
    precision: float
    recall: float
    onset_error_steps: float | None
    returned_percent: float


def noise_of(name: str, own_s: Times, roles: Sequence[object], offset_sigma: float | None = None) -> Noise:
    """Noise of a measured table [step, rank]; ranks of equal role are peers.

    Args:
        offset_sigma: of ranks that cannot be compared (one a role), else None: as measured.
    """
    series, offsets = [], []
    for role in dict.fromkeys(roles):
        columns = [column for column, other in enumerate(roles) if other == role]
        times = own_s[:, columns]
        # A single rank cannot be told from what its step had in common with others: all of it counts as its noise.
        common = np.median(times, axis=1, keepdims=True) if len(columns) > 1 else np.median(times)
        relative = times / common - 1
        for column in range(len(columns)):
            offset = float(np.median(relative[:, column]))
            if abs(offset) < _FAULTY:
                series.append(relative[:, column] - offset)
                offsets.append(offset)
    measured = 1.4826 * float(np.median(np.abs(np.array(offsets) - np.median(offsets))))
    return Noise(name, series, measured if offset_sigma is None else offset_sigma)


def trace_noise(path: Path) -> Noise:
    """Noise of the computation in a published straggler trace.

    Raises:
        ConfigError: it is none.
    """
    from netlayer.observe.readers import bytedance
    from netlayer.observe.verdicts.timeline import timeline_of

    try:
        timeline = timeline_of(bytedance.read(path, []))
    except ValueError as exc:
        raise ConfigError("--trace", path, str(exc), "give a parquet file of the straggler traces") from exc
    compute = np.array([operation.kind in ("forward", "backward") for operation in timeline.operations])
    durations = timeline.end_s - timeline.start_s
    own, roles = [], []
    for stage in range(timeline.ranks.shape[0]):
        for dp in range(timeline.ranks.shape[1]):
            own.append(durations[compute & (timeline.stages == stage), :, dp].sum(axis=0))
            roles.append(stage)
    return noise_of(path.stem, np.array(own).T, roles)


def record_noise(path: Path, offset_sigma: float) -> Noise:
    """Noise of the series of 100 or more step times in a record of this project.

    Raises:
        ConfigError: there is none.
    """
    try:
        rows = json.loads(path.read_text())["rows"]
        series = [np.array(row["each_ms"], float) for row in rows if len(row.get("each_ms", ())) >= 100]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError("--record", path, f"is no record ({exc})", "give a record with rows of each_ms") from exc
    if not series:
        raise ConfigError("--record", path, "has no row with 100 or more each_ms", "give another record")
    together = np.stack([one[: min(map(len, series))] for one in series], axis=1)
    return noise_of(path.stem, together, range(len(series)), offset_sigma)


@dataclass(frozen=True)
class Setting:
    """Size of the made traces."""

    hosts: int
    slow_hosts: int
    trials: int
    seed: int


def measure(noise: Noise, num_steps: int, quiet_steps: int, setting: Setting) -> Row:
    """Find the smallest slowdown for one length of the slow part.

    Args:
        num_steps: steps in which the slow hosts are slow, the last of the trace.
        quiet_steps: steps before, in which they are not.
    """
    counts = {name: np.zeros((len(GRID), 3), int) for name in ("ours", *map(str, _NULL_K))}
    onset_errors: list[list[int]] = [[] for _ in GRID]
    gains: list[list[float]] = [[] for _ in GRID]
    for trial in range(setting.trials):
        rng = np.random.default_rng([setting.seed, trial, num_steps, quiet_steps])
        healthy = noise.draw(rng, quiet_steps + num_steps, setting.hosts)
        slow = rng.choice(setting.hosts, setting.slow_hosts, replace=False)
        for at, slowdown in enumerate(GRID):
            times = healthy.copy()
            times[quiet_steps:, slow] *= 1 + slowdown
            detection = detect(times)
            suspects = {suspect.column for suspect in detection.stragglers}
            _count(counts["ours"][at], suspects, slow)
            onset_errors[at] += [
                abs(suspect.since - quiet_steps) for suspect in detection.stragglers if suspect.column in set(slow)
            ]
            gains[at].append(_step_gain(times[quiet_steps:], slow))
            for k in _NULL_K:
                # The null model knows the window in which the hosts are slow; whoever reads a page would guess it.
                _count(counts[str(k)][at], set(np.flatnonzero(null_model(times[quiet_steps:], k))), slow)
    ours = _smallest(counts["ours"])
    nulls = {k: _smallest(counts[str(k)]) for k in _NULL_K}
    best = min((k for k in _NULL_K if nulls[k] is not None), key=lambda k: (nulls[k], k), default=None)
    level = ours if ours is not None else len(GRID) - 1
    precision, recall = _rates(counts["ours"][level])
    null_best = nulls[best] if best is not None else None
    null_3 = nulls[_NULL_K[0]]
    errors = onset_errors[level]
    return Row(
        noise.name,
        len(noise.series),
        100 * noise.sigma,
        100 * noise.offset_sigma,
        f"after {quiet_steps} steps" if quiet_steps else "before the record",
        num_steps,
        100 * GRID[ours] if ours is not None else None,
        100 * GRID[null_best] if null_best is not None else None,
        best,
        100 * GRID[null_3] if null_3 is not None else None,
        precision,
        recall,
        float(np.median(errors)) if errors else None,
        100 * float(np.mean(gains[level])),
    )


def _count(row: Any, suspects: set[int], slow: Any) -> None:
    right = len(suspects & set(slow.tolist()))
    row += (right, len(suspects) - right, len(slow) - right)


def _rates(row: Any) -> tuple[float, float]:
    right, false, missed = (int(value) for value in row)
    return (right / (right + false) if right + false else 1.0), right / (right + missed)


def _smallest(rows: Any) -> int | None:
    """Place in the grid from which on precision and recall suffice; None: nowhere."""
    good = [min(_rates(row)) >= _LEAST for row in rows]
    return next((at for at in range(len(good)) if all(good[at:])), None)


def _step_gain(times: Times, slow: Any) -> float:
    """Share by which MFU rises if the slow hosts go: steps are as long as the slowest host's own time."""
    rest = np.delete(times, slow, axis=1)
    return float(times.max(axis=1).mean() / rest.max(axis=1).mean() - 1)


@click.command()
@click.option("--trace", "traces", type=click.Path(path_type=Path), multiple=True, help="ByteDance's straggler trace.")
@click.option(
    "--record", "records", type=click.Path(path_type=Path), multiple=True, help="Record with rows of each_ms."
)
@click.option(
    "--num-hosts",
    "hosts",
    type=click.IntRange(8),
    default=1536,
    show_default=True,
    help="Hosts of the made traces.",
)
@renamed_option("--hosts", "--num-hosts", "hosts")
@click.option("--slow-hosts", type=click.IntRange(1), default=8, show_default=True, help="Slow ones among them.")
@click.option("--trials", type=click.IntRange(1), default=20, show_default=True, help="Made traces a row.")
@click.option("--steps", type=click.IntRange(1), multiple=True, default=STEPS, show_default=True)
@click.option("--quiet-steps", type=click.IntRange(0), default=100, show_default=True, help="Before a later fault.")
@click.option("--offset-percent", type=float, default=0.35, show_default=True, help="Spread of hosts, for --record.")
@run_options_without_config
def command(
    options: RunOptions,
    traces: tuple[Path, ...],
    records: tuple[Path, ...],
    hosts: int,
    slow_hosts: int,
    trials: int,
    steps: tuple[int, ...],
    quiet_steps: int,
    offset_percent: float,
) -> None:
    """Measure the smallest straggler that is found, by number of steps, beside a null model.

    \b
    Examples:
      python -m bench.stragglers.detection --trace trace-AR.parquet --trace trace-ST.parquet --out runs/stragglers
      python -m bench.stragglers.detection --record reports/trainer_2xh200_202611.jitter.json --steps 20
    """
    started = utc_now()
    noises = [trace_noise(path) for path in traces]
    noises += [record_noise(path, offset_percent / 100) for path in records]
    if not noises:
        raise ConfigError("--trace", None, "no noise is given", "give --trace or --record, once or more")
    setting = Setting(hosts, slow_hosts, trials, options.seed)
    rows = []
    for noise in noises:
        for quiet in dict.fromkeys((0, quiet_steps)):
            for num_steps in steps:
                rows.append(measure(noise, num_steps, quiet, setting))
                click.echo(_line(rows[-1]))
    record = RunRecord(
        name="bench.stragglers.detection",
        source="simulated",
        rows=[asdict(row) for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={"traces": list(map(str, traces)), "records": list(map(str, records)), **asdict(setting)},
        environment=snapshot(),
    )
    if options.json_file:
        write_text(options.json_file, record.to_json())
    folder = open_out(options.out, "straggler_detection")
    write_text(folder / "records" / f"{record.name}.json", record.to_json())
    click.echo(f"report: {write_page([asdict(row) for row in rows], folder)}", err=True)


def write_page(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write a page with charts of the smallest slowdown by number of steps; `rows` are those of a record."""
    import pandas as pd

    from netlayer.report import Axis, Report, charts

    page = Report("Smallest straggler that is found", "measured noise, made faults")
    section = page.section("By number of steps", "Precision and recall of at least 0.99.", source="simulated")
    x, y = Axis("steps", "Steps that the hosts are slow"), Axis("slowdown", "Smallest slowdown", "share", zero=True)
    settings = dict.fromkeys((row["noise"], row["begins"]) for row in rows)
    for number, setting in enumerate(settings):
        points = [
            {"steps": row["steps_slow"], "slowdown": row[key] / 100, "finder": finder}
            for row in rows
            for key, finder in (("smallest_percent", "observe report"), ("smallest_null_percent", "median + k MAD"))
            if (row["noise"], row["begins"]) == setting and row[key] is not None
        ]
        if points:
            title = f"{setting[0]}, slow {setting[1]}"
            chart = charts.line(pd.DataFrame(points), x, y, colour="finder", title=title)
            caption = f"Smallest slowdown found, {title}; k is the best for each length."
            section.chart(chart, name=f"smallest_{number}", caption=caption)
    section.table(pd.DataFrame(rows))
    return page.write(folder)


def _line(row: Row) -> str:
    def percent(value: float | None) -> str:
        return f"{value:.2f}%" if value is not None else f"above {100 * GRID[-1]:.0f}%"

    return (
        f"{row.noise}: slow {row.begins}, {row.steps_slow} steps: {percent(row.smallest_percent)} found; "
        f"null {percent(row.smallest_null_percent)} (k {row.null_k}), k 3 {percent(row.smallest_null_k3_percent)}; "
        f"onset error {row.onset_error_steps} steps, MFU +{row.returned_percent:.2f}%"
    )


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.stragglers.detection")
