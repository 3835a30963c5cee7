"""The page that a quickstart ends in: what was found, measured, simulated and learned, and how to go on."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import pandas as pd

from bench.quickstart.outcome import Outcome, fabric_summary, summary
from netlayer.config.file import example
from netlayer.report import Axis, Figure, Report, Section, charts
from netlayer.units import format_size
from trainer.data.corpus import text_folder
from trainer.train import TrainResult

_SPLIT = {True: "with split", False: "without"}


def build_page(outcome: Outcome, seed: int, out: Path, stopped: str = "") -> Report:
    """Build the report of one quickstart; `Report.write` puts it into the folder.

    Args:
        stopped: why the run was interrupted, empty if it was not; the stages that were done are shown.
    """
    report = Report("netlayer quickstart" + ", incomplete" * bool(stopped), _subtitle(outcome, seed))
    if stopped:
        report.verdict("FAIL", f"Interrupted, what was done until then is shown: {stopped}")
    else:
        good, learnt = outcome.wrong_elements == 0, outcome.trained.validation_fall > 0
        report.verdict("FAIL" if not good else "PASS" if learnt else "WARN", _sentence(outcome))
        report.fill(outcome, [_overview])  # its figures are of every stage
    report.fill(outcome, [_bench, _fabric, _training, _environment])
    return report.fill(out, [_onwards])


def _subtitle(outcome: Outcome, seed: int) -> str:
    ranks = outcome.config.cluster.num_gpus
    text = f"{ranks} rank{'s' * (ranks > 1)} on {outcome.backend}"
    if outcome.training is not None:
        text += ", " + ", ".join(f"{name} a rank" for name in dict.fromkeys(outcome.training.devices))
    return f"{text}; seed {seed}"


def _sentence(outcome: Outcome) -> str:
    fall = outcome.trained.validation_fall
    data = (
        f"all data right in {sum(1 for _ in outcome.checked_rows)} measurements"
        if outcome.wrong_elements == 0
        else f"{outcome.wrong_elements} elements arrived wrong"
    )
    way, steps = "fell" if fall > 0 else "rose", len(outcome.trained.steps)
    criterion = "PASS asks for right data and a validation loss that fell, by however little"
    return f"{data}; validation loss {way} by {abs(fall):.0%} in {steps} steps. {criterion}."


def _overview(report: Report, outcome: Outcome) -> None:
    """Add the figures at a glance: bandwidth, loss, speed, exposed communication, and the fabric's collisions."""
    measured, fabric = summary(outcome), fabric_summary(outcome)
    bandwidth = _bandwidth(outcome)
    section = report.section("At a glance")
    section.figures(
        Figure(
            f"all_reduce, peak {bandwidth.title.lower()}",
            measured[f"all_reduce_peak_{bandwidth.column}"],
            "GB/s",
            f"out of place, {measured['ranks']} ranks on {measured['backend']}",
        ),
        Figure(
            "Validation loss",
            f"{measured['validation_loss_last']:.2f}",
            "",
            f"from {measured['validation_loss_first']:.2f} before the first step",
        ),
        Figure(
            "Training", round(measured["tokens_per_s"]), "tokens/s", f"over the last {measured['steady_steps']} steps"
        ),
        Figure(
            "Exposed communication",
            f"{measured['exposed_comm']:.1%}",
            "",
            "share of a step in which computation waits for it",
        ),
        source="measured",
    )
    section.figures(
        Figure(
            "Flows in collision, ToR split",
            f"{fabric['collision_share_split']:.1%}",
            "",
            f"without the split {fabric['collision_share_whole']:.1%}",
        ),
        Figure(
            "Excess demand, ToR split",
            f"{fabric['excess_split']:.1%}",
            "",
            f"without the split {fabric['excess_whole']:.1%}",
        ),
        source="simulated",
    )


