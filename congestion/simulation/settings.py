"""Settings of a simulation besides fabric and flows: switch, NIC and control laws, as named presets.

`ns3` and `ns3-paper` are HPCC's ns-3 simulator with two DCQCN parameter sets: fast timers, and those of the DCQCN paper
(Zhu et al., SIGCOMM 2015). `htsim-roce` and `htsim-swift` have the packets of csg-htsim and its Swift. Rates and ECN
thresholds are given for a 200G link and scale with the rate of the link, as in the runs that we compare with.
"""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from netlayer.config.tree import Bytes, Section
from netlayer.errors import ConfigError
from topology.ecmp.hashing import HashName

MOST_US = 1e12  # any time that is set: 11 days, where the engine's clock ends after 53
_PREFIX = "congestion."
_MOST = 10**15  # any other number: bit/s, bytes, counts
_OLD_PLUGIN = "congestion.entered."
_OPEN = ("congestion.plugin.", "congestion.classes.", "congestion.loss_rates.")  # sections whose names are the user's


class DcqcnSettings(Section):
    """`congestion.dcqcn`; defaults of HPCC's ns-3 simulator."""

    alpha_us: float = Field(1.0, ge=0.1, description="Period of alpha's update.")
    decrease_us: float = Field(4.0, ge=0.1, description="Period in which a CNP cuts once.")
    increase_us: float = Field(300.0, ge=0.1, description="Period of the rate's increase.")
    byte_counter_bytes: Bytes = Field(
        0, ge=0, le=2**40, description="Bytes after which the rate increases too, 10 MB in the paper; 0: never."
    )
    fast_recovery_steps: int = Field(1, ge=0, description="Increases that only halve the way to the target.")
    rai_bps: int = Field(40_000_000, ge=0, description="Additive increase, at 200G.")
    rhai_bps: int = Field(400_000_000, ge=0, description="Hyper increase, at 200G.")
    min_rate_bps: int = Field(1_000_000_000, gt=0, description="Lowest rate of a flow.")
    g: float = Field(1 / 256, gt=0, le=1, description="Gain of alpha.")
    clamp_target: bool = Field(False, description="Every cut lowers the target rate too.")


class SwiftSettings(Section):
    """`congestion.swift`; the paper prints few values, the defaults are csg-htsim's."""

    base_target_us: float = Field(20.0, gt=0, description="Target delay before hops and flows are counted.")
    hop_us: float = Field(20 / 6.55, ge=0, description="Added to the target for each switch on the path.")
    fs_range_us: float = Field(100.0, ge=0, description="Most that flow scaling adds to the target.")
    fs_min_packets: float = Field(0.1, gt=0, description="Window at and below which it adds all of that.")
    fs_max_packets: float = Field(100.0, gt=0, description="Window at and above which it adds nothing.")
    ai_packets: float = Field(1.0, gt=0, description="Additive increase of the window in a round trip.")
    beta: float = Field(0.8, gt=0, le=1, description="Decrease for each share of the delay that is above the target.")
    max_mdf: float = Field(0.5, gt=0, lt=1, description="Largest share that one decrease takes.")
    min_packets: float = Field(0.01, gt=0, le=1, description="Smallest window.")
    max_packets: float = Field(1_000.0, ge=1, description="Largest window.")
    initial_packets: float = Field(0.0, ge=0, description="First window; 0: what the idle path holds at line rate.")
    reset_after: int = Field(5, ge=1, description="Losses without progress that set the smallest window.")
    htsim_quirks: bool = Field(
        False, description="As csg-htsim is: no hop scaling, and flow scaling by whole packets of the window."
    )


