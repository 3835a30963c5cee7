"""`netlayer topology report`: one page about a fabric and its job, its rows as CSV and parquet beside it."""

from __future__ import annotations

import click

from netlayer.command import RunOptions, open_out, run_options


@click.command("report")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds of the split's comparison."
)
@click.option("--processes", type=click.IntRange(min=1), help="Workers of the failure sweep [default: a core each].")
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run the failure sweep on this Dask scheduler's workers.")
@run_options
def command(options: RunOptions, seeds: int, processes: int | None, dask: str | None) -> None:
    """Write report.html: the fabric drawn, link utilisation, collisions with and without split, placements, failures.

    Says in words whether the split halves hash collisions, under which definition, load and hash. The rows of every
    section lie beside the page. Exit 2 where no flow can cross the fabric.

    \b
    Examples:
      netlayer topology report --config examples/megascale-12288.toml --out fabric
      netlayer topology report --config examples/megascale-12288.toml --set cluster.aoc_split=false --seeds 10
    """
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.keeping import keep
    from topology.report_data import find, tier_rows
    from topology.report_page import build_page
    from topology.split_verdict import verdict

    started, config = utc_now(), options.load_config()
    config.check_world()
    out = open_out(options.out, "topology-report")
    with Stages() as stages:
        findings = find(config, options.seed, seeds, stages, processes=processes, dask=dask)
        with stages.open("page"):
            page = build_page(findings, _named(options)).write(out)
    tables = {
        "claims": [claim._asdict() for claim in findings.claims],
        "split": findings.by_load,
        "ratios": findings.ratios,
        "tiers": tier_rows(findings.loads),
        "placements": findings.placements,
        "failures": findings.failures,
        "ports": findings.cures,
        "knobs": findings.knobs,
    }
    if keep("report", tables, started, options, config, out, seeds=seeds, dask=dask or ""):
        click.echo(verdict(findings.claims)[1])
        for claim in findings.claims:
            click.echo(f"  {claim.sentence} ({claim.source})")
    click.echo(f"report: {page}", err=True)


def _named(options: RunOptions) -> str:
    """The configuration as the page's commands should name it."""
    changed = "".join(f" --set {override}" for override in options.overrides)
    return f"{options.config_path}{changed}" if options.config_path else f"examples/laptop.toml{changed}"
