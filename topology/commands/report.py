"""`netlayer topology report`: one page about a fabric and its job, its rows as CSV and parquet next to it."""

from __future__ import annotations

from typing import Any

import click

from netlayer.command import RunOptions, run_options
from topology.commands.records import not_on_imported_fabrics
from topology.workers import check_scheduler


@click.command("report")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds of the split's comparison."
)
@click.option("--processes", type=click.IntRange(min=1), help="Workers of the failure sweep [default: a core each].")
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run the failure sweep on this Dask scheduler's workers.")
@not_on_imported_fabrics("the report")
@run_options
def command(options: RunOptions, seeds: int, processes: int | None, dask: str | None) -> None:
    """Write report.html: the fabric drawn, link utilisation, collisions with and without split, placements, failures.

    Says in words whether the split halves hash collisions, under which definition, load and hash, or that it has no
    effect on this fabric. The rows of every section lie next to the page. Exit 2 where no flow can cross the fabric.

    \b
    Examples:
      netlayer topology report --config examples/megascale-12288.toml --out fabric
      netlayer topology report --config examples/megascale-12288.toml --set cluster.aoc_split=false --seeds 10
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.records import keep, load_cluster, refuse_without_effect
    from topology.ecmp.split_verdict import verdict
    from topology.report.data import find, use_rows
    from topology.report.page import build_page

    both = processes is not None and dask is not None
    refuse_without_effect([("--processes", both, "beside --dask")])
    if dask is not None:
        check_scheduler(dask)  # the sweep comes last: half a minute in
    started, config = utc_now(), load_cluster(options)
    config.check_world()
    with open_output(options.out, "topology-report") as out:
        with Stages() as stages:
            findings = find(
                config, options.seed, seeds, _config_options(options), stages, processes=processes, dask=dask
            )
            with stages.open("page"):
                page = build_page(findings).write(out.part)
        tables = {
            "claims": [claim.row() for claim in findings.claims],
            "split": findings.by_load,
            "ratios": findings.ratios,
            "link_use": findings.link_use,
            "tor_collisions": findings.tor_collisions,
            "tiers": use_rows(findings.loads),
            "placements": findings.placements,
            "failures": findings.failures,
            "worst": findings.worst,
            "ports": findings.cures,
            "knobs": findings.knobs,
        }
        arguments: dict[str, Any] = {"seeds": seeds, "processes": processes, "dask": dask}
        prints_tables = keep("report", tables, out, started, options, config, source="simulated", **arguments)
    if prints_tables:
        click.echo(verdict(findings.claims, findings.ratios, findings.fabric.design)[1])
        for claim in findings.claims if findings.split_has_effect else ():
            click.echo(f"  {claim.definition}, {claim.hash_name} ({claim.source}): {claim.words}")
    click.echo(f"report: {out.folder / page.name}", err=True)


def _config_options(options: RunOptions) -> list[str]:
    """Return the options of a command line that name the configuration."""
    file = ["--config", str(options.config_path)] if options.config_path else []
    return [*file, *(word for override in options.overrides for word in ("--set", override))]
