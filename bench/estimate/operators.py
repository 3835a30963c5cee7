"""Times of what one rank computes: GEMMs by their FLOPs, attention, and all else by the bytes that it moves.

FLOPs are those of `netlayer.workload.flops`; bytes are those of fused kernels in bfloat16, each tensor read or written
once. What differs between programs enters by facts: fused kernels or not, FP8 with its casts, recomputation, exchanges
of tensor parallelism under GEMMs or not. No constant belongs to a program or a row.

T tokens of a micro-batch on a rank's tensor-parallel group, h hidden, f inside the MLP, a of all heads, g of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.estimate.devices import Numbers
from bench.estimate.network import Network
from bench.estimate.plan import Plan
from netlayer.workload.buckets import USUAL_BLOCKS
from netlayer.workload.dtypes import DTYPE_BYTES
from netlayer.workload.float8 import cast_bytes
from netlayer.workload.flops import head_flops, linear_flops, scores_flops
from netlayer.workload.model_size import block_elements, linear_widths, table_elements, up_width

POINTWISE = {"fused": 1.0, "compiled": 1.2, "eager": 2.2}
"""Time of norms and activations over that of fused kernels: geometric means of the rows of ours, Inductor's and torch's
own in reports/trainer_h200_202611.operators.txt."""
PREVIOUS = {"Hopper": 1.87, "Ampere": 2.0}
"""Time of attention made for the generation before over this one's, forward and backward: FlashAttention-2 over cuDNN's
on an H200 of ours (reports/trainer_h200_202611.operators.txt: 2,032 and 1,089 us; over FlashAttention-3 on H100 1.5 to
2.0, arXiv 2407.08608), -1 over -2 on A100 (about 2, arXiv 2307.08691)."""
ENDS = 2.0
"""Times that a GEMM's outputs pass the memory while no product runs: they are written when a tile is done, and about as
many bytes of its operands are read before its first product. It makes short inner dimensions slower."""
PARTS = 4
"""Parts of a GEMM that an exchange follows or precedes (Transformer Engine's default for reduce-scatters, whose last
part lies under nothing)."""
_FORWARDS_OF_ATTENTION = 2.5
"""Products of fused attention's backward over its forward's: five to two, for it computes the scores again."""
_SCORE_BYTES = 13.0, 19.0
"""Bytes a score that attention without fusion moves forward and backward, a row of scores whole: two products, a
softmax with its scale and mask, and a dropout with its mask of one byte, each tensor of two bytes read or written once
(of these Korthikanti et al., arXiv 2205.05198, section 4.1, keep five of a score)."""


@dataclass(frozen=True)
class Times:
    """Seconds of a pass by kind.

    `exposed` is communication that the pass waits for, `slowed` how much longer computation takes because of the rest.
    """

    gemm: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tp_exposed: float = 0.0
    cp_exposed: float = 0.0
    slowed: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of the multiprocessors, slowed by the exchanges that run meanwhile."""
        return self.gemm + self.attention + self.pointwise + self.slowed

    @property
    def total(self) -> float:
        return self.compute + self.tp_exposed + self.cp_exposed

    def __add__(self, other: Times) -> Times:
        return Times(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.pointwise + other.pointwise,
            self.tp_exposed + other.tp_exposed,
            self.cp_exposed + other.cp_exposed,
            self.slowed + other.slowed,
        )

    def times(self, number: float) -> Times:
        return Times(
            number * self.gemm,
            number * self.attention,
            number * self.pointwise,
            number * self.tp_exposed,
            number * self.cp_exposed,
            number * self.slowed,
        )


@dataclass(frozen=True)
class ChunkTimes:
    """Forward and backward of one micro-batch through one chunk of a stage."""

    forward: Times = field(default_factory=Times)
    backward: Times = field(default_factory=Times)

    def __add__(self, other: ChunkTimes) -> ChunkTimes:
        return ChunkTimes(self.forward + other.forward, self.backward + other.backward)

    def times(self, number: float) -> ChunkTimes:
        return ChunkTimes(self.forward.times(number), self.backward.times(number))


