"""The page of `bench.convergence`: curves over tokens and over time, what each run came to, and what it ran on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from bench.convergence.rows import BROKEN_OFF, EVALUATION, RUN, TRAINING, comparison
from netlayer.report import Axis, Figure, Report, Section, charts
from netlayer.results import RunRecord

Row = Mapping[str, Any]

_MIB = 2**20
_LEARNED = {
    "run": "run",
    "million_tokens": "million tokens",
    "epochs": "epochs",
    "steps": "steps",
    "batch_sequences": "batch",
    "held_out_loss": "held-out loss",
}
_SPEED = {
    "run": "run",
    "minutes": "minutes",
    "wall_minutes": "minutes in all",
    "first_step_s": "first step, s",
    "tokens_per_s": "tokens/s",
    "mfu_full": "MFU, full",
    "mfu_causal": "MFU, causal",
    "mfu_done": "MFU, keys seen",
}
_FORMATS = {"million tokens": ",.2f", "epochs": ".2f", "held-out loss": ".4f"}
_SPEED_FORMATS = {"minutes": ".2f", "minutes in all": ".2f", "first step, s": ".1f", "tokens/s": ",.0f"}
_MFU = ("MFU, full", "MFU, causal", "MFU, keys seen")


def build_page(record: RunRecord) -> Report:
    """The report; `Report.write` puts it into a folder."""
    model = next(iter(record.config["jobs"].values()))["model"]
    size = f"{model['preset']}: {model['layers']} layers of {model['hidden']}, {model['seq_len']} tokens a sequence"
    where = f"{len(record.devices)} x {record.devices[0]}"
    report = Report("Convergence on real text", f"{size}, {where}", commit=str(record.environment["commit"]))
    return report.fill(record, [_verdict, _overview, _curves, _text, _settings, _meaning])


def _rows_of(record: RunRecord, table: str) -> list[Row]:
    return [row for row in record.rows if row["table"] == table]


def _verdict(report: Report, record: RunRecord) -> None:
    """A run that did not come to its end is said on top; there is no threshold to pass."""
    reasons = [f"{row['run']}: {row['stopped']}" for row in _rows_of(record, RUN) if row["stopped"]]
    text = " ".join(reasons)
    for row in _rows_of(record, BROKEN_OFF):
        reasons += [row["reason"]] if row["reason"] not in text else []
        reasons += [f"not run: {', '.join(row['not_run'])}"] if row["not_run"] else []
    if reasons:
        report.verdict("WARN", f"Interrupted: {'; '.join(reasons)}. What was measured is below")


def _overview(report: Report, record: RunRecord) -> None:
    """Add the section on what each run came to: its loss, comparisons, resumptions, speed and MFU."""
    runs = _rows_of(record, RUN)
    section = report.section("What each run came to", source="measured")
    section.figures(*(_figure(row) for row in runs if row["held_out_loss"] is not None))
    for sentence in (comparison(row) for row in runs):
        if sentence:
            section.text(f"{sentence}.")
    for row in runs:
        if row["resumed_at"]:
            steps = ", ".join(f"{step:,}" for step in row["resumed_at"])
            section.text(f"{row['run']} was interrupted, and resumed from the checkpoint after step {steps}.")
    if all(row["baseline"] is None for row in runs):
        section.note("No standard run came to its end, so nothing is compared.")
    frame = pd.DataFrame(runs).assign(million_tokens=[row["tokens"] / 1e6 for row in runs])
    section.table(
        frame[list(_LEARNED)].rename(columns=_LEARNED),
        caption="Batch: sequences of a step. Held-out loss: nats a token, of the last evaluation.",
        formats=_FORMATS,
    )
    speed = frame[list(_SPEED)].rename(columns=_SPEED).dropna(axis="columns", how="all")
    known = [name for name in _MFU if name in speed]
    section.table(
        speed,
        caption="Minutes and rates are of training steps alone, the first of which, where it compiles and warms up, "
        "counts as the median of the others. Minutes in all: with the start, that step and all evaluations."
        + ("" if known else " No MFU: no peak is known for this device and dtype."),
        formats={
            name: spec for name, spec in {**_SPEED_FORMATS, **dict.fromkeys(_MFU, ".3f")}.items() if name in speed
        },
    )


def _figure(row: Row) -> Figure:
    if row["baseline"] in (None, row["run"]):
        hint = "held-out loss at the end" if row["is_whole"] else "held-out loss, interrupted"
        return Figure(row["run"], f"{row['held_out_loss']:.3f}", "", hint)
    reached = "not reached"
    if row["tokens_over_baseline"] is not None:
        reached = f"in {row['tokens_over_baseline']:.0%} of its tokens, {row['seconds_over_baseline']:.0%} of its time"
    hint = f"{row['baseline']}'s {row['baseline_loss']:.3f}: {reached}"
    return Figure(row["run"], f"{row['held_out_loss']:.3f}", "", hint)


def _curves(report: Report, record: RunRecord) -> None:
    section = report.section("Curves", source="measured")
    evaluations = pd.DataFrame(_rows_of(record, EVALUATION))
    training = pd.DataFrame(_rows_of(record, TRAINING))
    loss = Axis("held_out_loss", "Held-out loss", "nats a token")
    learned = evaluations[evaluations["step"] > 0]
    if learned.empty:
        section.note("No run came to an evaluation after training began.")
    else:
        _chart(
            section,
            learned,
            _tokens(learned),
            loss,
            "convergence_tokens",
            "Held-out loss over tokens, from the second evaluation on.",
        )
        in_minutes = learned.assign(minutes=learned["seconds"] / 60)
        minutes = Axis("minutes", "Training time", "min")
        _chart(section, in_minutes, minutes, loss, "convergence_time", "Held-out loss over training time.")
    if not training.empty:
        caption = "Training loss, means over stretches of steps, each drawn at its middle."
        axis = Axis("loss", "Training loss", "nats a token")
        _chart(section, training, _tokens(training), axis, "convergence_training", caption)


def _tokens(frame: pd.DataFrame) -> Axis:
    scale, unit = (1e6, "million") if frame["tokens"].max() >= 1e6 else (1e3, "thousand")
    frame["scaled_tokens"] = frame["tokens"] / scale
    return Axis("scaled_tokens", "Tokens", unit)


def _chart(section: Section, frame: pd.DataFrame, x: Axis, y: Axis, name: str, caption: str) -> None:
    section.chart(charts.line(frame, x, y, colour="run"), name=name, caption=caption)


def _text(report: Report, record: RunRecord) -> None:
    text, corpus = record.config["text"], record.config["corpus"]
    section = report.section("The text")
    section.keyvalues(
        {
            "from": ", ".join(text["roots"].values()),
            "files": f"{text['files']:,} ({corpus['validation_files']:,} held out)",
            "text": _size(text["text_bytes"]),
            **{f"text from {name}": _size(size) for name, size in text["by_root"].items()},
            **{f"text in {name or 'other'} files": _size(size) for name, size in _large(text)},
            "tokens to train on (an epoch)": f"{corpus['train_tokens']:,}",
            "tokens held out": f"{corpus['validation_tokens']:,}",
            "vocabulary": f"{corpus['vocab_size']:,} (byte-level BPE, trained on the training files)",
            "omitted: copies of another file": f"{text['copies']:,}",
            "omitted: no UTF-8, too short or too long": f"{text['unread']:,}",
            "omitted: there was enough": f"{text['beyond']:,}",
            "digest": corpus["identity"]["text"],
        }
    )
    section.note(
        "Windows are drawn from the whole text with replacement: an epoch is so many tokens, not each token once. "
        "Files that are nearly alike may stand on both sides."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB" if num_bytes >= _MIB / 10 else f"{num_bytes / 1024:,.1f} KiB"


def _large(text: Mapping[str, Any]) -> list[tuple[str, int]]:
    return sorted(text["by_suffix"].items(), key=lambda pair: -pair[1])


def _settings(report: Report, record: RunRecord) -> None:
    """Add the table of the runs' settings, and the command that repeats them."""
    section = report.section("Settings")
    jobs = record.config["jobs"]
    columns = {}
    for row in _rows_of(record, RUN):
        job = jobs[row["run"]]
        optimizer, model = job["optimizer"], job["model"]
        window = f"{model['attention_window']} ({model['window_pattern']})" if model["attention_window"] else "none"
        columns[row["run"]] = {
            "block": "parallel" if model["parallel_block"] else "standard",
            "window": window,
            "optimizer": optimizer["name"],
            "peak learning rate": f"{optimizer['lr']:g}",
            "warm-up": f"{optimizer['warmup_steps']:,} of {optimizer['steps']:,} steps",
            "schedule": f"{optimizer['schedule']} to {optimizer['min_lr_ratio']:g}",
            "betas": f"{optimizer['beta1']:g}, {optimizer['beta2']:g}",
            "eps": f"{optimizer['eps']:g}",
            "weight decay": f"{optimizer['weight_decay']:g}",
            "clipping": f"{optimizer['max_grad_norm']:g}",
            "batch": f"{job['batch']['global_batch_size']} x {model['seq_len']} tokens",
            "micro-batch": f"{job['batch']['micro_batch_size']}",
            "dtype": model["dtype"] + (", compiled" if model["compile"] else ""),
            "evaluated every": f"{job['evaluation']['every_steps']} steps",
        }
    frame = pd.DataFrame(columns)
    frame.index.name = "setting"
    section.table(frame)
    section.code(_command(record.arguments))


