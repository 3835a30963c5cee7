"""`python -m bench.convergence`: compare held-out loss over tokens and over time, on real text.

Compares MegaScale's two changes that can affect convergence (section 3.1) with what they replace: the parallel block
with sliding-window attention against the standard block, and LAMB at four times the batch against AdamW. The text is
this machine's Python sources and documentation, or a folder. Not covered: downstream quality; several seeds.
"""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from bench.convergence.join import (
    RUNS,
    before,
    check_alike,
    check_same_text,
    joined_lines,
    left_to_do,
    read_joined,
    read_runs,
    shown_beside,
)
from bench.convergence.options import (
    NONE,
    most_mib_of,
    read_kinds,
    read_number,
    read_rates,
    read_settings,
    read_tokens,
    tokens_of,
)
from bench.convergence.pace import Pace
from bench.convergence.rows import BROKEN_OFF, RUN, Before, Curve, Row, named_apart, rows_of, table
from bench.convergence.run import KINDS, MEGASCALE_KINDS, Plan, Settings, device_name, plans, run, tokens_in
from bench.convergence.text import PATTERNS, Chosen, Root, choose, folder_root, machine_roots
from netlayer import environ
from netlayer.command import RunOptions, open_run, run_options
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.launch.early_end import ending_at, reason_of
from netlayer.progress import Stages
from netlayer.results import RunRecord, check_target, utc_now, write_text
from netlayer.store.meeting import MeetingPlace, meeting_place
from netlayer.workload.presets import MODELS
from trainer.commands.train import words_of
from trainer.data.prepare import Corpus
from trainer.plan import check_memory, prepare
from trainer.train import Progress

logger = logging.getLogger(__name__)

_UNPLANNED_TOKENS = 10**15  # any number: with --minutes it is only known when the text is there
_PATH = click.Path(path_type=Path)


