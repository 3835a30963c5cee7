"""Export of a user's own results as an anonymous registry entry, printed for review.

Only allow-listed facts and figures are written: collective, device, ranks, hosts, NCCL, NVLS, graph, NICs, sizes and
bandwidths. Names of hosts and files, serial numbers, bus ids and addresses never are.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.accept.judge.expectations import Expectation, Facts, facts_of, load
from bench.accept.judge.logs import Judgement
from netlayer.errors import ConfigError, NetlayerError
from netlayer.units import format_size

_KEYS = ("device", "ranks", "hosts", "nvls", "nccl", "graph", "nics")
_LEAST_BYTES = 64 << 20
# Allowed characters of a device name; anything else may be part of a serial number or an address.
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9 ./_+()-]{1,59}")
_SERIAL = re.compile(r"\d{7,}|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}|\d{1,3}(?:\.\d{1,3}){3}|GPU-[0-9a-f]")
_NOT_GOOD = "publish only complete runs with correct data"


def publish(judgement: Judgement, user_facts: Facts, address: str = "", day: str = "") -> str:
    """Return the TOML file of one machine type.

    Args:
        judgement: judgement of the logs; all must be of one machine type and without faults.
        user_facts: facts that the user adds: `nvls`, `nics`.
        address: web address with the measurement's description.
        day: date, ISO 8601; empty: today.

    Raises:
        ConfigError: the logs have no figure that can be published, or are of several machine types.
        NetlayerError: a log has wrong data or a failed run.
    """
    if judgement.damaged:
        raise ConfigError("LOGS", None, f"cannot all be read: {judgement.damaged[0]}", "omit what is not a log")
    bad = [finding for run in judgement.runs for finding in run.log.findings if finding.verdict in ("FAIL", "WARN")]
    bad += [finding for finding in judgement.findings if finding.verdict == "FAIL"]
    if bad:
        raise NetlayerError(f"{bad[0].subject}: {bad[0].check}: {bad[0].figure}; {_NOT_GOOD}")
    machines: dict[tuple[tuple[str, Any], ...], dict[tuple[str, int], list[float]]]
    machines = defaultdict(lambda: defaultdict(list))
    for run in judgement.runs:
        for figure in run.log.figures:
            facts = facts_of(figure, user_facts)
            if _can_be_published(facts):
                keys = tuple((key, facts[key]) for key in _KEYS if key in facts)
                machines[keys][str(facts["collective"]), int(facts["bytes"])].append(figure.value)
    if not machines:
        rule = f"hold no bus bandwidth of {format_size(_LEAST_BYTES)} or more with collective, device, ranks and hosts"
        raise ConfigError("LOGS", None, rule, "give nccl-tests' own output, with its '# Rank' lines")
    if len(machines) > 1:
        one, other = (dict(keys) for keys in list(machines)[:2])
        different = ", ".join(
            f"{key} {one.get(key)} and {other.get(key)}" for key in _KEYS if one.get(key) != other.get(key)
        )
        raise ConfigError(
            "LOGS", None, f"are of {len(machines)} machine types ({different})", "publish each on its own"
        )
    [(keys, figures)] = machines.items()
    return "\n".join(
        _expectation_lines(
            dict(keys), figures, len(judgement.runs), address, day or datetime.now(UTC).date().isoformat()
        )
    )


def check(text: str, place: Path) -> tuple[Expectation, ...]:
    """Parse the text as a registry file, written to `place`, and return its entries.

    Raises:
        ConfigError: it is not a valid registry file.
    """
    place.write_text(text, encoding="utf-8")
    return load(place)


def _can_be_published(facts: Mapping[str, Any]) -> bool:
    device = facts.get("device")
    return (
        facts.get("quantity") == "bus_bw_gbs"
        and all(key in facts for key in ("collective", "device", "ranks", "hosts", "bytes"))
        and int(facts["bytes"]) >= _LEAST_BYTES
        and isinstance(device, str)
        and _DEVICE.fullmatch(device) is not None
        and _SERIAL.search(device) is None
    )


def _expectation_lines(
    keys: Mapping[str, Any], figures: Mapping[tuple[str, int], Sequence[float]], num_runs: int, address: str, day: str
) -> Iterator[str]:
    """Yield the lines of a TOML file of expected values: its keys, its source, and the lowest figure of each size."""
    per_host = keys["ranks"] // keys["hosts"]
    where = "one host" if keys["hosts"] == 1 else f"{keys['hosts']} hosts"
    nvls = "" if "nvls" not in keys else f", NVLS {'on' if keys['nvls'] else 'off'}"
    yield "machine = " + _text(f"{per_host} x {keys['device']} a host, {where}{nvls}")
    yield "conditions = " + _text("say here what else was so: algorithm, plug-in, driver, clocks")
    yield ""
    yield "[keys]"
    yield 'quantity = "bus_bw_gbs"'
    for key, value in keys.items():
        # The version's minor release is what matters: 22809 becomes the range [22800, 22900).
        toml_value = f"[{value // 100 * 100}, {value // 100 * 100 + 100}]" if key == "nccl" else _value(value)
        yield f"{key} = {toml_value}"
    yield ""
    yield "[source.published]"
    yield f"address = {_text(address)}"
    yield f"date = {day}"
    runs = f"{num_runs} run{'s' * (num_runs != 1)}"
    yield "text = " + _text(f"measured by its publisher in {runs}, the lowest of each size")
    for (collective, size), values in sorted(figures.items()):
        yield ""
        middle = statistics.median(values)
        yield f"# {len(values)} measurements: {min(values):.4g} to {max(values):.4g}, median {middle:.4g}"
        yield "[[expect]]"
        yield f"collective = {_text(collective)}"
        yield f"bytes = {size}"
        yield f"figure = {{ published = {min(values):.6g} }}"
    yield ""


def _value(value: object) -> str:
    return (
        ("true" if value else "false")
        if isinstance(value, bool)
        else _text(value)
        if isinstance(value, str)
        else str(value)
    )


def _text(value: str) -> str:
    """Format a TOML basic string, which has JSON's escapes."""
    return json.dumps(value, ensure_ascii=True)