def _bench(report: Report, outcome: Outcome) -> None:
    """Add the section on the acceptance bench: bandwidth of four collectives by message size."""
    section = report.section(
        "Acceptance bench",
        "Four collectives over real ranks, every element checked before its time counts. Bus bandwidth is nccl-tests': "
        "the rate a link must carry, comparable between collectives.",
        source="measured",
    )
    bandwidth = _bandwidth(outcome)
    rows = pd.DataFrame(
        [
            {"collective": record.name.removeprefix("bench."), **row}
            for record in outcome.bench
            for row in record.rows
            if not row["in_place"]
        ]
    )
    section.chart(
        charts.line(
            rows,
            Axis("size_bytes", "Message size", "bytes", log=True),
            bandwidth,
            colour="collective",
        ),
        name="bandwidth",
        caption=f"{bandwidth.title} by message size, out of place. Small messages show latency, large ones bandwidth.",
    )
    table = rows.pivot_table(index="size_bytes", columns="collective", values=bandwidth.column, sort=False)
    table.index = pd.Index([format_size(int(size)) for size in table.index], name="message")
    section.table(
        table.reset_index(),
        caption=f"{bandwidth.title}, GB/s, out of place. nccl-tests' own table was printed to stdout.",
    )
    emulated = rows[rows["emulated"] != ""].groupby("collective", sort=False)["emulated"].first()
    if len(emulated):
        methods = "; ".join(f"{name}: {how}" for name, how in emulated.items())
        section.note(f"This backend lacks some of these calls, so the bench emulates them. {methods}.")
    if outcome.backend == "gloo":
        section.note("gloo on the CPU of one machine: these rates say that the path works, not how fast a network is.")


def _bandwidth(outcome: Outcome) -> Axis:
    """Bus bandwidth; one rank moves nothing over a bus, so there the algorithm's."""
    if outcome.config.cluster.num_gpus == 1:
        return Axis("alg_bw_gbs", "Algorithm bandwidth", "GB/s", log=True)
    return Axis("bus_bw_gbs", "Bus bandwidth", "GB/s", log=True)


def _fabric(report: Report, outcome: Outcome) -> None:
    """Add the section on the simulated fabric: collisions with and without the ToR split, by hash and by load."""
    if not outcome.collisions:
        return
    cluster = outcome.fabric.cluster
    section = report.section(
        "Fabric: what the ToR split does to ECMP",
        f"The three-tier CLOS of `examples/{cluster.name}.toml`: {cluster.num_gpus:,} GPUs, {cluster.servers:,} "
        f"servers, {cluster.rails} rails. A flow is in collision where the demand hashed onto a link of its path "
        "exceeds that link's capacity; excess is the demand above capacity over total demand. The baseline has the "
        "same NICs and the same uplink capacity, with uplinks at NIC rate.",
        source="simulated",
    )
    rows = pd.DataFrame([row.to_row() for row in outcome.collisions])
    uplinks = rows[(rows["tier"] == "tor-spine") & (rows["traffic"] == "permutation")].assign(
        design=lambda frame: frame["split"].map(_SPLIT)
    )
    for column, title in (("collision_share", "Flows in collision"), ("excess", "Excess demand")):
        section.chart(
            charts.bars(uplinks, Axis("hash", "Hash"), Axis(column, title, "share"), colour="design"),
            name=column,
            caption=f"{title} on ToR uplinks, random permutation at full load, mean of "
            f"{int(uplinks['seeds'].max())} seeds; the closed form is a prediction.",
            source=["simulated", "predicted"],
        )
    by_load = pd.DataFrame([row.to_row() for row in outcome.by_load]).assign(
        design=lambda frame: frame["split"].map(_SPLIT)
    )
    section.chart(
        charts.line(
            by_load,
            Axis("load", "Share of a ToR's NICs that send at full rate", "share"),
            Axis("collision_share", "Flows in collision", "share", zero=True),
            colour="design",
        ),
        name="collision_by_load",
        caption="The split's gain is at partial load: at full load nearly as many flows are in collision with it as "
        "without it, though less of their demand is in excess.",
        source="predicted",
    )
    columns = {
        "traffic": "traffic",
        "hash": "hash",
        "design": "ToR split",
        "source": "source",
        "flows": "flows",
        "collision_share": "in collision",
        "collision_share_std": "±",
        "excess": "excess",
        "excess_std": "± ",
    }
    table = rows[rows["tier"] == "tor-spine"].assign(design=lambda frame: frame["split"].map(_SPLIT))
    deviations = ["collision_share_std", "excess_std"]
    table[deviations] = table[deviations].where(table["source"] == "simulated")  # a formula has none
    section.table(
        table[list(columns)].rename(columns=columns),
        caption="Shares on ToR uplinks, for each phase of the 175B job and for a random permutation; ± is the "
        "deviation over seeds. The job's rings leave one flow a ToR, which collides with none.",
        formats={"flows": ",.0f"}
        | dict.fromkeys(("in collision", "excess"), ".1%")
        | dict.fromkeys(("±", "± "), ".2%"),
        source=["simulated", "predicted"],
    )
    section.code(f"{_program('netlayer')} topology ecmp --config {_shortest(example(cluster.name))}")


