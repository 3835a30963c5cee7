"""A plan as SONiC's tables: a fragment of config_db.json, or a switch's whole file with the plan in it.

Names and forms: sonic-yang-models of sonic-net/sonic-buildimage, and its qos_config.j2. The hash's seed and offset are
no part of that file: they go into `switch.json`, which swssconfig writes into the application database. Left out:
buffer pools, whose sizes belong to a chip; profiles refer to `ingress_lossless_pool`, which SONiC's own defaults have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from congestion.nic.switch import NAME, WATCHDOG_MS, SwitchPlan
from congestion.nic.switch_schema import check_tables
from netlayer.errors import ConfigError

Tables = dict[str, dict[str, Any]]
POOL = "ingress_lossless_pool"
_COLOURS = ("green", "yellow", "red")
_DATA_WEIGHT, _REST_WEIGHT = 90, 10
# Rows of which fields that the plan does not name stay; and tables whose keys may name several queues.
_MERGED = ("PORT_QOS_MAP", "QUEUE", "PFC_WD", "CABLE_LENGTH", "SWITCH_HASH")
_RANGED = ("QUEUE", "BUFFER_PG")
# These fields make ECMP tell queue pairs apart by their UDP source port; SONiC's names.
HASH_FIELDS = ("SRC_IP", "DST_IP", "IP_PROTOCOL", "L4_SRC_PORT", "L4_DST_PORT")


def tables_of(plan: SwitchPlan, known: Mapping[str, Any] | None = None) -> Tables:
    """The tables of a plan, checked against the schema, and against the tables that the switch has (`known`).

    Raises:
        ConfigError: a value that SONiC would refuse.
    """
    tables = {
        **_maps(plan),
        "SCHEDULER": {
            f"{NAME}_DATA": {"type": "DWRR", "weight": str(_DATA_WEIGHT)},
            f"{NAME}_REST": {"type": "DWRR", "weight": str(_REST_WEIGHT)},
            f"{NAME}_CNP": {"type": "STRICT"},
        },
        "PORT_QOS_MAP": {port: _port_map(plan) for port in plan.ports},
        "QUEUE": {key: row for port in plan.ports for key, row in _queues(plan, port).items()},
    }
    if plan.marking:
        tables["WRED_PROFILE"] = {f"{NAME}_DATA": _wred(plan)}
    if plan.lossless and plan.lossless_headroom:
        tables |= _buffers(plan)
    check_tables(tables, known)
    return tables


def merge(base: Mapping[str, Any], plan: SwitchPlan) -> dict[str, Any]:
    """A switch's whole file with the plan in it: rows of other names stay, and so does what the plan says nothing of.

    Raises:
        ConfigError: a port that the switch lacks, or what the plan refers to is not there.
    """
    _check_rates(base, plan)
    tables = tables_of(plan, base)
    merged: dict[str, Any] = {name: dict(rows) if isinstance(rows, Mapping) else rows for name, rows in base.items()}
    for name, rows in tables.items():
        own = merged.setdefault(name, {})
        if not isinstance(own, dict):
            raise ConfigError("--base", name, "is no table", "give config_db.json as the switch holds it")
        if name in _RANGED:
            own = merged[name] = _split_ranges(own, rows)
        for key, row in rows.items():
            known = own.get(key)
            own[key] = {**known, **row} if name in _MERGED and isinstance(known, dict) else row
    check_tables({name: merged[name] for name in tables}, known=merged)
    return merged


def _split_ranges(own: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a switch, those of several queues that a row of the plan falls into as one row a queue.

    SONiC would hold to one of `Ethernet0|3-4` and `Ethernet0|3`, and not say which.
    """
    found: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for key, row in own.items():
        port, _, queues = key.partition("|")
        match = re.fullmatch(r"(\d{1,2})-(\d{1,2})", queues, re.ASCII)
        each = [f"{port}|{one}" for one in range(int(match[1]), int(match[2]) + 1)] if match else []
        if any(one in rows for one in each):
            parts |= dict.fromkeys(each, row)
        else:
            found[key] = row
    return {**parts, **found}


def switch_json(plan: SwitchPlan) -> list[dict[str, Any]]:
    """For swssconfig: seed and offset of ECMP and of link aggregation; empty where the plan has none."""
    row: dict[str, str] = {}
    for kind, value in (("seed", plan.hash_seed), ("offset", plan.hash_offset)):
        if value is not None:
            row |= {f"ecmp_hash_{kind}": str(value), f"lag_hash_{kind}": str(value)}
    return [{"SWITCH_TABLE:switch": row, "OP": "SET"}] if row else []


