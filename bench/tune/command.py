"""`netlayer tune`: one profile of settings for a cluster and a job, with the reason and the gain of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bench.estimate.command import make_record
from netlayer.command import FiniteRange, RunOptions, run_options, run_options_without_config
from netlayer.errors import ConfigError, HardwareMissing

if TYPE_CHECKING:
    from bench.estimate.devices import Device
    from bench.tune.planner import Inputs, Planned
    from bench.tune.profile import Profile
    from congestion.nic.profile.file import Profile as NicProfile
    from netlayer.config.tree import Config
    from netlayer.progress import Stages

_PATH = click.Path(path_type=Path)
_PROFILES = ("lossless-dcqcn", "tuned-dcqcn")


@click.group()
def tune() -> None:
    """Plan the settings of NCCL, NICs, switches, trainer and checkpoints in one profile; change nothing."""


@tune.command()
@click.option(
    "--device",
    default="H100",
    show_default=True,
    metavar="NAME",
    help="A100, H100, H200, FILE.toml (docs/benchmarks.md), or none.",
)
@click.option("--nccl", help="Release of NCCL that will run [default: the one beside torch, else the newest known].")
@click.option(
    "--measured",
    "records",
    type=_PATH,
    multiple=True,
    metavar="RECORD",
    help="Record of a measurement: tune probe, bench.mfu, bench.overlap, bench.data_idle, bench.checkpoint_stall.",
)
@click.option(
    "--nic-profile",
    "nic_profiles",
    type=_PATH,
    multiple=True,
    help="NIC profile; repeatable, the first is what runs now [default: the examples' lossless and tuned DCQCN].",
)
@click.option("--simulate", is_flag=True, help="Set NIC profiles against each other, packet by packet.")
@click.option("--export", type=_PATH, metavar="DIR", help="Also write what each consumer takes into this new folder.")
@click.option("--nic", metavar="MODEL", help="With --export: NICs that hosts have, for scripts: ConnectX-7, ...")
@click.option("--switches", metavar="FORM", help="With --nic: also switch files: sonic, nvue, arista, cisco.")
@click.option("--chip", metavar="NAME", help="With --switches sonic: the switches' chip.")
@run_options
def plan(
    options: RunOptions,
    device: str,
    nccl: str | None,
    records: tuple[Path, ...],
    nic_profiles: tuple[Path, ...],
    simulate: bool,
    export: Path | None,
    nic: str | None,
    switches: str | None,
    chip: str | None,
) -> None:
    """Plan settings for --config's job: each value with what it rests on and the gain that is expected of it.

    A gain is measured (by --measured records of this card, shape and layout), simulated, or a formula's; where nothing
    carries a figure it is none, and the consumer's own value stays. The training's numerics are left alone. Nothing on
    the machine is changed: --export writes files. With --out the profile and its record go to a folder.

    \b
    Examples:
      netlayer tune plan --config examples/megascale-12288.toml --device A100
      netlayer tune plan --config examples/megascale-12288.toml --device A100 --simulate --export plan \\
          --nic ConnectX-6 --switches nvue
      netlayer tune plan --config examples/h200x8.toml --device H200 --measured probe.json --out runs/tune
      netlayer tune plan --config examples/laptop.toml --device none --measured probe.json --json -
    """
    from bench.tune.export import check_fabric_options
    from bench.tune.planner import make_plan
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    for option, value, needs in (("--nic", nic, export), ("--switches", switches, nic), ("--chip", chip, switches)):
        if value is not None and needs is None:
            other = {"--nic": "--export", "--switches": "--nic", "--chip": "--switches"}[option]
            raise ConfigError(option, value, f"has no effect without {other}", "give both, or omit it")
    if export is not None and export.exists() and any(export.iterdir() if export.is_dir() else [export]):
        raise ConfigError("--export", export, "holds files, which could be taken for this plan's", "give a new folder")
    config = options.load_config()
    config.check_world()
    with Stages() as stages:
        if nic is not None:
            first = next(iter(_load_profiles(nic_profiles).values()))
            check_fabric_options(config, first, nic, switches, chip)
        inputs = read_inputs(options, config, device, nccl, records, nic_profiles, simulate, stages)
        with stages.open("plan") as bar:
            planned = make_plan(inputs, bar)
    arguments: dict[str, Any] = {"device": device, "nccl": inputs.release, "measured": list(map(str, records))}
    arguments |= {"nic_profiles": list(inputs.nic_profiles), "simulate": simulate, "export": str(export or "")}
    record = make_record(
        options, "tune.plan", _rows(planned.profile), started, arguments, config.model_dump(mode="json")
    )
    keep_record(options, record, planned.profile)
    if export is not None:
        _export(planned, export, record, nic, switches, chip)
    if str(options.json_file) != "-":
        _print(planned.profile)


@tune.command()
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="[default: nccl where there are GPUs.]")
@click.option("--ranks", type=click.IntRange(2, 64), help="[default: all GPUs, or 2 on gloo.]")
@click.option(
    "--channels", default="4,16,32", show_default=True, metavar="N[,N...]", help="Of NCCL; more numbers take longer."
)
@click.option("--max-bytes", default="64MiB", show_default=True, help="Largest size, of the whole buffer.")
@click.option(
    "--seconds", default=240.0, show_default=True, type=FiniteRange(1, 3600), help="Begin nothing after so long."
)
@run_options_without_config
def probe(
    options: RunOptions,
    backend: Literal["gloo", "nccl"] | None,
    ranks: int | None,
    channels: str,
    max_bytes: str,
    seconds: float,
) -> None:
    """Measure this machine's collectives for tune plan: by size, and on GPUs by NCCL's algorithm and channels.

    Every byte is checked. The record goes to --out, or ./runs; give it to `tune plan --measured`.

    \b
    Examples:
      netlayer tune probe --backend gloo --max-bytes 4MiB --out runs/probe
      netlayer tune probe --seconds 120 --channels 8,24
    """
    import tempfile

    from bench.tune.probes import run_probe
    from netlayer.environ import list_gpus, usable_gpus
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import write_text
    from netlayer.units import parse_size

    number = ranks or (len(list_gpus()) if backend != "gloo" else 0) or 2
    if number < 2:
        raise ConfigError("--ranks", number, "is one GPU, which has nobody to exchange with", "give --backend gloo")
    usable = len(usable_gpus())
    chosen = backend or ("nccl" if usable else "gloo")
    if chosen == "nccl" and usable < number:
        why = f"{number} ranks want a GPU each, {usable} can be used"
        raise HardwareMissing(f"--backend = nccl: {why}; lower --ranks, or give --backend gloo")
    try:
        largest = parse_size(max_bytes)
    except ValueError as exc:
        raise ConfigError("--max-bytes", max_bytes, f"is no size ({exc})", "give one such as 64MiB") from exc
    if not 1024 <= largest <= 2**34:
        raise ConfigError("--max-bytes", max_bytes, "is not from 1KiB to 16GiB", "give one such as 64MiB")
    counts = _channels(channels)
    with open_output(options.out, "tune-probe") as out, Stages() as stages, tempfile.TemporaryDirectory() as logs:
        with stages.open("collectives") as bar:
            record = run_probe(
                backend=chosen,
                ranks=number,
                channels=counts,
                min_bytes=1024,
                max_bytes=largest,
                seconds=seconds,
                seed=options.seed,
                log_dir=Path(logs),
                on_progress=bar,
            )
        record.save(out.part / "records")
        for path in out.publish():
            click.echo(f"record: {path}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        _print_probe(record.rows, record.arguments["skipped"])


@tune.command()
@click.argument("first", type=_PATH)
@click.argument("second", type=_PATH)
@click.option("--json", "json_file", type=_PATH, help="Also write the differences here; - is stdout.")
def diff(first: Path, second: Path, json_file: Path | None) -> None:
    """Print the settings in which two profiles differ, and why.

    \b
    Example:
      netlayer tune diff runs/before/profile.toml runs/tune/profile.toml
    """
    import json

    from bench.tune.profile import diff as differences_of
    from bench.tune.profile import read_profile
    from netlayer.printing import print_table
    from netlayer.results import check_target, write_text

    check_target("--json", json_file)
    one, other = read_profile(first, "FIRST"), read_profile(second, "SECOND")
    differences = differences_of(one, other)
    if json_file:
        write_text(json_file, json.dumps([each.model_dump() for each in differences], indent=1) + "\n")
    if str(json_file) == "-":
        return
    made_for = [(f"{each.job} on {each.gpus:,} {each.device or 'ranks'}, NCCL {each.nccl}") for each in (one, other)]
    note = "" if made_for[0] == made_for[1] else f"made for {made_for[0]}; and for {made_for[1]}"
    lines = [[each.key, _value(each.first), _value(each.second), each.why] for each in differences]
    print_table(f"{len(lines)} settings differ", ["key", str(first), str(second), "why"], lines, note)


@tune.command()
@click.argument("profile", type=_PATH)
@click.argument("key")
def explain(profile: Path, key: str) -> None:
    """Tell of one KEY of a profile: value, default, evidence, source, what it rests on, expected gain.

    \b
    Example:
      netlayer tune explain runs/tune/profile.toml job.overlap.bucket_mib
    """
    from bench.tune.profile import read_profile

    setting = read_profile(profile).explain(key)
    click.echo(f"{key} = {_value(setting.value)}   (default: {_value(setting.default)}; read by: {setting.consumer})")
    click.echo(f"  evidence  {setting.evidence}: {setting.source}")
    click.echo(f"  gain      {setting.gain_text}")
    if setting.rests_on:
        click.echo(f"  rests on  {setting.rests_on}")


def read_inputs(
    options: RunOptions,
    config: Config,
    device: str,
    nccl: str | None,
    records: Sequence[Path],
    nic_profiles: Sequence[Path],
    simulate: bool,
    stages: Stages,
) -> Inputs:
    """Read what a plan is made from, and simulate the NIC profiles where that is wished."""
    from bench.tune.evidence import read_facts
    from bench.tune.planner import Inputs
    from netlayer.nccl.environment import NEWEST, installed_nccl, parse_release

    release = nccl or installed_nccl() or NEWEST
    parse_release("--nccl", release)
    profiles = _load_profiles(nic_profiles)
    facts = read_facts(records)
    trials = {}
    if simulate:
        from bench.tune.congestion_trial import SEEDS, run_trials

        if config.cluster.servers == 1:
            raise ConfigError("--simulate", config.cluster.name, "is one server, which sends nothing", "omit it")
        with stages.open("packets") as bar:
            trials = run_trials(config, profiles, range(options.seed, options.seed + SEEDS), bar)
    chosen, why = _device(config, device)
    return Inputs(config, chosen, release, profiles, facts, trials, why, seed=options.seed)


def _load_profiles(files: Sequence[Path]) -> dict[str, NicProfile]:
    """Read NIC profiles, by default those of the examples, by their names."""
    from congestion.nic.profile.file import load_profile
    from netlayer.commands.example_files import examples_folder

    paths = files or [examples_folder() / "profiles" / f"{name}.toml" for name in _PROFILES]
    profiles = {path.stem: load_profile(path) for path in paths}
    if len(profiles) < len(paths):
        raise ConfigError("--nic-profile", None, "names two files alike", "rename one of them")
    return profiles


def _device(config: Config, name: str) -> tuple[Device | None, str]:
    from bench.estimate.devices import device_of

    if name.lower() == "none":
        return None, "no step is estimated with --device none"
    device = device_of(name)
    if config.job.model.dtype != "bfloat16":
        rule = "is not what tensor cores are counted in here"
        raise ConfigError("job.model.dtype", config.job.model.dtype, rule, "set bfloat16, or give --device none")
    _check_fits(config, device)
    return device, ""


def _check_fits(config: Config, device: Device) -> None:
    """Refuse a job that no setting of memory makes fit, with the layout search's own words where none does."""
    from netlayer.workload.fit import check_room, settle
    from netlayer.workload.memory import RESERVED_BYTES, estimate, gib

    num_bytes = config.cluster.gpu_memory_bytes or device.memory_bytes
    settled, _ = settle(config.job, num_bytes)
    needed = estimate(settled)
    line = f"a rank needs {gib(needed.total)}, and {device.name} has {gib(num_bytes - RESERVED_BYTES)} to give"
    check_room(settled, line, num_bytes - RESERVED_BYTES)


