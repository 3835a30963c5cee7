"""The plan: each planner of the project asked in turn, and what each value is worth.

Order matters where one choice changes the next: placement, queue pairs, buckets, channels, switches of overlap; then
gains are taken with all others as planned. Training's numerics are left alone: nothing here changes a dtype, a batch
or a model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from bench.estimate.devices import Device
from bench.estimate.plan import CHANNELS, Plan, check_plan
from bench.life.inputs import Life
from bench.tune.congestion_trial import Trial
from bench.tune.evidence import Facts, MeasuredSwitch
from bench.tune.gains import DRAWS, LEAST_GAIN, SEEDS, FabricModel, State, StepModel, gain_of
from bench.tune.life_plan import CheckpointPlan, life_of, plan_checkpoints, sooner_gain
from bench.tune.nccl_tuner import check as check_tuner
from bench.tune.profile import CANNOT_TELL, Area, Gain, Profile, Setting
from congestion.nic.profile import file as nic_file
from congestion.nic.profile.parameters import PARAMETERS
from congestion.retransmit.timers import nccl_timeout, schedule
from netlayer.config.tree import Config, JobConfig
from netlayer.errors import ConfigError
from netlayer.nccl.environment import Choice, choose
from netlayer.nccl.variables import KNOWN, read_release
from netlayer.results import utc_now
from netlayer.workload.fit import settle
from netlayer.workload.memory import gib

Progress = Callable[[int, int, str], None]
_BUCKETS_MIB = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_QPS = (1, 2, 4)
_STRATEGIES: tuple[Any, ...] = ("given", "packed", "paper", "pipeline-first")
_SWITCHES = ("dp", "tp", "pp", "zero_bubble")
_CHANNEL_MARGIN = 2
"""Times the channels that carry the NIC's rate alone: computation beside them slows each."""
_LEAST_OF_TRAFFIC = 1e-2
"""Share of the simulated time below which a NIC profile is not changed: seeds outweigh it."""
_LATENCY_SHARE = 0.05
"""Of a bucket's time on a network whose latency and rate were measured, by which its size is chosen."""
_PLACEMENT_TEXT = "slots of servers in this order; placement.csv says which server runs which ranks"
_STEP_RESTS = "the step's estimate (reports/estimate: MFU off by 1.4 points on rows omitted), its numbers drawn"


@dataclass(frozen=True)
class Inputs:
    """Inputs of a plan.

    Args:
        device: whose steps are estimated; None: no estimate can be had, `no_device` says why.
        release: of NCCL.
        nic_profiles: by name, the first is the default; several are set against each other by `trials`.
        trials: by profile name, simulated; empty: none was run.
    """

    config: Config
    device: Device | None
    release: str
    nic_profiles: Mapping[str, nic_file.Profile]
    facts: Facts = field(default_factory=Facts)
    trials: Mapping[str, Trial] = field(default_factory=dict)
    no_device: str = ""
    zero: int = 2
    seed: int = 0
    draws: int = DRAWS
    runs: int = 200


@dataclass
class Planned:
    """A plan as it grows: the profile's settings, and what an export needs besides.

    Args:
        state: of the step as planned; None without an estimate.
        defaults, offs: of each key of the step, how the state is with its default, and with it switched off.
        measured: of each key of the step that a record decides, how the state is with the job's own value.
    """

    inputs: Inputs
    job: JobConfig
    nic: nic_file.Profile
    settings: dict[str, Setting] = field(default_factory=dict)
    choices: Sequence[Choice] = ()
    model: StepModel | None = None
    fabric: FabricModel | None = None
    state: State | None = None
    defaults: dict[str, Callable[[State], State]] = field(default_factory=dict)
    offs: dict[str, Callable[[State], State]] = field(default_factory=dict)
    measured: dict[str, Callable[[State], State]] = field(default_factory=dict)
    checkpoints: CheckpointPlan | None = None
    profile: Profile = field(default_factory=Profile)

    @property
    def leaves_server(self) -> bool:
        return self.inputs.config.cluster.servers > 1

    def add(
        self, key: str, area: Area, value: Any, default: Any, consumer: str, evidence: Any, source: str, **more: Any
    ) -> None:
        """Add a setting."""
        self.settings[key] = Setting(
            area=area, value=value, default=default, consumer=consumer, evidence=evidence, source=source, **more
        )


