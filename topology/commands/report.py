"""`netlayer topology report`: one page about a fabric and its job, its rows as CSV and parquet next to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, run_options
from topology.commands.fabrics import fabric_option
from topology.workers import check_scheduler

if TYPE_CHECKING:
    from topology.fabric.imported import ImportedFabric


@click.command("report")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds of the split's comparison."
)
@click.option("--processes", type=click.IntRange(min=1), help="Workers of the failure sweep [default: a core each].")
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run the failure sweep on this Dask scheduler's workers.")
@fabric_option
@run_options
def command(options: RunOptions, seeds: int, processes: int | None, dask: str | None, fabric_file: Path | None) -> None:
    """Write report.html: the fabric drawn, link utilisation, collisions with and without split, placements, failures.

    Says in words whether the split halves hash collisions, under which definition, load and hash, or that it has no
    effect on this fabric. The rows of every section lie next to the page. Of an imported fabric the page omits
    what only a plan has (split, bisection, optics, pictures), and placements where there is no job (--config). Exit 2
    where no flow can cross the fabric.

    \b
    Examples:
      netlayer topology report --config examples/megascale-12288.toml --out fabric
      netlayer topology report --config examples/megascale-12288.toml --set cluster.aoc_split=false --seeds 10
      netlayer topology report --fabric fabric/fabric.graphml --config my-job.toml
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.fabrics import open_world
    from topology.commands.records import keep, load_cluster, refuse_without_effect
    from topology.ecmp.split_verdict import verdict
    from topology.report.data import find, find_imported, use_rows
    from topology.report.page import LEFT_OUT, build_page

    both = processes is not None and dask is not None
    refuse_without_effect([("--processes", both, "beside --dask")])
    if dask is not None:
        check_scheduler(dask)  # the sweep comes last: half a minute in
    started = utc_now()
    if fabric_file is None:
        config, world = load_cluster(options), None
        config.check_world()
    else:
        world = open_world(options, fabric_file)
    with open_output(options.out, "topology-report") as out:
        with Stages() as stages:
            named = _config_options(options, fabric_file)
            if world is None:
                findings = find(config, options.seed, seeds, named, stages, processes=processes, dask=dask)
            else:
                imported = cast("ImportedFabric", world.fabric)
                findings = find_imported(
                    imported,
                    world.config,
                    world.subject(),
                    options.seed,
                    seeds,
                    named,
                    stages,
                    processes=processes,
                    dask=dask,
                )
            with stages.open("page"):
                page = build_page(findings).write(out.part)
        tables = {
            "claims": [claim.to_row() for claim in findings.claims],
            "split": [shares.to_row() for shares in findings.by_load],
            "ratios": [ratio.to_row() for ratio in findings.ratios],
            "link_use": findings.link_use,
            "tor_collisions": findings.tor_collisions,
            "tiers": use_rows(findings.loads),
            "placements": findings.placements,
            "failures": findings.failures,
            "worst": findings.worst,
            "ports": findings.improvements,
            "knobs": findings.knobs,
        }
        arguments: dict[str, Any] = {"seeds": seeds, "processes": processes, "dask": dask}
        arguments |= {"fabric": fabric_file} if fabric_file is not None else {}
        prints_tables = keep("report", tables, out, started, options, findings.config, source="simulated", **arguments)
    if prints_tables:
        clos = findings.clos
        click.echo(verdict(findings.claims, findings.ratios, clos.design)[1] if clos else LEFT_OUT)
        for claim in findings.claims if findings.split_has_effect else ():
            click.echo(f"  {claim.definition}, {claim.hash_name} ({claim.source}): {claim.words}")
    click.echo(f"report: {out.folder / page.name}", err=True)


def _config_options(options: RunOptions, fabric_file: Path | None) -> list[str]:
    """Return the options of a command line that name the configuration and the fabric."""
    fabric = ["--fabric", str(fabric_file)] if fabric_file is not None else []
    file = ["--config", str(options.config_path)] if options.config_path else []
    return [*file, *fabric, *(word for override in options.overrides for word in ("--set", override))]