def _training(report: Report, outcome: Outcome) -> None:
    """Add the section on the training run: loss, speed, exposed communication and MFU."""
    training = outcome.training
    if training is None:
        return
    job, facts = outcome.config.job, training.corpus
    section = report.section(
        "Training",
        f"A GPT of {training.num_parameters:,} parameters, data-parallel over {job.parallel.dp} ranks: parameters are "
        "all-gathered ahead of the computation, gradients reduce-scattered behind it. Text: "
        f"`{job.data.pattern}` under `{text_folder(job.data)}`, {facts.train_files:,} files to train on, "
        f"{facts.validation_files:,} held out, {format_size(facts.text_bytes)}; byte-level BPE of "
        f"{facts.vocab_size:,} tokens.",
        source="measured",
    )
    section.chart(
        charts.line(
            _losses(training),
            Axis("step", "Step"),
            Axis("loss", "Loss (nats a token)"),
            colour="text",
        ),
        name="loss",
        caption="Loss of each training step, and on held-out files.",
    )
    steps = pd.DataFrame([dict(row) for row in training.steps])
    section.chart(
        charts.line(steps, Axis("step", "Step"), Axis("tokens_per_s", "Tokens a second", zero=True)),
        name="tokens_per_s",
        caption="Throughput over all ranks.",
    )
    section.chart(
        charts.line(steps, Axis("step", "Step"), Axis("exposed_comm", "Exposed communication", "share", zero=True)),
        name="exposed_comm",
        caption="Share of each step in which computation waits for a communication (rank 0).",
    )
    figures = summary(outcome)
    if figures["mfu_full"] is None:
        section.note(f"No MFU: no peak rate is on record for {job.model.dtype} on this device.")
    else:
        section.text(f"MFU {figures['mfu_full']:.1%} with full attention counted, {figures['mfu_causal']:.1%} causal.")


def _losses(training: TrainResult) -> pd.DataFrame:
    own = [{"step": row["step"], "loss": row["loss"], "text": "training"} for row in training.steps]
    held_out = [
        {"step": row["step"], "loss": row["validation_loss"], "text": "held out"} for row in training.evaluations
    ]
    return pd.DataFrame(own + held_out)


def _environment(report: Report, outcome: Outcome) -> None:
    section = report.section("Environment", "What `netlayer doctor` found, and the configuration that ran.")
    section.table(pd.DataFrame([dataclasses.asdict(finding) for finding in outcome.findings]))
    section.keyvalues({"store": outcome.store, "job": outcome.config.job.model_dump(mode="json")})


def _onwards(report: Report, out: Path) -> None:
    section: Section = report.section(
        "How to go on", f"Records of this run: `{out}/records/`. Each is JSON with its environment."
    )
    section.code(onwards(out))


def onwards(out: Path) -> str:
    """Commands that run as they stand in the folder from which this run was started."""
    fabric = shlex.quote(str(_shortest(example("megascale-12288"))))
    return f"""\
# your own text, your own size
{_program("netlayer")} quickstart --set data.folder=$HOME/src --set 'data.pattern=*.c' --set model.layers=6 --steps 500

# the acceptance bench alone, nccl-tests' flags
{_program("all_reduce_perf")} -g 2 --backend gloo -b 1K -e 64M -f 4

# your own fabric: copy an example, change it, look at it
{_program("netlayer")} topology describe --config {fabric}
{_program("netlayer")} topology ecmp --config {fabric} --set cluster.oversubscription=2

# every figure that this run measured, as a table
{shlex.quote(sys.executable)} -c '
import sys; from pathlib import Path; from netlayer.results import load_frame
print(load_frame(Path(sys.argv[1]), "measured"))' {shlex.quote(str(out / "records"))}
"""


def _program(name: str) -> str:
    """Return how this user's shell finds one of our commands: its name, or its path in this environment."""
    beside = Path(sysconfig.get_path("scripts")) / name
    return name if shutil.which(name) or not beside.exists() else shlex.quote(str(_shortest(beside)))


def _shortest(path: Path) -> Path:
    """Relative to the current folder where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
