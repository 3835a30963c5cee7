"""Readers of evidence that other programs and commands left, as events of the one schema. Needs no torch.

| kind | recognised by | becomes |
|---|---|---|
| our event streams | name (.arrows, .jsonl, .parquet) and schema | the same |
| Flight Recorder dump | pickle or JSON with entries | a mark a launch |
| RAS output | its headings or JSON | a counter a rank, communicator and operation |
| NCCL Inspector v4, v5 | lines with `coll_perf`, `p2p_perf` | a segment a collective |
| NCCL's example profiler plug-in | list of asynchronous events COLL, P2P | a segment a collective |
| Kineto trace | object with `traceEvents`, also .gz | steps, collectives, stretches of computation |
| log of `nic watch` | parquet with its metadata | a counter a reading |
| MLPerf log | lines `:::MLLOG` | steps, evaluations, marks, counters |
| ByteDance's straggler trace | parquet with its columns | a segment an operation |
"""

from netlayer.observe.readers.evidence_files import KINDS, EvidenceFiles, open_evidence

__all__ = ["KINDS", "EvidenceFiles", "open_evidence"]
