"""`netlayer data`: token datasets on disk, made of text or of Megatron's files, and looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer import log
from netlayer.errors import EXIT_FAILED, EXIT_OK, ConfigError
from netlayer.results import check_target, write_text
from netlayer.units import parse_size

if TYPE_CHECKING:
    from trainer.data.dataset.manifest import Manifest

_PATH = click.Path(path_type=Path)
_verbose = click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all.")
_json = click.option("--json", "json_file", type=_PATH, help="Also write the facts here; - is stdout.")
_vocab_size = click.option(
    "--vocab-size", type=click.IntRange(2, 2**31), help="Bound of the token ids: that of the model."
)
_eod = click.option("--eod", metavar="TOKEN", help="Token that ends each document [default: the tokenizer's own].")


@click.group()
def data() -> None:
    """Make and look at token datasets: text is tokenised once, and training reads it by position.

    \b
    Examples:
      netlayer data prepare my-text --out tokens/mine --tokenizer train --vocab-size 2048
      netlayer data prepare corpus/*.jsonl.zst --out tokens/web --tokenizer tokenizer.json --workers 32
      netlayer data inspect tokens/web --verify
      netlayer data import megatron/web_text_document --out tokens/web --tokenizer tokenizer.json
    """


@data.command()
@click.argument("inputs", nargs=-1, required=True, type=_PATH, metavar="INPUT...")
@click.option("--out", required=True, type=_PATH, help="Folder of the dataset; a run that was killed goes on there.")
@click.option("--tokenizer", required=True, metavar="FILE|train", help="tokenizer.json, a folder with one, or train.")
@click.option(
    "--vocab-size",
    type=click.IntRange(257, 2**31),
    help="Most tokens: to be trained [default: 2048], or those of the model, which FILE is checked against.",
)
@_eod
@click.option("--field", "text_field", default="text", show_default=True, help="JSON field, or column, of the text.")
@click.option("--pattern", default="*", show_default=True, metavar="GLOB", help="Which files of folders, by name.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["text", "jsonl", "parquet", "arrow"]),
    help="Of all files [default: by their names; text is a document a file].",
)
@click.option("--split", help="Of a saved Hugging Face dataset with several.")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do about a document that is empty or cannot be read: end, or count it and go on.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes [default: one a core].")
@click.option(
    "--dask", metavar="tcp://HOST:PORT", help="Work on this Dask scheduler's workers; they see INPUT and --out."
)
@click.option(
    "--shard-size", metavar="SIZE", help="Input of one shard, such as 256MiB [default: by how much there is]."
)
@_json
@_verbose
def prepare(
    inputs: tuple[Path, ...],
    out: Path,
    tokenizer: str,
    vocab_size: int | None,
    eod: str | None,
    text_field: str,
    pattern: str,
    kind: str | None,
    split: str | None,
    on_error: str,
    workers: int | None,
    dask: str | None,
    shard_size: str | None,
    json_file: Path | None,
    verbose: int,
) -> None:
    """Tokenise INPUT into a dataset folder: shards, an index, checksums, and where it all came from.

    INPUT are files and folders: text (a document a file), JSON lines (.jsonl, .ndjson, .json), both also as .gz and
    .zst, parquet, and Hugging Face datasets as `save_to_disk` leaves them. The tokens are the same whatever the number
    of workers. Nothing stands at --out before it is whole; started again, a killed run keeps what it had finished.

    \b
    Examples:
      netlayer data prepare my-text --out tokens/mine --tokenizer train --vocab-size 2048
      netlayer data prepare corpus/*.jsonl.zst --out tokens/web --tokenizer tokenizer.json --on-error skip
      netlayer data prepare saved-dataset --split train --field content --out tokens/code --tokenizer tokenizer.json
    """
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.progress import Stages

    log.configure(verbose)
    check_target("--json", json_file)
    if workers and dask:
        raise ConfigError("--workers", workers, "has no effect beside --dask", "omit one")
    with held_interrupt():
        from topology.workers import check_scheduler
        from trainer.data.dataset.prepare import PrepareOptions, describe, notes, prepare_dataset
    if dask:
        check_scheduler(dask)
    options = PrepareOptions(
        inputs=inputs,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_token=eod,
        text_field=text_field,
        pattern=pattern,
        kind=kind,  # type: ignore[arg-type]  # one of click's choices
        split=split,
        on_error=on_error,  # type: ignore[arg-type]  # one of click's choices
        unit_bytes=_size("--shard-size", shard_size),
    )
    with Stages() as stages, stages.open("prepare") as bar:
        prepared = prepare_dataset(
            options,
            out,
            workers=workers,
            dask=dask,
            on_stage=lambda stage, done, total, text: bar(done, total, f"{stage} {text}".strip()),
        )
    for line in notes(prepared):
        click.echo(line, err=True)
    if json_file:
        write_text(json_file, prepared.manifest.to_json())
    if str(json_file) != "-":
        click.echo(f"{out}: {describe(prepared)}")


@data.command()
@click.argument("dataset", type=_PATH, metavar="DIR")
@click.option("--samples", "num_samples", type=click.IntRange(0), default=3, show_default=True, help="Documents shown.")
@click.option("--tokenizer", type=_PATH, help="Decode with this one [default: the dataset's own].")
@click.option(
    "--verify", is_flag=True, help="Read everything: checksums, offsets, ids, ends. Exit 1 where one is wrong."
)
@_json
@_verbose
def inspect(
    dataset: Path, num_samples: int, tokenizer: Path | None, verify: bool, json_file: Path | None, verbose: int
) -> None:
    """Show the counts of a dataset and a few documents as text; check it.

    DIR is a dataset folder, or the prefix of Megatron's .bin and .idx.

    \b
    Examples:
      netlayer data inspect tokens/web --samples 5
      netlayer data inspect megatron/web_text_document --tokenizer tokenizer.json --verify
    """
    from netlayer.printing import print_rows, print_table
    from trainer.data.dataset import open_dataset
    from trainer.data.dataset.summary import count, samples

    log.configure(verbose)
    check_target("--json", json_file)
    opened = open_dataset(dataset, field="DIR")
    facts = count(opened)
    rows = list(samples(opened, num_samples, tokenizer))
    checks = [check._asdict() for check in opened.checks()] if verify else []
    if json_file:
        write_text(json_file, json.dumps({**facts, "samples": rows, "checks": checks}, indent=1) + "\n")
    if str(json_file) != "-":
        print_table(str(dataset), ("", "value"), _lines(facts))
        if rows:
            columns = {"document": "document", "tokens": "tokens", "text": "text"}
            print_rows("samples", rows, columns)
        if checks:
            lines = [
                (row["name"], "good" if row["is_good"] else "WRONG", "" if row["is_good"] else row["detail"])
                for row in checks
            ]
            print_table("checks", ("check", "result", "detail"), lines)
    sys.exit(EXIT_OK if all(check["is_good"] for check in checks) else EXIT_FAILED)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return facts as lines of a table; what is nested is for --json."""
    flat = {**facts, **facts.get("provenance", {})}
    if facts.get("tokenizer"):
        flat["tokenizer"] = facts["tokenizer"]["name"]
    plain = {key: value for key, value in flat.items() if not isinstance(value, dict | list) and value is not None}
    skipped = flat.get("skipped") or {}
    lines = [
        (key.replace("_", " "), f"{value:,.6g}" if isinstance(value, float) else _number(value))
        for key, value in plain.items()
    ]
    return lines + [(f"skipped: {reason}", _number(number)) for reason, number in skipped.items()]


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


@data.command("import")
@click.argument("prefix", type=_PATH)
@click.option("--out", required=True, type=_PATH, help="Folder of the dataset.")
@click.option("--tokenizer", type=_PATH, help="That made the tokens: tokenizer.json, or a folder with one.")
@_vocab_size
@_eod
@_json
@_verbose
def import_(
    prefix: Path,
    out: Path,
    tokenizer: Path | None,
    vocab_size: int | None,
    eod: str | None,
    json_file: Path | None,
    verbose: int,
) -> None:
    """Make a dataset folder of Megatron's PREFIX.bin and PREFIX.idx, once every entry of them is checked.

    Training reads the two files as they are, too; a folder has checksums, its vocabulary and its tokenizer.
    Without --tokenizer the vocabulary ends with the largest id, and --eod is an id. Nothing stands at --out before
    it is whole; started again, a killed run keeps what it had finished.

    \b
    Example:
      netlayer data import megatron/web_text_document --out tokens/web --tokenizer tokenizer.json
    """
    from netlayer.progress import Stages
    from trainer.data.dataset.convert import ImportOptions, import_megatron

    log.configure(verbose)
    check_target("--json", json_file)
    with Stages() as stages, stages.open("import") as bar:
        imported = import_megatron(prefix, out, ImportOptions(tokenizer, vocab_size, eod), bar)
    if imported.was_there:
        click.echo("it is there already, made of the same files by the same options: nothing was done", err=True)
    if imported.shards_reused:
        click.echo(f"finished by an earlier run, and verified: {imported.shards_reused} shards", err=True)
    if json_file:
        write_text(json_file, imported.manifest.to_json())
    if str(json_file) != "-":
        click.echo(f"{out}: {_line(imported.manifest)}")


@data.command()
@click.argument("dataset", type=_PATH, metavar="DIR")
@click.argument("prefix", type=_PATH)
@_verbose
def export(dataset: Path, prefix: Path, verbose: int) -> None:
    """Write a dataset as PREFIX.bin and PREFIX.idx for Megatron: a sequence a document, its end in it.

    PREFIX.idx comes last. Started again, a killed run goes on where it was.

    \b
    Example:
      netlayer data export tokens/web megatron/web_text_document
    """
    from netlayer.progress import Stages
    from trainer.data.dataset.convert import export_megatron
    from trainer.data.dataset.folder import TokenFolder

    log.configure(verbose)
    opened = TokenFolder(dataset, field="DIR")
    with Stages() as stages, stages.open("export") as bar:
        written = export_megatron(opened, prefix, bar)
    if written:
        click.echo(f"written by an earlier run: {written:,} tokens", err=True)
    click.echo(f"{prefix}.bin, {prefix}.idx: {_line(opened.manifest)}")


def _line(manifest: Manifest) -> str:
    return f"{manifest.tokens:,} tokens of {manifest.documents:,} documents; vocabulary {manifest.vocab_size:,}"


def _size(field: str, text: str | None) -> int | None:
    """Return the bytes of a size option."""
    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError as exc:
        raise ConfigError(field, text, str(exc), "give a size such as 256MiB") from exc
    if size < 1:
        raise ConfigError(field, text, "is no size of a shard", "give a size such as 256MiB")
    return size
