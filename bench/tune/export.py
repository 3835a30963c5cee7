"""Files of a plan for each consumer, in one folder; nothing on the machine is changed.

`profile.toml` the plan itself; `job.toml` the trainer's configuration; `nccl.env.sh` NCCL's variables; `nic.toml` the
NIC profile for `netlayer nic`; `fabric/` its scripts and switch files by `netlayer nic fabric`; `placement.csv` for the
launcher's host list; `tuner.csv` for NCCL's example tuner, where rows were measured.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from pathlib import Path
from typing import Any

import tomlkit

from bench.tune.nccl_tuner import read_rows, to_csv
from bench.tune.planner import Planned, communicators_of
from congestion.nic.commands.env import lines
from congestion.nic.profile.file import Profile
from netlayer.config.file import to_toml
from netlayer.config.tree import Config, build_config
from netlayer.errors import ConfigError

TUNER, ENVIRONMENT, NIC, JOB, PLACEMENT = "tuner.csv", "nccl.env.sh", "nic.toml", "job.toml", "placement.csv"


def write_export(planned: Planned, folder: Path, nic: str | None, switches: str | None, chip: str | None) -> list[str]:
    """Write the files into an empty folder; return a line on each.

    Args:
        nic: model of the hosts' NICs (`netlayer nic fabric --nic`); None: no scripts.
        switches: form of the switches' files; None: none.
        chip: of the switches, where the form needs it.

    Raises:
        ConfigError: a file cannot be written, or `nic fabric` refuses something.
    """
    config = planned.inputs.config
    tree = config.model_dump(exclude_unset=True)
    tree["job"] = planned.job.model_dump(exclude_unset=True)
    (folder / JOB).write_text(to_toml(build_config(tree)), encoding="utf-8")
    planned.profile.save(folder / "profile.toml")
    notes = ["profile.toml: the plan; netlayer tune explain PROFILE KEY", f"{JOB}: netlayer train --config {JOB}"]
    if planned.leaves_server:
        (folder / ENVIRONMENT).write_text(_environment(planned), encoding="utf-8")
        notes.append(f"{ENVIRONMENT}: . ./{ENVIRONMENT} before the ranks start")
        document = tomlkit.dumps(planned.nic.model_dump(mode="json", exclude_unset=True))
        (folder / NIC).write_text(document, encoding="utf-8")
        notes.append(f"{NIC}: netlayer nic plan --profile {NIC}, then nic apply --apply on each host")
    if planned.fabric is not None and "placement.strategy" in planned.settings:
        strategy: Any = planned.settings["placement.strategy"].value
        placement = planned.fabric.placement(strategy, planned.inputs.seed)
        placement.write_csv(folder / PLACEMENT, config.cluster.gpus_per_server)
        notes.append(f"{PLACEMENT}: rank,server for the launcher's host list")
    if planned.profile.tuner_rows:
        rows = read_rows("\n".join(planned.profile.tuner_rows) + "\n")
        source = planned.settings["NCCL_TUNER_CONFIG_FILE"].source
        (folder / TUNER).write_text(to_csv(rows, communicators_of(config), [source]), encoding="utf-8")
        notes.append(f"{TUNER}: NCCL_TUNER_CONFIG_FILE, with NCCL_TUNER_PLUGIN naming NCCL's example tuner")
    if nic and planned.leaves_server:
        _plan_fabric(folder / JOB, folder / NIC, nic, switches, chip, folder / "fabric")
        notes.append("fabric/: scripts of the NICs" + " and files of the switches" * bool(switches))
    return notes


def check_fabric_options(config: Config, profile: Profile, nic: str, switches: str | None, chip: str | None) -> None:
    """Plan the fabric with a NIC profile and write nothing, so that a long plan does not end in a refusal.

    Raises:
        ConfigError: nothing leaves the server.
        ClickException: `nic fabric` refuses something.
    """
    if config.cluster.servers == 1:
        raise ConfigError("--nic", nic, "has no effect where cluster.servers = 1, which sends nothing", "omit it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / JOB).write_text(to_toml(config), encoding="utf-8")
        (folder / NIC).write_text(tomlkit.dumps(profile.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        _plan_fabric(folder / JOB, folder / NIC, nic, switches, chip, None)


def _environment(planned: Planned) -> str:
    text = ["# NCCL's variables of a plan of netlayer tune; what is set already goes before them where NCCL reads it."]
    text += lines(planned.choices)
    for key in ("NCCL_MAX_CTAS",):
        setting = planned.settings.get(key)
        if setting is not None and setting.value != "unset":
            text += [f"# {setting.source}", f"export {key}={shlex.quote(str(setting.value))}"]
    return "\n".join(text) + "\n"


def _plan_fabric(
    cluster: Path, profile: Path, nic: str, switches: str | None, chip: str | None, out: Path | None
) -> None:
    """Run `netlayer nic fabric`; its table goes nowhere, its errors to the caller."""
    from congestion.nic.commands.fabric import fabric

    arguments = ["--cluster", str(cluster), "--profile", str(profile), "--nic", nic]
    arguments += ["--switches", switches] if switches else []
    arguments += ["--chip", chip] if chip else []
    arguments += ["--out", str(out)] if out else []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        fabric.main(arguments, prog_name="nic fabric", standalone_mode=False)
