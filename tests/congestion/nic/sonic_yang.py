"""A plan's SONiC tables in the form that SONiC's own YANG models describe, and yanglint's judgement of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]
# Table by module: the list's name within a row, its key, its value, and what is a number there.
_MAPS: dict[str, tuple[str, str, str, Callable[[str], Any], Callable[[str], Any]]] = {
    "sonic-dscp-tc-map": ("DSCP_TO_TC_MAP", "dscp", "tc", str, int),
    "sonic-tc-queue-map": ("TC_TO_QUEUE_MAP", "tc", "qindex", int, str),
    "sonic-tc-priority-group-map": ("TC_TO_PRIORITY_GROUP_MAP", "tc", "pg", int, str),
    "sonic-pfc-priority-queue-map": ("MAP_PFC_PRIORITY_TO_QUEUE", "pfc_priority", "qindex", str, str),
    "sonic-pfc-priority-priority-group-map": (
        "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP", "pfc_priority", "pg", str, str,
    ),
    "sonic-cable-length": ("CABLE_LENGTH", "port", "length", str, str),
}  # fmt: skip
_ROWS = {
    "sonic-scheduler": ("SCHEDULER", ("name",)),
    "sonic-wred-profile": ("WRED_PROFILE", ("name",)),
    "sonic-queue": ("QUEUE", ("ifname", "qindex")),
    "sonic-port-qos-map": ("PORT_QOS_MAP", ("ifname",)),
    "sonic-buffer-profile": ("BUFFER_PROFILE", ("name",)),
    "sonic-buffer-pg": ("BUFFER_PG", ("port", "pg_num")),
    "sonic-pfcwd": ("PFC_WD", ("ifname",)),
}
_NUMBERS = {"weight", "dynamic_th", "POLL_INTERVAL", "detection_time", "restoration_time"}


def refusals(tables: Tables, models: Path, folder: Path) -> str:
    """What yanglint has against the tables; empty where it takes them."""
    tree = {f"{module}:{module}": body for module, body in _modules(tables).items()}
    file = folder / "config.json"
    file.write_text(json.dumps(tree))
    modules = [str(models / f"{name.partition(':')[0]}.yang") for name in tree]
    command = ["yanglint", "-p", str(models), *modules, str(models / "sonic-device_metadata.yang"), "-t", "config"]
    answer = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False, timeout=60)
    errors = [line for line in answer.stderr.splitlines() if "err :" in line or "[E]" in line]
    return "\n".join(errors) or ("" if answer.returncode == 0 else answer.stderr)


def _modules(tables: Tables) -> dict[str, Any]:
    ports = sorted(tables["PORT_QOS_MAP"])
    pool = {"name": "ingress_lossless_pool", "type": "ingress", "mode": "dynamic", "size": "100000000"}
    found: dict[str, Any] = {
        "sonic-port": {
            "PORT": {"PORT_LIST": [{"name": port, "lanes": "0,1", "speed": 400_000, "alias": port} for port in ports]}
        },
        "sonic-buffer-pool": {"BUFFER_POOL": {"BUFFER_POOL_LIST": [pool]}},
        "sonic-hash": {"SWITCH_HASH": dict(tables.get("SWITCH_HASH", {}))},
    }
    for module, (table, key, value, of_key, of_value) in _MAPS.items():
        rows = [
            {"name": name, table: [{key: of_key(one), value: of_value(other)} for one, other in row.items()]}
            for name, row in tables.get(table, {}).items()
        ]
        found[module] = {table: {f"{table}_LIST": rows}}
    for module, (table, keys) in _ROWS.items():
        rows = [
            {
                **dict(zip(keys, name.split("|"), strict=True)),
                **{field: _value(field, one) for field, one in row.items()},
            }
            for name, row in tables.get(table, {}).items()
        ]
        found[module] = {table: {f"{table}_LIST": rows}}
    return found


def _value(field: str, value: str) -> Any:
    if field in _NUMBERS:
        return int(value)
    return value == "true" if field.endswith("_enable") and field.startswith("wred") else value
