"""A switch's configuration as the simulator's settings: PFC thresholds, headroom, watchdog and ECN of SONiC's tables.

What `netlayer nic switch` writes, alone or merged into a switch's whole config_db.json, is what `netlayer simulate
--switch-config` runs with. One lossless profile, one watchdog and one WRED profile are known: ports that differ are
refused. Not covered: queues and schedulers (congestion.classes), and the ECMP seed, which is in switch.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from congestion.nic.switches.schema import plain_reference
from congestion.nic.switches.sonic import POOL, read_json
from netlayer.errors import ConfigError

_REFERENCE_BPS = 200_000_000_000  # marking thresholds of the settings are for this rate
_ACTIONS = ("drop", "forward", "alert")
Row = Mapping[str, Any]


def settings_of_switch(path: Path) -> tuple[tuple[str, ...], list[str]]:
    """`congestion.x=y` for each value that the file gives, and what it leaves open, a line each.

    Raises:
        ConfigError: the file cannot be read, or its lossless ports are not alike.
    """
    tree = read_json(path, "--switch-config")
    where = f"--switch-config {path}"
    enabled = {
        (port, priority)
        for port, row in _rows(tree, "PORT_QOS_MAP").items()
        for priority in str(row.get("pfc_enable", "")).split(",")
        if priority
    }
    values: dict[str, object] = {}
    notes: list[str] = []
    if not enabled:
        values["pfc"] = "false"
        notes.append(f"{where}: no port has pfc_enable, so nothing is lossless")
    else:
        name, profile = _lossless(tree, enabled, where)
        values |= _thresholds(where, name, profile)
        pool = _rows(tree, "BUFFER_POOL").get(POOL)
        if pool and "size" in pool:
            values["buffer_bytes"] = _number(where, pool, "size") + _number(where, pool, "xoff", 0)
        else:
            notes.append(f"{where}: no size of {POOL}, so congestion.buffer_bytes stays as it is")
        values |= _watchdog(tree, {port for port, _ in enabled}, where)
        notes.append(f"{where}: headroom and thresholds of {name} hold for every port of the fabric")
    marking = _one(
        "WRED profile",
        (
            _referred(row.get("wred_profile"), "WRED_PROFILE")
            for row in _rows(tree, "QUEUE").values()
            if row.get("wred_profile")
        ),
        where,
    )
    if marking is None:
        values["ecn"] = "false"
        notes.append(f"{where}: no queue has a WRED profile, so nothing is marked")
    else:
        values |= _marking(tree, marking, where)
    return tuple(f"congestion.{key}={value}" for key, value in values.items()), notes


def _lossless(tree: Mapping[str, Any], enabled: set[tuple[str, str]], where: str) -> tuple[str, Row]:
    """The buffer profile of all lossless priority groups."""
    names = []
    for key, row in _rows(tree, "BUFFER_PG").items():
        port, _, groups = key.partition("|")
        low, _, high = groups.partition("-")
        if low.isdecimal() and (high or low).isdecimal():
            lossless = any((port, str(one)) in enabled for one in range(int(low), int(high or low) + 1))
            names += [_referred(row.get("profile"), "BUFFER_PROFILE")] if lossless else []
    name = _one("lossless buffer profile", names, where)
    profile = _rows(tree, "BUFFER_PROFILE").get(name or "")
    if name is None or profile is None:
        rule = f"has no BUFFER_PROFILE of the lossless groups ({name or 'no BUFFER_PG names one'})"
        raise ConfigError(where, None, rule, "give what `netlayer nic switch` writes, or the switch's whole file")
    return name, profile


def _thresholds(where: str, name: str, profile: Row) -> dict[str, object]:
    inside = f"{where}, {name}"
    xoff, size = _number(inside, profile, "xoff"), _number(inside, profile, "size", 0)
    values: dict[str, object] = {
        "pfc": "true",
        "headroom_bytes": xoff,
        # `size` holds the headroom too, unless that comes out of a pool of its own.
        "reserve_bytes": size - xoff if size >= xoff else size,
        "xon_bytes": _number(inside, profile, "xon", 0),
        "resume_offset_bytes": _number(inside, profile, "xon_offset", 0),
    }
    if "static_th" in profile:
        return {**values, "xoff_bytes": _number(inside, profile, "static_th")}
    return {**values, "pfc_alpha": 2.0 ** _number(inside, profile, "dynamic_th")}


def _watchdog(tree: Mapping[str, Any], ports: set[str], where: str) -> dict[str, object]:
    rows = _rows(tree, "PFC_WD")
    watchdogs = {port: tuple(str(row.get(key, "")) for key in ("detection_time", "restoration_time", "action"))
            for port, row in rows.items() if port in ports}  # fmt: skip
    if not watchdogs:
        return {}
    if len(set(watchdogs.values())) > 1 or set(watchdogs) != ports:
        rule = "gives the PFC watchdog of lossless ports several values, or some of them none"
        raise ConfigError(f"{where}, PFC_WD", None, rule, "the simulator knows one for all: give them alike")
    row = rows[min(watchdogs)]
    action = str(row.get("action", "drop")).lower()
    if action not in _ACTIONS:
        raise ConfigError(f"{where}, PFC_WD action", action, "is unknown", f"give one of {', '.join(_ACTIONS)}")
    values: dict[str, object] = {"watchdog_detection_us": 1_000 * _number(where, row, "detection_time")}
    if "restoration_time" in row:
        values["watchdog_restoration_us"] = 1_000 * _number(where, row, "restoration_time")
    return {**values, "watchdog_action": action}


def _marking(tree: Mapping[str, Any], name: str, where: str) -> dict[str, object]:
    row = _rows(tree, "WRED_PROFILE").get(name)
    if row is None:
        raise ConfigError(f"{where}, WRED_PROFILE", name, "is referred to and not there", "give the whole file")
    rate = _rate_bps(tree, where)
    inside = f"{where}, {name}"
    scaled = {
        key: _number(inside, row, f"green_{which}_threshold") * _REFERENCE_BPS // rate
        for key, which in (("kmin_bytes", "min"), ("kmax_bytes", "max"))
    }
    return {"ecn": "true", **scaled, "pmax": _number(inside, row, "green_drop_probability") / 100}


def _rate_bps(tree: Mapping[str, Any], where: str) -> int:
    """Return the rate of the marked ports, by the table PORT, or the name of their lossless profile."""
    ports = {key.partition("|")[0] for key, row in _rows(tree, "QUEUE").items() if row.get("wred_profile")}
    speeds = {str(row["speed"]) for port, row in _rows(tree, "PORT").items() if port in ports and "speed" in row}
    if not speeds:
        matches = (re.search(r"_(\d+)(G?)_\d+m", name, re.ASCII) for name in _rows(tree, "BUFFER_PROFILE"))
        speeds = {match[1] + ("000" if match[2] else "") for match in matches if match}
    speed = _one("port speed", speeds, where)
    if speed is None or not speed.isdecimal() or not int(speed):
        rule = "does not say how fast its ports are, and marking thresholds scale with a link's rate"
        raise ConfigError(where, None, rule, "give the switch's whole file, with its table PORT")
    return int(speed) * 10**6


def _one(what: str, names: Iterable[str], where: str) -> str | None:
    """The one name there is; None for none."""
    different = sorted(set(names))
    if len(different) > 1:
        rule = f"has {len(different)} of them: the simulator knows one for all ports"
        raise ConfigError(f"{where}, {what}", ", ".join(different), rule, "give the plan of one rate and cable")
    return different[0] if different else None


def _referred(value: object, table: str) -> str:
    return str(plain_reference(value, table))


def _rows(tree: Mapping[str, Any], table: str) -> dict[str, Row]:
    rows = tree.get(table)
    return {key: row for key, row in rows.items() if isinstance(row, Mapping)} if isinstance(rows, Mapping) else {}


def _number(where: str, row: Row, key: str, usual: int | None = None) -> int:
    if key not in row and usual is not None:
        return usual
    text = str(row.get(key, ""))
    if not re.fullmatch(r"-?\d{1,15}", text, re.ASCII):
        raise ConfigError(f"{where}, {key}", text or None, "is no whole number", "give it as SONiC has it")
    return int(text)
