"""Rules of SONiC for the tables that a plan writes: forms, ranges, and that what is referred to is there.

Written from the models of sonic-net/sonic-buildimage, src/sonic-yang-models (sonic-wred-profile, -queue, -scheduler,
-port-qos-map, -dscp-tc-map, -tc-queue-map, -tc-priority-group-map, -pfc-priority-queue-map,
-pfc-priority-priority-group-map, -buffer-profile, -buffer-pg, -buffer-queue, -cable-length, -pfcwd, -hash), which no
package index has. Not covered: every table and field that a plan does not write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from netlayer.errors import ConfigError

Known = Mapping[str, Any]
Check = Callable[[Any, Known], bool]
_NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9_]{0,31}")
_UINT64 = 2**64 - 1
_HASH_FIELDS = {
    "IN_PORT", "DST_MAC", "SRC_MAC", "ETHERTYPE", "VLAN_ID", "IP_PROTOCOL", "DST_IP", "SRC_IP", "L4_DST_PORT",
    "L4_SRC_PORT", "INNER_DST_MAC", "INNER_SRC_MAC", "INNER_ETHERTYPE", "INNER_IP_PROTOCOL", "INNER_DST_IP",
    "INNER_SRC_IP", "INNER_L4_DST_PORT", "INNER_L4_SRC_PORT", "IPV6_FLOW_LABEL", "RDMA_BTH_OPCODE", "RDMA_BTH_DEST_QP",
}  # fmt: skip
_HASH_ALGORITHMS = {"CRC", "XOR", "RANDOM", "CRC_32LO", "CRC_32HI", "CRC_CCITT", "CRC_XOR"}
_ECN = {f"ecn_{word}" for word in ["none", "green", "yellow", "red", "green_yellow", "green_red", "yellow_red", "all"]}


def check_tables(tables: Mapping[str, Mapping[str, Any]], known: Known | None = None) -> None:
    """Refuse what SONiC would.

    Args:
        tables: those to check.
        known: where a reference may point to as well; with a table PORT or BUFFER_POOL in it, those are held to too.

    Raises:
        ConfigError: an unknown table, a row or field that is out of form, or a reference to nothing.
    """
    everything: dict[str, Any] = {**(known or {})}
    for table, rows in tables.items():
        base = everything.get(table)
        everything[table] = {**base, **rows} if isinstance(base, Mapping) else rows
    for table, rows in tables.items():
        form = _TABLES.get(table)
        if form is None:
            raise ConfigError(table, None, "is no table that a plan writes", f"known: {', '.join(_TABLES)}")
        key_fits, fields = form
        for key, row in rows.items():
            where = f"{table}|{key}"
            if not key_fits(key, everything):
                raise ConfigError(where, None, "has a key that SONiC does not take", "see sonic-yang-models")
            if not isinstance(row, Mapping):
                raise ConfigError(where, row, "must be a table of fields", "see sonic-yang-models")
            _check_row(where, row, fields, everything)


def _check_row(where: str, row: Mapping[str, Any], fields: Mapping[str, Check], known: Known) -> None:
    for name, value in row.items():
        check = next((one for pattern, one in fields.items() if re.fullmatch(pattern, name)), None)
        if check is None:
            raise ConfigError(f"{where}.{name}", value, "is no field of that table", "see sonic-yang-models")
        if not check(value, known):
            raise ConfigError(f"{where}.{name}", value, "is not what SONiC takes", "see sonic-yang-models")
    for low, high in ((f"{one}_min_threshold", f"{one}_max_threshold") for one in ("green", "yellow", "red")):
        if low in row and high in row and int(row[high]) < int(row[low]):
            raise ConfigError(f"{where}.{high}", row[high], f"is below {low} = {row[low]}", "raise it")


def _number(low: int, high: int) -> Check:
    return lambda value, _: (
        isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value) is not None and (low <= int(value) <= high)
    )


def _one_of(choices: set[str]) -> Check:
    return lambda value, _: value in choices


def _matching(pattern: str) -> Check:
    return lambda value, _: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _in(table: str) -> Check:
    """A row of another table."""
    return lambda value, known: value in known.get(table, {})


def _are_hash_fields(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(one in _HASH_FIELDS for one in value)


def plain_reference(value: Any, table: str) -> Any:
    """`x` of `[BUFFER_POOL|x]`, as releases before 202111 refer to it."""
    text = str(value)
    return text[len(table) + 2 : -1] if text.startswith(f"[{table}|") and text.endswith("]") else value


def _pool(value: Any, known: Known) -> bool:
    value = plain_reference(value, "BUFFER_POOL")
    return value in known["BUFFER_POOL"] if "BUFFER_POOL" in known else _NAME.fullmatch(str(value)) is not None


def _profile(value: Any, known: Known) -> bool:
    return plain_reference(value, "BUFFER_PROFILE") in known.get("BUFFER_PROFILE", {})


def _name(key: str, _: Known) -> bool:
    return _NAME.fullmatch(key) is not None


def _any_name(key: str, _: Known) -> bool:
    return re.fullmatch(r"[\w.-]+", key, re.ASCII) is not None


def _port(key: str, known: Known) -> bool:
    return key in known["PORT"] if "PORT" in known else re.fullmatch(r"Ethernet\d+", key) is not None


def _port_and(pattern: str) -> Callable[[str, Known], bool]:
    def fits(key: str, known: Known) -> bool:
        port, _, rest = key.partition("|")
        return _port(port, known) and re.fullmatch(pattern, rest) is not None

    return fits


def _port_or(word: str) -> Callable[[str, Known], bool]:
    return lambda key, known: key == word or _port(key, known)


_CLASS, _EIGHT = _number(0, 15), _matching("[0-7]")
_BYTES, _PERCENT, _TRUTH = _number(0, _UINT64), _number(0, 100), _one_of({"true", "false"})
_PRIORITIES = _matching(r"([0-7](,[0-7])*)?")
# By table: what a key may be, and by field (a pattern) what a value may be.
_TABLES: dict[str, tuple[Callable[[str, Known], bool], dict[str, Check]]] = {
    "DSCP_TO_TC_MAP": (_name, {r"6[0-3]|[1-5]?\d": _CLASS}),
    "TC_TO_QUEUE_MAP": (_name, {r"1[0-5]|\d": _EIGHT}),
    "TC_TO_PRIORITY_GROUP_MAP": (_name, {r"1[0-5]|\d": _EIGHT}),
    "MAP_PFC_PRIORITY_TO_QUEUE": (_name, {"[0-7]": _EIGHT}),
    "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP": (_name, {"[0-7]": _EIGHT}),
    "SWITCH_HASH": (
        lambda key, _: key == "GLOBAL",
        {
            "(ecmp|lag)_hash": lambda value, _: _are_hash_fields(value),
            "(ecmp|lag)_hash_algorithm": _one_of(_HASH_ALGORITHMS),
        },
    ),
    "SCHEDULER": (
        _any_name,
        {"type": _one_of({"DWRR", "WRR", "STRICT"}), "weight": _number(1, 100), "priority": _number(0, 9)},
    ),
    "WRED_PROFILE": (
        _name,
        {
            "ecn": _one_of(_ECN),
            "wred_(green|yellow|red)_enable": _TRUTH,
            "(green|yellow|red)_(min|max)_threshold": _BYTES,
            "(green|yellow|red)_drop_probability": _PERCENT,
        },
    ),
    "QUEUE": (
        _port_and(r"\d{1,2}(-\d{1,2})?"),
        {"scheduler": _in("SCHEDULER"), "wred_profile": _in("WRED_PROFILE")},
    ),
    "PORT_QOS_MAP": (
        _port_or("global"),
        {
            "dscp_to_tc_map": _in("DSCP_TO_TC_MAP"),
            "tc_to_queue_map": _in("TC_TO_QUEUE_MAP"),
            "tc_to_pg_map": _in("TC_TO_PRIORITY_GROUP_MAP"),
            "pfc_to_queue_map": _in("MAP_PFC_PRIORITY_TO_QUEUE"),
            "pfc_to_pg_map": _in("PFC_PRIORITY_TO_PRIORITY_GROUP_MAP"),
            "tc_to_dscp_map": _in("TC_TO_DSCP_MAP"),
            "scheduler": _in("SCHEDULER"),
            "pfc_enable|pfcwd_sw_enable": _PRIORITIES,
        },
    ),
    "BUFFER_PROFILE": (
        _any_name,
        {
            "pool": _pool,
            "xon|xoff|size|xon_offset|static_th": _BYTES,
            "dynamic_th": _number(-8, 7),
            "headroom_type": _one_of({"static", "dynamic"}),
            "packet_discard_action": _one_of({"drop", "trim"}),
        },
    ),
    "BUFFER_PG": (
        _port_and("[0-7](-[0-7])?"),
        {"profile": lambda value, known: value == "NULL" or _profile(value, known)},
    ),
    "BUFFER_QUEUE": (
        _port_and(r"(1[0-5]|\d)(-(1[0-5]|\d))?"),
        {"profile": _profile},
    ),
    "CABLE_LENGTH": (_name, {r"[\w/-]+": _matching(r"\d+m")}),
    "PFC_WD": (
        _port_or("GLOBAL"),
        {
            "POLL_INTERVAL": _number(100, 1000),
            "action": _one_of({"drop", "forward", "alert"}),
            "detection_time": _number(100, 5000),
            "restoration_time": _number(100, 60_000),
            "pfc_stat_history": _one_of({"enable", "disable"}),
        },
    ),
}
