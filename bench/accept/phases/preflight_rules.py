"""Judgement of preflight facts: faults, differences from the majority of hosts, and from the cluster file.

Outputs of nvidia-smi and the kernel log go through the parsers of `netlayer accept judge`. `preflight` collects the
facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.accept.evidence.kernel import parse_text as parse_kernel
from bench.accept.evidence.log import Log, Text
from bench.accept.evidence.recognise import parse
from bench.accept.judge.peers import judge_traits
from bench.accept.phases.trial import Trial
from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from netlayer.units import format_rate
from netlayer.verdict import Finding

PHASE = "preflight"
_RATE = re.compile(r"([\d.]{1,12}) ?Gb/sec")


def judge_hosts(facts_by_host: Mapping[str, Any], cluster: ClusterConfig | None, trial: Trial) -> list[Finding]:
    """Return findings on every host with ranks alive, also for hosts without an answer; flag those that failed."""
    findings = [replace(finding, file=PHASE, line=0) for finding in _findings(facts_by_host, cluster, trial)]
    for finding in findings:
        hosts = [host for host in facts_by_host if finding.subject == host or finding.subject.startswith(f"{host}: ")]
        trial.flag(PHASE, "part", trial.ranks_of(hosts or [finding.subject]), finding, label=finding.subject)
    return findings


def _findings(facts_by_host: Mapping[str, Any], cluster: ClusterConfig | None, trial: Trial) -> list[Finding]:
    hosts = {trial.members[rank].host for rank in trial.alive}
    findings = [_no_answer(host) for host in sorted(hosts - set(facts_by_host))]
    logs: dict[str, Log] = {}
    host_of: dict[str, str] = {}
    for host, facts in facts_by_host.items():
        before = len(findings)
        logs[host] = Log("preflight", traits=_traits(host, facts))
        findings += _text_findings(host, facts["texts"], logs)
        host_of |= dict.fromkeys(logs.keys() - host_of.keys(), host)
        for nic in facts["nics"]:
            findings += _nic_findings(host, nic, cluster)
        findings += _cluster_findings(host, facts, cluster)
        if not any(finding.verdict in ("WARN", "FAIL") for finding in findings[before:]):
            figure = f"{len(facts['traits'])} facts read, {len(facts['nics'])} NIC ports"
            findings.append(Finding("PASS", host, "preflight", figure, "no fault reported", "", PHASE))
        if facts["unread"]:
            reasons = sorted(set(facts["unread"].values()))
            findings.append(Finding(None, host, "not read", ", ".join(facts["unread"]), "; ".join(reasons), "", PHASE))
    return findings + [_with_host(finding, host_of[finding.file]) for finding in judge_traits(logs)]


def _with_host(finding: Finding, host: str) -> Finding:
    """Return the finding with the host before its subject, if that is a part of the host."""
    return finding if finding.subject == host else replace(finding, subject=f"{host}: {finding.subject}")


def _traits(host: str, facts: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    traits = {(name, host): value for name, value in facts["traits"].items()}
    for nic in facts["nics"]:
        for key in ("firmware", "board", "rate", "layer"):
            if nic[key]:
                traits[f"NIC {key}", f"{nic['name']} port {nic['port']}"] = nic[key]
    return traits


def _text_findings(host: str, texts: Mapping[str, str], logs: dict[str, Log]) -> Iterator[Finding]:
    """Yield the findings of the log parsers on the tools' outputs."""
    for name, content in texts.items():
        text = Text(f"{host} {name}", content)
        try:
            # dmesg's output is a kernel log, even if its lines have no time stamps or none is of the driver.
            log = parse_kernel(text) if name == "dmesg" else parse(text)
        except ConfigError as exc:
            step = f"run {name} on {host} by hand"
            yield Finding("WARN", host, name, "cannot be read", str(exc), step, PHASE)
            continue
        logs[f"{host} {name}"] = Log(log.kind, traits=log.traits)
        for finding in log.findings:
            whole = finding.subject == text.stem
            yield replace(finding, subject=host if whole else f"{host}: {finding.subject}")


def _nic_findings(host: str, nic: Mapping[str, Any], cluster: ClusterConfig | None) -> Iterator[Finding]:
    subject = f"{host}: {nic['name']} port {nic['port']}"
    if "ACTIVE" not in nic["state"]:
        step = f"look at cable and switch port of {subject}"
        yield Finding("FAIL", subject, "NIC state", nic["state"] or "unknown", "ACTIVE", step, PHASE)
    for key, check in (("width", "PCIe width"), ("speed", "PCIe speed")):
        if nic[key] and nic[f"max_{key}"] and nic[key] != nic[f"max_{key}"]:
            step = f"reseat {subject}, then read lspci -vv (LnkSta) of every bridge above it"
            yield Finding("FAIL", subject, check, nic[key], f"{nic[f'max_{key}']}, its maximum", step, PHASE)
    for name, count in nic["counters"].items():
        if count not in ("", "0"):
            step = f"clean or swap the cable of {subject}; watch whether {name} still rises"
            yield Finding("WARN", subject, f"NIC {name}", count, "0", step, PHASE)
    rate = _RATE.search(nic["rate"])
    if cluster is not None and rate and float(rate[1]) * 1e9 < 0.99 * cluster.nic_bps:
        expected = f"{format_rate(cluster.nic_bps)}, cluster.nic_bps"
        yield Finding(
            "FAIL", subject, "NIC rate", nic["rate"], expected, f"look at cable and switch port of {subject}", PHASE
        )


def _cluster_findings(host: str, facts: Mapping[str, Any], cluster: ClusterConfig | None) -> Iterator[Finding]:
    """Compare the numbers of NICs and GPUs with the cluster file, if they can be read."""
    if cluster is None:
        return
    for what, actual, required in (
        ("NICs", len({nic["name"] for nic in facts["nics"]}), cluster.nics_per_server),
        ("GPUs", facts["texts"].get("nvidia-smi -q", "").count("\nGPU "), cluster.gpus_per_server),
    ):
        if actual == 0:
            expected = f"cluster file: {required}"
            yield Finding(None, host, f"number of {what}", "none readable", expected, "", PHASE)
        elif actual != required:
            step = f"see which of them {host} lacks, or correct the cluster file"
            yield Finding("FAIL", host, f"number of {what}", str(actual), f"{required}, cluster file", step, PHASE)


def _no_answer(host: str) -> Finding:
    return Finding("WARN", host, "preflight", "no answer", "facts", f"log in to {host}: a tool may hang there", PHASE)
