"""Parser of NCCL warnings in any log, and of the messages of launchers that tell why a run ended.

Formats: github.com/NVIDIA/nccl, src/debug.cc and its WARN calls (2.4 to 2.29; RCCL's are the same); Slurm, Open MPI,
hydra, kubectl and the kernel for the end of a process. A warning alone is at most WARN, since its run may have passed.
NCCL's INFO lines are ignored, except the one that P2P is disabled between GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from bench.accept.evidence.log import Log, Text
from netlayer.verdict import Finding, Verdict

KIND = "NCCL log"

_WARN = re.compile(
    r"(?:(?P<host>[\w.-]{1,64}):\d{1,9}:\d{1,9} )?\[(?P<gpu>\d{1,4})\] (?:\S{1,120}:\d{1,6} )?"
    r"NCCL WARN (?P<text>.{1,400})"
)
_P2P_OFF = re.compile(r"P2P is disabled between (?:connected )?GPUs (\d{1,4}) and (\d{1,4})")
_PREFIXED = re.compile(r"(?P<host>[\w.-]{1,64}):\d{1,9}:\d{1,9} \[\d{1,4}\]")
# ibv_wc_status: status of an RDMA completion.
_COMPLETIONS = {
    "4": "local protection error",
    "5": "flushed: an error before it closed the connection",
    "10": "remote access error",
    "11": "remote operation error",
    "12": "retries exceeded: the peer or the path to it does not answer",
    "13": "receiver not ready for too long",
}
_SPEAKS = re.compile(r"\[\d{1,4}\] (?:\S{1,120}:\d{1,6} )?NCCL (?:WARN|INFO) ")
_MAX_FINDINGS = 8
_CABLE = "read ibstat, the port's error counters and the switch port of both ends; swap cable and transceiver"
_PEER = "look at the log of {peer}: the process there ended first, or its network went away"


class _Rule(NamedTuple):
    """Kind of warning; named groups of the pattern are `peer`, `device` and `status`."""

    pattern: re.Pattern[str]
    part: str
    step: str


_RULES = tuple(
    _Rule(re.compile(pattern), part, step)
    for pattern, part, step in (
        (
            r"Got completion (?:from peer (?P<peer>[^\s<]{1,80})\S* )?with (?:status|error)\s?=?\s?(?P<status>\d{1,3})"
            r"(?:.*?\bhca (?P<device>[\w.-]{1,40}))?",
            "RDMA",
            _CABLE,
        ),
        (
            r"async (?:fatal )?event.{0,60}(?P<device>mlx5_\w{1,20})|(?P<device2>mlx5_\w{1,20}).{0,60}async",
            "RDMA",
            _CABLE,
        ),
        (r"Call to ibv_\w{1,40} failed", "RDMA", _CABLE),
        (
            r"Connection closed by remote peer (?P<peer>[^\s<]{1,80})|[Cc]onnect(?:ion)? to (?P<peer2>[^\s<]{1,80})\S* "
            r"(?:failed|timed out|refused)|Call to (?:recv|send|connect) .{0,60}failed",
            "socket",
            _PEER,
        ),
        (r"out of memory", "memory", "a smaller -e, or see by nvidia-smi who else holds the GPU's memory"),
        (r"(?:Cuda|CUDA|HIP) (?:failure|error)", "GPU", "read nvidia-smi -q and the kernel's log (XID) of this GPU"),
        (r"Duplicate GPU detected", "ranks", "start one process a GPU: local ranks must see different GPUs"),
        (
            r"/dev/shm|shared memory",
            "shared memory",
            "give the container more /dev/shm (--shm-size, an emptyDir of medium Memory)",
        ),
        (r"[Mm]ismatch", "versions", "bring all ranks to the same NCCL and the same arguments"),
        (
            r"NVLS|NVLink SHARP|multicast|IMEX|fabric",
            "NVLink fabric",
            "read the state of the fabric manager and nvidia-smi -q (Fabric) of this host",
        ),
        (
            r"P2P|peer access|NVLink",
            "GPU peers",
            "read nvidia-smi topo -p2p r and the ACS and IOMMU settings of this host",
        ),
    )
)
_GENERIC = _Rule(re.compile(""), "NCCL", "read what it says; where the run was slow or failed, begin with it")


class _End(NamedTuple):
    """Way in which a process was ended or failed, with the verdict on its node."""

    pattern: re.Pattern[str]
    reason: str
    verdict: Verdict
    step: str


_ALONE = "run netlayer accept --hosts with this node alone, then with one neighbour"
# The first one that matches any line counts: causes come before the messages of neighbours and launchers about them.
_ENDS = tuple(
    _End(re.compile(pattern), reason, cast(Verdict, verdict), step)
    for pattern, reason, verdict, step in (
        # A run ended from outside (memory, a limit, a signal) is no fault of the node, so these are WARN.
        (
            r"(?:(?:Cuda|CUDA|HIP|hip|cuda)\w{0,12}[ :].{0,200}|')out of memory|(?:cuda|hip)Error\w{0,20}OutOfMemory",
            "GPU memory ran out",
            "WARN",
            "take a smaller -e, or see by nvidia-smi who else holds the GPU's memory; it says nothing of the node",
        ),
        (
            r"oom[-_ ]?kill|OOM ?Killed|Out Of Memory|Out of memory: Kill",
            "host memory ran out and the process was killed",
            "WARN",
            "give the job more host memory (--mem, the pod's limit), then take it again; the GPUs were not judged",
        ),
        (r"DUE TO NODE FAILURE", "its node failed", "FAIL", "read the node's state and its kernel log"),
        (r"DUE TO PREEMPTION|[Pp]reempted", "preempted", "WARN", "take it again: the scheduler ended it"),
        (
            r"requested but only \d{1,4} were found|number of GPUs (?:available|specified)|only for \d{1,4} GPUs exist",
            "fewer GPUs than were asked for",
            "FAIL",
            "where the host should have as many, read nvidia-smi and the kernel's log; else correct -g and the ranks",
        ),
        (
            r"(?:^|Test )(?:NCCL|CUDA|Cuda|HIP) failure \S{1,80}:\d|Test failure",
            "",
            "FAIL",
            f"read the lines around it; {_ALONE}",
        ),
        (
            r"Segmentation fault|Aborted \(core dumped\)|Bus error|core dumped|[Ss]ignal (?:4|6|7|8|11)\b"
            r"|SIG(?:SEGV|ABRT|BUS)",
            "crashed",
            "FAIL",
            f"read the lines around it; {_ALONE}",
        ),
        (
            r"DUE TO TIME LIMIT|Test timeout \(|COMMUNICATION TIMEOUT|timeout: sending signal|[Tt]imed out after"
            r"|DeadlineExceeded",
            "ended by a time limit",
            "WARN",
            f"where it hung, {_ALONE}; where it still ran, give it more time",
        ),
        (
            r"\bKilled\b|[Ss]ignal 9\b|SIGKILL|(?:exit(?:ed with)? |terminated with exit )code:? 137",
            "killed",
            "WARN",
            "read the kernel's log and the scheduler's: the host's memory, or an operator; then take it again",
        ),
        (
            r"CANCELLED|^Terminated\b|Interrupted system|KeyboardInterrupt|\^C|[Ss]ignal (?:2|15)\b|SIG(?:TERM|INT)\b",
            "cancelled",
            "WARN",
            f"take it again; where it was cancelled because it hung, {_ALONE}",
        ),
        (
            r"non-zero (?:exit )?(?:code|status)|(?:exit(?:ed with)? |terminated with exit )(?:code|status):? [1-9]"
            r"|BAD TERMINATION|lost communication with|daemon .{0,40}(?:died|failed|unexpectedly)|MPI_ABORT"
            r"|ssh exited with",
            "its launcher ended it",
            "FAIL",
            f"read the lines around it; {_ALONE}",
        ),
    )
)


class Line(NamedTuple):
    """A line with its number in the text, and the host from its prefix."""

    number: int
    text: str
    host: str = ""


class Ending(NamedTuple):
    """Reason why a run ended early.

    Args:
        reason: short reason; empty if the line itself tells it.
        line_text: text of the line.
        line: line number.
        verdict: verdict on the run.
        step: next step.
    """

    reason: str
    line_text: str
    line: int
    verdict: Verdict
    step: str

    @property
    def text(self) -> str:
        """Reason with the line: `cancelled: slurmstepd: error: ...`."""
        return f"{self.reason}: {self.line_text}" if self.reason else self.line_text


def is_text(content: str) -> bool:
    """Return True for a log of another program, such as a training run, with NCCL messages."""
    return _SPEAKS.search(content) is not None


def parse_text(text: Text) -> Log:
    """Return NCCL's warnings in the log of another program."""
    lines = [
        Line(number, line_text, prefix.host)
        for number, (line_text, prefix) in enumerate(zip(text.lines, text.prefixes, strict=True), start=1)
    ]
    findings = warnings(lines, (), text.file, text.stem)
    hosts = {match["host"] for line in lines if (match := _PREFIXED.search(line.text))}
    if not findings:
        num_lines = sum(" NCCL " in line.text for line in lines)
        expected = "warnings of NCCL, or figures of a test"
        findings = [Finding(None, text.stem, "NCCL warning", f"none in {num_lines:,} lines", expected, "", text.file)]
    return Log(KIND, tuple(findings), host=hosts.pop() if len(hosts) == 1 else "")


