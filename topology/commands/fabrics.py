"""The fabric of a command: that of a cluster file, or an imported one (`--fabric`), with a job or without."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from netlayer.errors import ConfigError

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from collections.abc import Mapping

    from netlayer.command import RunOptions
    from netlayer.config.tree import Config
    from topology.fabric.graph import Graph
    from topology.fabric.imported import ImportedFabric
    from topology.fabric.interface import Fabric
    from topology.sweep import Subject
    from topology.traffic.job import Flows

fabric_option = click.option(
    "--fabric",
    "fabric_file",
    type=click.Path(path_type=Path),
    help="An imported fabric in place of the cluster's: fabric.graphml, or what `import` reads; the job is --config's.",
)


class World(NamedTuple):
    """A fabric, and cluster and job where there are any: of an imported fabric's servers those that the job needs."""

    fabric: Fabric
    config: Config | None

    def job_config(self, what: str) -> Config:
        """Return cluster and job.

        Raises:
            ConfigError: there is no job; `what` says what needs one.
        """
        if self.config is None:
            raise ConfigError("--fabric", None, f"has no job, and {what} needs one", "give --config FILE with a [job]")
        return self.config

    def subject(self, flows: Flows | None = None) -> Subject:
        """Return what a sweep runs on: these flows, or the job's, or else a permutation."""
        from topology.fabric.imported import ImportedFabric
        from topology.sweep import Subject

        config = "" if self.config is None or flows is not None else self.config.model_dump_json()
        if not isinstance(self.fabric, ImportedFabric):
            return Subject(config)
        # A copy, without all that was derived from it: every task carries it.
        return Subject(config, dataclasses.replace(self.fabric.source), flows, self.fabric.hosts_per_server)


def open_world(options: RunOptions, fabric_file: Path | None) -> World:
    """Build the cluster's fabric, or read an imported one and say on stderr what it is taken for.

    Raises:
        ConfigError: the job does not fill the cluster, or finds no room on the imported fabric's servers; the file
            cannot be read; no flow can cross the fabric.
    """
    from topology.commands.records import load_cluster
    from topology.ecmp.compare import check_crossed
    from topology.fabric.clos import Clos

    if fabric_file is not None:
        return _open_imported(options, fabric_file)
    config = load_cluster(options)
    config.check_world()
    fabric = Clos.build(config.cluster)
    check_crossed(fabric)
    return World(fabric, config)


def read_file_flows(path: Path, fabric: Fabric) -> Flows:
    """The flows of a file between the NICs of an imported fabric.

    Raises:
        ConfigError: see `read_network_flows`.
    """
    from topology.fabric.imported import ImportedFabric

    assert isinstance(fabric, ImportedFabric)
    flows = read_network_flows(path, fabric.graph, fabric.nvswitch_of)
    if flows.start_s is not None:
        click.echo(f"{path}: starts have no effect here, all flows run together", err=True)
    src, dst = (fabric.nic_of_node[node] for node in (flows.src_nic, flows.dst_nic))
    return dataclasses.replace(flows, src_nic=src, dst_nic=dst, start_s=None)


def read_network_flows(path: Path, graph: Graph, nvswitch_of: Mapping[int, int]) -> Flows:
    """The flows of a file that cross the network, between nodes of a graph; those inside an NVSwitch are omitted.

    Args:
        path: the file.
        graph: the fabric without cables to NVSwitches, and `nvswitch_of` each host's, as `without_nvlink` gives them.

    Raises:
        ConfigError: see `flow_files.read_flows`; a host has no other cable; no flow is left.
    """
    import numpy as np

    from topology.traffic.flow_files import read_flows

    flows = read_flows(path, graph)
    if not nvswitch_of:
        return flows
    nvswitch = np.array([nvswitch_of.get(node, -1 - node) for node in range(graph.num_nodes)])
    inside = nvswitch[flows.src_nic] == nvswitch[flows.dst_nic]
    if inside.all():
        raise ConfigError("--flows", path, "has no flow but between GPUs of one NVSwitch", "give flows of the network")
    if inside.any():
        click.echo(f"{path}: {int(inside.sum())} flows between GPUs of one NVSwitch omitted: they use NVLink", err=True)
        flows = flows.where(~inside)
    cabled = np.bincount(graph.link_src, minlength=graph.num_nodes) > 0
    for node in np.concatenate([flows.src_nic, flows.dst_nic]).tolist():
        if not cabled[node]:
            rule = f"host {graph.names[node]} has no cable but to an NVSwitch"
            raise ConfigError("--flows", path, rule, "skip its flows")
    return flows


def _open_imported(options: RunOptions, path: Path) -> World:
    from topology.ecmp.compare import check_crossed
    from topology.fabric.imported import ImportedFabric
    from topology.importers import read_one
    from topology.importers.files import show

    graph = read_one(path, "--fabric")
    config = options.load_config() if options.config_path is not None or options.overrides else None
    fabric = ImportedFabric.of(graph, config.cluster.nics_per_server if config else 1)
    has_job = config is not None and "job" in config.model_fields_set  # a file may give the cluster alone
    click.echo(f"fabric: {show(path)}, {fabric.describe()}", err=True)
    check_crossed(fabric, "--fabric")
    return World(fabric, _of_imported(config, fabric, path) if config and has_job else None)


def _of_imported(config: Config, fabric: ImportedFabric, path: Path) -> Config:
    """The configuration with a cluster of as many servers as the job needs, whose NICs are the fabric's."""
    from topology.placement.strategies import num_slots

    slots, room = num_slots(config.cluster, config.job.parallel), int(fabric.full_servers.sum())
    if slots > room:
        rule = f"need {slots} servers of {config.cluster.gpus_per_server} GPUs, --fabric has {room} that can hold ranks"
        ranks = f"{config.job.parallel.layout.world_size} ranks"
        raise ConfigError("job.parallel", ranks, rule, "lower job.parallel.dp, or give a larger fabric")
    known = {"name": path.stem, "servers": slots, "nics_per_server": fabric.nics_per_server}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=known)})
