"""What a rank of a job will hold, part by part, before any of it is allocated; and whether this machine has that much.

Parameters, masters, gradients and optimiser state are counted exactly (but for less than `dp` elements of padding a
bucket). Activations are what the blocks of `trainer.model` save for their backward, operator by operator, as
Korthikanti et al. count them (arXiv 2205.05198, section 4: their 34 s b h bytes a layer, here 32 s b h for a GPT in
bfloat16, for there are no dropout masks, and attention keeps no scores; all of it over t), times the micro-batches that
the schedule has in flight (Narayanan et al., SC'21, section 2.2). Work space is what the largest operators hold for a
moment: an upper estimate. Left out: torch, CUDA and NCCL themselves (some hundred MiB a rank), fragmentation,
evaluation, masks of sliding windows, gradients of vectors until their bucket takes them.

[Note: where gradients are] Products write weights' gradients into their bucket (`collectives.slot`). Without other
data-parallel ranks that is what the optimiser reads, in any number of micro-batches: there is nothing beside it. Among
ranks it is what travels, or, where micro-batches add up or gradients wait (`trainer.zero_bubble`), whole wide sums,
which travel themselves or as narrow copies.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from netlayer import environ
from netlayer.config import JobConfig, ModelConfig
from netlayer.errors import ConfigError
from trainer.stages import BlockPart, count_parts, halves_in, run_of

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
_TOKEN_BYTES = 8
_LOGITS_ROWS = 2048  # trainer.ops.loss.CHUNK_ROWS, not imported: it would load torch
# What to lower, by the key without which nothing of its kind is left. The width is in all of them.
_LEADING = {
    "job.model.layers or job.model.hidden": "layers",
    "job.model.vocab_size": "vocab_size",
    "job.model.seq_len": "seq_len",
}
_REDUCTIONS_AT_ONCE = 5  # of collectives.sharded: `in_flight`, and the one that is being filled
_COPIED_AT_ONCE, _MOST_COPYING = 2, 8  # of collectives.peer_reduce, and ranks of collectives.symmetric; likewise


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank holds.

    Args:
        parameters: whole, in the dtype of the computation.
        masters: this rank's share in float32; none where the computation has that dtype already.
        gradients: this rank's share of the reduced ones, and among ranks whole ones where several micro-batches add up.
        optimizer: moments of this rank's share.
        activations: of all micro-batches in flight.
        logits: of the rows that the loss works on at once, and the table's gradient.
        buckets: gradients on their way to other ranks, and sums on theirs to the share; or windows for both.
        work: what one block's backward pass holds beside that.
        step: what the optimiser holds while it steps, when activations are gone.
        construction: the parameters in float32 as they are made, whole, with the first bucket that takes some over.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buckets: int
    work: int
    step: int
    construction: int

    @property
    def total(self) -> int:
        """At the peak: in the loss, in a block's backward pass, in the optimiser's step, or before all of them."""
        return max(self._trains, self.construction)

    @property
    def _trains(self) -> int:
        always = self.parameters + self.masters + self.gradients + self.optimizer
        return always + max(self.activations + self.buckets + max(self.logits, self.work), self.step)

    def parts(self) -> dict[str, int]:
        """Of a step."""
        found = dataclasses.asdict(self)
        found.pop("construction")
        return found

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in self.parts().items() if num_bytes)
        if self.construction > self._trains:
            return f"{_gib(self.construction)} while the model is made, then {_gib(self._trains)} ({parts})"
        return f"{_gib(self.total)} ({parts})"


def num_parameters(model: ModelConfig) -> int:
    """Parameters of `trainer.model.GPT`, without rows that pad its vocabulary."""
    blocks = model.layers * _block_elements(model, 1)
    tables = model.vocab_size * model.hidden * (1 if model.tied_embeddings else 2)
    return tables + _position_elements(model) + blocks + _norm_elements(model)


def estimate(job: JobConfig) -> Estimate:
    """Of the rank that holds most: the pipeline stage with the largest total."""
    return max((estimate_stage(job, stage) for stage in range(job.parallel.pp)), key=lambda each: each.total)


def estimate_stage(job: JobConfig, stage: int) -> Estimate:
    """Of a rank of one pipeline stage."""
    model, parallel = job.model, job.parallel
    width = _DTYPE_BYTES[model.dtype]
    wide = max(4, width)
    elements = stage_elements(job, stage)
    share = -(-elements // parallel.dp)
    adds_up = parallel.dp > 1 and (micro_batches(job) > 1 or has_zero_bubble(job))
    tokens = job.batch.micro_size * model.seq_len
    rows, table = min(_LOGITS_ROWS, tokens), _table_elements(job)
    has_head = stage == parallel.pp - 1
    return Estimate(
        parameters=elements * width,
        masters=share * wide if width < wide else 0,
        gradients=share * wide + (elements * wide if adds_up else 0),
        optimizer=2 * share * wide,
        activations=_activation_bytes(job, stage),
        logits=(rows * table // model.hidden * (2 * wide + width) + table * wide) if has_head else 0,
        buckets=_travelling_bytes(job, stage, elements, wide, adds_up) if parallel.dp > 1 else 0,
        work=_block_work_bytes(job),
        step=share * wide if job.optimizer.name == "lamb" else 0,
        construction=elements * 4 + max(_table_elements(job), _block_elements(model, parallel.tp)) * (wide + width),
    )


def stage_elements(job: JobConfig, stage: int) -> int:
    """Elements of the parameters that a rank of a pipeline stage has, rows that pad the vocabulary among them."""
    model, parallel = job.model, job.parallel
    is_first, is_last = stage == 0, stage == parallel.pp - 1
    tables = is_first + is_last - (model.tied_embeddings and parallel.pp == 1)
    blocks = sum(
        number * _block_elements(model, parallel.tp, part)
        for chunk in range(parallel.vpp)
        for part, number in count_parts(run_of(job, stage, chunk)).items()
    )
    ends = (_position_elements(model) if is_first else 0) + (_norm_elements(model) if is_last else 0)
    return tables * _table_elements(job) + blocks + ends


def micro_batches(job: JobConfig) -> int:
    """Of a data-parallel rank, in a step of the full batch."""
    return job.batch.global_size // (job.batch.micro_size * job.parallel.dp)


def in_flight(job: JobConfig, stage: int) -> int:
    """(micro-batch, chunk) pairs that wait for their backward at once: `trainer.schedule.Schedule.peak_in_flight`."""
    pp, vpp, count = job.parallel.pp, job.parallel.vpp, micro_batches(job)
    behind = pp - 1 - stage
    warm_up = behind if vpp == 1 else 2 * behind + (vpp - 1) * pp
    postponed = stage if has_zero_bubble(job) else 0
    return min(warm_up + 1 + postponed, count * vpp)


def has_zero_bubble(job: JobConfig) -> bool:
    """Whether stages compute weights' gradients where they would wait (`trainer.zero_bubble`)."""
    return job.overlap.zero_bubble and why_no_zero_bubble(job) is None


