"""Cases of `bench.operators`: each operator of a GPT's block and head in several ways, on one shape.

A case has inputs as the model gives them (heads are slices of one product, [T, B, .] in memory), the ways to compute
it, the same in float64, and the least that has to be done: bytes to and from memory, or operations.

Shapes: B sequences, T positions, M = T * B rows, D hidden, F inside the MLP, H heads of K values, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint

from bench.operators.case import Case, Sizes, Way
from bench.operators.products import products, products_in_8_bits, rotary
from collectives.triton_support import HAS_TRITON
from trainer.ops.activation import bias_gelu, swiglu
from trainer.ops.attention import attention, flex_window, window_mask
from trainer.ops.backend import Operators, uses_triton
from trainer.ops.loss import linear_cross_entropy
from trainer.ops.norm import add_norm

if HAS_TRITON:
    from trainer.ops.join_kernels import join_and_sum
    from trainer.optim.adamw_kernel import adamw_step


def build_cases(sizes: Sizes, device: torch.device, compiles: bool, seed: int) -> Iterator[Case]:
    """One after the other, so that only one case's tensors are held."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, std: float = 1) -> Tensor:
        drawn = torch.randn(shape, device=device, generator=generator) * std
        return drawn.to(sizes.dtype)

    yield from _norms(sizes, random, compiles)
    yield from _activations(sizes, random, compiles)
    yield _loss(sizes, random, compiles, torch.randint(sizes.vocab, (sizes.rows,), device=device, generator=generator))
    yield from _attentions(sizes, random, compiles)
    yield from products(sizes, random)
    yield from products_in_8_bits(sizes, random)
    yield from rotary(sizes, random)
    yield _joined(sizes, random)
    yield _adamw(sizes, random)


def _norms(sizes: Sizes, random: Callable[..., Tensor], compiles: bool) -> Iterator[Case]:
    once = 4 * sizes.rows * sizes.hidden * sizes.dtype.itemsize  # two in, two out; backward three in, one out
    for name, has_bias in (("layer_norm + add", True), ("rms_norm + add", False)):

        def way(operators: Operators) -> Way:
            return lambda x, branch, weight, bias=None: add_norm(x, branch, weight, bias, operators=operators)

        shape = sizes.positions, sizes.batch, sizes.hidden
        inputs = [random(*shape), random(*shape), *(random(sizes.hidden) for _ in range(1 + has_bias))]
        yield Case(name, inputs, _both(way, inputs[0], compiles), way("torch"), bytes_moved=(once, 2 * once))


def _activations(sizes: Sizes, random: Callable[..., Tensor], compiles: bool) -> Iterator[Case]:
    shape = sizes.positions, sizes.batch
    once = sizes.rows * sizes.ffn * sizes.dtype.itemsize

    def gelu(operators: Operators) -> Way:
        return lambda x, bias: bias_gelu(x, bias, operators)

    inputs = [random(*shape, sizes.ffn), random(sizes.ffn)]
    yield Case("bias + gelu", inputs, _both(gelu, inputs[0], compiles), gelu("torch"), bytes_moved=(2 * once, 5 * once))

    def gated(operators: Operators) -> Way:
        return lambda gate, value: swiglu(gate, value, operators)

    inputs = list(torch.split(random(*shape, 2 * sizes.ffn), sizes.ffn, dim=-1))
    yield Case("swiglu", inputs, _both(gated, inputs[0], compiles), gated("torch"), bytes_moved=(3 * once, 8 * once))


def _loss(sizes: Sizes, random: Callable[..., Tensor], compiles: bool, targets_M: Tensor) -> Case:
    def ours(operators: Operators) -> Way:
        return lambda x, weight: linear_cross_entropy(x, weight, targets_M, vocab_size=sizes.vocab, operators=operators)

    def plain(x_MD: Tensor, weight_VD: Tensor) -> Tensor:
        """Compute the loss as the FSDP2 peer does: full logits in the model's dtype, softmax in float32."""
        logits_MV = F.linear(x_MD, weight_VD)
        return F.cross_entropy(logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), targets_M)

    inputs = [random(sizes.rows, sizes.hidden), random(sizes.vocab, sizes.hidden, std=sizes.hidden**-0.5)]
    ways: dict[str, Way] = {name: ours(name) for name in _operators(inputs[0])}
    ways["whole logits"] = plain
    if compiles:
        ways["whole logits, compiled"] = torch.compile(plain, dynamic=False)
    product = 2.0 * sizes.rows * sizes.hidden * sizes.vocab
    return Case("head + cross entropy", inputs, ways, plain, flops=(product, 3 * product))