class NsccSettings(Section):
    """`congestion.nscc`; defaults of Ultra Ethernet 1.0 as uet-htsim has them, without trimming."""

    network_rtt_us: float = Field(12.0, gt=0, description="Idle round trip of the network's longest path.")
    target_us: float = Field(12.0, gt=0, description="Queueing delay to keep; the network's round trip if untrimmed.")
    proportional_packets: float = Field(4.0, ge=0, description="Increase in a round trip with an empty queue.")
    fair_packets: float = Field(5.0, ge=0, description="Increase in a round trip with delay and no mark.")
    eta_packets: float = Field(0.15, ge=0, description="Increase in every adjustment period.")
    fast_share: float = Field(0.25, ge=0, description="Of what is acknowledged, while a whole window met no queue.")
    fast_us: float = Field(1.0, gt=0, description="Queueing delay that counts as no queue.")
    gamma: float = Field(0.8, gt=0, le=1, description="Decrease for each share of the delay that is above the target.")
    max_cut: float = Field(0.5, gt=0, lt=1, description="Largest share that one decrease takes.")
    delay_gain: float = Field(0.0125, gt=0, le=1, description="Weight of a sample in the average delay.")
    adjust_packets: float = Field(8.0, gt=0, description="Packets after which gathered increases are applied.")
    window_bdps: float = Field(1.5, gt=0, description="Largest and first window, in what the idle path holds.")
    quick_adapt: bool = Field(True, description="Set the window to what arrived when the delay or a loss is extreme.")
    quick_targets: float = Field(4.0, gt=0, description="Delay that is extreme, in targets.")
    quick_gate: float = Field(0.125, gt=0, le=1, description="Only if less than this share of the window arrived.")


class HybridSettings(Section):
    """`congestion.hybrid`; ours. Without RTT it is DCQCN by `congestion.dcqcn`."""

    use_rtt: bool = Field(True, description="Part: steady rate by RTT; off, the law is DCQCN.")
    use_ecn: bool = Field(True, description="Part: fast cut by marks; off, the law is a Swift in rates.")
    flow_scaling: bool = Field(True, description="Part: slower flows aim at longer queues, which makes flows equal.")
    fast_increase: bool = Field(True, description="Part: rise by the room there is; off, by a packet a round trip.")
    limit_flight: bool = Field(True, description="Part: bound the bytes in flight, which a pace alone does not.")
    line_window: bool = Field(True, description="Part: no window above what fills an idle path, but for bursts.")
    open_gaps: bool = Field(True, description="Part: where routing is by flowlets, a gap to leave a queue by.")
    queue_us: float = Field(8.0, gt=0, description="Queueing delay that a flow at line rate aims at.")
    gain: float = Field(0.25, gt=0, le=1, description="Share of the way to the target that a round trip takes.")
    unconfirmed: float = Field(
        0.25, ge=0, le=1, description="Share of a decrease by delay that is done where no mark confirms it."
    )
    sure_targets: float = Field(4.0, ge=1, description="RTT, in targets, that is as good as a mark.")
    flight_windows: float = Field(1.25, ge=1, description="Bytes in flight, in windows.")
    min_rate_bps: int = Field(100_000_000, gt=0, description="Lowest rate of a flow.")


_LAWS = ("dcqcn", "swift", "nscc", "hybrid")


class ClassSettings(Section):
    """`congestion.classes.N`, a class of traffic; what is omitted is as for a run without classes."""

    weight: int = Field(1, ge=0, le=1_000, description="Packets in its turn (DWRR); 0: strictly before, by number.")
    lossless: bool | None = Field(None, description="Paused rather than dropped; a lossy class drops above its share.")
    ecn: bool | None = Field(None, description="Mark packets.")
    kmin_bytes: Bytes | None = Field(None, ge=0, description="Queue at which marking begins, at 200G.")
    kmax_bytes: Bytes | None = Field(None, ge=0, description="Queue above which every packet is marked, at 200G.")
    pmax: float | None = Field(None, ge=0, le=1, description="Share of packets marked at kmax.")
    headroom_bdps: int | None = Field(None, ge=0, le=1_000, description="Headroom, in rate x propagation delay.")
    law: str = Field("", description="Control law of its flows; omitted: the run's.")
    dcqcn: dict[str, str] = Field(default_factory=dict, description="What differs from congestion.dcqcn.")
    swift: dict[str, str] = Field(default_factory=dict, description="What differs from congestion.swift.")
    nscc: dict[str, str] = Field(default_factory=dict, description="What differs from congestion.nscc.")
    hybrid: dict[str, str] = Field(default_factory=dict, description="What differs from congestion.hybrid.")
    plugin: dict[str, float] = Field(default_factory=dict, description="What differs from congestion.plugin.")


