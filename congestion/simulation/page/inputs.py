"""Case that `netlayer simulate` runs, from its options: scenario or files, their losses, and where it stops."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from congestion.scenarios.catalogue import Case, build_scenario, case_of_cm, case_of_flows
from congestion.simulation.files import MOST_BYTES
from congestion.simulation.settings import Settings
from netlayer.errors import ConfigError
from netlayer.units import parse_size
from topology.importers import link_losses, read_one


def read_case(
    scenario: str | None,
    topo: Path | None,
    flow_file: Path | None,
    cm_file: Path | None,
    fabric: str | None,
    config: Path | None,
    overrides: Sequence[str],
    seed: int,
    flow_bytes: str | None,
    more_bytes: int,
) -> Case:
    """Read the case: a scenario or a file's flows, on a named fabric or a file's.

    Args:
        flow_bytes: size of a file's flows in place of their own.
        more_bytes: that a file's flows send beyond their size.

    Raises:
        ConfigError: options contradict each other, or what they name cannot be used.
    """
    sources = {"SCENARIO": scenario, "--flows": flow_file, "--cm": cm_file}
    *others, first = [name for name, value in sources.items() if value is not None] or [""]
    if not first:
        remedy = "name a scenario of --list, or give --topo and --flows, or --cm"
        raise ConfigError("SCENARIO", None, "is missing, and so are --flows and --cm", remedy)
    if others:
        rule = f"says what flows there are, and so does {others[0]} = {sources[others[0]]}"
        raise ConfigError(first, sources[first], rule, "omit one of them")
    if flow_bytes and scenario:
        raise ConfigError("--flow-bytes", flow_bytes, "has no effect on a scenario", "set scenario.num_bytes")
    if topo and fabric:
        raise ConfigError("--fabric", fabric, "has no effect where --topo gives the fabric", "omit one")
    if config and not scenario:
        raise ConfigError("--config", config, "has no effect on flows of a file", "omit it")
    fabric_text = read_one(topo, "--topo") if topo else fabric or ""
    sizes = {"num_bytes": _size(flow_bytes) if flow_bytes else 0, "more_bytes": more_bytes}
    if scenario:
        return build_scenario(scenario, overrides, seed, fabric=fabric_text, config=config)
    if cm_file:
        return case_of_cm(cm_file, overrides, fabric=fabric_text, **sizes)
    if not fabric_text:
        raise ConfigError("--topo", None, "is missing", "give the fabric of --flows, or --fabric NAME")
    return case_of_flows(Path(str(flow_file)), overrides, fabric=fabric_text, **sizes)


def with_losses(settings: Settings, topo: Path | None, case: Case) -> tuple[Settings, list[str]]:
    """The settings with the losses of the fabric's file, where they have none of their own; and what is to be said.

    That is where losses came from, and that flows name classes which do not exist.

    Raises:
        ConfigError: a loss cannot be.
    """
    losses = link_losses(topo, case.fabric, "--topo") if topo else {}
    notes = []
    if losses:
        notes.append(f"links that lose packets by --topo: {len(losses)}; congestion.loss_rates.A,B says otherwise")
        settings = settings.model_copy(update={"loss_rates": {**losses, **settings.loss_rates}})
    classes = sorted(set(case.flows.pg.tolist()))
    if len(classes) > 1 and not settings.classes:
        named = ", ".join(map(str, classes))
        notes.append(f"flows are of classes {named}, without effect: set congestion.classes.N.weight for each")
    return settings, notes


def ended_of(text: str | None, num_flows: int) -> int:
    """Return the number of flows that `--until-flows` means; 0 for all.

    Raises:
        ConfigError: it is no number up to `num_flows`, nor a share of them.
    """
    if text is None:
        return 0
    share = re.fullmatch(r"(\d{1,3}(\.\d{1,9})?)%", text, re.ASCII)
    if share:
        many = math.ceil(Decimal(share[1]) * num_flows / 100)
    else:
        many = int(text) if re.fullmatch(r"\d{1,12}", text, re.ASCII) else 0
    if not 1 <= many <= num_flows:
        rule = f"is neither a number of 1..{num_flows} flows nor a share of them"
        raise ConfigError("--until-flows", text, rule, "give such as 1, or 95%")
    return many


def _size(text: str) -> int:
    try:
        num_bytes = parse_size(text)
    except ValueError as exc:
        raise ConfigError("--flow-bytes", text, str(exc), "give a size such as 10MB") from exc
    if not 0 < num_bytes <= MOST_BYTES:
        raise ConfigError("--flow-bytes", text, f"is not within 1..{MOST_BYTES}", "give a size such as 10MB")
    return num_bytes