def make_plan(inputs: Inputs, on_progress: Progress = lambda _done, _total, _name: None) -> Planned:
    """Make the whole plan.

    Raises:
        ConfigError: the job fits on no such GPU, or a value of it cannot be had.
    """
    steps: list[tuple[str, Callable[[Planned], None]]] = [
        ("memory", _plan_memory),
        ("step", _start_step),
        ("placement", _plan_placement),
        ("queue pairs", _plan_queue_pairs),
        ("buckets", _plan_buckets),
        ("channels", _plan_channels),
        ("overlap", _plan_overlap),
        ("congestion", _plan_congestion),
        ("retransmission", _plan_retransmission),
        ("NCCL", _plan_nccl),
        ("loader", _plan_loader),
        ("gains", _take_gains),
        ("checkpoints", _plan_checkpoints),
    ]
    first = next(iter(inputs.nic_profiles.values()))
    planned = Planned(inputs, inputs.config.job, first)
    for index, (name, plan) in enumerate(steps):
        on_progress(index, len(steps), name)
        plan(planned)
    planned.profile = _profile(planned)
    return planned


def _plan_memory(planned: Planned) -> None:
    """Take the trainer's own memory chooser: what steps down by itself where the job does not fit as it is."""
    device, job = planned.inputs.device, planned.job
    num_bytes = planned.inputs.config.cluster.gpu_memory_bytes or (device.memory_bytes if device else 0)
    settled, text = settle(job, num_bytes)
    if not text:
        return
    before, after = job.model_dump(), settled.model_dump()
    for section, keys in after.items():
        for name, value in keys.items() if isinstance(keys, dict) else ():
            if before[section][name] != value:
                planned.add(
                    f"job.{section}.{name}",
                    "collectives",
                    value,
                    before[section][name],
                    "trainer",
                    "formula",
                    f"netlayer.workload.fit: a rank fits {gib(num_bytes)} with it",
                    no_gain="without it the job does not fit, so there is no step to compare with",
                )
    planned.job = settled


def _start_step(planned: Planned) -> None:
    inputs = planned.inputs
    if planned.leaves_server:
        planned.fabric = FabricModel(inputs.config, inputs.seed)
    if inputs.device is None:
        return
    plan = Plan(job=planned.job, cluster=inputs.config.cluster, device=inputs.device, zero=inputs.zero)
    planned.state = State(check_plan(plan))
    planned.model = StepModel(inputs.device.numbers, planned.fabric, inputs.draws, inputs.seed)


def _plan_placement(planned: Planned) -> None:
    if planned.fabric is None:
        return
    key, consumer = "placement.strategy", "launcher's host list"
    off = functools.partial(dataclasses.replace, strategy="random")
    if planned.model is None or planned.state is None:
        networks = {each: planned.fabric.network(each, 1) for each in _STRATEGIES}
        best = min(_STRATEGIES, key=lambda each: _median(networks[each].ring) + _median(networks[each].pipeline))
        planned.add(
            key, "placement", best, "given", consumer, "simulated", "topology place: slowdown of rings and pipeline",
            no_gain=planned.inputs.no_device, rests_on=_PLACEMENT_TEXT,
        )  # fmt: skip
        return
    best = _choose(planned, _STRATEGIES, "given", lambda state, value: dataclasses.replace(state, strategy=value))
    planned.state = dataclasses.replace(planned.state, strategy=best)
    planned.defaults[key] = functools.partial(dataclasses.replace, strategy="given")
    planned.offs[key] = off
    planned.add(
        key, "placement", best, "given", consumer, "simulated",
        f"topology place's strategies under {SEEDS} seeds of a hash, max-min rates",
        rests_on=f"{_PLACEMENT_TEXT}; hash and seeds are not your switches'; {_STEP_RESTS}",
    )  # fmt: skip


