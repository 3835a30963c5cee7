"""Catalogue of scenarios, by name or by file: parameters from text, the fabric they run on, and a list for people.

`scenario.x=y` sets a parameter, `fabric.x=y` one of the fabric; a job's cluster and model come from the configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
from pydantic import ValidationError

from congestion.engine.tables import MOST_FLOWS
from congestion.scenarios import job as scenario_job
from congestion.scenarios import patterns as scenario
from congestion.scenarios.fabric import FABRICS, build_fabric
from congestion.simulation.files import Flap, FlowSet, cm_nodes, read_cm, read_flows
from netlayer.config.file import load_config
from netlayer.config.tree import Section
from netlayer.errors import ConfigError
from topology.fabric.cable_plan import CablePlan
from topology.fabric.graph import Graph

_S = TypeVar("_S", bound=Section)


class Scenario(NamedTuple):
    """A pattern, the fabric that suits it, and how many hosts it needs."""

    parameters: type[scenario.Pattern]
    flows: Callable[[Graph, Any, int], FlowSet]
    fabric: str
    num_hosts: Callable[[Any], int]
    num_flows: Callable[[Any], int]


class Case(NamedTuple):
    """A scenario ready to run, and its resolved parameters for a record."""

    fabric: Graph
    flows: FlowSet
    config: dict[str, Any]
    flaps: tuple[Flap, ...] = ()


def _in_groups(p: scenario.Collective) -> int:
    return p.ranks * p.copies


def _ranks(p: scenario.Permutation) -> int:
    return p.ranks


SCENARIOS = {
    "incast": Scenario(scenario.Incast, scenario.incast, "star", lambda p: p.senders + 1, lambda p: p.senders),
    "permutation": Scenario(scenario.Permutation, scenario.permutation, "clos", _ranks, _ranks),
    "flap": Scenario(scenario.Flap, scenario.permutation, "clos", _ranks, _ranks),
    "all-to-all": Scenario(
        scenario.AllToAll, scenario.all_to_all, "clos", _in_groups, lambda p: _in_groups(p) * (p.ranks - 1)
    ),
    "ring-all-reduce": Scenario(
        scenario.RingAllReduce,
        scenario.ring_all_reduce,
        "clos",
        _in_groups,
        lambda p: 2 * _in_groups(p) * (p.ranks - 1) * p.channels,
    ),
    "victim": Scenario(
        scenario.Victim, scenario.victim, "dumbbell", lambda p: 2 * p.senders + 2, lambda p: p.senders + 1
    ),
    "poisson": Scenario(scenario.Poisson, scenario.poisson, "star", lambda p: p.senders + 1, lambda p: p.packets),
}
JOB = "job-phases"
_FLOW_BYTES = 1_000  # of a flow's rows, its path and what it waits for, while all of it is made
# A job that runs in seconds, for who names none: 16 servers of 8 GPUs, a rail each.
_SMALL_JOB = (
    *("cluster.name=small", "cluster.servers=16", "cluster.gpus_per_server=8", "cluster.nics_per_server=8"),
    *("cluster.rails=8", "cluster.tiers=2", "cluster.servers_per_tor_set=4", "cluster.switch_radix=32"),
    *("job.name=gpt-small", "job.model.layers=32", "job.model.hidden=4096", "job.model.heads=32"),
    *("job.model.ffn_hidden=16384", "job.model.seq_len=2048", "job.model.dtype=bfloat16"),
    *("job.parallel.tp=8", "job.parallel.pp=4", "job.parallel.dp=4"),
    *("job.batch.global_batch_size=64", "job.batch.micro_batch_size=1"),
)


def build_scenario(
    name: str,
    overrides: Sequence[str] = (),
    seed: int = 0,
    *,
    fabric: str | Graph = "",
    config: Path | None = None,
) -> Case:
    """The scenario `name` (dashes or underscores) on its own fabric or on the one that is given.

    Args:
        overrides: `scenario.x=y`, `fabric.x=y`; for a job `cluster.x=y` and `job.x=y` too.
        fabric: a name of FABRICS, or a graph; empty is the scenario's own.
        config: TOML file of a job's cluster and model.

    Raises:
        ConfigError: a name or a value is unknown or breaks its rule, or the fabric has too few hosts.
    """
    # Python's callers and `--set` write underscores, the command dashes.
    name = name.replace("_", "-")
    known = [*SCENARIOS, JOB]
    if name not in known:
        raise ConfigError("SCENARIO", name, "is unknown", f"give one of {', '.join(known)}")
    # Its flows come from a cluster and a model, of which the other scenarios know nothing.
    if name == JOB:
        return _job(overrides, seed, fabric, config)
    if config:
        raise ConfigError("--config", config, f"has no effect on {name}", f"omit it, or run {JOB}")
    values = _split(overrides, ("scenario", "fabric"))
    chosen = SCENARIOS[name]
    p = section_of(chosen.parameters, "scenario", values["scenario"])
    # Counted before they are made: a typing error may ask for more flows than fit in memory.
    check_room(name, chosen.num_flows(p))
    graph, fabric_config = _fabric(fabric or chosen.fabric, values["fabric"], chosen.num_hosts(p))
    # With defaults filled in: a record says all that made its flows.
    resolved = {"scenario": {"name": name, **p.model_dump(mode="json")}, "fabric": fabric_config}
    flaps = scenario.flaps(graph, p) if isinstance(p, scenario.Flap) else ()
    return Case(graph, chosen.flows(graph, p, seed), resolved, flaps)


def check_room(name: str, num_flows: int) -> None:
    """
    Raises:
        ConfigError: so many flows are more than a run can have, or than there is memory for.
    """
    needed, free = num_flows * _FLOW_BYTES, psutil.virtual_memory().available
    if num_flows > MOST_FLOWS:
        rule = f"has {num_flows:,} flows, a run has at most {MOST_FLOWS:,}"
    elif needed > free:
        rule = f"has {num_flows:,} flows, which need about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
    else:
        return
    raise ConfigError("SCENARIO", name, rule, "lower its ranks, senders, packets, copies or channels")


def case_of_flows(
    path: Path, overrides: Sequence[str] = (), *, fabric: str | Graph, num_bytes: int = 0, more_bytes: int = 0
) -> Case:
    """The flows of HPCC's flow.txt on a fabric; errors as `build_scenario`, and `read_flows`.

    Args:
        num_bytes: of each flow, in place of the file's; 0: the file's.
        more_bytes: that each flow sends beyond that.
    """
    graph, resolved = _fabric(fabric, _split(overrides, ("fabric",))["fabric"], 0)
    return Case(graph, _sized(read_flows(path, graph), num_bytes, more_bytes), {"fabric": resolved})


def case_of_cm(
    path: Path, overrides: Sequence[str] = (), *, fabric: str | Graph = "", num_bytes: int = 0, more_bytes: int = 0
) -> Case:
    """The flows of htsim's .cm, by default on its own fabric: the least fat tree for its nodes, 100G, 1 us a link.

    Args:
        num_bytes, more_bytes: as for `case_of_flows`; htsim's -flowsize, and the packet that its Swift sends beyond it.
    """
    values = _split(overrides, ("fabric",))["fabric"]
    # htsim's own default, so that its .cm files give its results as they are.
    if not fabric:
        values = {"bps": "100G", **values}
    graph, resolved = _fabric(fabric or "fat-tree", values, cm_nodes(path))
    return Case(graph, _sized(read_cm(path, graph), num_bytes, more_bytes), {"fabric": resolved})


def _sized(flows: FlowSet, num_bytes: int, more_bytes: int) -> FlowSet:
    # 0 is no size that a flow could have, so it can stand for `as the file says`.
    sizes = np.full_like(flows.num_bytes, num_bytes) if num_bytes else flows.num_bytes
    return replace(flows, num_bytes=sizes + more_bytes)


def section_of(kind: type[_S], prefix: str, values: Mapping[str, str]) -> _S:
    """A section from text.

    Raises:
        ConfigError: a name is unknown or a value breaks its rule.
    """
    for key in values:
        if key not in kind.model_fields:
            close = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.5)
            remedy = f"did you mean {prefix}.{close[0]}?" if close else f"known: {', '.join(kind.model_fields)}"
            raise ConfigError(f"{prefix}.{key}", values[key], "sets nothing that is known", remedy)
    try:
        # pydantic reads the text by the field's type: one place has rules, defaults and units.
        return kind.model_validate_strings(dict(values))
    except ValidationError as exc:
        # The first alone: an error is one line, and the next call shows the next.
        error = exc.errors()[0]
        rule = error["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{prefix}.{error['loc'][0]}", error["input"], rule, "give a value that fits") from exc


def describe() -> list[dict[str, str]]:
    """A row a parameter: whose it is, its name as `--set` takes it, default, meaning; what all have stands once."""
    # Fields that all scenarios inherit would fill most of the list.
    common = scenario.Pattern.model_fields
    kinds: dict[str, tuple[str, type[Section]]] = {"every scenario": ("scenario", scenario.Pattern)}
    kinds |= {name: ("scenario", one.parameters) for name, one in SCENARIOS.items()}
    kinds[JOB] = ("scenario", scenario_job.JobPhases)
    kinds |= {f"{name} (fabric)": ("fabric", kind) for name, kind in FABRICS.items()}
    return [
        {
            "of": of,
            "name": f"{prefix}.{key}",
            "default": str(field.default).lower(),
            "meaning": field.description or "",
        }
        for of, (prefix, kind) in kinds.items()
        for key, field in kind.model_fields.items()
        if kind is scenario.Pattern or key not in common
    ]


def _job(overrides: Sequence[str], seed: int, fabric: str | Graph, path: Path | None) -> Case:
    values = _split(overrides, ("scenario", "fabric", "cluster", "job"))
    p = section_of(scenario_job.JobPhases, "scenario", values["scenario"])
    ours = [f"{part}.{key}={value}" for part in ("cluster", "job") for key, value in values[part].items()]
    # Without a file the small job, in which --set changes what it names.
    config = load_config(path, ours if path else [*_SMALL_JOB, *ours])
    cluster, job = config.cluster, config.job
    if fabric:
        graph, fabric_config = _fabric(fabric, values["fabric"], cluster.servers * cluster.nics_per_server)
    elif values["fabric"]:
        key, value = next(iter(values["fabric"].items()))
        raise ConfigError(f"fabric.{key}", value, f"has no effect on {JOB}", "set cluster.x, or give --fabric")
    else:
        # With cables as `topology build` plans them, so that packets take the links that ECMP figures are about.
        graph, fabric_config = CablePlan.build(cluster).graph(), {"name": "cluster"}
    resolved = {"scenario": {"name": JOB, **p.model_dump(mode="json")}, "fabric": fabric_config}
    resolved |= {"cluster": cluster.model_dump(mode="json"), "job": job.model_dump(mode="json")}
    return Case(graph, scenario_job.job_phases(graph, p, seed, job, cluster), resolved)


def _fabric(fabric: str | Graph, values: Mapping[str, str], least_hosts: int) -> tuple[Graph, dict[str, Any]]:
    if isinstance(fabric, Graph):
        if values:
            key, value = next(iter(values.items()))
            raise ConfigError(f"fabric.{key}", value, "has no effect on a fabric from a file", "omit it")
        return fabric, {"name": "file"}
    fabric = fabric.replace("_", "-")
    if fabric not in FABRICS:
        raise ConfigError("--fabric", fabric, "is unknown", f"give one of {', '.join(FABRICS)}")
    # A planned fabric grows to the hosts that the scenario needs.
    made = section_of(FABRICS[fabric], "fabric", values)
    return build_fabric(made, least_hosts), {"name": fabric, **made.model_dump(mode="json")}


def _split(overrides: Sequence[str], prefixes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Overrides by their first word; the last one of a name counts."""
    by_prefix: dict[str, dict[str, str]] = {prefix: {} for prefix in prefixes}
    for override in overrides:
        key, equals, value = override.partition("=")
        prefix, dot, name = key.partition(".")
        if not (equals and dot and name and prefix in by_prefix):
            known = ", ".join(f"{one}.x=y" for one in prefixes)
            raise ConfigError("--set", override, "sets nothing here", f"give {known}, or congestion.x=y")
        by_prefix[prefix][name] = value
    return by_prefix
