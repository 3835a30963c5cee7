"""A plan as SONiC's tables: a fragment of config_db.json, or a switch's whole file with the plan in it.

Names and forms: sonic-yang-models of sonic-net/sonic-buildimage, and its qos_config.j2. The hash's seed and offset are
no part of that file: they go into `switch.json`, which swssconfig writes into the application database. Not covered:
buffer pools, whose sizes belong to a chip; profiles refer to `ingress_lossless_pool`, which SONiC's own defaults have.

In the traditional buffer model buffermgrd looks a port's speed and cable up in the chip's pg_profile_lookup.ini and
writes `pg_lossless_<speed>_<cable>_profile` over the groups of all priorities in pfc_enable, a group of our own among
them; a profile of that name that is there already it leaves as it is (sonic-swss, cfgmgr/buffermgr.cpp). So there the
plan's profile has that name, and its groups the ranges that buffermgrd writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from congestion.nic.switches.buffers import unknown_chip
from congestion.nic.switches.plan import NAME, WATCHDOG_MS, SwitchPlan
from congestion.nic.switches.schema import check_tables, plain_reference
from netlayer.errors import ConfigError

Tables = dict[str, dict[str, Any]]
POOL = "ingress_lossless_pool"
_COLOURS = ("green", "yellow", "red")
_DATA_WEIGHT, _REST_WEIGHT = 90, 10
# Rows of which fields that the plan does not name stay; and tables whose keys may name several queues.
_MERGED = ("PORT_QOS_MAP", "QUEUE", "PFC_WD", "CABLE_LENGTH", "SWITCH_HASH")
_RANGED = ("QUEUE", "BUFFER_PG", "BUFFER_QUEUE")
_EGRESS_LOSSLESS = "egress_lossless_profile"
_DYNAMIC_CHIPS = "spectrum"  # whose SONiC computes buffers by itself, unless told otherwise
# These fields make ECMP tell queue pairs apart by their UDP source port; SONiC's names.
HASH_FIELDS = ("SRC_IP", "DST_IP", "IP_PROTOCOL", "L4_SRC_PORT", "L4_DST_PORT")


def tables_of(plan: SwitchPlan, known: Mapping[str, Any] | None = None) -> Tables:
    """The tables of a plan, checked against the schema, and against the tables that the switch has (`known`).

    Raises:
        ConfigError: a value that SONiC would refuse; priorities that are lossless on a chip that is not known.
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
    if plan.lossless:
        if plan.lossless_headroom is None:
            raise unknown_chip("--chip", plan.chip or None, "is missing: PFC headroom differs from chip to chip")
        tables |= _buffers(plan, known or {})
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
            if name == "CABLE_LENGTH":
                _drop_cables(own, key, row)
            own[key] = {**known, **row} if name in _MERGED and isinstance(known, dict) else row
    check_tables({name: merged[name] for name in tables}, known=merged)
    return merged


