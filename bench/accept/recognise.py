"""Which tool wrote a file, told by its content alone: the name says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.accept import (
    logs_dcgmi,
    logs_kernel,
    logs_nccl_tests,
    logs_nvbandwidth,
    logs_nvidia_smi,
    logs_nvlink,
    logs_perftest,
)
from bench.accept.log import Log, Text

_JSON: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Text, Mapping[str, Any]], Log]], ...] = (
    (logs_nccl_tests.is_json, logs_nccl_tests.parse_json),
    (logs_dcgmi.is_json, logs_dcgmi.parse_json),
    (logs_nvbandwidth.is_json, logs_nvbandwidth.parse_json),
)
_TEXT: tuple[tuple[Callable[[str], bool], Callable[[Text], Log]], ...] = (
    (logs_nvidia_smi.is_text, logs_nvidia_smi.parse_text),
    (logs_nccl_tests.is_text, logs_nccl_tests.parse_text),
    (logs_perftest.is_text, logs_perftest.parse_text),
    (logs_nvbandwidth.is_text, logs_nvbandwidth.parse_text),
    (logs_nvlink.is_text, logs_nvlink.parse_text),
    (logs_kernel.is_text, logs_kernel.parse_text),
)
KNOWN = (
    "nccl-tests (text, -J), perftest, dcgmi diag -j, nvbandwidth (text, -j), nvidia-smi -q, nvidia-smi nvlink -s, "
    "the kernel's log"
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
    if "<nvidia_smi_log>" in content:
        raise text.damaged(0, "is nvidia-smi's XML", "give the text of nvidia-smi -q, without -x")
    raise text.damaged(0, "is of no known form", f"give a log of {KNOWN}")