@click.command()
@run_options
@click.option("--html", "html_file", type=_PATH, help="Also write the page here, its pictures into plots/ beside it.")
@click.option("--model", type=click.Choice(list(MODELS)), default="125m", show_default=True, help="Preset of the size.")
@click.option(
    "--runs",
    "kinds",
    default=",".join(MEGASCALE_KINDS),
    show_default=True,
    callback=read_kinds,
    help="Runs, in order; large_batch: AdamW at LAMB's batch; fp8: standard with 8-bit products; none: only show the "
    "runs of --join.",
)
@click.option("--tokens", callback=read_tokens, help="Tokens per run: 300M, 200000 [by model: 125m 300M, 1m 2M].")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    callback=read_number,
    help="Instead of --tokens: as many tokens as the standard run trains on in so many minutes, measured first.",
)
@click.option("--text", type=_PATH, help="Folder of text [this machine's Python sources and documentation].")
@click.option(
    "--patterns", default=",".join(PATTERNS), show_default=True, help="Patterns of file names, separated by commas."
)
@click.option(
    "--mib",
    type=click.FloatRange(0, min_open=True),
    callback=read_number,
    help="Limit of the text, MiB [as --join; else 5 bytes per token of a run, at least 4; no limit with --minutes].",
)
@click.option("--ranks", type=click.IntRange(1), help="Processes that share each run [all GPUs, or one].")
@click.option("--batch", type=click.IntRange(1), help="Sequences per step of AdamW [125m 64, 1m 16].")
@click.option("--micro", type=click.IntRange(1), help="Sequences per micro-batch of a rank [125m 16, 1m 8].")
@click.option(
    "--lr",
    callback=read_rates,
    help="Learning rate of AdamW; several with commas make a run each [125m 6e-4, 1m 3e-3].",
)
@click.option("--lamb-lr", callback=read_rates, help="Learning rate of LAMB, likewise [125m 2e-2, 1m 2e-2].")
@click.option("--lamb-times", type=click.IntRange(1), default=4, show_default=True, help="LAMB's batch over AdamW's.")
@click.option(
    "--warmup", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Warm-up of AdamW, share of steps."
)
@click.option(
    "--lamb-warmup", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Warm-up of LAMB, likewise."
)
@click.option("--window", type=click.IntRange(1), help="Keys that a query of the parallel run sees [sequence / 4].")
@click.option(
    "--evaluations", type=click.IntRange(1), default=20, show_default=True, help="Evaluations of held-out loss per run."
)
@click.option(
    "--validation-tokens",
    callback=read_tokens,
    help="Tokens per evaluation, rounded to whole steps of LAMB [125m 500k, 1m 16k].",
)
@click.option(
    "--checkpoints",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Per run, plus one at SIGTERM; --join resumes an interrupted run from the last one, else it starts anew.",
)
@click.option(
    "--join",
    type=_PATH,
    multiple=True,
    help="Output folder of an earlier call: its runs are shown and not repeated; another learning rate is another run.",
)
def command(options: RunOptions, html_file: Path | None, **flags: Any) -> None:
    """Compare how well and how fast runs learn; rows go to DIR/runs/NAME as they come, a table to stdout.

    All runs see the same number of tokens of one text; held-out loss is taken on the same windows at the same numbers
    of tokens. --set and --config change what all runs share: model.compile, optimizer.schedule, overlap, nccl, ...

    A run that was interrupted is shown up to that point, and not compared.

    Exit 0; 1 a run diverged; 2 options that cannot be used; 3 hardware missing; 130 interrupted by Ctrl-C, 143 by
    SIGTERM: what was measured is shown and kept. Rows also survive SIGKILL: --runs none --join DIR shows them.

    \b
    Examples:
      python -m bench.convergence --model 1m --tokens 200k               # a minute or two on a laptop
      python -m bench.convergence --minutes 8 --set model.compile=true   # a GPU
      python -m bench.convergence --runs lamb --lamb-lr 1e-2,2e-2,4e-2 --tokens 30M --mib 1500    # tune first, on less
      python -m bench.convergence --runs standard --tokens 300M --out a  # one run a call,
      python -m bench.convergence --runs lamb --join a --out b           # compared with each other,
      python -m bench.convergence --runs none --join a --join b          # here or on another machine
      python -m bench.convergence --runs standard --lr 3e-4 --join a --join b --out c     # and at another rate
      timeout -k 60 540 python -m bench.convergence --tokens 300M --checkpoints 4 --out a   # as far as the time goes,
      timeout -k 60 540 python -m bench.convergence --tokens 300M --checkpoints 4 --join a --out b       # and on
      python -m bench.convergence --model 1m --text ~/books --patterns '*.txt'
    """
    check_target("--html", html_file)
    settings, joined = read_settings(options, flags), read_joined(flags["join"])
    if not flags["kinds"] and not joined:
        raise ConfigError("--runs", NONE, "trains nothing, and --join gives nothing to show", "give folders that do")
    tokens = tokens_of(flags, joined)
    bench = _Bench(options, flags, settings, joined)
    planned = bench.plans(tokens or _UNPLANNED_TOKENS)
    remaining = bench.left_to_do(planned)
    for plan in remaining:
        logger.info("%s: %s", plan.name, check_memory(plan.job, settings.ranks, settings.backend))
    roots, patterns = _roots(flags["text"]), tuple(flags["patterns"].split(","))
    if flags["kinds"]:
        for line in joined_lines(planned, remaining, joined):
            click.echo(line, err=True)
    with ending_at(signal.SIGTERM), open_run(options.out, "convergence") as out:
        try:
            if remaining:
                _train_all(bench, roots, patterns, tokens, out)
        except BaseException as exc:
            if bench.own(out):
                click.echo(f"{reason_of(exc)}: what was measured until then is kept", err=True)
                _finish(bench, out, html_file, broken_off=reason_of(exc), planned=remaining)
                joins = " ".join(f"--join {path}" for path in (*flags["join"], out))
                click.echo(f"to go on: the same options, {joins} and another --out", err=True)
            elif isinstance(exc, SystemExit):  # the caller reports every other exception
                click.echo(f"{reason_of(exc)}: nothing was measured until then", err=True)
            raise
        rows = _finish(bench, out, html_file)
    diverged = [f"{row['run']}: {row['stopped']}" for row in rows if row["table"] == RUN and row["diverged"]]
    if diverged:
        raise CheckFailed("; ".join(diverged))


