"""An inventory that `netlayer nic inventory --json` wrote, read back: of one host, or of the hosts of `--ssh`.

What stands in such a file goes into scripts, so a name that is none, or a word that inventories do not use, is refused.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from congestion.nic.hosts.inventory import MODELS, SURFACES, VENDORS, Device, Gid, is_name, is_pci
from netlayer.errors import ConfigError
from netlayer.printing import printable_line
from netlayer.remote.hosts import is_host

_REMEDY = "write it anew: netlayer nic inventory --hosts HOSTS --json FILE"
RELEASE = "is the same release of netlayer there?"
_WORDS = ("driver", "firmware", "link_layer", "state")


class NoInventory(ValueError):
    """An answer that is no inventory: of another release of ours, for example."""


def read_inventory(path: Path) -> dict[str, list[Device] | str]:
    """The devices of each host by its name; of one that gave none, what it said. One host alone is named by the file.

    Raises:
        ConfigError: the file is missing, or no such inventory.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError("--inventory", path, "there is no such file", _REMEDY) from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError("--inventory", path, f"cannot be read ({exc})", _REMEDY) from exc
    hosts = tree.get("hosts") if isinstance(tree, dict) else None
    one_host = hosts is None
    if one_host:
        hosts = {path.stem: {"result": tree}}
    if not isinstance(hosts, dict) or not hosts or not all(isinstance(one, dict) for one in hosts.values()):
        raise ConfigError("--inventory", path, "has no hosts", _REMEDY)
    devices: dict[str, list[Device] | str] = {}
    for host, row in hosts.items():
        try:
            if not is_host(host):
                raise ValueError("is no host's name")
            devices[host] = (
                printable_line(str(row.get("said") or "no answer"))
                if row.get("result") is None
                else devices_of(row["result"])
            )
        except NoInventory as exc:
            if one_host:
                raise ConfigError("--inventory", path, str(exc), _REMEDY) from exc
            devices[host] = f"its answer {exc}: {RELEASE}"
        except ValueError as exc:
            raise ConfigError("--inventory", path, f"host {host!r}: {exc}", _REMEDY) from exc
    return devices


def devices_of(result: Any) -> list[Device]:
    """The devices of one host, out of what the command printed as JSON.

    Raises:
        NoInventory: it is none.
        ValueError: it has something in it that no inventory has.
    """
    rows = result.get("devices") if isinstance(result, dict) else None
    if not isinstance(rows, list):
        raise NoInventory("has no devices")
    return [_device(row) for row in rows]


def _device(row: Any) -> Device:
    """Make a device of a row of JSON, which somebody else has written.

    Raises:
        NoInventory: its keys are others.
        ValueError: a value is none that an inventory can hold.
    """
    names = {field.name for field in fields(Device)}
    if not isinstance(row, dict) or set(row) != names:
        raise NoInventory("has a device whose keys are not those of an inventory")
    try:
        device = Device(
            **{
                **row,
                "gpus": tuple((str(address), str(level)) for address, level in row["gpus"]),
                "gids": tuple(Gid(**gid) for gid in row["gids"]),
                "surfaces": tuple(row["surfaces"]),
                "closed": tuple(row["closed"]),
            }
        )
        right = (
            is_name(device.name)
            and device.vendor in {*VENDORS.values(), "soft", "unknown"}
            and device.model in {"", *MODELS.values()}
            and (not device.netdev or is_name(device.netdev))
            and (not device.pci or is_pci(device.pci))
            and {*device.surfaces, *device.closed} <= SURFACES
            and type(device.rate_mbps) is int
            and all(_is_plain(getattr(device, word)) for word in _WORDS)
        )
    except (TypeError, ValueError) as exc:
        raise ValueError(f"has a device that is none ({printable_line(str(exc))})") from exc
    if not right:
        raise ValueError(f"has a device that is none: {str(device.name)[:64]!r}")
    return device


def _is_plain(value: object) -> bool:
    """Words that a terminal may be given as they are."""
    return isinstance(value, str) and value.isprintable()
