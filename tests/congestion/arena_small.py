"""A suite of seconds: the arena's own rules on sixteen hosts, three workloads and two seeds."""

from __future__ import annotations

from dataclasses import replace

from congestion.arena.protocol import SUITE, CaseSet, Condition, Fabric, Workload

_WORKLOADS = (
    Workload("all-to-all 8", "all-to-all", {"ranks": 8, "num_bytes": 32_768}),
    Workload("incast 6:1", "incast", {"senders": 6, "num_bytes": 262_144}),
    Workload("victim 6:1", "victim", {"senders": 6, "num_bytes": 131_072, "placement": "in-order"}),
)
_CONDITIONS = (Condition("200G-ecmp"), Condition("200G-deep", buffer="deep"))

SMALL = replace(
    SUITE,
    fabric=Fabric(hosts=16, hosts_per_tor=8),
    test=CaseSet(_WORKLOADS, _CONDITIONS, (1, 2)),
    tuning_set=CaseSet(_WORKLOADS[1:2], _CONDITIONS[:1], (3,)),
    tuning=replace(
        SUITE.tuning,
        switch_parameters=("kmin_bytes", "kmax_bytes"),
        trials_per_parameter=4,
        trials_step=1,
        trials_most=5,
    ),
    rules=replace(SUITE.rules, buffers_bytes=(4 * 2**20, 3 * 2**20)),
)