class _Bench:
    """One call of the bench: its options, the runs of earlier calls, and the runs under its output folder.

    Args:
        joined: all runs of earlier calls.
    """

    def __init__(
        self, options: RunOptions, flags: Mapping[str, Any], settings: Settings, joined: Sequence[Curve]
    ) -> None:
        self.options, self.flags, self.settings, self.joined = options, flags, settings, joined
        self.started = utc_now()

    def plans(self, tokens: int) -> list[Plan]:
        """Plan the runs that the options ask for, of at least `tokens` tokens each."""
        return plans(self.settings, self.flags["kinds"], tokens, [curve.key for curve in self.joined])

    def left_to_do(self, planned: Sequence[Plan]) -> list[Plan]:
        """Return the planned runs that earlier calls have not done.

        Raises:
            ConfigError: they cannot be compared with the runs of earlier calls.
        """
        remaining = left_to_do(planned, self.joined)
        known = [(curve.facts["kind"], curve.job, curve.facts) for curve in shown_beside(remaining, self.joined)]
        if known:  # the text is not read yet; check_same_text compares it later
            here = {
                "seed": self.settings.seed,
                "ranks": self.settings.ranks,
                "device": device_name(self.settings.backend),
            }
            known += [(plan.kind, plan.job, {**known[0][2], **here}) for plan in remaining]
        check_alike(known)
        return remaining

    def own(self, out: Path) -> list[Curve]:
        """Read the runs of this call that have at least one evaluation."""
        return [curve for curve in read_runs(out) if curve.evaluations]

    def curves(self, out: Path) -> list[Curve]:
        """Return the runs of this and earlier calls, standard first, then by learning rate.

        A run that this call resumed or restarted appears once, as this call has it.
        """
        own = self.own(out)
        curves = [*shown_beside(own, self.joined), *own]
        return named_apart(sorted(curves, key=lambda curve: (KINDS.index(curve.key[0]), curve.key[1])))

    def record(self, rows: Sequence[Row], curves: Sequence[Curve]) -> RunRecord:
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in self.flags.items()}
        settings = {curve.name: curve.facts["nccl_settings"] for curve in curves if curve.facts.get("nccl_settings")}
        return RunRecord(
            name="bench.convergence",
            source="measured",
            rows=rows,
            started_utc=min([self.started, *(str(curve.facts["started_utc"]) for curve in curves)]),
            ended_utc=utc_now(),
            arguments={**self.options.arguments(), **arguments, "join": [str(path) for path in self.flags["join"]]},
            config={
                "jobs": {curve.name: curve.facts["job"] for curve in curves},
                "text": curves[0].facts["text"],
                "corpus": curves[0].facts["corpus"],
            },
            environment=environ.snapshot(self.options.seed) | ({"nccl_settings": settings} if settings else {}),
            devices=[str(curves[0].facts["device"])] * curves[0].facts["ranks"],
        )


def _train_all(bench: _Bench, roots: Sequence[Root], patterns: Sequence[str], tokens: int | None, out: Path) -> None:
    """Prepare the text, then train every run in turn; one that diverges does not stop the others."""
    settings = bench.settings
    url = str(settings.overrides.get("store", {}).get("url", ""))
    with Stages() as stages, meeting_place(url) as place:
        corpus, facts = _text(bench, roots, patterns, tokens, out, stages)
        if tokens is None:
            with stages.open("speed"):
                tokens = tokens_in(bench.flags["minutes"], settings, corpus, place, out / "speed")
        remaining = bench.left_to_do(bench.plans(tokens))
        known = [(curve.facts["kind"], curve.job, curve.facts) for curve in shown_beside(remaining, bench.joined)]
        check_alike([*known, *((plan.kind, plan.job, facts) for plan in remaining)])
        epochs = remaining[0].tokens / corpus.facts.train_tokens
        ranks = f"{settings.ranks} rank{'s' * (settings.ranks > 1)} on {settings.backend}"
        stages.say(f"each run: {remaining[0].tokens:,} tokens, {epochs:.2f} epochs; {ranks}")
        pace = Pace(len(remaining))
        for plan in remaining:
            _train_one(plan, corpus, place, out, facts, stages, pace, before(plan, facts, bench.joined))


def _train_one(
    plan: Plan,
    corpus: Corpus,
    place: MeetingPlace,
    out: Path,
    facts: Mapping[str, Any],
    stages: Stages,
    pace: Pace,
    part: Before | None,
) -> None:
    if part:
        stages.say(f"{plan.name} resumes from step {part.step:,} of {plan.job.optimizer.steps:,}: {part.checkpoint}")
    with stages.open(plan.name) as bar:

        def hear(progress: Progress) -> None:
            bar(progress.done, progress.total, words_of(progress) + pace.words(progress.left_s))

        known = {**facts, "started_utc": utc_now()}
        stopped = run(plan, corpus, place, out / RUNS / plan.folder_name, known, hear, part)
    pace.next()
    if stopped:
        stages.say(f"{plan.name}: {stopped}")