def read_base(path: Path) -> dict[str, Any]:
    """A switch's config_db.json.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(
            "--base", path, f"cannot be read ({exc})", "give config_db.json as the switch holds it"
        ) from exc
    if not isinstance(tree, dict) or not isinstance(tree.get("PORT"), dict):
        raise ConfigError("--base", path, "has no table PORT", "give config_db.json as the switch holds it")
    return tree


def _check_rates(base: Mapping[str, Any], plan: SwitchPlan) -> None:
    """Headroom and cable are of one rate: a port of another would get the wrong ones."""
    for port in plan.ports:
        row = base["PORT"].get(port)
        if row is None:
            raise ConfigError("--ports", port, "is no port of --base", "name those that its table PORT has")
        speed = str(row.get("speed", "")) if isinstance(row, Mapping) else ""
        if speed and speed != str(plan.rate_bps // 10**6):
            rule = f"is not the speed of {port} in --base, {speed} Mb/s"
            raise ConfigError("--rate", plan.rate_bps, rule, "run once a speed, each time with --ports of that speed")


def _maps(plan: SwitchPlan) -> Tables:
    classes = plan.dscp_to_class
    groups = {str(one): str(one) if one in plan.lossless else "0" for one in range(8)}
    straight = {str(one): str(one) for one in range(8)}
    maps: Tables = {
        "DSCP_TO_TC_MAP": {NAME: {str(dscp): str(classes.get(dscp, 0)) for dscp in range(64)}},
        "TC_TO_QUEUE_MAP": {NAME: straight},
        "TC_TO_PRIORITY_GROUP_MAP": {NAME: groups},
    }
    if plan.hash_seed is not None or plan.hash_offset is not None:
        maps["SWITCH_HASH"] = {"GLOBAL": {"ecmp_hash": list(HASH_FIELDS)}}
    if plan.lossless:
        maps["MAP_PFC_PRIORITY_TO_QUEUE"] = {NAME: straight}
        maps["PFC_PRIORITY_TO_PRIORITY_GROUP_MAP"] = {NAME: {str(one): str(one) for one in plan.lossless}}
    return maps


def _port_map(plan: SwitchPlan) -> dict[str, str]:
    row = {"dscp_to_tc_map": NAME, "tc_to_queue_map": NAME, "tc_to_pg_map": NAME}
    if plan.lossless:
        priorities = ",".join(map(str, plan.lossless))
        row |= {"pfc_to_queue_map": NAME, "pfc_to_pg_map": NAME}
        row |= {"pfc_enable": priorities, "pfcwd_sw_enable": priorities}
    return row


def _queues(plan: SwitchPlan, port: str) -> Tables:
    rows: Tables = {}
    for queue in range(8):
        kind = "DATA" if queue == plan.priority else "CNP" if queue == plan.cnp_priority else "REST"
        rows[f"{port}|{queue}"] = {"scheduler": f"{NAME}_{kind}"}
    if plan.marking:
        rows[f"{port}|{plan.priority}"]["wred_profile"] = f"{NAME}_DATA"
    return rows


def _wred(plan: SwitchPlan) -> dict[str, str]:
    assert plan.marking is not None
    row = {"ecn": "ecn_all"}
    for colour in _COLOURS:
        row |= {
            f"wred_{colour}_enable": "true",
            f"{colour}_min_threshold": str(plan.marking.kmin_bytes),
            f"{colour}_max_threshold": str(plan.marking.kmax_bytes),
            f"{colour}_drop_probability": str(plan.marking.pmax_percent),
        }
    return row


def _buffers(plan: SwitchPlan) -> Tables:
    room = plan.lossless_headroom
    assert room is not None
    name = f"{NAME}_lossless_{plan.rate_bps // 10**9}G_{plan.cable_m}m"
    sizes = {"xon": str(room.xon_bytes), "xoff": str(room.xoff_bytes), "size": str(room.size_bytes)}
    detection = {"action": "drop", "detection_time": str(WATCHDOG_MS), "restoration_time": str(2 * WATCHDOG_MS)}
    return {
        "BUFFER_PROFILE": {name: {"pool": POOL, **sizes, "dynamic_th": "0"}},
        "BUFFER_PG": {f"{port}|{one}": {"profile": name} for port in plan.ports for one in plan.lossless},
        "CABLE_LENGTH": {"AZURE": dict.fromkeys(plan.ports, f"{plan.cable_m}m")},
        "PFC_WD": {"GLOBAL": {"POLL_INTERVAL": str(WATCHDOG_MS)}, **{port: dict(detection) for port in plan.ports}},
    }