def why_no_zero_bubble(job: JobConfig) -> str | None:
    """What `overlap.zero_bubble` has no effect for, if there is anything."""
    reasons = {
        "job.parallel.pp is 1": job.parallel.pp == 1,
        "job.overlap.pp is false: a stage waits for what it sends before it goes on": not job.overlap.pp,
        "job.model.compile is true: compiled linears hand their gradients to autograd": job.model.compile,
        f"job.model.recompute is {job.model.recompute}, to save the memory that gradients would take while they wait": (
            job.model.recompute != "none"
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def block_bytes(model: ModelConfig, tp: int) -> tuple[float, float]:
    """What a block saves for one token on one rank: its input, and all beside that, without recomputation."""
    kept, dropped = _kept_and_dropped(model)
    return model.hidden * _DTYPE_BYTES[model.dtype] / tp, (kept + dropped) / tp


def check_memory(job: JobConfig, ranks: int, backend: Literal["gloo", "nccl"]) -> str:
    """Refuse a job that does not fit, before any rank starts; one line that says what it will take.

    Raises:
        ConfigError: the ranks together need more than this machine has free, or one more than its GPU has.
    """
    there, where = _room(backend)
    if backend == "gloo" or (job.overlap.windows == "auto" and there and not has_room_for_windows(job, there)):
        job = _with(job, windows=False)
    elif there and not has_room_for_copies(job, there):
        job = _with(job, peer_reduce=False)
    found = estimate(job)
    sharing = 1 if backend == "nccl" else ranks
    line = f"a rank will hold about {found}"
    if sharing > 1:
        line += f"; {ranks} ranks {_gib(found.total * ranks)}"
    if not there:
        return line
    line += f"; {where} {_gib(there)}"
    if found.total * sharing > there:
        raise ConfigError(
            "job", job.name, f"{num_parameters(job.model):,} parameters: {line}", _remedy(job, there, sharing)
        )
    return line


def has_room_for_windows(job: JobConfig, num_bytes: int) -> bool:
    """Whether a GPU of so many bytes holds a rank that has windows: `auto` takes none where it does not."""
    return estimate(_with(job, windows=True, peer_reduce=False)).total <= num_bytes


def has_room_for_copies(job: JobConfig, num_bytes: int) -> bool:
    """Whether it also holds what peers copy there: where it does not, NCCL reduces."""
    return estimate(_with(job, windows=True)).total <= num_bytes


def _with(job: JobConfig, **overlap: bool) -> JobConfig:
    return job.model_copy(update={"overlap": job.overlap.model_copy(update=overlap)})


def _remedy(job: JobConfig, there: int, sharing: int) -> str:
    """The smallest change that fits, in words."""
    for words, other in _smaller(job):
        total = estimate(other).total
        if total * sharing <= there:
            return f"set {words}: then a rank holds about {_gib(total)}"
    ranks = job.parallel.layout.world_size
    for words, other in _fewer_ranks(job) if sharing > 1 else ():
        total, num_ranks = estimate(other).total, other.parallel.layout.world_size
        if total * num_ranks <= there:
            return f"start {num_ranks} of the {ranks} ranks, with {words}: then each holds about {_gib(total)}"
    tried = "no recompute, micro_size, tp or pp" + ", with windows or without," * bool(job.overlap.windows)
    return f"{tried} fits it on {ranks} rank{'s' * (ranks > 1)}: lower {_leading(job)}" + (
        ", or take more GPUs" if sharing == 1 else ""
    )


def _leading(job: JobConfig) -> str:
    """The keys of the model that most of it hangs on, where all that `_smaller` tries is done."""
    smallest = min((other for _, other in _smaller(job)), key=lambda other: estimate(other).total, default=job)

    def without(key: str) -> int:
        model = smallest.model.model_copy(update={key: 0})  # no job, but its parts can be counted
        return estimate(smallest.model_copy(update={"model": model})).total

    return min(_LEADING, key=lambda words: without(_LEADING[words]))


def _smaller(job: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """Jobs that take less: without windows, zero bubble, balance, with recomputation, a smaller micro-batch, tp, pp."""
    model, batch, parallel = job.model, job.batch, job.parallel
    levels = ("none", "selective", "full")
    recomputes = levels[levels.index(model.recompute) :]
    micro_sizes = [size for size in range(batch.micro_size, 0, -1) if batch.micro_size % size == 0]
    degrees = [factor for factor in range(1, parallel.dp + 1) if parallel.dp % factor == 0]
    spreads = sorted(itertools.product(degrees, degrees), key=lambda pair: (pair[0] * pair[1], pair[1]))
    bubbles = (True, False) if job.overlap.zero_bubble else (False,)
    windows = (job.overlap.windows, False) if job.overlap.windows and parallel.dp > 1 else (job.overlap.windows,)
    balances = (True, False) if job.parallel.balance else (False,)
    for (tp, pp), micro_size, recompute, balance, zero_bubble, has_windows in itertools.product(
        spreads, micro_sizes, recomputes, balances, bubbles, windows
    ):
        if parallel.dp % (tp * pp):
            continue
        changes: dict[str, dict[str, Any]] = {
            "overlap": {"windows": has_windows, "zero_bubble": zero_bubble},
            "model": {"recompute": recompute},
            "batch": {"micro_size": micro_size},
            "parallel": {
                "tp": parallel.tp * tp,
                "pp": parallel.pp * pp,
                "dp": parallel.dp // (tp * pp),
                "balance": balance,
            },
        }
        changed = _changed(job, changes)
        if changed:
            yield changed


def _fewer_ranks(job: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """The same layout with fewer data-parallel ranks, the most first: what ranks share a machine's memory for."""
    dp = job.parallel.dp
    changed = (_changed(job, {"parallel": {"dp": dp // part}}) for part in range(2, dp + 1) if dp % part == 0)
    return (each for each in changed if each)


def _changed(job: JobConfig, changes: Mapping[str, Mapping[str, Any]]) -> tuple[str, JobConfig] | None:
    tree = job.model_dump()
    words = [
        f"job.{section}.{name} = {str(value).lower()}"
        for section, keys in changes.items()
        for name, value in keys.items()
        if tree[section][name] != value
    ]
    for section, keys in changes.items():
        tree[section] |= keys
    try:
        return (" and ".join(words), JobConfig.model_validate(tree)) if words else None
    except (ValidationError, ConfigError):  # degrees that this model cannot have
        return None


def _room(backend: Literal["gloo", "nccl"]) -> tuple[int, str]:
    """Bytes that ranks can take: of the smallest GPU, or of this machine; 0 where nobody says."""
    if backend == "gloo":
        return environ.available_memory_bytes(), "free here are"
    sizes = [gpu.memory_mib for gpu in environ.usable_gpus() if gpu.memory_mib]
    return min(sizes, default=0) * 2**20, "the GPU has"


def _activation_bytes(job: JobConfig, stage: int) -> int:
    model, parallel = job.model, job.parallel
    tokens, width = job.batch.micro_size * model.seq_len, _DTYPE_BYTES[model.dtype]
    stream = model.hidden * width / parallel.tp
    held = in_flight(job, stage)
    each = held * (stream if parallel.pp > 1 else 0.0)  # what was sent is held until its gradient comes
    chunks = []
    for chunk in range(parallel.vpp):
        parts = count_parts(run_of(job, stage, chunk))
        chunks.append(sum(number * _saved_bytes(job, part) for part, number in parts.items()))
    if stage == parallel.pp - 1:  # its last chunk is the shortest, and at the peak few may be of that
        each += held * max(chunks)
    else:  # as many micro-batches as there are stages through each in turn
        rounds, rest = divmod(held, parallel.pp * parallel.vpp)
        for chunk, num_bytes in enumerate(chunks):
            num = rounds * parallel.pp + min(max(0, rest - chunk * parallel.pp), parallel.pp)
            each += num * num_bytes
    if stage == 0:
        each += _TOKEN_BYTES * held
    if stage == parallel.pp - 1:  # the last norm's input, and the loss' gradient; one micro-batch at a time
        each += 2 * stream + _norm_saved_bytes(model) / parallel.tp
    return round(each * tokens)


def _saved_bytes(job: JobConfig, part: BlockPart) -> float:
    """Of one token, what a block or a part of it holds from its forward pass until its gradients are computed."""
    model, tp = job.model, job.parallel.tp
    kept, dropped = _kept_and_dropped(model, part)
    stream = model.hidden * _DTYPE_BYTES[model.dtype]
    own = {"none": kept + dropped, "selective": kept, "full": 0.0}[model.recompute]
    has_input = part == "mlp" and model.recompute != "full"  # it is what a whole block keeps between its halves
    saved = (own + (0 if has_input else stream)) / tp
    if job.overlap.keep_gathered and model.recompute != "full":
        saved += _num_branches(model, part) * stream * (1 - 1 / tp)
    return max(saved, _postponed_bytes(job, part)) if has_zero_bubble(job) else saved


def _postponed_bytes(job: JobConfig, part: BlockPart = "whole") -> float:
    """Of one token, what linears keep for weights' gradients that wait: inputs, and gradients of outputs.

    Of the residual stream's width they are whole on every rank.
    """
    model = job.model
    has_attention, has_mlp = halves_in(part)
    branches = _num_branches(model, part)
    attention = (model.hidden + _qkv_width(model)) * has_attention
    inside = attention + (model.ffn_hidden + _up_width(model)) * has_mlp
    return (2 * branches * model.hidden + inside / job.parallel.tp) * _DTYPE_BYTES[model.dtype]


def _num_branches(model: ModelConfig, part: BlockPart) -> int:
    """Which read the residual stream, and add to it."""
    return 1 if model.parallel_block else sum(halves_in(part))


def _block_work_bytes(job: JobConfig) -> int:
    """Of one block's backward pass: the gradients of its widest activations, and what is computed again.

    A compiled block hands its weights' gradients over at its end.
    """
    model, tp = job.model, job.parallel.tp
    tokens, width = job.batch.micro_size * model.seq_len, _DTYPE_BYTES[model.dtype]
    kept, dropped = _kept_and_dropped(model)
    again = {"none": 0.0, "selective": dropped, "full": kept + dropped}[model.recompute] / tp
    widest = (2 * _up_width(model) + 2 * model.hidden) * width / tp
    gathered = 2.0 * model.hidden * width if tp > 1 else 0.0  # rows of all ranks, in and out of a linear
    by_nccl = not job.overlap.peer_memory or model.dtype == "float64"  # or between hosts, which the job does not say
    if tp > 1 and job.overlap.tp and by_nccl:  # of the linear before too, whose weights' gradients wait
        gathered += (2 * model.hidden + _up_width(model) / tp) * width
    handed = _block_elements(model, tp) * width if model.compile else 0
    return round(tokens * (again + widest + gathered)) + handed


def _kept_and_dropped(model: ModelConfig, part: BlockPart = "whole") -> tuple[float, float]:
    """Bytes a token that a block saves beside its input: with any recomputation but full, and without it only.

    Norm outputs are what the linears read; queries, keys and values what attention reads (turned ones beside the plain
    ones, of which the values are a part); its output and the activation what the last linears read. The MLP of a
    standard block keeps its own input.
    """
    hidden, width = model.hidden, _DTYPE_BYTES[model.dtype]
    shared = hidden * model.num_kv_heads // model.heads
    turned = hidden + shared if model.positions == "rotary" else 0
    attended = (turned + hidden) * width + model.heads * 4  # one logarithm a head, float32
    activated = model.ffn_hidden * width
    norm = hidden * width + _norm_saved_bytes(model)
    if model.parallel_block:  # computes attention again too; a standard one only what its activation gave
        return norm + (_qkv_width(model) + _up_width(model)) * width, attended + activated
    attention = norm + _qkv_width(model) * width + attended
    mlp = norm + (hidden + _up_width(model)) * width
    has_attention, has_mlp = halves_in(part)
    return attention * has_attention + mlp * has_mlp, activated * has_mlp


def _norm_saved_bytes(model: ModelConfig) -> int:
    """Of one token: mean and reciprocal deviation in float32, or the latter alone."""
    return 8 if model.norm == "layernorm" else 4


def _qkv_width(model: ModelConfig) -> int:
    return model.hidden + 2 * (model.hidden * model.num_kv_heads // model.heads)


def _up_width(model: ModelConfig) -> int:
    return model.ffn_hidden * (2 if model.activation == "swiglu" else 1)


def _block_elements(model: ModelConfig, tp: int, part: BlockPart = "whole") -> int:
    """Parameters of a block on one rank: linears are cut, what they add behind a sum and norms are whole."""
    hidden = model.hidden
    has_attention, has_mlp = halves_in(part)
    outputs = _num_branches(model, part)
    inner = _qkv_width(model) * has_attention + _up_width(model) * has_mlp
    summed = hidden * has_attention + model.ffn_hidden * has_mlp
    cut = hidden * inner + summed * hidden + (inner if model.bias else 0)
    return cut // tp + outputs * ((hidden if model.bias else 0) + _norm_elements(model))


def _norm_elements(model: ModelConfig) -> int:
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def _position_elements(model: ModelConfig) -> int:
    return model.seq_len * model.hidden if model.positions == "learned" else 0


def _table_elements(job: JobConfig) -> int:
    """This rank's rows of a token table."""
    return -(-job.model.vocab_size // job.parallel.tp) * job.model.hidden


def _travelling_bytes(job: JobConfig, stage: int, elements: int, wide: int, adds_up: bool) -> int:
    """Of gradients on their way while activations are still held, and of their sums where these land apart."""
    reduced = wide if wide == 8 else _DTYPE_BYTES[job.overlap.reduce_dtype]
    if job.overlap.windows:
        return _window_elements(job, stage, sums_stay=reduced == wide) * reduced
    usual = _block_bucket_elements(job)
    largest_and_others = max(usual, _table_elements(job)) + (_REDUCTIONS_AT_ONCE - 1) * usual
    travelling = min(largest_and_others, elements) * reduced
    if reduced < wide:
        return travelling + -(-travelling // job.parallel.dp)
    return 0 if adds_up else travelling  # what has added up travels itself


def _window_elements(job: JobConfig, stage: int, sums_stay: bool) -> int:
    """Every chunk has windows of its own: as many as go at once, of its largest bucket whole and, cast, as a share.

    Or for what peers copy there, which is as much as a whole bucket each: whether they do, only the machine can say.
    """
    model, parallel, table = job.model, job.parallel, _table_elements(job)
    wholes = []
    for run in (run_of(job, stage, chunk) for chunk in range(parallel.vpp)):
        blocks = [_block_bucket_elements(job, part) for part in count_parts(run)]
        has_table = run.start == 0 or run.stop == 2 * model.layers
        wholes.append(max([*blocks, table * has_table]))
    may_copy = job.overlap.copies_gradients and 2 <= parallel.dp <= _MOST_COPYING and model.dtype != "float64"
    copied = _COPIED_AT_ONCE if may_copy else 0
    shares = [0 if sums_stay else _REDUCTIONS_AT_ONCE * -(-whole // parallel.dp) for whole in wholes]
    beside = (max(copied * whole, share) for whole, share in zip(wholes, shares, strict=True))
    return _REDUCTIONS_AT_ONCE * sum(wholes) + sum(beside)


def _block_bucket_elements(job: JobConfig, part: BlockPart = "whole") -> int:
    """The largest bucket of a block or of a part of it."""
    model, tp, bucket_mib = job.model, job.parallel.tp, job.overlap.bucket_mib
    has_attention, has_mlp = halves_in(part)
    qkv, up = _qkv_width(model) * has_attention, _up_width(model) * has_mlp
    width = qkv + up if model.parallel_block else max(qkv, up)
    block = _block_elements(model, tp, part)
    asked = round(bucket_mib * 2**20) // _DTYPE_BYTES[model.dtype] if bucket_mib else block
    return min(max(asked, model.hidden * width // tp), block)  # a bucket ends with its block


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:,.1f} MiB"
