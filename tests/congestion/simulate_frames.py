"""Made-up frames of a few laws on a small fabric, for the page of `netlayer simulate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from congestion.simulation.measures import summary
from congestion.simulation.page.page import Findings

TIERS = ("host-switch1", "switch1-host", "switch1-switch2", "switch2-switch1")
BEGIN_US = 50.0


def made_up(
    slower: dict[str, float],
    *,
    num_flows: int = 40,
    paused: dict[str, float] | None = None,
    unended: dict[str, int] | None = None,
    sampled: bool = True,
    **more: Any,
) -> Findings:
    """Laws by how much slower than 400 us they are; `paused`: share of port-time, 0 where omitted."""
    rng = np.random.default_rng(0)
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in ("flows", "ports", "samples", "links", "tiers")}
    rows = []
    for law, times in slower.items():
        flows = _flows(rng, num_flows, 400 * times, (unended or {}).get(law, 0))
        ports = _ports(rng, (paused or {}).get(law, 0.0), 400 * times)
        rows.append({"cc": law, **summary(flows, ports), "completed": True, "wall_s": 1.0})
        made = {"flows": flows, "ports": ports}
        if sampled:
            made |= _over_time(ports, num_flows, 400 * times)
        for name, frame in made.items():
            frames[name].append(frame.assign(cc=law))
    joined: dict[str, Any] = {
        name: pd.concat(found, ignore_index=True) if found else None for name, found in frames.items()
    }
    return Findings("incast", rows, **joined, **{"bound_us": 390.0, "command": "netlayer simulate incast", **more})


def _flows(rng: np.random.Generator, num_flows: int, longest_us: float, unended: int) -> pd.DataFrame:
    fct = longest_us * np.sort(rng.uniform(0.3, 1.0, num_flows))
    fct[-1] = longest_us
    ideal = np.full(num_flows, 20.0)
    fct[:unended] = np.nan
    return pd.DataFrame(
        {
            "flow": np.arange(num_flows),
            "bytes": 1_000_000,
            "acked_bytes": np.where(np.isnan(fct), 0, 1_000_000),
            "start_us": BEGIN_US,
            "fct_us": fct,
            "slowdown": fct / ideal,
            "goodput_bps": 8e12 / fct,
            "retransmissions": 0,
            "cnps": 2,
        }
    )


def _ports(rng: np.random.Generator, paused: float, span_us: float) -> pd.DataFrame:
    many = 10
    share = rng.uniform(0, 2 * paused, (len(TIERS), many)) * np.array([[1.0], [0.0], [0.5], [0.1]])
    return pd.DataFrame(
        {
            "src": [f"a{tier}_{port}" for tier in range(len(TIERS)) for port in range(many)],
            "dst": [f"b{tier}" for tier in range(len(TIERS)) for _ in range(many)],
            "tier": np.repeat(TIERS, many),
            "utilisation": rng.uniform(0, 1, len(TIERS) * many),
            "max_queue_bytes": rng.integers(0, 400_000, len(TIERS) * many),
            "ecn_marked": 3,
            "drops": 0,
            "pauses": (share.ravel() > 0).astype(int),
            "pauses_set_off": np.roll(share.ravel() > 0, 1).astype(int),
            "pauses_passed_on": 0,
            "paused_us": share.ravel() * span_us,
            "pause_share": share.ravel(),
            "deadlock": 0,
        }
    )


def _over_time(ports: pd.DataFrame, num_flows: int, span_us: float) -> dict[str, pd.DataFrame]:
    times = BEGIN_US + np.arange(5.0, span_us, 5.0)
    wave = 1 + np.sin(times / 40)
    samples = pd.DataFrame(
        {
            "time_us": times,
            "rate_bps": 2e11 * np.minimum(1, wave),
            "flows": num_flows,
            "jain": [None if number == 3 else 0.9 for number in range(len(times))],
            "queue_bytes": (2e5 * wave).astype(int),
            "paused_ports": 1,
        }
    )
    links = [
        pd.DataFrame(
            {
                "time_us": times,
                "link": f"{port.src} -> {port.dst}",
                "tier": port.tier,
                "utilisation": float(port.utilisation) * np.minimum(1, wave),
                "queue_bytes": 0,
                "pause_share": 0.0,
            }
        )
        for port in ports.itertuples()
    ]
    tiers = [
        pd.DataFrame(
            {
                "time_us": times,
                "tier": tier,
                "ports": len(mine),
                "paused_ports": 0,
                "reached_ports": (mine["pause_share"].gt(0).sum() * wave / 2).astype(int),
                "pause_share": mine["pause_share"].mean() * wave,
            }
        )
        for tier, mine in ports.groupby("tier", sort=False)
    ]
    return {
        "samples": samples,
        "links": pd.concat(links, ignore_index=True),
        "tiers": pd.concat(tiers, ignore_index=True),
    }