def ending(lines: Iterable[Line]) -> Ending | None:
    """Find the reason nearest to the root cause: out of memory before the kill, the kill before launcher messages."""
    best: tuple[int, Line] | None = None
    for line in lines:
        rank = next((at for at, end in enumerate(_ENDS) if end.pattern.search(line.text)), None)
        if rank is not None and (best is None or rank < best[0]):
            best = rank, line
    if best is None:
        return None
    end, line = _ENDS[best[0]], best[1]
    return Ending(end.reason, line.text.strip()[:200], line.number, end.verdict, end.step)


def warnings(lines: Sequence[Line], hosts: Sequence[str], file: str, default_subject: str) -> list[Finding]:
    """Return one finding for each kind and subject of warning, at its first line; the last one counts the rest.

    Args:
        lines: lines of the log.
        hosts: hosts of the run, to recognise the host in a line's prefix.
        file: name of the file.
        who: subject of warnings that name none.
    """
    groups: dict[tuple[str, str], list[tuple[Line, str, str]]] = {}
    for line in lines:
        match, peers_off = _WARN.search(line.text), _P2P_OFF.search(line.text)
        if match is None and peers_off is None:
            continue
        host = _host(line, hosts) or default_subject
        if peers_off is not None:
            rule, message, name = (
                _RULES[-1],
                line.text[peers_off.start() :],
                f"GPU {peers_off[1]} and GPU {peers_off[2]}",
            )
        else:
            assert match is not None
            message = match["text"].strip()
            rule = next((rule for rule in _RULES if rule.pattern.search(message)), _GENERIC)
            name = _named(rule, message, match["gpu"])
        groups.setdefault((rule.part, f"{host} {name}".strip()), []).append((line, message[:200], rule.step))
    findings = []
    for (part, subject), hits in groups.items():
        line, message, step = hits[0]
        times = f" ({len(hits)} times)" if len(hits) > 1 else ""
        peer = _group(_RULES, message, "peer") or "the peer"
        text = message + _status(message) + times
        findings.append(
            Finding(
                "WARN", subject, f"NCCL warning: {part}", text, "no warning", step.format(peer=peer), file, line.number
            )
        )
    if len(findings) > _MAX_FINDINGS:
        rest = findings[_MAX_FINDINGS - 1 :]
        message = f"{len(rest)} more warnings, the first: {rest[0].figure}"
        last = Finding(
            "WARN", default_subject, "NCCL warning", message, "no warning", _GENERIC.step, file, rest[0].line
        )
        findings = [*findings[: _MAX_FINDINGS - 1], last]
    return findings