def _text(
    bench: _Bench, roots: Sequence[Root], patterns: Sequence[str], tokens: int | None, out: Path, stages: Stages
) -> tuple[Corpus, dict[str, Any]]:
    """Choose the files, tokenise them, and return the corpus with the facts that every run's record has."""
    settings, most_mib = bench.settings, most_mib_of(bench.flags["mib"], tokens, bench.joined)
    with stages.open("text") as bar, tempfile.TemporaryDirectory(prefix="text-", dir=out) as links:
        chosen = choose(roots, patterns, round(most_mib * 2**20), settings.seed, bar)
        check_same_text(chosen, bench.joined)
        chosen.link_into(Path(links))
        write_text(out / "text.txt", "".join(f"{name}\n" for name in _names(chosen)))
        job = plans(replace(settings, lamb_lr=settings.lamb_lr[:1]), ["lamb"], tokens or _UNPLANNED_TOKENS)[0].job
        share = max(0.01, min(0.1, 4 * 2**20 / chosen.text_bytes))
        data = {"folder": links, "pattern": "*", "validation_share": share, "max_mib": chosen.text_bytes / 2**20 + 1}
        job = job.model_copy(update={"data": job.data.model_copy(update=data)})
        corpus = prepare(job, settings.ranks, settings.seed, out, lambda stage, done, total: bar(done, total, stage))
    counts = corpus.facts
    stages.say(
        f"text: {chosen.text_bytes / 2**20:,.1f} MiB of {len(chosen.files):,} files, {counts.train_tokens:,} tokens to "
        f"train on and {counts.validation_tokens:,} held out, a vocabulary of {counts.vocab_size:,}"
        + (", tokenised before" if counts.cache_hit else "")
    )
    facts = {
        "seed": settings.seed,
        "ranks": settings.ranks,
        "backend": settings.backend,
        "device": device_name(settings.backend),
        "text": {
            **chosen.as_record(),
            "roots": {root.name: str(root.folder) for root in roots},
            "most_mib": most_mib,
        },
        "corpus": {**asdict(counts), "identity": dict(corpus.identity)},
    }
    return corpus, facts


def _names(chosen: Chosen) -> list[str]:
    """Return the files' names as valid UTF-8, with bytes that are not escaped by a backslash."""
    return [name.encode("utf-8", "backslashreplace").decode() for name in chosen.files]


def _roots(text: Path | None) -> tuple[Root, ...]:
    return machine_roots() if text is None else (folder_root(text),)


def _finish(
    bench: _Bench, out: Path, html_file: Path | None, broken_off: str = "", planned: Sequence[Plan] = ()
) -> list[Row]:
    """Write the record, the table and the page of the runs that have begun, and return the record's rows.

    Args:
        broken_off: why the call ended early; empty if it did not.
        planned: runs of this call; those that had not begun go into the record by name.
    """
    curves = bench.curves(out)
    rows = rows_of(curves)
    if broken_off:
        begun = {curve.key for curve in curves}
        not_run = [plan.name for plan in planned if plan.key not in begun]
        rows.append({"table": BROKEN_OFF, "reason": broken_off, "not_run": not_run})
    record = bench.record(rows, curves)
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if bench.options.json_file:
        write_text(bench.options.json_file, record.to_json())
    for line in table(rows):
        click.echo(line, err=str(bench.options.json_file) == "-")
    _page(record, out, html_file)
    return rows


def _page(record: RunRecord, out: Path, html_file: Path | None) -> None:
    """Write the page; if matplotlib is not installed, print a line and fail only if --html was given.

    Raises:
        HardwareMissing: --html was given, and the page cannot be drawn here.
    """
    try:
        page = _write_page(record, out)
    except (HardwareMissing, ModuleNotFoundError) as exc:
        if html_file:
            raise HardwareMissing(f"--html: {exc}") from exc
        click.echo(f"no page: {exc}; --runs {NONE} --join {out} writes it elsewhere", err=True)
        return
    click.echo(f"report: {page}", err=True)
    if html_file:
        write_text(html_file, page.read_text(encoding="utf-8"))
        if str(html_file) != "-":
            _copy_pictures(page.parent / "plots", html_file.resolve().parent / "plots")


def _write_page(record: RunRecord, out: Path) -> Path:
    from bench.convergence.page import build_page  # the plots' libraries take a second to load

    return build_page(record).write(out)


def _copy_pictures(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for picture in source.glob("convergence_*.png"):
        if picture.resolve() != (target / picture.name).resolve():
            (target / picture.name).write_bytes(picture.read_bytes())
