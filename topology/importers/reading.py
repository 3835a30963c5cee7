"""One door to all formats: which format files have, and the fabric in them.

A format is recognised by contents, never by a file's name. Not covered: mixing formats in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from netlayer.errors import ConfigError
from topology.fabric.export import read_graphml
from topology.fabric.graph import Graph
from topology.importers.cable_table import is_cable_table, read_cable_table
from topology.importers.files import clean, parse_json, read_text, show
from topology.importers.hpcc import hpcc_losses, read_hpcc
from topology.importers.htsim import read_htsim
from topology.importers.lldp import read_lldp
from topology.importers.sonic import read_sonic

Format = Literal["sonic", "lldp", "hpcc", "htsim", "graphml", "cables"]
FORMATS: tuple[Format, ...] = get_args(Format)
_UNKNOWN = "has no format that is known"
_SONIC_TABLES = {"DEVICE_METADATA", "DEVICE_NEIGHBOR", "PORT"}


def read_fabric(
    paths: Sequence[Path],
    file_format: Format | None = None,
    *,
    default_bps: float = 0.0,
    skip_dangling: bool = False,
    parallel: bool = False,
    hosts: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Graph:
    """The fabric that files describe.

    Args:
        paths: one file a device (sonic, lldp; a folder stands for its *.json), or one file (the others).
        file_format: recognised by the first file's contents where None.
        default_bps: lldp, sonic, cables: rate of a link whose rate no file gives; 0 for none.
        skip_dangling: lldp, sonic: omit links that their other end does not list, with a warning.
        parallel: hpcc: a repeated pair is a parallel link, not a mistake.
        hosts: lldp, sonic, cables: patterns of device names that are hosts whatever they announce.
        exclude: lldp, sonic: patterns of device names to omit, such as management switches.
        keep: lldp, sonic: patterns of device names that are no management switches, whatever they look like.

    Raises:
        ConfigError: no file, a damaged one, or a fabric that cannot be; one line that names the place.
    """
    files = _files(paths)
    kind = file_format or detect(files[0])
    if kind == "sonic":
        return read_sonic(
            files, default_bps=default_bps, skip_dangling=skip_dangling, hosts=hosts, exclude=exclude, keep=keep
        )
    if kind == "lldp":
        return read_lldp(
            files, default_bps=default_bps, skip_dangling=skip_dangling, hosts=hosts, exclude=exclude, keep=keep
        )
    without_effect = {"--exclude": exclude, "--keep": keep} | ({} if kind == "cables" else {"--host-names": hosts})
    unused = next((option for option, patterns in without_effect.items() if patterns), None)
    if unused:
        raise ConfigError(unused, None, f"has no effect on {kind}: its file has the fabric alone", "omit it")
    if kind == "cables":
        if len(files) > 1:
            raise ConfigError("FILES", f"{len(files)} files", "cables is one file a fabric", "give one")
        return read_cable_table(files[0], default_bps=default_bps, hosts=hosts)
    if len(files) > 1:
        raise ConfigError("FILES", f"{len(files)} files", f"{kind} is one file a fabric", "give one")
    if kind == "hpcc":
        return read_hpcc(files[0], parallel=parallel)
    return read_htsim(files[0]) if kind == "htsim" else _read_graphml(files[0])


def read_one(path: Path, option: str) -> Graph:
    """The fabric in the file that a command's `option` names, with nothing more to say about it.

    Raises:
        ConfigError: as `read_fabric`; it names the option, and `topology import` where an option of that would help.
    """
    with _of_option(path, option):
        return read_fabric([path])


def link_losses(path: Path, graph: Graph, option: str) -> dict[str, float]:
    """Shares of packets that links lose, by their ends `A,B`; only HPCC's topo.txt has them.

    Raises:
        ConfigError: a share cannot be.
    """
    with _of_option(path, option):
        return hpcc_losses(path, graph) if path.is_file() and detect(path) == "hpcc" else {}


@contextmanager
def _of_option(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as exc:
        remedy = exc.remedy
        if exc.rule == _UNKNOWN:
            remedy = "give HPCC's topo.txt, htsim's .topo, GraphML, or the JSON of SONiC or lldpcli"
        elif "--" in remedy:
            remedy = f"{remedy}, to `netlayer topology import`, and give the fabric.graphml that it writes"
        if exc.field in ("FILES", "fabric"):
            raise ConfigError(option, exc.value, exc.rule, remedy) from exc
        raise ConfigError(option, show(path), f"{exc.field} {exc.value} {exc.rule}", remedy) from exc


def detect(path: Path) -> Format:
    """Return the format of a file, by its contents.

    Raises:
        ConfigError: it has none of ours.
    """
    text = read_text(path)
    start = text.lstrip()[:1]
    if start in ("{", "["):
        tree = parse_json(text, path)
        if "lldp" in tree:
            return "lldp"
        if _SONIC_TABLES & tree.keys():
            return "sonic"
    elif start == "<":
        return "graphml"
    else:
        fields = next((line.split() for line in text.splitlines() if line.strip() and line.strip()[0] != "#"), [])
        if is_cable_table(text.lstrip().partition("\n")[0]):
            return "cables"
        if fields and fields[0].lower() in ("nodes", "tiers", "podsize"):
            return "htsim"
        numbers = [word.isascii() and word.isdigit() for word in fields]
        if numbers in ([True] * 3, [True] * 5 + [False]):  # HPCC's header, SimAI's
            return "hpcc"
    raise ConfigError("FILES", show(path), _UNKNOWN, f"pass --format {' | '.join(FORMATS)}")


def _read_graphml(path: Path) -> Graph:
    graph = read_graphml(path)
    for name in graph.names:
        clean(name, "device name", path)
    for port in {*graph.a_port, *graph.b_port} - {""}:
        clean(port, "port", path)
    return graph


def _files(paths: Sequence[Path]) -> list[Path]:
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise ConfigError("FILES", " ".join(show(path) for path in paths), "holds no *.json", "give the files")
    return files
