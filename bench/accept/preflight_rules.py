"""The preflight's facts judged: faults by themselves, differences from what most hosts have, and the cluster file.

The texts of nvidia-smi and of the kernel go through the parsers of `netlayer accept judge`. Left out: gathering facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.accept.evidence.kernel import parse_text as parse_kernel
from bench.accept.evidence.log import Log, Text
from bench.accept.evidence.recognise import parse
from bench.accept.peers import judge_traits
from bench.accept.trial import Trial
from netlayer.config import ClusterConfig
from netlayer.errors import ConfigError
from netlayer.units import format_rate
from netlayer.verdict import Finding

PHASE = "preflight"
_RATE = re.compile(r"([\d.]{1,12}) ?Gb/sec")


def judge_hosts(looked: Mapping[str, Any], cluster: ClusterConfig | None, trial: Trial) -> list[Finding]:
    """Findings on every host that has ranks left; one that said nothing is a finding too. Whoever failed is accused."""
    found = [replace(finding, file=PHASE, line=0) for finding in _findings(looked, cluster, trial)]
    for finding in found:
        hosts = [host for host in looked if finding.subject == host or finding.subject.startswith(f"{host}: ")]
        trial.flag(PHASE, "part", trial.ranks_of(hosts or [finding.subject]), finding, label=finding.subject)
    return found


def _findings(looked: Mapping[str, Any], cluster: ClusterConfig | None, trial: Trial) -> list[Finding]:
    hosts = {trial.members[rank].host for rank in trial.alive}
    found = [_silent(host) for host in sorted(hosts - set(looked))]
    logs: dict[str, Log] = {}
    host_of: dict[str, str] = {}
    for host, facts in looked.items():
        before = len(found)
        logs[host] = Log("preflight", traits=_traits(host, facts))
        found += _of_texts(host, facts["texts"], logs)
        host_of |= dict.fromkeys(logs.keys() - host_of.keys(), host)
        for nic in facts["nics"]:
            found += _of_nic(host, nic, cluster)
        found += _of_cluster(host, facts, cluster)
        if not any(finding.verdict in ("WARN", "FAIL") for finding in found[before:]):
            words = f"{len(facts['traits'])} facts read, {len(facts['nics'])} NIC ports"
            found.append(Finding("PASS", host, "preflight", words, "no fault reported", "", PHASE))
        if facts["unread"]:
            reasons = sorted(set(facts["unread"].values()))
            found.append(Finding(None, host, "not read", ", ".join(facts["unread"]), "; ".join(reasons), "", PHASE))
    return found + [_placed(finding, host_of[finding.file]) for finding in judge_traits(logs)]


def _placed(finding: Finding, host: str) -> Finding:
    """A difference with its host in front, where it is about a part of it."""
    return finding if finding.subject == host else replace(finding, subject=f"{host}: {finding.subject}")


def _traits(host: str, facts: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    found = {(name, host): value for name, value in facts["traits"].items()}
    for nic in facts["nics"]:
        for key in ("firmware", "board", "rate", "layer"):
            if nic[key]:
                found[f"NIC {key}", f"{nic['name']} port {nic['port']}"] = nic[key]
    return found


def _of_texts(host: str, texts: Mapping[str, str], logs: dict[str, Log]) -> Iterator[Finding]:
    """What the parsers of logs say of the tools' output."""
    for name, content in texts.items():
        text = Text(f"{host} {name}", content)
        try:
            # What dmesg prints is the kernel's log, though the lines may have no times, or none be from the driver.
            log = parse_kernel(text) if name == "dmesg" else parse(text)
        except ConfigError as exc:
            step = f"run {name} on {host} by hand"
            yield Finding("WARN", host, name, "cannot be read", str(exc), step, PHASE)
            continue
        logs[f"{host} {name}"] = Log(log.kind, traits=log.traits)
        for finding in log.findings:
            whole = finding.subject == text.stem
            yield replace(finding, subject=host if whole else f"{host}: {finding.subject}")


def _of_nic(host: str, nic: Mapping[str, Any], cluster: ClusterConfig | None) -> Iterator[Finding]:
    who = f"{host}: {nic['name']} port {nic['port']}"
    if "ACTIVE" not in nic["state"]:
        step = f"look at cable and switch port of {who}"
        yield Finding("FAIL", who, "NIC state", nic["state"] or "unknown", "ACTIVE", step, PHASE)
    for key, words in (("width", "PCIe width"), ("speed", "PCIe speed")):
        if nic[key] and nic[f"max_{key}"] and nic[key] != nic[f"max_{key}"]:
            step = f"reseat {who}, then read lspci -vv (LnkSta) of every bridge above it"
            yield Finding("FAIL", who, words, nic[key], f"{nic[f'max_{key}']}, its maximum", step, PHASE)
    for name, count in nic["counters"].items():
        if count not in ("", "0"):
            step = f"clean or swap the cable of {who}; watch whether {name} still rises"
            yield Finding("WARN", who, f"NIC {name}", count, "0", step, PHASE)
    rate = _RATE.search(nic["rate"])
    if cluster is not None and rate and float(rate[1]) * 1e9 < 0.99 * cluster.nic_bps:
        wanted = f"{format_rate(cluster.nic_bps)}, cluster.nic_bps"
        yield Finding("FAIL", who, "NIC rate", nic["rate"], wanted, f"look at cable and switch port of {who}", PHASE)


def _of_cluster(host: str, facts: Mapping[str, Any], cluster: ClusterConfig | None) -> Iterator[Finding]:
    """Numbers of parts, where the cluster file says them and the host can be read."""
    if cluster is None:
        return
    for what, found, wanted in (
        ("NICs", len({nic["name"] for nic in facts["nics"]}), cluster.nics_per_server),
        ("GPUs", facts["texts"].get("nvidia-smi -q", "").count("\nGPU "), cluster.gpus_per_server),
    ):
        if found == 0:
            words = f"cluster file: {wanted}"
            yield Finding(None, host, f"number of {what}", "none readable", words, "", PHASE)
        elif found != wanted:
            step = f"see which of them {host} lacks, or correct the cluster file"
            yield Finding("FAIL", host, f"number of {what}", str(found), f"{wanted}, cluster file", step, PHASE)


def _silent(host: str) -> Finding:
    return Finding("WARN", host, "preflight", "no answer", "facts", f"log in to {host}: a tool may hang there", PHASE)
