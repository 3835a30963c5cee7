"""NCCL's variables that concern RoCE: since which release, what values, what NCCL does by itself.

Read from NCCL's tags v2.3.7 to v2.30.7: a variable's first release is the first tag whose sources name it. Of 2.31.2
and 2.32.3 there are packages alone (nvidia-nccl-cu13): names and defaults are those that stand in their libraries, read
in the same way as in 2.30.7's, where they are those of the sources. New in them, and none that a job asks for:
NCCL_IB_EVENT_BASED_LB, NCCL_IB_PKEY_VALUE and NCCL_IB_WQE_LATENCY_* (2.31.2), NCCL_IB_RAIL_POLICY and
NCCL_IB_SORT_MERGE_NICS (2.32.3), all off unless set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Release = tuple[int, int, int]
_EVER = (2, 0, 0)
_LAST = 999  # of a series such as 2.30, of which the first release is seldom x.0


@dataclass(frozen=True)
class Variable:
    """One variable.

    Args:
        field: of `NcclConfig`.
        since: first release that reads it.
        low, high: of its whole numbers; None where it is text.
        rule: why these, in words.
        unset: a number out of them that stands for NCCL's own choice, where no preset says it.
        zero_is_unset_before: releases below it take a 0 for "not set".
        presets: what NCCL does by itself from a release on, newest first.
    """

    name: str
    field: str
    meaning: str
    since: Release = _EVER
    low: int | None = None
    high: int | None = None
    rule: str = ""
    presets: tuple[tuple[Release, int], ...] = ()
    unset: int | None = None
    zero_is_unset_before: Release = _EVER

    def preset(self, release: Release) -> int | None:
        """Return that release's own value, where it is a number."""
        return next((value for since, value in self.presets if release >= since), None)

    def takes_besides(self, value: int, release: Release) -> bool:
        """Whether a number out of the range asks a release for no more than it does by itself."""
        return value in {self.preset(release), self.unset} - {None}


_SWITCH = "0 is off, 1 is on"
_BYTE = "a byte, 0..255: DSCP * 4 + ECN, so 106 for DSCP 26"
VARIABLES = (
    Variable(
        "NCCL_IB_TIMEOUT",
        "timeout",
        "exponent of the retransmit timer",
        low=0,
        high=31,
        rule="InfiniBand's field has five bits: 0..31, of which 0 waits for ever and is no job's to ask for",
        presets=(((2, 23, 4), 20), ((2, 14, 3), 18), (_EVER, 14)),
    ),
    Variable(
        "NCCL_IB_RETRY_CNT",
        "retry_cnt",
        "retransmissions before an error",
        low=0,
        high=7,
        rule="InfiniBand's field has three bits: 0..7 (13, seen in public scripts, is none of them)",
        presets=((_EVER, 7),),
    ),
    Variable(
        "NCCL_IB_TC",
        "traffic_class",
        "TOS byte of all packets",
        low=0,
        high=255,
        rule=_BYTE,
        presets=(((2, 26, 2), -1), (_EVER, 0)),
    ),
    Variable(
        "NCCL_IB_FIFO_TC",
        "fifo_traffic_class",
        "TOS byte of control messages",
        since=(2, 22, 3),
        low=0,
        high=255,
        rule=_BYTE,
        presets=(((2, 24, 3), -1), ((2, 22, 3), 0)),
        zero_is_unset_before=(2, 24, 3),
    ),
    Variable(
        "NCCL_IB_GID_INDEX",
        "gid_index",
        "which GID, so which address and RoCE version",
        low=-1,
        high=255,
        rule="an index of the NIC's GID table, or -1 since 2.21.5: NCCL looks for one of RoCE v2",
        presets=(((2, 21, 5), -1), (_EVER, 0)),
    ),
    Variable("NCCL_IB_HCA", "hca", "NICs to use"),
    Variable(
        "NCCL_IB_QPS_PER_CONNECTION",
        "qps_per_connection",
        "queue pairs a connection",
        since=(2, 10, 3),
        low=1,
        high=128,
        rule="NCCL has room for 128 queue pairs a connection: 1..128",
        presets=(((2, 10, 3), 1),),
    ),
    Variable(
        "NCCL_IB_SPLIT_DATA_ON_QPS",
        "split_data_on_qps",
        "each message over all queue pairs",
        since=(2, 18, 1),
        low=0,
        high=1,
        rule=_SWITCH,
        presets=(((2, 20, 3), 0), ((2, 18, 1), 1)),
    ),
    Variable(
        "NCCL_IB_ADAPTIVE_ROUTING",
        "adaptive_routing",
        "off on RoCE unless set",
        since=(2, 16, 2),
        low=0,
        high=1,
        rule=_SWITCH,
        unset=-2,
    ),
    Variable(
        "NCCL_IB_PCI_RELAXED_ORDERING",
        "pci_relaxed_ordering",
        "relaxed ordering on PCIe",
        since=(2, 12, 7),
        low=0,
        high=2,
        rule="0 is off, 1 is on, 2 is where the NIC can",
        presets=(((2, 12, 7), 2),),
    ),
    Variable(
        "NCCL_IB_MERGE_NICS",
        "merge_nics",
        "ports of one NIC as one device",
        since=(2, 20, 3),
        low=0,
        high=1,
        rule=_SWITCH,
        presets=(((2, 20, 3), 1),),
    ),
    Variable(
        "NCCL_CROSS_NIC",
        "cross_nic",
        "rings over different NICs",
        since=(2, 5, 6),
        low=0,
        high=2,
        rule="0 is no, 1 is yes, 2 is where it is better",
        presets=(((2, 5, 6), 2),),
    ),
    Variable(
        "NCCL_IB_RESILIENCY_PORT_FAILOVER",
        "port_failover",
        "another port where one fails",
        since=(2, 29, 7),
        low=0,
        high=1,
        rule=_SWITCH,
        presets=(((2, 29, 7), 0),),
    ),
)
KNOWN = {variable.name: variable for variable in VARIABLES}


def read_release(text: str) -> Release | None:
    """(2, 30, 7) of 2.30.7; of 2.30 one after all of that series. None where it is no release of NCCL 2."""
    match = re.fullmatch(r"2\.(\d{1,3})(?:\.(\d{1,3}))?(?:[-+].*)?", text, re.ASCII)
    return None if match is None else (2, int(match[1]), int(match[2]) if match[2] else _LAST)


def preset_of(name: str, release: Release) -> int:
    """Return a release's own value.

    Raises:
        ValueError: it is no number, or none is known.
    """
    preset = KNOWN[name].preset(release) if name in KNOWN else None
    if preset is None:
        raise ValueError(f"{name}: no preset is known")
    return preset
