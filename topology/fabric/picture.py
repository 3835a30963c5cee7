"""The fabric as one picture: every level of switches, coloured by the load of its links, fewer where they are many.

Links of a few switches are drawn alone: all links of a CLOS are a grey slab, and the caption says that the others are
alike.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from netlayer.report import Chart
from netlayer.report.theme import INK, MUTED, SCALE
from netlayer.units import format_rate
from topology.ecmp.load import Load
from topology.fabric.clos import Clos, Ints, Tier

# Switches drawn a level, links drawn from a pod's ToRs.
_MOST = 240
_LINKED_TORS = 4
_HEIGHT = 380
# The rows are named left of the drawing, where no link crosses.
_LABELS_FROM = -0.28
_ROWS = {"core": 3.0, "spine": 2.0, "tor": 1.0, "server": 0.0}


def fabric_chart(fabric: Clos, load: Load) -> Chart:
    """Servers by ToR set, ToRs, spines and core switches, pod by pod, and how full their links are."""
    nodes = _nodes(fabric, load)
    links = _links(fabric, nodes)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[_LABELS_FROM, 1.02], nice=False, zero=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.5, 3.25], nice=False, zero=False))
    lines = alt.Chart(links).mark_rule(strokeWidth=0.5, opacity=0.28, color=MUTED)
    marks = (
        alt.Chart(nodes)
        .mark_point(filled=True, opacity=1, strokeWidth=0, shape="square")
        .encode(
            x=x,
            y=y,
            size=alt.Size("area:Q", scale=None),
            color=alt.Color(
                "utilisation:Q",
                scale=alt.Scale(scheme=SCALE, domainMin=0),
                legend=alt.Legend(
                    title="Mean utilisation of its links", titleLimit=400, format=".0%", gradientLength=260
                ),
            ),
            tooltip=[
                alt.Tooltip("name:N", title="what"),
                alt.Tooltip("utilisation:Q", format=".1%", title="mean of its links"),
                alt.Tooltip("fullest:Q", format=".0%", title="fullest"),
            ],
        )
    )
    labels = alt.Chart(_labels(fabric)).encode(x=x, y=y, text="text:N")
    place: dict[str, Any] = {"align": "left", "baseline": "middle", "lineBreak": "\n", "fontSize": 12}
    written = labels.mark_text(**place, color=INK)
    pods = alt.Chart(_pod_labels(fabric)).encode(x="x:Q", y="y:Q", text="text:N")
    under = pods.mark_text(baseline="top", color=MUTED, fontSize=12)
    drawn: Any = alt.layer(lines.encode(x=x, y=y, x2="x2:Q", y2="y2:Q"), marks, written, under)
    return drawn.properties(width="container", height=_HEIGHT)  # type: ignore[no-any-return]


def caption(fabric: Clos) -> str:
    """Say what is drawn, and what is not."""
    design = fabric.design
    drawn = _per_pod(design.num_pods, design.tors_per_pod)
    every = "Every switch is drawn" if drawn == design.tors_per_pod else f"{drawn} of {design.tors_per_pod} ToRs a pod"
    return (
        f"{every}; of the links, those of {min(drawn, _LINKED_TORS)} ToRs a pod and of every drawn spine: the others "
        "are alike. Colour: mean demand over capacity of a square's links upwards (of a core switch: downwards)."
    )


def _per_pod(pods: int, count: int) -> int:
    return max(1, min(count, _MOST // pods))


def _chosen(count: int, most: int) -> Ints:
    """Evenly chosen indices."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _nodes(fabric: Clos, load: Load) -> pd.DataFrame:
    """Return the points of the picture, a row a node: level, position, name, area and the load of its links."""
    design = fabric.design
    use = load.link_bps / fabric.link_bps
    parts = [
        _in_pods("server", design.pods_per_network, design.tor_sets_per_pod, _by_set(fabric, use)),
        _in_pods("tor", design.num_pods, design.tors_per_pod, _by_switch(fabric, use, Tier.TOR_SPINE)),
        _in_pods("spine", design.num_pods, design.spines_per_pod, _by_switch(fabric, use, Tier.SPINE_CORE)),
    ]
    if design.num_cores:
        index = _chosen(design.num_cores, _MOST)
        mean, fullest = _by_core(fabric, use)
        parts.append(
            pd.DataFrame(
                {
                    "level": "core",
                    "index": index,
                    "x": (index + 0.5) / design.num_cores,
                    "name": [f"core {core}, plane {core // design.cores_per_plane}" for core in index],
                    "utilisation": mean[index],
                    "fullest": fullest[index],
                }
            )
        )
    nodes = pd.concat(parts, ignore_index=True)
    nodes["y"] = nodes["level"].map(_ROWS)
    widest = float(nodes.groupby("level").size().max())
    nodes["area"] = np.where(
        nodes["level"] == "server", min(260.0, 9000 / fabric.design.num_tor_sets), 60.0 * min(1.0, 900 / widest)
    )
    return nodes


def _in_pods(level: str, pods: int, per_pod: int, use: tuple[Any, Any]) -> pd.DataFrame:
    """Nodes of one level, evenly chosen inside each pod, with a gap between pods."""
    inside = _chosen(per_pod, _per_pod(pods, per_pod))
    pod = np.arange(pods).repeat(len(inside))
    place = np.tile(inside, pods)
    index = pod * per_pod + place
    word = {"server": "servers of ToR set", "tor": "ToR", "spine": "spine"}[level]
    return pd.DataFrame(
        {
            "level": level,
            "index": index,
            "x": (pod + 0.04 + 0.92 * (place + 0.5) / per_pod) / pods,
            "name": [f"{word} {number}, pod {home}" for number, home in zip(index, pod, strict=True)],
            "utilisation": use[0][index],
            "fullest": use[1][index],
        }
    )