def cause(lines: Iterable[Line]) -> str:
    """Return the first warning that names what failed, to explain NCCL's general error; empty if there is none."""
    for line in lines:
        match = _WARN.search(line.text)
        if match and any(rule.pattern.search(match["text"]) for rule in _RULES):
            return match["text"].strip()[:160] + _status(match["text"])
    return ""


def _named(rule: _Rule, message: str, gpu: str) -> str:
    device = _group((rule,), message, "device")
    return device or (f"GPU {gpu}" if rule.part in ("GPU", "memory", "GPU peers") else "")


def _group(rules: Iterable[_Rule], message: str, name: str) -> str:
    """Return the named group of the first rule that matches."""
    for rule in rules:
        if match := rule.pattern.search(message):
            return next((value for key, value in match.groupdict().items() if key.startswith(name) and value), "")
    return ""


def _status(message: str) -> str:
    status = _COMPLETIONS.get(_group(_RULES[:1], message, "status"))
    return f" ({status})" if status else ""


def _host(line: Line, hosts: Sequence[str]) -> str:
    """Return the host that printed a line; digits of a table row that runs into the line may precede its name."""
    match = _PREFIXED.search(line.text)
    if match is None:
        return line.host
    name = match["host"]
    return next((host for host in sorted(hosts, key=len, reverse=True) if name.endswith(host)), name)
