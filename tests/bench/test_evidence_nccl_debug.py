"""NCCL's own warnings in the log of a training run, where there is no table of a test."""

from __future__ import annotations

from bench.accept.evidence.log import Text
from bench.accept.evidence.recognise import parse_all

LATE = "NCCL WARN NET/IB : Got completion from peer 10.1.2.3<41> with status=12 opcode=0"
LOG = f"""step 12 loss 3.4
gpu7:991:1044 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] via P2P/IPC
gpu7:991:1044 [3] transport/net_ib.cc:1295 {LATE}
gpu7:991:1044 [3] transport/net_ib.cc:1295 {LATE}
step 13 loss 3.3
"""


def test_warning_of_a_training_log_names_host_and_peer() -> None:
    [log] = parse_all(Text("train.log", LOG))
    [finding] = log.findings
    assert (log.kind, log.host, finding.verdict, finding.line) == ("NCCL log", "gpu7", "WARN", 3)
    assert "retries exceeded" in finding.figure
    assert "(2 times)" in finding.figure


def test_log_without_a_warning_is_no_pass() -> None:
    [log] = parse_all(Text("train.log", "\n".join(line for line in LOG.splitlines() if "WARN" not in line)))
    [finding] = log.findings
    assert finding.verdict is None
    assert finding.figure == "none in 1 lines"