def _by_switch(fabric: Clos, use: Any, tier: Tier) -> tuple[Any, Any]:
    """Mean and maximum over the uplinks of each switch; 0 where it has none."""
    design = fabric.design
    switches = design.num_tors if tier == Tier.TOR_SPINE else design.num_spines
    links = use[fabric.tier_links(tier)].reshape(switches, -1)
    return (links.mean(axis=1), links.max(axis=1)) if links.shape[1] else (np.zeros(switches), np.zeros(switches))


def _by_core(fabric: Clos, use: Any) -> tuple[Any, Any]:
    """Mean and maximum over the downlinks of each core switch."""
    design, span = fabric.design, fabric.tier_links(Tier.CORE_SPINE)
    core = fabric.link_src[span] - fabric.core_nodes(np.array(0))
    fullest = np.zeros(design.num_cores)
    np.maximum.at(fullest, core, use[span])
    counts = np.bincount(core, minlength=design.num_cores)
    return np.bincount(core, weights=use[span], minlength=design.num_cores) / np.maximum(counts, 1), fullest


def _by_set(fabric: Clos, use: Any) -> tuple[Any, Any]:
    """Mean and maximum over the NICs of each ToR set."""
    design = fabric.design
    nics = np.arange(design.num_nics)
    owner = nics // (design.nics_per_server * design.servers_per_tor_set)
    links = use[fabric.tier_links(Tier.NIC_TOR)]
    fullest = np.zeros(design.num_tor_sets)
    np.maximum.at(fullest, owner, links)
    return np.bincount(owner, weights=links) / np.bincount(owner), fullest


def _links(fabric: Clos, nodes: pd.DataFrame) -> pd.DataFrame:
    """Set to its ToRs, a few ToRs to all drawn spines of the pod, spines to the core switches of their plane."""
    design = fabric.design
    by_level = {level: rows.set_index("index") for level, rows in nodes.groupby("level")}
    tors, spines = by_level["tor"], by_level["spine"]
    set_of = np.empty(design.num_tors, dtype=np.int64)
    for rail in range(design.rails):
        set_of[fabric.tors_of_rail(rail)] = np.arange(design.num_tor_sets)
    parts = [_segments(by_level["server"], tors, set_of[tors.index], np.asarray(tors.index))]
    pod = np.asarray(tors.index) // design.tors_per_pod
    order = np.asarray(tors.groupby(pod).cumcount())
    per_pod = int(order.max()) + 1
    linked = np.asarray(tors.index)[np.isin(order, _chosen(per_pod, _LINKED_TORS))]
    above = np.asarray(spines.index)
    lower, upper = (grid.ravel() for grid in np.meshgrid(linked, above, indexing="ij"))
    same = lower // design.tors_per_pod == upper // design.spines_per_pod
    parts.append(_segments(tors, spines, lower[same], upper[same]))
    if "core" in by_level:
        cores = np.asarray(by_level["core"].index)
        lower, upper = (grid.ravel() for grid in np.meshgrid(above, cores, indexing="ij"))
        plane = fabric.core_of(lower, np.zeros_like(lower)) // design.cores_per_plane
        same = plane == upper // design.cores_per_plane
        parts.append(_segments(spines, by_level["core"], lower[same], upper[same]))
    return pd.concat(parts, ignore_index=True).round(4)


def _segments(lower: pd.DataFrame, upper: pd.DataFrame, src: Ints, dst: Ints) -> pd.DataFrame:
    known = np.isin(src, lower.index) & np.isin(dst, upper.index)
    one, two = lower.loc[src[known]], upper.loc[dst[known]]
    return pd.DataFrame({"x": one["x"].array, "y": one["y"].array, "x2": two["x"].array, "y2": two["y"].array})


def _labels(fabric: Clos) -> pd.DataFrame:
    design = fabric.design
    nics = f"{design.nics_per_server} x {format_rate(design.nic_bps)}"
    uplinks = f"{design.tor_uplinks} x {format_rate(design.tor_uplink_bps)}"
    rails = "1 rail" if design.rails == 1 else f"{design.rails} rails"
    apart = f"{design.num_networks} networks, " if design.num_networks > 1 else ""
    texts = {
        "server": f"{design.num_servers:,} servers\nin {design.num_tor_sets} ToR sets\n{nics} each",
        "tor": f"{design.num_tors:,} ToRs\n{apart}{rails}\n{uplinks} up each",
        "spine": f"{design.num_spines:,} spines\n{apart}{design.spines_per_pod} planes\n{design.spine_uplinks} up each",
        "core": f"{design.num_cores:,} core switches\n{design.cores_per_plane} a plane",
    }
    levels = [level for level in texts if level != "core" or design.num_cores]
    return pd.DataFrame(
        {"x": _LABELS_FROM, "y": [_ROWS[level] for level in levels], "text": [texts[level] for level in levels]}
    )


def _pod_labels(fabric: Clos) -> pd.DataFrame:
    pods = fabric.design.num_pods
    labelled = _chosen(pods, 12)
    return pd.DataFrame({"x": (labelled + 0.5) / pods, "y": -0.22, "text": [f"pod {pod}" for pod in labelled]})
