"""Evidence that a hung job left behind, read and judged: `netlayer observe`. Needs no GPU and no torch."""

from netlayer.observe.blame import Blame, Finding, diagnose
from netlayer.observe.evidence import Evidence, Group, Launch, RankLog
from netlayer.observe.files import read_files

__all__ = ["Blame", "Evidence", "Finding", "Group", "Launch", "RankLog", "diagnose", "read_files"]
