"""Which tool wrote a file, told by its content alone: the name says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.accept.evidence import (
    dcgmi,
    fabricmanager,
    foreign,
    infiniband,
    kernel,
    nccl_inspector,
    nccl_tests,
    nvbandwidth,
    nvidia_smi,
    nvidia_smi_table,
    nvlink,
    perftest,
    topo,
)
from bench.accept.evidence.log import Log, Text

_JSON: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Text, Mapping[str, Any]], Log]], ...] = (
    (nccl_tests.is_json, nccl_tests.parse_json),
    (dcgmi.is_json, dcgmi.parse_json),
    (nvbandwidth.is_json, nvbandwidth.parse_json),
    (kernel.is_json, kernel.parse_json),
    (nccl_inspector.is_json, nccl_inspector.parse_json),
)
_TEXT: tuple[tuple[Callable[[str], bool], Callable[[Text], Log]], ...] = (
    (nvidia_smi.is_xml, nvidia_smi.parse_xml),
    (nvidia_smi.is_text, nvidia_smi.parse_text),
    (nccl_tests.is_text, nccl_tests.parse_text),
    (perftest.is_text, perftest.parse_text),
    (nvbandwidth.is_text, nvbandwidth.parse_text),
    (nvidia_smi_table.is_text, nvidia_smi_table.parse_text),
    (nvlink.is_text, nvlink.parse_text),
    (topo.is_text, topo.parse_text),
    (dcgmi.is_text, dcgmi.parse_text),
    (infiniband.is_text, infiniband.parse_text),
    (fabricmanager.is_text, fabricmanager.parse_text),
    (kernel.is_text, kernel.parse_text),
    (nvidia_smi_table.is_error, nvidia_smi_table.parse_text),
    (foreign.is_text, foreign.parse_text),
)
KNOWN = (
    "nccl-tests (text, -J), perftest, dcgmi diag and health (text, -j), nvbandwidth (text, -j), nvidia-smi (table, -q, "
    "-x, topo -m, nvlink -s, -e), ibstat, ibstatus, ibv_devinfo, rdma link, fabricmanager.log, NCCL Inspector, the "
    "kernel's log"
)
# The names that the JSON of a known tool holds; a tool may print warnings above its JSON.
_JSON_MARKS = ('"nccl_version"', '"DCGM Diagnostic"', '"DCGM GPU Diagnostic"', '"nvbandwidth"')


def parse(text: Text) -> Log:
    """What the file says, by the first parser that knows its form.

    Raises:
        ConfigError: no parser knows it, or it is damaged.
    """
    content = text.content
    if content.lstrip().startswith("{") or any(mark in content for mark in _JSON_MARKS):
        tree = text.tree()
        for is_json, parse_json in _JSON:
            if is_json(tree):
                return parse_json(text, tree)
    else:
        for is_text, parse_text in _TEXT:
            if is_text(content):
                return parse_text(text)
    raise text.damaged(0, "is of no known form", f"give a log of {KNOWN}")


def parse_all(text: Text) -> tuple[Log, ...]:
    """Return one `Log` for each run that the file holds.

    Raises:
        ConfigError: no parser knows the file, or it is damaged.
    """
    return (parse(text),)