class Operators:
    """Operator times of a plan under some fitted numbers; half blocks of one window are computed once."""

    def __init__(self, plan: Plan, numbers: Numbers, network: Network) -> None:
        self.plan, self.numbers, self.network = plan, numbers, network
        device = plan.device
        self._bandwidth = device.bandwidth * numbers.memory
        peak = device.peak("bf16") or 0.0
        self._wide = peak * numbers.gemm * device.clock
        fp8 = (device.peak("fp8") or 0.0) * numbers.gemm_fp8 * device.clock
        share = plan.narrow_share if plan.precision == "fp8" else 0.0
        self._narrow = 1 / (share / (fp8 or 1.0) + (1 - share) / self._wide)
        slower = PREVIOUS[device.generation] if plan.attention == "previous" else 1.0
        self._attention = peak * numbers.attention * device.clock / slower
        self._halves: dict[tuple[int, bool], ChunkTimes] = {}

    def stage(self, stage: int) -> list[ChunkTimes]:
        """Return the times of each chunk of a stage."""
        parallel = self.plan.job.parallel
        chunks = []
        for chunk, halves in enumerate(self.plan.stages[stage].chunks):
            total = ChunkTimes()
            for (window, is_mlp), number in halves.items():
                total += self.half(window, is_mlp).times(number)
            if stage == parallel.pp - 1 and chunk == parallel.vpp - 1:
                total += self.head()
            chunks.append(total)
        return chunks

    def half(self, window: int, is_mlp: bool) -> ChunkTimes:
        """Attention or MLP of a block. A parallel block's norm and exchanges are its attention's."""
        key = window, is_mlp
        if key not in self._halves:
            self._halves[key] = self._half(*key)
        return self._halves[key]

    def _half(self, window: int, is_mlp: bool) -> ChunkTimes:
        """Return the times of a half block: GEMMs, attention, bytes of all else, exchanges; then the same backward."""
        plan = self.plan
        model, tp, tokens = plan.job.model, plan.job.parallel.tp, plan.tokens
        h, f, a, g = model.hidden, model.ffn_hidden, model.attention_width, model.kv_width
        gemm = tokens * linear_flops(model)[is_mlp] / tp / self._narrow
        if plan.waits_for_nccl:  # products leave it some multiprocessors throughout
            gemm /= 1 - 2 * USUAL_BLOCKS / plan.device.multiprocessors
        inputs, outputs = map(sum, linear_widths(model, tp, is_mlp=is_mlp))
        writes = ENDS * 2 * tokens / self._bandwidth
        attention, attention_backward = (0.0, 0.0) if is_mlp else self._attention_s(window)
        scale = POINTWISE[plan.kernels] / self._bandwidth
        has_norm = not (model.parallel_block and is_mlp)
        # Bytes a token. A norm with the sum before it reads two tensors and writes two; so does its backward.
        forward, backward = 8.0 * h * has_norm, 8.0 * h * has_norm
        if is_mlp:  # GELU reads and writes f, then reads 2 f, writes f; SwiGLU 2 f and f, then 3 f and 2 f
            forward, backward = (
                (forward + 6 * f, backward + 10 * f)
                if up_width(model) > f
                else (
                    forward + 4 * f,
                    backward + 6 * f,
                )
            )
        elif model.positions == "rotary":
            forward, backward = forward + 4 * (a + g), backward + 4 * (a + g)
        if model.qk_norm and not is_mlp:
            forward, backward = forward + 4 * (a + g), backward + 6 * (a + g)
        forward, backward = tokens * forward / tp * scale, tokens * backward / tp * scale
        casts_forward, casts_backward = self._casts(is_mlp)
        sums = self._weight_sums(is_mlp)
        exposed, hidden = self._exchanges(gemm, has_norm)
        keys_exposed, keys_hidden = (0.0, 0.0) if is_mlp else self._keys_exchange(attention)
        first = Times(
            gemm + writes * outputs,
            attention,
            forward + casts_forward,
            exposed[0],
            keys_exposed,
            plan.borrowed * (hidden[0] + keys_hidden),
        )
        again = plan.linear_share_again
        recompute = model_recompute(plan)
        # A norm's output is computed from what is kept, the activation's where its gradient is: one more write.
        forward_again = tokens * scale / tp * (4.0 * h * has_norm * model.recomputes("layernorm"))
        forward_again += tokens * scale / tp * (2.0 * f * is_mlp * model.recomputes("mlp_act"))
        if recompute == "full" or plan.recompute_share is not None or model.recomputes("core_attn"):
            forward_again = forward
        second = Times(
            (2 + again) * gemm + writes * (inputs + again * outputs),
            attention_backward,
            backward + casts_backward + sums + forward_again + again * casts_forward,
            exposed[1] + (exposed[0] if recompute == "full" else 0.0),
            2 * keys_exposed,
            plan.borrowed * (hidden[1] + 2 * keys_hidden + (hidden[0] if recompute == "full" else 0.0)),
        )
        return ChunkTimes(first, second)

    def head(self) -> ChunkTimes:
        """Return the times of the projection to the vocabulary in bfloat16, and of the loss at 12 bytes a logit."""
        plan = self.plan
        model, tp, tokens = plan.job.model, plan.job.parallel.tp, plan.tokens
        gemm = tokens * head_flops(model) / tp / self._wide
        scale = POINTWISE[plan.kernels] / self._bandwidth
        loss = tokens * model.vocab_size / tp * 6 * scale
        sums = 8.0 * table_elements(plan.share_job) / self._bandwidth
        now = 1 - self.deferred_heads / plan.num_micro_batches
        return ChunkTimes(Times(gemm=gemm, pointwise=loss), Times(gemm=(1 + now) * gemm, pointwise=loss + now * sums))

    @property
    def deferred_heads(self) -> int:
        """Micro-batches whose gradients of the head's weights come last; without a pipeline none waits for them."""
        return min(self.plan.deferred_heads, self.plan.num_micro_batches) if self.plan.job.parallel.pp > 1 else 0

    def deferred_s(self) -> float:
        """Seconds of those gradients, all together."""
        plan = self.plan
        gemm = plan.tokens * head_flops(plan.job.model) / plan.job.parallel.tp / self._wide
        return self.deferred_heads * (gemm + 8.0 * table_elements(plan.share_job) / self._bandwidth)

    def optimizer(self, elements: int) -> float:
        """Return seconds of AdamW's step over a rank's share: gradient, master and moments read, all but it written.

        And of setting whole gradients to 0, and of Transformer Engine's copy of the weights in FP8. Masters that travel
        in 8 bits are not written in bfloat16: they are read for the largest magnitudes, and cast (4 bytes read, 1
        written) once a step, or, gathered for each pass, in `copies`.
        """
        plan = self.plan
        share = elements / (1 if plan.zero == 0 else plan.group_size)
        whole = elements * (4.0 + 3.0 * plan.narrow_exchanges) if plan.zero < 3 else 0.0
        narrow = self._narrow_gathers(elements) / elements if elements else 0.0
        written = 2.0 * (1 - narrow) + (4.0 + (4.0 + 1.0) * (plan.zero < 3)) * narrow
        return (share * (4 + 4 + 12 + 12 + written) + whole) / self._bandwidth

    def copies(self, elements: int) -> float:
        """Return seconds a micro-batch of FSDP's copies out of two all-gathers and into a reduce-scatter.

        This trainer's stage 3 gathers to where products read, and its products write where gradients leave from: what
        is left are two casts of a rank's masters, to 2 bytes or 1.
        """
        if self.plan.zero != 3:
            return 0.0
        if self._is_own_stage_3:
            wide = elements - self._narrow_gathers(elements)
            return 2 * (5.0 * elements + wide) / self.plan.group_size / self._bandwidth
        return elements * (2 * 4.0 + 6.0) / self._bandwidth

    @property
    def _is_own_stage_3(self) -> bool:
        return self.plan.zero == 3 and self.plan.job.parallel.stage == 3

    def _narrow_gathers(self, elements: int) -> float:
        """Return how many of a stage's parameters this trainer gathers in 8 bits: those of its 8-bit blocks."""
        plan = self.plan
        model, parallel = plan.job.model, plan.job.parallel
        if not model.fp8_param_gather or model.fp8 == "off" or plan.group_size == 1:
            return 0.0
        return min(elements, plan.narrow_share * model.layers / parallel.pp * block_elements(model, parallel.tp))

    def _attention_s(self, window: int) -> tuple[float, float]:
        """Return seconds between the linears of attention, forward, and backward with what is computed again."""
        plan = self.plan
        model, tp = plan.job.model, plan.job.parallel.tp
        again = model_recompute(plan) == "full"
        if plan.attention != "unfused":
            forward = plan.tokens * self._keys_flops(window) / tp / self._attention
            return forward, (_FORWARDS_OF_ATTENTION + again) * forward
        # A mask is applied to all scores of a sequence, and saves none of their products.
        products = plan.tokens * 4 * model.attention_width * model.seq_len / tp / self._attention
        scores = plan.tokens * model.seq_len * model.heads / tp
        forward, backward = (
            number * products + num_bytes * scores / self._bandwidth
            for number, num_bytes in zip((1, 2), _SCORE_BYTES, strict=True)
        )
        return forward, backward + (again or model.recomputes("core_attn")) * forward

    def _keys_flops(self, window: int) -> float:
        """Forward FLOPs a token of causal attention."""
        model = self.plan.job.model
        layer = next(layer for layer in range(model.layers) if model.window(layer) == window)
        return scores_flops(model, layer)

    def _casts(self, is_mlp: bool) -> tuple[float, float]:
        """Return seconds of FP8's casts: of a linear's input, and of its output's gradient, each also transposed.

        Transformer Engine's: a tensor is read and written twice in a byte an element, and with current scaling read
        once more before. This trainer's are the workload's to say.
        """
        plan = self.plan
        if plan.precision != "fp8":
            return 0.0, 0.0
        model, tp = plan.job.model, plan.job.parallel.tp
        scale = plan.narrow_share / self._bandwidth
        if plan.narrow_exchanges:
            inputs, outputs = map(sum, linear_widths(model, tp, is_mlp=is_mlp))
            num_bytes = 4 if plan.delayed_scaling else 6
            return num_bytes * plan.tokens * inputs * scale, num_bytes * plan.tokens * outputs * scale
        each, elements = cast_bytes(model, tp, is_mlp=is_mlp), self._elements(is_mlp)
        return (
            scale * (plan.tokens * each.forward + elements * each.forward_weight),
            scale * (plan.tokens * each.backward + elements * each.backward_weight),
        )

    def _weight_sums(self, is_mlp: bool) -> float:
        """Return seconds in which a micro-batch's gradients of weights are added to the wide sums, as a product ends.

        FSDP's are written in bfloat16, this trainer's stage 3 in float32. Not counted: those that are reduced in
        bfloat16, which 8-bit products have cast apart.
        """
        plan = self.plan
        num_bytes = 8.0 if plan.num_micro_batches > 1 and plan.zero < 3 else 4.0 if self._is_own_stage_3 else 2.0
        return self._elements(is_mlp) * num_bytes / self._bandwidth

    def _elements(self, is_mlp: bool) -> float:
        """Return a rank's parameters in a half block."""
        model, tp = self.plan.job.model, self.plan.job.parallel.tp
        if model.parallel_block:
            share = linear_flops(model)[is_mlp] / sum(linear_flops(model))
            return block_elements(model, tp) * share
        return block_elements(model, tp, "mlp" if is_mlp else "attention")

    def _exchanges(self, gemm: float, has_exchange: bool) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return exposed and hidden seconds of tensor-parallel exchanges, each forward and backward.

        Forward gathers the input's rows and scatters the output's; backward gathers the output's gradient, gathers the
        input again, scatters the input's gradient. Without overlap all are waited for: the latter two could run under
        GEMMs of the same linear, which need neither, but those hold the multiprocessors that NCCL's kernel needs
        (reports/estimate_202611.md, "Exchanges without overlap"). With it, a gather hides under the GEMM on the rows
        that are there (as do the others), and a reduce-scatter follows its GEMM in parts. Where a gather comes in
        parts of all ranks' rows too, nothing lies over its first.
        """
        plan = self.plan
        tp = plan.job.parallel.tp
        if tp == 1 or not has_exchange:
            return (0.0, 0.0), (0.0, 0.0)
        model = plan.job.model
        width = DTYPE_BYTES[model.dtype]
        rows = plan.tokens * model.hidden
        in_parts = PARTS if plan.job.overlap.tp and plan.tp_under == "parts" else 1
        gather = self.network.tp(rows * (1 if plan.narrow_exchanges else width), in_parts)
        narrow = plan.narrow_share if model.fp8_tp_gather else 0.0  # of the blocks, whose inputs travel in 8 bits
        of_input = self.network.tp(rows * (narrow + (1 - narrow) * width), in_parts) if narrow else gather
        scatter = self.network.tp(rows * width, in_parts)
        if not plan.job.overlap.tp or plan.waits_for_nccl:
            return (of_input + scatter, gather + of_input + scatter), (0.0, 0.0)
        # Of the two linears each hides one exchange forward; backward, the first gather has one input gradient to hide
        # under, the others have the three GEMMs that are left.
        under = gemm / 2 * (1 - 1 / (in_parts if in_parts > 1 else tp))
        first_part = 1 / PARTS if in_parts > 1 else 0.0
        late_input, late_gradient = (
            each * first_part + max(0.0, each * (1 - first_part) - under) for each in (of_input, gather)
        )
        tail = scatter / PARTS
        late_scatter = tail + max(0.0, scatter - tail - under)
        exposed = late_input + late_scatter, late_gradient + max(0.0, of_input + scatter - 1.5 * gemm)
        all_of_it = of_input + scatter, gather + of_input + scatter
        return exposed, (all_of_it[0] - exposed[0], all_of_it[1] - exposed[1])

    def _keys_exchange(self, attention: float) -> tuple[float, float]:
        """Return exposed and hidden seconds of context parallelism's exchange of keys and values in a forward."""
        plan = self.plan
        if plan.cp == 1:
            return 0.0, 0.0
        model = plan.job.model
        num_bytes = plan.tokens * 2 * model.kv_width / plan.job.parallel.tp * DTYPE_BYTES[model.dtype]
        whole = self.network.cp(num_bytes * plan.cp)
        exposed = max(0.0, whole - attention * (1 - 1 / plan.cp))
        return exposed, whole - exposed


def model_recompute(plan: Plan) -> str:
    """Return what the backward computes again: none, selective (what is no product) or full."""
    if plan.recompute_share is not None:
        return "selective"
    return plan.job.model.recompute
