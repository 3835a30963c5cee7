"""`netlayer simulate`: flows of a file over the fabric of a file, under one law or several, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import check_target, write_text

if TYPE_CHECKING:
    from congestion.engine.build import Law

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--topo", type=_PATH, required=True, help="The fabric: HPCC's topo.txt.")
@click.option("--flows", "flow_file", type=_PATH, required=True, help="The flows: HPCC's flow.txt.")
@click.option("--cc", default="dcqcn", show_default=True, metavar="LAW[,LAW...]", help="none | dcqcn.")
@click.option("--preset", default="ns3", show_default=True, help="Switch, NIC and law: ns3 | ns3-paper.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of all randomness.")
@click.option("--set", "overrides", multiple=True, metavar="congestion.X=Y", help="Override one value; repeatable.")
@click.option("--truncate-ns", is_flag=True, help="Cut serialisation times to whole ns, as ns-3 does.")
@click.option("--json", "json_file", type=_PATH, default=Path("-"), help="Where the result goes [default: stdout].")
def simulate(
    topo: Path,
    flow_file: Path,
    cc: str,
    preset: str,
    seed: int,
    overrides: tuple[str, ...],
    truncate_ns: bool,
    json_file: Path,
) -> None:
    """Simulate flows packet by packet; exit 1 where one did not end (its fct_ns is null).

    \b
    Example:
      netlayer simulate --topo topo.txt --flows flow.txt --cc none,dcqcn --seed 3 --json result.json
    """
    from congestion.files import read_flows
    from congestion.settings import settings_of
    from congestion.simulate import simulate as run
    from topology.importers.hpcc import read_hpcc

    check_target("--json", json_file)
    laws = [_law(name) for name in cc.split(",")]
    settings = settings_of(preset, overrides)
    fabric = read_hpcc(topo)
    flows = read_flows(flow_file, fabric)
    runs: list[dict[str, Any]] = []
    for law in laws:
        outcome = run(fabric, flows, settings, law, seed=seed, truncate_ns=truncate_ns)
        runs.append(
            {"cc": law, "preset": preset, "seed": seed, "source": "simulated", **outcome.to_json(fabric, flows)}
        )
    write_text(json_file, json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}, indent=1) + "\n")
    for result in runs:
        stuck = sum(flow["fct_ns"] is None for flow in result["flows"])
        if stuck:
            cause = "the last packets of a flow were lost, and there is no retransmit timer yet"
            raise CheckFailed(f"{result['cc']}: {stuck} of {len(result['flows'])} flows did not end: {cause}")


def _law(name: str) -> Law:
    from congestion.engine.build import LAWS

    for law in LAWS:
        if law == name:
            return law
    raise ConfigError("--cc", name, "is unknown", f"give one of {', '.join(LAWS)}, or several with commas")