class Settings(Section):
    """The `congestion` section."""

    mtu_bytes: Bytes = Field(4_096, gt=0, le=65_536, description="Payload of a full packet.")
    header_bytes: Bytes = Field(48, ge=0, le=512, description="Wire bytes of a data packet beyond its payload.")
    ack_bytes: Bytes = Field(60, gt=0, le=512, description="Wire bytes of an ACK or NACK.")
    pfc_frame_bytes: Bytes = Field(43, gt=0, le=512, description="Wire bytes of a pause or resume frame.")
    buffer_bytes: Bytes = Field(64 * 2**20, gt=0, le=2**40, description="Shared buffer of a switch.")
    pfc: bool = Field(True, description="Lossless: pause the sender of an ingress; off, buffers have no limit.")
    reserve_bytes: Bytes = Field(4_096, ge=0, description="Buffer that each ingress has to itself.")
    resume_offset_bytes: Bytes = Field(3_072, ge=0, description="How far below its threshold an ingress resumes.")
    headroom_bdps: int = Field(3, ge=0, le=1_000, description="Headroom of an ingress, in rate x propagation delay.")
    headroom_bytes: Bytes = Field(0, ge=0, le=2**40, description="The same in bytes, of every ingress; 0: by that.")
    pfc_alpha: float = Field(
        0.0,
        ge=0,
        le=2**8,
        description="Share of the free pool that a lossless ingress may take, a power of two (SONiC's dynamic_th n is "
        "2^n); 0: as ns-3's HPCC, 1/8, and twice that for each doubling of a link's rate over the hosts'.",
    )
    xoff_bytes: Bytes = Field(
        0, ge=0, le=2**40, description="Static threshold of a lossless ingress beyond its reserve; 0: by pfc_alpha."
    )
    xon_bytes: Bytes = Field(
        0, ge=0, le=2**40, description="Bytes beyond its reserve at or below which an ingress resumes in any case."
    )
    watchdog_detection_us: float = Field(
        0.0, ge=0, le=1e9, description="PFC watchdog of a switch's port: how long it is paused before it acts; 0: none."
    )
    watchdog_restoration_us: float = Field(
        400_000.0, ge=0, le=1e9, description="How long a port must not be paused before the watchdog trusts it again."
    )
    watchdog_action: Literal["drop", "forward", "alert"] = Field(
        "drop", description="Of the watchdog: drop what leaves and comes in there, send in spite of pauses, or count."
    )
    ecn: bool = Field(True, description="Mark packets; only a control law that reads marks reacts.")
    kmin_bytes: Bytes = Field(800_000, ge=0, description="Queue at which marking begins, at 200G.")
    kmax_bytes: Bytes = Field(3_200_000, ge=0, description="Queue above which every packet is marked, at 200G.")
    pmax: float = Field(0.2, ge=0, le=1, description="Share of packets marked at kmax.")
    loss_rate: float = Field(
        0.0, ge=0, lt=1, description="Share of packets lost on each link; not where topo.txt gives a rate above 0."
    )
    loss_rates: dict[str, Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=dict, description="The same of single cables, by the names of their ends A,B."
    )
    nack_interval_us: float = Field(
        500.0, ge=0, description="How long a receiver waits to repeat a NACK; 0: one a packet out of order."
    )
    cnp_interval_us: float = Field(
        0.0, ge=0, description="At most one mark is echoed to a flow in this time; 0: all of them."
    )
    window_bytes: Bytes = Field(0, ge=0, le=2**50, description="Most bytes of a flow in flight, NCCL's window; 0: any.")
    timeout_us: float = Field(0.0, ge=0, description="Retransmit timer of a sender; 0: none, as in ns-3's HPCC.")
    retries: int = Field(7, ge=0, le=100_000, description="Timeouts in a row that a flow outlives.")
    routing: Literal["ecmp", "spray", "flowlet", "hashed_ports"] = Field(
        "ecmp",
        description="A packet's path: by its flow's header (ecmp); each switch sprays packets evenly over all ports of "
        "shortest paths (spray); the emptiest after a gap (flowlet); by the header with one of `paths` source ports, "
        "drawn for each packet (hashed_ports).",
    )
    ecmp_hash: HashName = Field("murmur3", description="Hash of ecmp, flowlet and hashed_ports, as `topology ecmp`'s.")
    ecmp_seed: int = Field(0, ge=0, lt=2**32, description="Seed of the switches' hashes, of which each has its own.")
    paths: int = Field(16, ge=2, le=16, description="Source ports of a flow that hashed_ports and flowlet choose from.")
    flowlet_gap_us: float = Field(5.0, gt=0, description="Gap in a flow after which its first switch chooses anew.")
    selective_repeat: bool = Field(False, description="Receivers keep what comes out of order; off: go-back-N.")
    drop_tail: bool = Field(False, description="Without PFC: a queue above its share of the free buffer drops.")
    rtt_noise_us: float = Field(0.0, ge=0, description="Most that noise adds to a measured round trip, evenly drawn.")
    measure_rtt: bool = Field(False, description="Keep each flow's mean and longest round trip.")
    deaf_share: float = Field(0.0, ge=0, le=1, description="Share of flows whose receiver echoes no mark.")
    dcqcn: DcqcnSettings = Field(default_factory=DcqcnSettings, description="DCQCN's own.")
    swift: SwiftSettings = Field(default_factory=SwiftSettings, description="Swift's own.")
    nscc: NsccSettings = Field(default_factory=NsccSettings, description="NSCC's own.")
    plugin: dict[str, float] = Field(default_factory=dict, description="Of a law from a file: what its Section takes.")
    hybrid: HybridSettings = Field(default_factory=HybridSettings, description="The hybrid's own.")
    classes: dict[Annotated[int, Field(ge=0, le=7)], ClassSettings] = Field(
        default_factory=dict, description="Classes of traffic by number, as flows' `pg` names them; none: one class."
    )
    ack_class: int = Field(-1, ge=-1, le=7, description="Class of ACKs, NACKs and notices; -1: that of their flow.")

    @property
    def num_classes(self) -> int:
        return max(self.classes, default=0) + 1

    def class_of(self, number: int) -> ClassSettings:
        """A class with nothing omitted but its law."""
        own = self.classes.get(number, ClassSettings())
        shared: dict[str, Any] = {
            "lossless": self.pfc,
            "ecn": self.ecn,
            "kmin_bytes": self.kmin_bytes,
            "kmax_bytes": self.kmax_bytes,
        }
        shared |= {"pmax": self.pmax, "headroom_bdps": self.headroom_bdps}
        return own.model_copy(update={name: value for name, value in shared.items() if getattr(own, name) is None})

    def of_class(self, number: int) -> Settings:
        """Return these settings with the laws' parameters as a class has them.

        Raises:
            ConfigError: a parameter is unknown or breaks its rule.
        """
        own = self.classes.get(number, ClassSettings())
        laws: dict[str, Any] = {name: self._law_of(number, name, getattr(own, name)) for name in _LAWS}
        return self.model_copy(update={**laws, "plugin": {**self.plugin, **own.plugin}})

    def _law_of(self, number: int, law: str, differs: dict[str, str]) -> Section:
        section: Section = getattr(self, law)
        if not differs:
            return section
        try:
            shared = {name: str(value) for name, value in section.model_dump().items()}
            made = type(section).model_validate_strings({**shared, **differs})
        except ValidationError as exc:
            error = exc.errors()[0]
            where = ".".join(map(str, (f"{_PREFIX}classes.{number}.{law}", *error["loc"])))
            raise ConfigError(where, error["input"], error["msg"], "give a parameter of the law that fits") from exc
        for name, value in made.model_dump().items():
            _check_size(f"{_PREFIX}classes.{number}.{law}.{name}", value)
        return made