def _split_ranges(own: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a switch, those of several queues that a row of the plan falls into as one row a queue.

    SONiC would hold to one of `Ethernet0|3-4` and `Ethernet0|3`, and not say which.
    """
    kept: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    covered = {one for key in rows for one in _each(key)}
    for key, row in own.items():
        each = _each(key)
        if key in rows or not covered.intersection(each):
            kept[key] = row
        else:
            parts |= {one: row for one in each if one in rows or one not in covered}
    return {**parts, **kept}


def _each(key: str) -> list[str]:
    """`Ethernet0|3` and `Ethernet0|4` of `Ethernet0|3-4`."""
    port, _, queues = key.partition("|")
    match = re.fullmatch(r"(\d{1,2})-(\d{1,2})", queues, re.ASCII)
    return [f"{port}|{one}" for one in range(int(match[1]), int(match[2]) + 1)] if match else [key]


def _drop_cables(own: dict[str, Any], key: str, row: Mapping[str, str]) -> None:
    """Take the ports of `row` out of tables of other names: SONiC would take the length that it reads last."""
    for name, cables in own.items():
        if name != key and isinstance(cables, dict):
            own[name] = {port: length for port, length in cables.items() if port not in row}


def switch_json(plan: SwitchPlan) -> list[dict[str, Any]]:
    """Return rows for swssconfig: seed and offset of ECMP and of link aggregation; empty where the plan has none."""
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
    tree = read_json(path, "--base")
    if not isinstance(tree.get("PORT"), dict):
        raise ConfigError("--base", path, "has no table PORT", "give config_db.json as the switch holds it")
    return tree


def read_json(path: Path, option: str) -> dict[str, Any]:
    """A file of SONiC's tables.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    remedy = "give config_db.json as the switch holds it"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(option, path, f"cannot be read ({exc})", remedy) from exc
    if not isinstance(tree, dict):
        raise ConfigError(option, path, "holds no tables", remedy)
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


def is_traditional(base: Mapping[str, Any], plan: SwitchPlan) -> bool:
    """Whether buffermgrd looks headroom up: where the switch does not say, as its chip's SONiC does by default."""
    table = base.get("DEVICE_METADATA")
    if isinstance(table, Mapping):
        own = table.get("localhost")
        return not (isinstance(own, Mapping) and own.get("buffer_model") == "dynamic")
    return bool(plan.chip) and not plan.chip.startswith(_DYNAMIC_CHIPS)


def platform_of(base: Mapping[str, Any]) -> str:
    """SONiC's name of the switch, such as x86_64-nvidia_sn5600-r0; empty where the base does not say."""
    table = base.get("DEVICE_METADATA")
    own = table.get("localhost") if isinstance(table, Mapping) else None
    return str(own.get("platform", "")) if isinstance(own, Mapping) else ""


def lanes_of(base: Mapping[str, Any], ports: Sequence[str]) -> int | None:
    """Lanes of the widest of the ports; None where the base does not say."""
    rows = [base["PORT"].get(port) for port in ports] if base else []
    texts = [str(row.get("lanes", "")) for row in rows if isinstance(row, Mapping)]
    return max((text.count(",") + 1 for text in texts if text), default=None)


def notes_on(base: Mapping[str, Any], plan: SwitchPlan) -> list[str]:
    """Return notes on the buffers that a switch's file already has."""
    room = plan.lossless_headroom
    if room is None:
        return []
    name, notes = _profile_name(base, plan), []
    known = _rows(base, "BUFFER_PROFILE").get(name)
    if known is not None:
        own, need = _whole_number(known.get("xoff")), room.xoff_bytes
        kept = own is not None and own > need
        groups = _rows(base, "BUFFER_PG").items()
        users = {key.partition("|")[0] for key, row in groups if _profile_of(row) == name}
        beside = sorted(users.difference(plan.ports))
        other = f"; also of {', '.join(beside[:3])}" if beside and not kept else ""
        outcome = "the larger one is kept" if kept else "the plan replaces it"
        notes.append(f"{name} of --base has xoff {own}, the plan {need}: {outcome}{other}")
    if is_traditional(base, plan):
        notes.append(f"traditional buffer model: the profile is called {name}, which buffermgrd then leaves as it is")
    if room.from_pool and _rows(base, "BUFFER_POOL").get(POOL) and not _shared_pool(base):
        rule = f"{POOL} has no xoff, and {plan.chip} takes its headroom out of that"
        notes.append(f"{rule}: give the pool at least {room.xoff_bytes:,} bytes of it")
    if _rows(base, "BUFFER_QUEUE") and _EGRESS_LOSSLESS not in _rows(base, "BUFFER_PROFILE"):
        notes.append(
            f"no {_EGRESS_LOSSLESS} in --base: see that queues of lossless priorities are not dropped from at egress"
        )
    left = sorted(
        key
        for key, row in _rows(base, "BUFFER_PG").items()
        for port, one in (each.split("|", 1) for each in _each(key) if "|" in each)
        if port in plan.ports and one.isdecimal() and int(one) not in plan.lossless
        and _profile_of(row).startswith("pg_lossless")
    )  # fmt: skip
    if left:
        notes.append(f"{left[0]}: keeps lossless headroom in --base for priorities that the plan does not pause")
    return notes


def _rows(base: Mapping[str, Any], table: str) -> dict[str, Mapping[str, Any]]:
    rows = base.get(table)
    return {key: row for key, row in rows.items() if isinstance(row, Mapping)} if isinstance(rows, Mapping) else {}


def _profile_of(row: Mapping[str, Any]) -> str:
    return str(plain_reference(row.get("profile", ""), "BUFFER_PROFILE"))


def _whole_number(text: object) -> int | None:
    return int(str(text)) if re.fullmatch(r"\d{1,20}", str(text), re.ASCII) else None


def _shared_pool(base: Mapping[str, Any]) -> bool:
    return bool(_whole_number(_rows(base, "BUFFER_POOL").get(POOL, {}).get("xoff")))


def _profile_name(base: Mapping[str, Any], plan: SwitchPlan) -> str:
    if is_traditional(base, plan):
        return f"pg_lossless_{plan.rate_bps // 10**6}_{plan.cable_m}m_profile"
    return f"{NAME}_lossless_{plan.rate_bps // 10**9}G_{plan.cable_m}m"


def _profile(base: Mapping[str, Any], plan: SwitchPlan, name: str) -> dict[str, str]:
    """The row of the lossless profile; that of the base where it has more headroom already."""
    room = plan.lossless_headroom
    assert room is not None
    known = _rows(base, "BUFFER_PROFILE").get(name)
    if known is not None and (_whole_number(known.get("xoff")) or 0) > room.xoff_bytes:
        return dict(known)
    sizes = {"xon": str(room.xon_bytes), "xoff": str(room.xoff_bytes)}
    sizes["size"] = str(room.profile_bytes(shared_pool=_shared_pool(base)))
    if room.xon_offset_bytes is not None:
        sizes["xon_offset"] = str(room.xon_offset_bytes)
    pool = _rows(base, "BUFFER_POOL").get(POOL, {})
    if pool.get("mode") == "static":  # a threshold that follows what is free is refused there
        return {"pool": POOL, **sizes, "static_th": str(pool.get("size", "0"))}
    return {"pool": POOL, **sizes, "dynamic_th": "0"}


def _groups(priorities: Sequence[int], *, as_ranges: bool) -> list[str]:
    """`3` and `4`, or `3-4`."""
    runs: list[list[int]] = []
    for one in priorities:
        if as_ranges and runs and runs[-1][-1] == one - 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _buffers(plan: SwitchPlan, base: Mapping[str, Any]) -> Tables:
    name = _profile_name(base, plan)
    groups = _groups(plan.lossless, as_ranges=is_traditional(base, plan))
    tables: Tables = {}
    if _EGRESS_LOSSLESS in _rows(base, "BUFFER_PROFILE"):
        keys = [f"{port}|{one}" for port in plan.ports for one in plan.lossless]
        known = {one: _profile_of(row) for key, row in _rows(base, "BUFFER_QUEUE").items() for one in _each(key)}
        lossy = [key for key in keys if known.get(key) != _EGRESS_LOSSLESS]
        if lossy:
            tables["BUFFER_QUEUE"] = {key: {"profile": _EGRESS_LOSSLESS} for key in lossy}
    detection = {"action": "drop", "detection_time": str(WATCHDOG_MS), "restoration_time": str(2 * WATCHDOG_MS)}
    return {
        **tables,
        "BUFFER_PROFILE": {name: _profile(base, plan, name)},
        "BUFFER_PG": {f"{port}|{one}": {"profile": name} for port in plan.ports for one in groups},
        "CABLE_LENGTH": {"AZURE": dict.fromkeys(plan.ports, f"{plan.cable_m}m")},
        "PFC_WD": {"GLOBAL": {"POLL_INTERVAL": str(WATCHDOG_MS)}, **{port: dict(detection) for port in plan.ports}},
    }