def _rows(profile: Profile) -> list[dict[str, Any]]:
    """Return the settings as rows of a record."""
    return [
        {
            "key": key,
            **setting.model_dump(mode="json", exclude={"gain"}),
            **({f"gain_{name}": value for name, value in setting.gain.model_dump().items()} if setting.gain else {}),
        }
        for key, setting in profile.settings.items()
    ]


def keep_record(options: RunOptions, record: Any, profile: Profile | None = None) -> None:
    """Write a record to --out, with the profile if there is one, and to --json."""
    from netlayer.output import open_output
    from netlayer.results import write_text

    if options.out:
        with open_output(options.out, "tune") as out:
            if profile is not None:
                profile.save(out.part / "profile.toml")
            record.save(out.part / "records")
            for path in out.publish():
                click.echo(f"record: {path}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def _export(
    planned: Planned, folder: Path, record: Any, nic: str | None, switches: str | None, chip: str | None
) -> None:
    from bench.tune.export import write_export
    from netlayer.output import open_output

    with open_output(folder, "tune-plan") as out:
        lines = write_export(planned, out.part, nic, switches, chip)
        record.save(out.part / "records")
        out.publish()
    for line in lines:
        click.echo(f"{folder}/{line}", err=True)


def _print(profile: Profile) -> None:
    """Print the profile: settings that change first, area by area."""
    from bench.tune.profile import CANNOT_TELL
    from netlayer.printing import duration, print_table

    lines = [
        [
            key,
            _value(setting.value),
            _value(setting.default),
            setting.evidence,
            setting.gain.text if setting.gain else CANNOT_TELL if setting.is_changed else "",
        ]
        for key, setting in sorted(profile.settings.items(), key=lambda pair: not pair[1].is_changed)
    ]
    title = f"planned, nothing is changed: {profile.job} on {profile.gpus:,} {profile.device or 'ranks'}"
    note = "gain: over the default, all others as planned. tune explain PROFILE KEY tells why."
    if profile.gain is not None and profile.step_s is not None:
        whole = f"all that are estimated, together: {profile.gain.text}"
        note = f"step of {duration(profile.step_s)} with the defaults; {whole}. {note}"
    print_table(title, ["setting", "value", "default", "evidence", "expected gain"], lines, note)


def _print_probe(rows: Sequence[Any], skipped: dict[str, str]) -> None:
    from netlayer.printing import print_rows

    fastest: dict[tuple[str, int], Any] = {}
    for row in rows:
        key = row["collective"], row["size_bytes"]
        if key not in fastest or row["time_us"] < fastest[key]["time_us"]:
            fastest[key] = row
    columns = {
        "collective": "collective",
        "size_bytes": "size",
        "algorithm": "fastest",
        "protocol": "protocol",
        "channels": "channels",
        "time_us": "time",
    }
    note = f"skipped: {'; '.join(f'{label}: {why}' for label, why in skipped.items())}" if skipped else ""
    print_rows("measured: the fastest choice of each size", list(fastest.values()), columns, note)


def _channels(text: str) -> list[int]:
    from bench.tune.nccl_tuner import MOST_CHANNELS

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= number <= MOST_CHANNELS for number in numbers):
        rule = f"is not numbers from 1 to {MOST_CHANNELS} with commas between"
        raise ConfigError("--channels", text, rule, "give some such as 4,16,32")
    return numbers


def _value(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