PRESETS: dict[str, Settings] = {
    "ns3": Settings(),
    "ns3-paper": Settings(dcqcn=DcqcnSettings(alpha_us=50.0, decrease_us=50.0, increase_us=55.0)),
    "htsim-roce": Settings(mtu_bytes=4_000, header_bytes=64, ack_bytes=64, ecn=False, nack_interval_us=0.0),
    "htsim-swift": Settings(
        mtu_bytes=4_000,
        header_bytes=0,
        ack_bytes=40,
        pfc=False,
        ecn=False,
        swift=SwiftSettings(htsim_quirks=True, initial_packets=15.0),
    ),
}


def settings_of(preset: str, overrides: tuple[str, ...] = ()) -> Settings:
    """A preset with `congestion.name=value` and `congestion.law.name=value` overrides.

    Raises:
        ConfigError: the preset or a name is unknown, or a value breaks its rule.
    """
    if preset not in PRESETS:
        raise ConfigError("--preset", preset, "is unknown", f"give one of {', '.join(PRESETS)}")
    values = _flat(PRESETS[preset].model_dump())
    for override in overrides:
        name, equals, value = override.partition("=")
        if name.startswith(_OLD_PLUGIN):  # read until 0.5
            name = "congestion.plugin." + name.removeprefix(_OLD_PLUGIN)
        if not equals or (name not in values and not name.startswith(_OPEN)):
            near = difflib.get_close_matches(name, values, n=1, cutoff=0.0)[0]
            raise ConfigError(
                "--set", override, "sets nothing that is known", f"give name=value; the nearest is {near}"
            )
        values[name] = value
    try:
        made = Settings.model_validate_strings(_nested(values))
    except ValidationError as exc:
        error = exc.errors()[0]
        where = ".".join(str(part) for part in error["loc"])
        rule = error["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{_PREFIX}{where}", error["input"], rule, "give a value that fits") from exc
    for name, value in _flat(made.model_dump()).items():
        _check_size(name, value)
    if made.routing in ("spray", "hashed_ports") and not made.selective_repeat:
        rule = "has packets come out of order, which go-back-N sends again for ever"
        raise ConfigError("congestion.routing", made.routing, rule, "set congestion.selective_repeat=true too")
    overridden = {one.partition("=")[0].removeprefix(_PREFIX) for one in overrides}
    for check in (_check_routing, _check_pfc, _check_watchdog):
        check(made, overridden)
    if made.selective_repeat and not made.timeout_us:
        raise ConfigError("congestion.selective_repeat", True, "finds losses by its timer", "set timeout_us above 0")
    _check_classes(made)
    _ordered("kmin_bytes", made.kmin_bytes, "kmax_bytes", made.kmax_bytes)
    _ordered("swift.fs_min_packets", made.swift.fs_min_packets, "swift.fs_max_packets", made.swift.fs_max_packets)
    return made


