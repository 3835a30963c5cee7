"""Removal of line prefixes of launchers and log collectors, which tell who printed each line.

Launchers, containers and collectors put a tag, a name or a time before every line: Open MPI and PRRTE (`--tag-output`,
`--output tag`, timestamps), hydra and Intel MPI (`[0] `), srun (`0: `), torchrun (`[default0]:`), kubectl (`--prefix`,
`--timestamps`), docker compose, pdsh and clush (also with dshbak), SkyPilot and Ray, syslog and journald, `ts`. A
terminal adds colours; an e-mail or an issue adds quote marks and indentation. Unmistakable tags are removed from every
line; the others (`node1: `, `[0] `, `web-1  | `, `> `) only if most lines of the file have them. Prefixes of kernel
lines are kept, since the kernel log's parser needs them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

_ANSI = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_=>78])")
_MONTHS = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAY_TIME = rf"{_MONTHS} [ \d]\d \d\d:\d\d:\d\d"
_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
# Prefix of syslog and journald; kernel lines keep it, since their parser needs it.
_KERNEL = re.compile(rf"(?:{_DAY_TIME}|{_ISO}) \S{{1,64}} kernel: ")
_SYSLOG = re.compile(
    rf"(?:<\d{{1,3}}>)?(?:{_DAY_TIME}|{_ISO}) (?P<host>[\w.-]{{1,64}}) [\w./@-]{{1,64}}(?:\[\d{{1,9}}\])?: ?"
)
_TAG_TIME = rf"(?:(?:[A-Z][a-z]{{2}} {_DAY_TIME} \d{{4}}|{_ISO}) ?)?"
# For tags without a space after them, a single space is removed; several belong to the line.
_ITS_SPACE = r"(?: (?! ))?"
# Tags that are unmistakable at the start of a line. Group `host` is a node; `task` a process, pod or service; `rank` is
# the launcher's number of a process.
_TAGS: tuple[re.Pattern[str], ...] = tuple(
    map(
        re.compile,
        (
            # Open MPI 4: [1,0]<stdout>:  Open MPI 5: [prterun-head-123@1,0]<stdout>: , [1,0][node1:4711]<stderr>: ,
            # each perhaps with a time before it.
            _TAG_TIME + r"\[\d{1,9},(?P<rank>\d{1,9})\]<std(?:out|err|diag)>:" + _ITS_SPACE,
            _TAG_TIME + r"\[(?:[\w.-]{1,120}@)?\d{1,9},(?P<rank>\d{1,9})\](?:\[(?P<host>[\w.-]{1,64})(?::\d{1,9})?\])?"
            r"<std(?:out|err|diag)>: ?",
            r"\[pod/(?P<task>[\w.-]{1,200})/[\w.-]{1,200}\] ?",
            # SkyPilot: (worker1, rank=1, pid=2, ip=10.0.0.2) ; Ray: (Worker pid=2, ip=10.0.0.2)
            r"\((?P<task>[\w.:@-]{1,80}),? (?:rank=(?P<rank>\d{1,9}), )?pid=\d{1,9}(?:, ip=(?P<host>[\w.:-]{1,64}))?"
            r"[^)]{0,80}\) ?",
            r"\[(?P<task>[a-z][a-z_]{1,30}\d{1,6}(?:\|\d{1,9})?)\]:" + _ITS_SPACE,  # torchrun --tee
            # ts '[%F %T]'; the time that NCCL itself writes belongs to its line.
            rf"\[{_ISO}\] ?(?![\w.-]{{1,64}}:\d{{1,9}}:\d{{1,9}} \[)",
            rf"{_ISO} ",
            rf"(?:[A-Z][a-z]{{2}} )?{_DAY_TIME}(?: \d{{4}})? ",  # ts, date
        ),
    )
)
# Words before a colon that are not a host: programs, log levels and components.
_NO_HOST = re.compile(
    r"(?:NVRM|kernel|error|warning|info|note|debug|fatal|srun|sbatch|salloc|slurmstepd|mpirun|prterun|mpiexec|bash|sh|"
    r"(?:GPU|rank|link|port|nic|mlx|nvme|eth|ib|cpu|numa|node_id|version|time|date|device|process|iteration|step|epoch)"
    r"[\d_]{0,6}|https?|ftp|pdsh@.*)$",
    re.IGNORECASE,
)
_SHARE, _MIN_LINES, _LINES_A_LABEL, _ROUNDS, _SAMPLE = 0.6, 3, 2, 4, 4000
_RULE = re.compile(r"-{4,200}$")
_HOST_LINE = re.compile(r"[\w.,\[\]-]{1,200}$")


class Prefix(NamedTuple):
    """Writer of a line, as far as its prefix tells.

    Args:
        host: node, or its address.
        task: pod, service or worker.
        rank: the launcher's number of the process.
    """

    host: str = ""
    task: str = ""
    rank: str = ""


NOBODY = Prefix()


class _MajorityForm(NamedTuple):
    """Prefix that is removed only if most lines have it; `field` of `Prefix` gets its label."""

    pattern: re.Pattern[str]
    field: str
    accepts: Callable[[str], bool]


_MAJORITY_FORMS = (
    _MajorityForm(re.compile(r"(?P<label>)> ?"), "", lambda _: True),
    _MajorityForm(re.compile(r"\[?(?P<label>)\d\d:\d\d:\d\d(?:\.\d{1,9})?\]? "), "", lambda _: True),
    _MajorityForm(re.compile(r"\[(?P<label>\d{1,6})\] ?"), "rank", lambda _: True),
    _MajorityForm(re.compile(r" {0,8}(?P<label>\d{1,6}): ?"), "rank", lambda _: True),
    _MajorityForm(re.compile(r"(?P<label>[\w.-]{1,120}) {1,80}\| ?"), "task", lambda _: True),
    _MajorityForm(
        re.compile(r"(?P<label>[A-Za-z0-9][\w.-]{0,120}): ?(?!\d{1,9}:\d)"),
        "host",
        lambda label: not _NO_HOST.match(label) and not label.isdecimal(),
    ),
)


def strip_prefixes(lines: Sequence[str]) -> tuple[list[str], list[Prefix]]:
    """Return the lines without their prefixes and colours, and the writer of each.

    Common indentation of all lines is removed too.
    """
    bare = [_ANSI.sub("", line) if "\x1b" in line else line for line in lines]
    printed_by = [NOBODY] * len(bare)
    for _ in range(_ROUNDS):
        _strip_tags(bare, printed_by)
        indent = min((len(line) - len(line.lstrip(" ")) for line in bare if line.strip()), default=0)
        if indent:
            bare = [line[indent:] for line in bare]
        if not _strip_majority_form(bare, printed_by) and not indent:
            break
    _read_blocks(bare, printed_by)
    return bare, printed_by


def _strip_tags(lines: list[str], printed_by: list[Prefix]) -> None:
    for at, line in enumerate(lines):
        while line and line[0] not in " #\t|+":
            if _KERNEL.match(line):
                break
            match = _SYSLOG.match(line) or next((match for tag in _TAGS if (match := tag.match(line))), None)
            if match is None:
                break
            printed_by[at] = _merged(printed_by[at], match.groupdict())
            line = line[match.end() :]
        lines[at] = line


def _strip_majority_form(lines: list[str], printed_by: list[Prefix]) -> bool:
    """Remove the first form that most lines have; return True if there is one."""
    # A sample spread over the file is enough to tell whether it has the form.
    sample = [line for line in lines[:: len(lines) // _SAMPLE + 1] if line.strip()]
    for form in _MAJORITY_FORMS:
        labels = Counter(
            match["label"] for line in sample if (match := form.pattern.match(line)) and form.accepts(match["label"])
        )
        num_matched = labels.total()
        if num_matched < max(_MIN_LINES, _SHARE * len(sample)) or num_matched < _LINES_A_LABEL * len(labels):
            continue
        for at, line in enumerate(lines):
            match = form.pattern.match(line)
            if match and form.accepts(match["label"]):
                printed_by[at] = _merged(printed_by[at], {form.field: match["label"]} if form.field else {})
                lines[at] = line[match.end() :]
        return True
    return False


def _merged(prefix: Prefix, groups: dict[str, str | None]) -> Prefix:
    """Combine an outer tag with an inner one, which takes precedence since it is nearer to the process."""
    given_groups = {name: value for name, value in groups.items() if value}
    return prefix._replace(**given_groups) if given_groups else prefix


def _read_blocks(lines: Sequence[str], printed_by: list[Prefix]) -> None:
    """Set the host of lines in blocks of dshbak and `clush -b`: a host name between two lines of dashes, then lines."""
    host = ""
    for at, line in enumerate(lines):
        if (
            0 < at < len(lines) - 1
            and _HOST_LINE.match(line)
            and _RULE.match(lines[at - 1])
            and _RULE.match(lines[at + 1])
        ):
            host = line
            printed_by[at - 1] = NOBODY
        if host and not printed_by[at].host:
            printed_by[at] = printed_by[at]._replace(host=host)
