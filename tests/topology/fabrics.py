"""Small valid clusters for the tests of topology."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from netlayer.config.file import load_config
from netlayer.config.tree import ClusterConfig, Config
from netlayer.errors import ConfigError
from topology.fabric.design import plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def megascale() -> Config:
    return load_config(EXAMPLES / "megascale-12288.toml")


def cluster(**changes: Any) -> ClusterConfig:
    """Two pods of two ToR sets of 32 servers, 128 NICs of half a port's rate; `changes` on top."""
    fields = {
        "servers": 128,
        "gpus_per_server": 1,
        "nic_bps": 200,
        "switch_port_bps": 400,
        "switch_radix": 32,
        "servers_per_tor_set": 32,
        "pods": 2,
        "core_switches_per_plane": 4,
    }
    return ClusterConfig(**{**fields, **changes})


@st.composite
def clusters(draw: st.DrawFn, *, rail_only: bool = False) -> ClusterConfig:
    """Clusters of at most a few hundred NICs whose ports suffice; the last ToR set may be partly filled."""
    lanes = draw(st.sampled_from([1, 2, 4]))
    tiers = draw(st.sampled_from([2, 3]))
    pods = draw(st.integers(1, 3)) if tiers == 3 else 1
    rails = draw(st.integers(1, 2))
    oversubscription = draw(st.sampled_from([1, 2]))
    servers_per_tor_set = lanes * oversubscription * draw(st.integers(1, 3))
    full = servers_per_tor_set * pods * draw(st.integers(1, 3))
    fields = {
        "servers": full - draw(st.integers(0, servers_per_tor_set - 1)),
        "gpus_per_server": draw(st.integers(1, 4)),
        "nics_per_server": rails * draw(st.integers(1, 2)),
        "nic_bps": 100_000_000_000,
        "rails": rails,
        "rail_only": rail_only,
        "tiers": tiers,
        "switch_radix": 64,
        "switch_port_bps": lanes * 100_000_000_000,
        "aoc_split": draw(st.booleans()),
        "oversubscription": oversubscription,
        "servers_per_tor_set": servers_per_tor_set,
        "pods": pods,
        "core_switches_per_plane": draw(st.sampled_from([1, 2, 4])),
    }
    try:
        plan(ClusterConfig(**fields))
    except ConfigError:  # a spine's uplinks cannot be shared among so many core switches, or one core has too few ports
        fields["tiers"], fields["pods"] = 2, 1
    return ClusterConfig(**fields)