def _check_classes(made: Settings) -> None:
    """Refuse classes of traffic whose settings contradict each other."""
    if made.ack_class >= made.num_classes or (made.ack_class >= 0 and not made.classes):
        rule = f"is no class, known are those up to {made.num_classes - 1}" if made.classes else "needs classes"
        raise ConfigError("congestion.ack_class", made.ack_class, rule, "set congestion.classes.N.weight for each")
    for number in made.classes:
        its, where = made.class_of(number), f"classes.{number}"
        made.of_class(number)
        _ordered(f"{where}.kmin_bytes", its.kmin_bytes or 0, f"{where}.kmax_bytes", its.kmax_bytes or 0)


def _check_size(name: str, value: object) -> None:
    """A number that the engine's 64 bits hold, with what is computed from it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    most = MOST_US if name.endswith("_us") else _MOST
    if not abs(value) <= most:  # nor is nan
        raise ConfigError(name, value, f"is not within {most:g}", "give a number that fits")


def _check_routing(made: Settings, overridden: set[str]) -> None:
    """Refuse what would change nothing."""
    if made.routing == "spray":
        for name in {"paths", "ecmp_hash", "ecmp_seed"} & overridden:
            rule = "has no effect: routing=spray takes every port of the shortest paths, and hashes nothing"
            raise ConfigError(_PREFIX + name, getattr(made, name), rule, "omit it, or set routing=hashed_ports")
    if made.routing == "ecmp" and "paths" in overridden:
        rule = "has no effect: routing=ecmp gives a flow one path"
        raise ConfigError("congestion.paths", made.paths, rule, "omit it, or set routing=hashed_ports or flowlet")


def _check_pfc(made: Settings, overridden: set[str]) -> None:
    """Thresholds of lossless ingresses."""
    lossless = any(made.class_of(number).lossless for number in range(made.num_classes))
    for name in ("headroom_bytes", "pfc_alpha", "xoff_bytes", "xon_bytes", "watchdog_detection_us"):
        if not lossless and name in overridden and getattr(made, name):
            rule = "has no effect without PFC"
            raise ConfigError(_PREFIX + name, getattr(made, name), rule, "set congestion.pfc=true")
    if made.pfc_alpha and not (math.frexp(made.pfc_alpha)[0] == 0.5 and made.pfc_alpha >= 2**-8):
        rule = "is none of 1/256, 1/128, .. 1/2, 1, 2, .. 256, which switches have"
        raise ConfigError("congestion.pfc_alpha", made.pfc_alpha, rule, "give a power of two")
    if made.xoff_bytes and made.pfc_alpha:
        rule = f"is a static threshold, and congestion.pfc_alpha = {made.pfc_alpha:g} one that follows what is free"
        raise ConfigError("congestion.xoff_bytes", made.xoff_bytes, rule, "omit one of them")
    if made.xoff_bytes:
        _ordered("xon_bytes", made.xon_bytes, "xoff_bytes", made.xoff_bytes)
    if made.headroom_bytes and "headroom_bdps" in overridden:
        rule = f"has no effect beside congestion.headroom_bytes = {made.headroom_bytes}"
        raise ConfigError("congestion.headroom_bdps", made.headroom_bdps, rule, "omit one of them")
    for number, its in made.classes.items():
        if made.headroom_bytes and its.headroom_bdps is not None:
            rule = f"has no effect beside congestion.headroom_bytes = {made.headroom_bytes}"
            raise ConfigError(f"{_PREFIX}classes.{number}.headroom_bdps", its.headroom_bdps, rule, "omit one")


def _check_watchdog(made: Settings, overridden: set[str]) -> None:
    if not made.watchdog_detection_us:
        for name in sorted({"watchdog_restoration_us", "watchdog_action"} & overridden):
            rule = "has no effect without a watchdog"
            raise ConfigError(_PREFIX + name, getattr(made, name), rule, "set congestion.watchdog_detection_us")
    elif made.classes:
        rule = "knows one class of traffic, and congestion.classes names more"
        raise ConfigError("congestion.watchdog_detection_us", made.watchdog_detection_us, rule, "omit one of them")


def _flat(tree: dict[str, Any], prefix: str = _PREFIX) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        first, _, rest = path.removeprefix(_PREFIX).partition(".")
        # Names of links may have dots.
        *sections, name = (first, rest) if first == "loss_rates" else path.removeprefix(_PREFIX).split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = str(value)
    return tree


def _ordered(low: str, low_value: float, high: str, high_value: float) -> None:
    if low_value > high_value:
        rule = f"is above {_PREFIX}{high} = {high_value}"
        raise ConfigError(f"{_PREFIX}{low}", low_value, rule, f"lower it, or raise {high}")