def _plan_queue_pairs(planned: Planned) -> None:
    if planned.model is None or planned.state is None or planned.fabric is None:
        return
    key = "NCCL_IB_QPS_PER_CONNECTION"
    users = planned.job.nccl.qps_per_connection
    candidates = (users,) if users else _QPS
    best = _choose(planned, candidates, users or 1, lambda state, value: dataclasses.replace(state, qps=value))
    planned.state = dataclasses.replace(planned.state, qps=best)
    planned.defaults[key] = planned.offs[key] = functools.partial(dataclasses.replace, qps=1)
    planned.add(
        key, "nccl", best, KNOWN[key].preset(read_release(planned.inputs.release) or (2, 30, 7)), "NCCL",
        "none" if users else "simulated",
        "the job's own" if users else "topology's hashed paths of 1, 2 and 4 queue pairs, max-min rates",
        rests_on=f"each queue pair is hashed by itself, and messages take turns over them; {_STEP_RESTS}",
    )  # fmt: skip
    planned.job = _with(planned.job, "nccl", qps_per_connection=best)


def _plan_buckets(planned: Planned) -> None:
    """Choose the bucket size by the step's estimate; "cannot tell" where there is none."""
    overlap, key = planned.job.overlap, "job.overlap.bucket_mib"
    if planned.job.parallel.dp == 1:
        return
    if planned.model is None or planned.state is None:
        sweeps = planned.inputs.facts.sweeps
        if not sweeps:
            planned.add(
                key, "collectives", overlap.bucket_mib, overlap.bucket_mib, "trainer", "none", "the trainer's default",
                no_gain=planned.inputs.no_device,
            )  # fmt: skip
            return
        alpha, beta = sweeps[0].alpha_beta()
        mib = alpha * beta * (1 / _LATENCY_SHARE - 1) / 2**20
        best = float(2 ** max(0, math.ceil(math.log2(max(mib, 1.0)))))
        planned.add(
            key, "collectives", best, overlap.bucket_mib, "trainer", "formula",
            f"least power of two whose latency is under {_LATENCY_SHARE:.0%} of its time",
            rests_on=f"{alpha * 1e6:,.0f} us and {beta / 1e9:.2f} GB/s, measured: {sweeps[0].where}",
            no_gain="how much of the exchange the computation hides here was not measured",
        )  # fmt: skip
        planned.job = _with(planned.job, "overlap", bucket_mib=best)
        return
    own = overlap.bucket_mib
    best = _choose(planned, (own, *_BUCKETS_MIB), own, lambda state, value: state.with_job("overlap", bucket_mib=value))
    planned.state = planned.state.with_job("overlap", bucket_mib=best)
    planned.defaults[key] = lambda state: state.with_job("overlap", bucket_mib=own)
    planned.offs[key] = lambda state: state.with_job("overlap", bucket_mib=0.0)
    planned.add(
        key, "collectives", best, own, "trainer", "formula",
        "step's estimate over 8 to 256 MiB: the latency of each bucket against the exposed part of the last",
        rests_on=_STEP_RESTS,
    )  # fmt: skip
    planned.job = _with(planned.job, "overlap", bucket_mib=best)
    planned.add(
        "job.overlap.prefetch", "collectives", overlap.prefetch, overlap.prefetch, "trainer", "none",
        "the trainer's default", no_gain="the estimate has no depth of prefetch, and no record given varies it",
    )  # fmt: skip