def _attentions(sizes: Sizes, random: Callable[..., Tensor], compiles: bool) -> Iterator[Case]:
    """Yield the cases of causal attention, full and with a window, ours beside cuDNN's and FlashAttention."""
    scale = 4.0 * sizes.batch * sizes.positions * sizes.hidden  # of a query and one key, forward

    is_shared = sizes.kv_heads != sizes.heads

    def inputs() -> list[Tensor]:
        qkv = random(sizes.positions, sizes.batch, sum(sizes.qkv))
        cuts = torch.split(qkv, sizes.qkv, dim=-1)
        return [each.view(*each.shape[:2], -1, sizes.head_width).permute(1, 2, 0, 3) for each in cuts]

    tensors = inputs()
    on_gpu = tensors[0].is_cuda

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)

    def only(backend: SDPBackend) -> Way:
        def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)

        return way

    ways: dict[str, Way] = {"ours": attention}
    if compiles:
        ways["ours, compiled"] = torch.compile(attention, dynamic=False)
    if on_gpu:
        ways |= {"cudnn": only(SDPBackend.CUDNN_ATTENTION), "flash": only(SDPBackend.FLASH_ATTENTION)}
    flops = scale * (sizes.positions + 1) / 2
    yield Case("attention, full", tensors, ways, _by_group(plain, sizes.kv_heads), flops=(flops, 3.5 * flops))

    tensors = inputs()
    window = sizes.window

    def plain_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                q, k, v, window_mask(q.shape[2], window, q.device), enable_gqa=is_shared
            )

    ways = {"ours": lambda q, k, v: attention(q, k, v, window)}
    if on_gpu:
        ways = {"flex (ours)": lambda q, k, v: flex_window(q, k, v, window), "flash": _flash(window)}
    keys = window - window * (window - 1) / 2 / sizes.positions
    yield Case(
        f"attention, window {window}",
        tensors,
        ways,
        _by_group(plain_window, sizes.kv_heads),
        flops=(scale * keys, 3.5 * scale * keys),
    )


def _by_group(attend: Way, num_groups: int) -> Way:
    """Attend one head of keys and values after the other: all scores of 8,192 tokens are 17 GB in float64, a copy."""

    def way(*tensors_BHTK: Tensor) -> Tensor:
        groups = zip(*(each.chunk(num_groups, dim=1) for each in tensors_BHTK), strict=True)
        return torch.cat([checkpoint(attend, *group, use_reentrant=False) for group in groups], dim=1)

    return way


def _flash(window: int) -> Way:
    """torch's FlashAttention-2 with its window, by the operator below its public functions."""

    def way(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q_BHTK, k_BHTK, v_BHTK))
        length, before = q.shape[1], {"window_size_left": window - 1, "window_size_right": 0}
        y_BTHK = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, length, length, 0.0, True, False, **before
        )[0]
        return y_BTHK.transpose(1, 2)  # type: ignore[no-any-return]

    return way


def _joined(sizes: Sizes, random: Callable[..., Tensor]) -> Case:
    """Backward of the joined q, k, v projection: concatenated gradients, and their sum for the bias."""

    def plain(*parts_MD: Tensor) -> tuple[Tensor, Tensor]:
        joined_MN = torch.cat(parts_MD, 1)
        return joined_MN, joined_MN.sum(0)

    inputs = [random(sizes.rows, sizes.hidden) for _ in range(3)]
    ways: dict[str, Way] = {"torch": plain}
    if uses_triton("triton", inputs[0]):
        ways = {"triton": lambda *parts_MD: join_and_sum(parts_MD), **ways}
    moved = (2 * 3 * inputs[0].numel() * sizes.dtype.itemsize,)
    return Case("join + bias's sum", inputs, ways, plain, bytes_moved=moved, directions=("backward",))


def _adamw(sizes: Sizes, random: Callable[..., Tensor]) -> Case:
    """The first step of a shard, and its copy in the model's dtype."""
    lr, beta1, beta2, eps, decay = 0.02, 0.9, 0.95, 1e-8, 0.1
    master, grad = random(sizes.shard, std=0.02).float(), random(sizes.shard).float()
    device = master.device

    def plain(w: Tensor, g: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
        step = first / (1 - beta1) / ((second / (1 - beta2)).sqrt() + eps)
        moved = (1 - lr * decay) * w - lr * step
        return moved, first, second, moved

    def by_torch(w: Tensor, g: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        step = torch.zeros((), device=device)
        adamw(
            [w], [g], [first], [second], [], [step], fused=True, amsgrad=False, maximize=False,
            lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay,
        )  # fmt: skip
        return w, first, second, w.to(sizes.dtype)

    def by_triton(w: Tensor, g: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        own = torch.empty_like(w, dtype=sizes.dtype)
        adamw_step(w, g, first, second, own, ends, decays, rate, number, (beta1, beta2), eps)
        return w, first, second, own

    ends, decays = torch.tensor([sizes.shard], device=device), torch.tensor([decay], device=device)
    rate, number = torch.tensor(lr, device=device), torch.ones(1, device=device)
    inputs = [master, grad, torch.zeros_like(master), torch.zeros_like(master)]
    ways: dict[str, Way] = {"torch": by_torch}
    if uses_triton("triton", master):
        ways = {"triton": by_triton, **ways}
    moved = ((7 * 4 + sizes.dtype.itemsize) * sizes.shard,)
    return Case("adamw", inputs, ways, plain, bytes_moved=moved, directions=("step",))


def _both(way: Callable[[Operators], Way], tensor: Tensor, compiles: bool) -> dict[str, Way]:
    ways: dict[str, Way] = {name: way(name) for name in _operators(tensor)}
    if compiles:
        ways["torch, compiled"] = torch.compile(way("torch"), dynamic=False)
    return ways


def _operators(tensor: Tensor) -> tuple[Operators, ...]:
    return ("triton", "torch") if uses_triton("triton", tensor) else ("torch",)