def _command(arguments: Mapping[str, Any]) -> str:
    """Return the command line, near enough to repeat the run."""
    argv = ["python", "-m", "bench.convergence"]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if name == "set":
            argv += [word for override in value for word in ("--set", override)]
        elif name == "join":
            argv += [word for path in value for word in ("--join", path)]
        elif name == "kinds":
            argv += ["--runs", ",".join(value) or "none"]
        elif isinstance(value, list | tuple):
            argv += [f"--{option}", ",".join(map(str, value))]
        elif value not in (None, ""):
            argv += [f"--{option}", str(value)]
    return shlex.join(argv)


def _meaning(report: Report, _record: RunRecord) -> None:
    section = report.section("What is what")
    section.text(
        "All runs have the same seed, text, number of tokens and held-out windows. A batch is drawn by step and "
        "sample, so the larger batches of LAMB hold other windows of the same text than AdamW's. The learning rate "
        "falls until the end of each run: one that came to the baseline's loss earlier did so with its rate still high."
    )
    section.text(
        "To the baseline's loss: where the straight line between two evaluations first comes to the held-out loss that "
        "the baseline had at its end. The baseline is the standard run; of several, the one that ended lowest. A run "
        "that was interrupted is drawn as far as it came, and compared with nothing."
    )
    section.text(
        "MFU counts matmuls over time and peak: attention in full, by half (causal), or the keys that a query "
        "sees; a window is not taken off the first two."
    )
    section.note("One seed: differences of a hundredth of a nat may be chance.")