def _plan_channels(planned: Planned) -> None:
    """Hold NCCL to the channels that carry the NIC, where no exchange over NVLink goes by NCCL."""
    inputs, job, key = planned.inputs, planned.job, "NCCL_MAX_CTAS"
    cluster, parallel = inputs.config.cluster, job.parallel
    consumer = "NCCL"
    by_copies = parallel.tp == 1 or (job.overlap.tp and job.overlap.peer_memory)
    if parallel.dp == 1:
        return
    stride = parallel.tp
    crosses = stride * parallel.dp > cluster.gpus_per_server and planned.leaves_server
    if not crosses or not by_copies or inputs.device is None or planned.state is None:
        return
    known = [(bps, where) for card, bps, where in inputs.facts.channel_bps if card == inputs.device.driver_name]
    if not known:
        why = f"no record of what one channel carries on {inputs.device.name} (bench.overlap --channels 1)"
        planned.add(key, "nccl", "unset", "unset", consumer, "none", "NCCL's own choice", no_gain=why)
        return
    slowest, where = min(known)
    rank_bps = cluster.nic_bps * cluster.nics_per_server / cluster.gpus_per_server / 8
    of_a_server = max(1, min(parallel.dp, cluster.gpus_per_server // stride))
    needed = _CHANNEL_MARGIN * math.ceil(of_a_server * rank_bps / slowest)
    if needed >= CHANNELS:
        return
    planned.state = _channels(planned.state, needed)
    planned.defaults[key] = planned.offs[key] = functools.partial(_channels, channels=CHANNELS)
    planned.add(
        key, "nccl", needed, "unset", consumer, "measured", f"one channel carries {slowest / 1e9:.1f} GB/s: {where}",
        rests_on=f"NCCL would take {CHANNELS} by itself, which is not known here; tensor parallelism by copy engines",
    )  # fmt: skip


def _plan_overlap(planned: Planned) -> None:
    """Switch overlap as the estimate has it, and add what records measured of any key of the job."""
    inputs, parallel = planned.inputs, planned.job.parallel
    reaches = {"dp": parallel.dp > 1, "tp": parallel.tp > 1, "pp": parallel.pp > 1, "zero_bubble": parallel.pp > 1}
    for name in _SWITCHES:
        key, own = f"job.overlap.{name}", getattr(inputs.config.job.overlap, name)
        if not reaches[name]:
            continue
        if planned.state is None:
            planned.add(
                key, "collectives", own, own, "trainer", "none", "the job's own", no_gain=inputs.no_device,
            )  # fmt: skip
            continue
        value = _choose(planned, (True, False), own, functools.partial(_switched, name))
        planned.state = _switched(name, planned.state, value)
        planned.defaults[key] = functools.partial(_switched, name, value=own)
        planned.offs[key] = functools.partial(_switched, name, value=False)
        planned.job = _with(planned.job, "overlap", **{name: value})
        planned.add(
            key, "collectives", value, own, "trainer", "formula", "step's estimate with and without",
            rests_on=_STEP_RESTS,
        )  # fmt: skip
    device = inputs.device.driver_name if inputs.device else ""
    for switch in sorted(
        inputs.facts.switches, key=lambda each: each.gain.share
    ):  # the best of a key has the last word
        _add_measured(planned, switch, device)


def _add_measured(planned: Planned, switch: MeasuredSwitch, device: str) -> None:
    """Take a measured switch of this very job as it came out; of another it is named without a figure.

    Where the runs' spread leaves open which value is faster, the job keeps its own.
    """
    current = planned.settings.get(switch.key)
    if not switch.key.startswith(("job.overlap.", "job.loop.", "job.parallel.balance", "job.model.operators")):
        return
    if switch.key == "job.overlap.reduce_dtype":  # changes the numerics
        return
    if not switch.is_of(planned.job, planned.inputs.config.cluster.servers, device):
        if current is not None:
            seen = f"seen elsewhere, {switch.value} over {switch.other}: {switch.gain.share:+.1%} of {switch.where}"
            rests = "; ".join(filter(None, (current.rests_on, seen)))
            planned.settings[switch.key] = current.model_copy(update={"rests_on": rests})
        return
    own, seen_gain = _value_of(planned.inputs.config.job, switch.key), switch.gain
    gain = None
    if seen_gain.low <= 0 <= seen_gain.high:
        if switch.key in planned.measured or (current is not None and current.evidence == "measured"):
            return  # another row of the key has decided
        # What memory needs has no default among those of the step, and stays.
        value = own if current is None or switch.key in planned.defaults else current.value
        why = f"{CANNOT_TELL} {switch.value} from {switch.other}: {seen_gain.text}"
    else:
        is_better = seen_gain.low > 0
        value, other = (switch.value, switch.other) if is_better else (switch.other, switch.value)
        low, high = (seen_gain.low, seen_gain.high) if is_better else (-seen_gain.high, -seen_gain.low)
        share = seen_gain.share if is_better else -seen_gain.share
        why = f"over {other}: {share:+.2%} of the step, measured"
        if own == other:
            gain = Gain(of="step time", share=share, low=low, high=high, evidence="measured")
            why = ""
        elif own == value:
            why = f"is the job's already; {why}"
    planned.defaults.pop(switch.key, None)
    planned.offs.pop(switch.key, None)
    planned.add(
        switch.key, "collectives", value, own, "trainer", "measured", switch.where, gain=gain, no_gain=why,
        rests_on="half the runs' spread on each side",
    )  # fmt: skip
    _, section, name = switch.key.split(".", 2)
    planned.job = _with(planned.job, section, **{name: value})
    if planned.state is not None:
        planned.state = planned.state.with_job(section, **{name: value})
        planned.measured[switch.key] = lambda state: state.with_job(section, **{name: own})


def _plan_congestion(planned: Planned) -> None:
    """Take the NIC profile that the packets' simulation prefers, or the first where none was run."""
    if not planned.leaves_server:
        return
    inputs = planned.inputs
    names = list(inputs.nic_profiles)
    scores = {name: trial.score for name, trial in inputs.trials.items()}
    best = min(scores, key=lambda name: (scores[name], names.index(name))) if scores else names[0]
    if scores and scores[best] > scores[names[0]] * (1 - _LEAST_OF_TRAFFIC):
        best = names[0]
    planned.nic = profile = inputs.nic_profiles[best]
    key, rests, why = "nic.profile", "", f"not simulated (--simulate): {best} is taken as it is"
    if scores:
        rests = (
            "packets of a cut of the job's traffic, whose share of hashed links is not the fabric's; the simulator's "
            "DCQCN, not a NIC's"
        )
        why = f"the profiles end within {max(scores.values()) / min(scores.values()) - 1:.2%} of each other"
        if best != names[0]:
            why = planned.inputs.no_device
            ratios = inputs.trials[names[0]].over(inputs.trials[best])
            planned.defaults[key] = planned.offs[key] = functools.partial(dataclasses.replace, congestion=ratios)
    planned.add(
        key, "congestion", profile.name, inputs.nic_profiles[names[0]].name, "netlayer nic apply, nic switch",
        "simulated" if scores else "none", f"NIC profile {best}", rests_on=rests, no_gain=why,
    )  # fmt: skip
    part = f"part of nic.profile = {profile.name}"
    law: list[tuple[str, Any, Any]] = [("nic.law", profile.law, "dcqcn"), ("nic.traffic.dscp", profile.traffic.dscp, 0)]
    law += [(f"nic.dcqcn.{name}", value, PARAMETERS[name].default) for name, value in profile.dcqcn.items()]
    marks = profile.switch
    law += [
        (f"switch.{name}", value, None)
        for name, value in (
            ("kmin_bytes", marks.kmin_bytes),
            ("kmax_bytes", marks.kmax_bytes),
            ("pmax_percent", marks.pmax_percent),
        )
        if value is not None
    ]
    for name, value, default in law:
        consumer = "switches" if name.startswith("switch.") else "NICs"
        planned.add(name, "congestion", value, default, consumer, "none", f"NIC profile {best}", no_gain=part)


def _plan_retransmission(planned: Planned) -> None:
    """Choose the timer by the longest flap to outlive, as netlayer.nccl.environment does."""
    if not planned.leaves_server:
        return
    inputs = planned.inputs
    settings = nic_file.fill_nccl(planned.nic, planned.job.nccl)
    chosen = {choice.name: choice for choice in choose({}, settings, inputs.release, ())}
    timeout, retries = chosen["NCCL_IB_TIMEOUT"], chosen["NCCL_IB_RETRY_CNT"]
    value, count, preset = int(timeout.value or 0), int(retries.value or 0), nccl_timeout(inputs.release)
    now, then = (schedule("connectx-6", exponent, count or 7).error_s for exponent in (preset, value))
    sooner = now - then
    gain, why = None, ""
    if sooner > 0:
        gain = sooner_gain(_life(planned), sooner)
    elif sooner < 0:
        why = "flaps that it outlives would end the run; how many there are is not published"
    else:
        why = "as NCCL has it by itself"
    planned.add(
        "NCCL_IB_TIMEOUT", "retransmission", value, preset, "NCCL", "formula", timeout.why, gain=gain, no_gain=why,
        rests_on=f"a ConnectX-6 finds a dead path after {then:.1f} s, {now:.1f} by default (others measured it); "
        "nothing gained where another watch is sooner",
    )  # fmt: skip
    planned.add(
        "NCCL_IB_RETRY_CNT", "retransmission", count, KNOWN["NCCL_IB_RETRY_CNT"].preset((2, 30, 7)), "NCCL", "formula",
        retries.why, no_gain="as NCCL has it by itself",
    )  # fmt: skip
    for name, own in planned.nic.retransmission.model_dump().items():
        if name not in ("timeout", "retry_cnt") and own is not None:
            planned.add(
                f"nic.retransmission.{name}", "retransmission", own, None, "NICs", "none",
                f"NIC profile {planned.nic.name}", no_gain="no record and no model here tells it",
            )  # fmt: skip


def _plan_nccl(planned: Planned) -> None:
    """Add the variables that NCCL's environment sets for the job and that are not planned yet, and the tuner's rows."""
    inputs = planned.inputs
    if planned.leaves_server:
        settings = nic_file.fill_nccl(planned.nic, planned.job.nccl)
        planned.choices = choose({}, settings, inputs.release, ())
        for choice in planned.choices:
            if choice.name in planned.settings or choice.value is None or choice.action != "set":
                continue
            preset = KNOWN[choice.name].preset(read_release(inputs.release) or (2, 30, 7))
            why = "it must be the class that switches and NICs treat as lossless; what else costs is not modelled"
            planned.add(
                choice.name, "nccl", choice.value, preset, "NCCL", "formula", choice.why,
                no_gain=why if choice.name == "NCCL_IB_TC" else "",
            )  # fmt: skip
    rows = [row for sweep in inputs.facts.sweeps for row in sweep.tuner_rows()]
    communicators = communicators_of(inputs.config)
    try:
        check_tuner(rows, communicators)
    except ConfigError as exc:
        planned.add(
            "NCCL_TUNER_CONFIG_FILE", "nccl", "unset", "unset", "NCCL", "none",
            "no file: NCCL's own choice of algorithm and protocol stays" if not rows else f"no file: {exc}",
            no_gain="rows are written from tune probe alone, and only if they name the channels of every collective: "
            "the example tuner runs what has no row on one channel",
        )  # fmt: skip
        return
    where = ", ".join(sweep.where for sweep in inputs.facts.sweeps)
    planned.add(
        "NCCL_TUNER_CONFIG_FILE", "nccl", "tuner.csv", "unset", "NCCL", "measured", f"fastest of each size: {where}",
        rests_on="measured with nothing beside it; needs NCCL's example tuner plugin (NCCL_TUNER_PLUGIN)",
        no_gain="of a step it was not measured",
    )  # fmt: skip


def communicators_of(config: Config) -> list[tuple[int, int]]:
    """Return (nodes, ranks) of the job's communicators: all ranks, data parallel, tensor parallel, stages."""
    cluster, parallel = config.cluster, config.job.parallel
    per_server = cluster.gpus_per_server
    sizes = {(cluster.servers, cluster.num_gpus)}
    for ranks, stride in (
        (parallel.tp, 1),
        (parallel.dp, parallel.tp),
        (parallel.pp, parallel.tp * parallel.dp),
    ):
        if ranks > 1:
            of_a_server = max(1, min(ranks, per_server // stride)) if stride < per_server else 1
            sizes.add((-(-ranks // of_a_server), ranks))
    return sorted(sizes)


def _plan_loader(planned: Planned) -> None:
    """Take the shared loader where a record of this card has it least idle; another job's idle time is no gain here."""
    inputs, data = planned.inputs, planned.job.data
    device = inputs.device.driver_name if inputs.device else ""
    own = [(shares, where) for card, shares, where in inputs.facts.idle if card == device and "loader" in shares]
    value, evidence, source = data.loader, "none", "the job's"
    why, rests = "no record of bench.data_idle on this card", ""
    for shares, where in own[:1]:
        why = "idle time is the host's, and was measured with another job's step"
        others = {name: share for name, share in shares.items() if name != "loader"}
        best = min(others, key=lambda name: others[name], default=None)
        if best is None:
            why = f"{where} has the loader alone"
        else:
            rests = f"seen elsewhere, loader over {best}: {others[best] - shares['loader']:+.2%} of a step of {where}"
            if shares["loader"] < others[best]:
                value, evidence, source = True, "measured", where
    planned.add(
        "job.data.loader", "loader", value, data.loader, "trainer", evidence, source, no_gain=why, rests_on=rests,
    )  # fmt: skip
    planned.add(
        "job.data.read_ahead", "loader", data.read_ahead, data.read_ahead, "trainer", "none", "the trainer's default",
        no_gain="how late the storage answers at worst is not known here",
    )  # fmt: skip
    planned.job = _with(planned.job, "data", loader=value)


def _take_gains(planned: Planned) -> None:
    """Take each setting's gain over its default, all others as planned; and keep what it is worth switched off."""
    model, state = planned.model, planned.state
    if model is None or state is None:
        return
    for key, default in planned.defaults.items():
        setting = planned.settings[key]
        simulated = key in ("placement.strategy", "NCCL_IB_QPS_PER_CONNECTION", "nic.profile")
        gain = model.gain(state, default(state), simulated=simulated) if setting.is_changed else None
        if gain is not None and key == "NCCL_MAX_CTAS":
            gain = gain.model_copy(update={"low": min(0.0, gain.low)})  # NCCL may take as few by itself
        off = planned.offs.get(key)
        no_gain = setting.no_gain
        if gain is None and off is not None:
            worth = model.gain(state, off(state), simulated=simulated)
            no_gain = f"is the default already; over switched off: {worth.text}"
        planned.settings[key] = setting.model_copy(update={"gain": gain, "no_gain": no_gain})


def _plan_checkpoints(planned: Planned) -> None:
    """Choose the interval of checkpoints by a simulation of the run's life, and its gain over the job's own."""
    inputs, own = planned.inputs, planned.job.checkpoint
    key = "job.checkpoint.every_steps"
    step_s = planned.model.middle_s(planned.state) if planned.model and planned.state else None
    usual = own.every_steps * step_s if own.every_steps and step_s else None
    plan = plan_checkpoints(_life(planned), usual, inputs.seed, inputs.runs)
    planned.checkpoints = plan
    rests = (
        f"failures at published rates (bench/life/defaults.toml); against a save each {plan.usual_s:,.0f} s"
        f"{'' if usual else ', which is usual: the job has none of its own'}"
        f"{f'; a save as in {inputs.facts.stall[0][2]}' if inputs.facts.stall else ''}"
    )
    if step_s is None:
        planned.add(
            key, "checkpoint", own.every_steps, own.every_steps, "trainer", "simulated",
            f"bench.life: a save each {plan.every_s:,.0f} s is best, and the step's time is not known here",
            rests_on=rests, no_gain=f"{inputs.no_device}; in seconds: {plan.gain.text}",
        )  # fmt: skip
        return
    steps = max(1, round(plan.every_s / step_s))
    planned.add(
        key, "checkpoint", steps, own.every_steps, "trainer", "simulated",
        f"bench.life: a save each {plan.every_s:,.0f} s trains {plan.ettr:.1%} of the time; a step of {step_s:.3g} s",
        gain=plan.gain, rests_on=rests,
    )  # fmt: skip
    planned.job = _with(planned.job, "checkpoint", every_steps=steps)


def _profile(planned: Planned) -> Profile:
    inputs, model = planned.inputs, planned.model
    rows = [row.line() for sweep in inputs.facts.sweeps for row in sweep.tuner_rows()]
    has_file = planned.settings["NCCL_TUNER_CONFIG_FILE"].value != "unset"
    gain = None
    is_changed = any(planned.settings[key].is_changed for key in planned.defaults)
    if model is not None and planned.state is not None and is_changed:
        saved = 1 - model.steps(planned.state) / model.steps(estimated_start(planned))
        gain = gain_of(saved, "simulated" if planned.fabric else "formula")
    return Profile(
        job=planned.job.name,
        cluster=inputs.config.cluster.name,
        gpus=planned.job.parallel.layout.world_size,
        device=inputs.device.name if inputs.device else "",
        nccl=inputs.release,
        created_utc=utc_now(),
        step_s=float(model.steps(start_of(planned))[0]) if model is not None else None,
        gain=gain,
        tuner_rows=tuple(rows) if has_file else (),
        settings=dict(planned.settings),
    )


def estimated_start(planned: Planned) -> State:
    """Return the state in which every setting that the estimate judges is its default, and measured ones as planned."""
    assert planned.state is not None
    state = planned.state
    for default in planned.defaults.values():
        state = default(state)
    return state


def start_of(planned: Planned) -> State:
    """Return the state in which every setting of the step is its default."""
    state = estimated_start(planned)
    for default in planned.measured.values():
        state = default(state)
    return state


def _life(planned: Planned) -> Life:
    stall = planned.inputs.facts.stall
    return life_of(planned.inputs.config, *(stall[0][:2] if stall else (None, None)))


def _choose(planned: Planned, values: Sequence[Any], default: Any, apply: Callable[[State, Any], State]) -> Any:
    """Return the value with the shortest step; the default where none is shorter by LEAST_GAIN."""
    assert planned.model is not None
    assert planned.state is not None
    times = {}
    for value in dict.fromkeys((default, *values)):
        try:
            times[value] = planned.model.middle_s(apply(planned.state, value))
        except (ConfigError, ValidationError):
            continue  # that this job cannot have
    best = min(times, key=lambda value: times[value])
    return best if times[best] < times[default] * (1 - LEAST_GAIN) else default


def _channels(state: State, channels: int) -> State:
    return dataclasses.replace(state, plan=dataclasses.replace(state.plan, dp_channels=channels))


def _switched(name: str, state: State, value: bool) -> State:
    return state.with_job("overlap", **{name: value})


def _with(job: JobConfig, section: str, **values: object) -> JobConfig:
    tree = job.model_dump(exclude_unset=True)
    tree[section] = {**tree.get(section, {}), **values}
    return JobConfig.model_validate(tree)


def _value_of(job: JobConfig, key: str) -> Any:
    value: Any = job
    for name in key.removeprefix("job.").split("."):
        value = getattr(value, name)
    return value


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
