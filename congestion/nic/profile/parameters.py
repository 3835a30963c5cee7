"""DCQCN's parameters as NICs name them: unit, documented range, default, and what each is called on which surface.

Names and meanings: `drivers/infiniband/hw/mlx5/cong.c` of Linux and NVIDIA's page "DCQCN CC Parameters" (DOCA 3.4).
Ranges: that page and the field widths of mstflint's `mlxconfig_host.db`, whichever is narrower. AMD's: `dcqcn_attrs` of
the ionic RDMA driver. Not covered: what a value does to flows (the simulator's `congestion.dcqcn` says that).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_17_BITS = 2**17 - 1
_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Parameter:
    """One of them.

    Args:
        name: of the debugfs file of mlx5, which is the canonical one here.
        key: of mlxconfig, without the port's `_P1` or `_P2`.
        unit: what a 1 is; `bool` for a switch.
        low, high: the documented range.
        default: of current ConnectX firmware.
        ionic: file of AMD's driver, below a profile; empty where it has none.
        ionic_low, ionic_high: its range there.
    """

    name: str
    key: str
    unit: str
    low: int
    high: int
    default: int
    meaning: str
    ionic: str = ""
    ionic_low: int = 1
    ionic_high: int = _INT_MAX

    @property
    def range_text(self) -> str:
        if self.unit == "bool":
            return "true or false"
        return f"{self.low}..{self.high}" + (f" {self.unit}" if self.unit else "")


def _table(*rows: Parameter) -> dict[str, Parameter]:
    return {row.name: row for row in rows}


PARAMETERS = _table(
    Parameter(
        "rp_clamp_tgt_rate", "CLAMP_TGT_RATE", "bool", 0, 1, 0, "every CNP lowers the target rate to the current one",
        "roce_rp/clamp_tgt_rate", 0, 1,
    ),
    Parameter(
        "rp_clamp_tgt_rate_ati", "CLAMP_TGT_RATE_AFTER_TIME_INC", "bool", 0, 1, 1,
        "a CNP after an increase by the timer lowers the target rate too", "roce_rp/clamp_tgt_rate_ati", 0, 1,
    ),
    Parameter(
        "rp_time_reset", "RPG_TIME_RESET", "us", 1, MOST_17_BITS, 300, "time between two increases of the rate",
        "roce_rp/time_reset", 1, 32_767,
    ),
    Parameter(
        "rp_byte_reset", "RPG_BYTE_RESET", "bytes", 0, 2**15 - 1, 32_767, "bytes between two increases; 0: off",
        "roce_rp/byte_reset",
    ),
    Parameter(
        "rp_threshold", "RPG_THRESHOLD", "increases", 1, 31, 1, "increases in fast recovery before additive increase",
        "roce_rp/threshold", 1, 31,
    ),
    Parameter(
        "rp_ai_rate", "RPG_AI_RATE", "Mb/s", 1, MOST_17_BITS, 5, "additive increase", "roce_rp/ai_rate"
    ),
    Parameter("rp_max_rate", "RPG_MAX_RATE", "Mb/s", 0, 800_000, 0, "rate at which the limiter lets go; 0: the line's"),
    Parameter(
        "rp_hai_rate", "RPG_HAI_RATE", "Mb/s", 1, MOST_17_BITS, 50, "hyper increase", "roce_rp/hai_rate"
    ),
    Parameter(
        "rp_min_dec_fac", "RPG_MIN_DEC_FAC", "%", 1, 100, 50, "least share of the rate that one cut leaves",
        "roce_rp/min_dec_fac", 0, 100,
    ),
    Parameter("rp_min_rate", "RPG_MIN_RATE", "Mb/s", 1, MOST_17_BITS, 1, "lowest rate of a flow", "roce_rp/min_rate"),
    Parameter(
        "rp_rate_to_set_on_first_cnp", "RATE_TO_SET_ON_FIRST_CNP", "Mb/s", 0, MOST_17_BITS, 0,
        "rate after a flow's first CNP; 0: the line's", "roce_rp/rate_to_set_on_first_cnp",
    ),
    Parameter(
        "rp_dce_tcp_g", "DCE_TCP_G", "/1024", 1, 1_023, 1_019, "what alpha keeps in a period: 1019 is a gain of 5/1024",
        "roce_rp/dce_tcp_g", 0, 1_023,
    ),
    Parameter(
        "rp_dce_tcp_rtt", "DCE_TCP_RTT", "us", 1, MOST_17_BITS, 1, "period of alpha's update", "roce_rp/dce_tcp_rtt",
        1, MOST_17_BITS,
    ),
    Parameter(
        "rp_rate_reduce_monitor_period", "RATE_REDUCE_MONITOR_PERIOD", "us", 1, MOST_17_BITS, 4,
        "period in which CNPs cut once", "roce_rp/rate_reduce_monitor_period",
    ),
    Parameter(
        "rp_initial_alpha_value", "INITIAL_ALPHA_VALUE", "/1024", 1, 1_023, 1_023, "alpha at a flow's first CNP",
        "roce_rp/initial_alpha_value", 0, 1_023,
    ),
    Parameter(
        "rp_gd", "RPG_GD", "log2", 0, 15, 11, "a cut is rate x alpha / 2^gd, alpha counted in 1024ths", "roce_rp/gd",
        1, 11,
    ),
    Parameter(
        "np_min_time_between_cnps", "MIN_TIME_BETWEEN_CNPS", "us", 0, MOST_17_BITS, 4, "least time between two CNPs"
    ),
)  # fmt: skip
"""By canonical name, in the order that plans list them. Priority and DSCP of CNPs are the profile's section `cnp`."""
