"""Tensors that a block keeps for its backward pass: count, autograd, a compiler; recomputation changes no bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from collectives import ShardedDataParallel
from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.errors import ConfigError
from netlayer.workload.memory import saved_tensors
from tests.trainer import layout_ranks
from tests.trainer.test_layouts import ByRank, Work, by_rank, job_of, on_ranks
from trainer.model.gpt import build_model
from trainer.ops import activation
from trainer.ops.rotary import Scaling, rotate, rotate_in_place

__all__ = ["by_rank"]  # the fixture
pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab_size": 64, "seq_len": 32}
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "kv_heads": 2,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}
MODULES = ["mlp_act", "layernorm", "mlp_act layernorm", "core_attn", "mlp_act layernorm core_attn"]


def model_of(modules: str, **more: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **more}, recompute="selective", recompute_modules=modules)


def kept_by_autograd(run: Callable[[], object], apart: Iterator[Tensor]) -> int:
    """Bytes of every storage that a forward pass keeps, but of `apart`."""
    storages: dict[int, int] = {}
    kept = list[Tensor]()  # or their addresses would come again

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    del output
    held = {tensor.untyped_storage().data_ptr() for tensor in apart}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("modules", ["mlp_act layernorm", "mlp_act layernorm core_attn"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"parallel_block": True}, LLAMA, {**LLAMA, "parallel_block": True, "head_dim": 24}],
    ids=["gpt", "parallel", "llama", "llama-parallel"],
)
def test_a_block_keeps_what_is_counted(shape: dict[str, Any], modules: str, dtype: str) -> None:
    """To the byte but for the masks and logarithms of the CPU's attention and norms: SwiGLU and RMSNorm too."""
    config = model_of(modules, dtype=dtype, **shape)
    block = next(iter(build_model(config, 0, CPU).blocks.values())).to(getattr(torch, dtype))
    x = torch.randn(32, 4, 64, dtype=getattr(torch, dtype), requires_grad=True)
    branch = torch.randn_like(x, requires_grad=True)
    found = kept_by_autograd(lambda: block(x, branch, adds=False), block.parameters())
    counted = sum(saved_tensors(config).values()) * 32 * 4
    assert found == pytest.approx(counted, rel=0.02)


def test_compiled_blocks_are_counted_with_what_their_compiler_keeps() -> None:
    asked = model_of("mlp_act layernorm", compile=True)
    assert saved_tensors(asked) == saved_tensors(asked.model_copy(update={"recompute": "none"}))


def test_of_a_7b_layer_recomputation_drops_what_a_compiler_drops() -> None:
    """Bytes of 8,192 tokens a layer, in units of [tokens, hidden] in bfloat16, which are 64 MiB."""
    unit = 4096 * 2
    for is_parallel, expected in ((False, (16, 12, 10)), (True, (14, 10, 9))):
        plain = ModelConfig(preset="7b", dtype="bfloat16", parallel_block=is_parallel, recompute="none")
        found = [plain]
        for names in ("mlp_act", "mlp_act layernorm"):
            found.append(plain.model_copy(update={"recompute": "selective", "recompute_modules": names}))
        assert [round(sum(saved_tensors(each).values()) / unit) for each in found] == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"parallel_block": True}], ids=["gpt", "parallel"])
def test_a_compilers_partitioner_keeps_outputs_of_norms_and_activation_too(shape: dict[str, Any]) -> None:
    """Torch's min-cut partitioner with Inductor's decompositions: what products read in the backward pass it keeps."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    config = ModelConfig(**{**SHAPE, **shape, "hidden": 256, "ffn_hidden": 1024}, recompute="none", dtype="bfloat16")
    block = next(iter(build_model(config, 0, CPU).blocks.values())).bfloat16()
    names, values = zip(*block.named_parameters(), strict=True)
    sizes = dict[str, int]()

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        with (
            torch.nn.utils.stateless._reparametrize_module(block, dict(zip(names, parameters, strict=True))),
            mock.patch("torch.compiler.is_compiling", return_value=True),
        ):
            return block(x)  # type: ignore[no-any-return]

    def source(node: torch.fx.Node) -> torch.fx.Node:
        """The node whose memory this one is a view of."""
        views = "view", "permute", "alias", "t.default", "split", "getitem"
        return source(node.all_input_nodes[0]) if any(each in str(node.target) for each in views) else node

    def note(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        [output] = [node for node in graph.graph.nodes if node.op == "output"]
        for node in (source(each) for each in output.args[0][1:] if isinstance(each, torch.fx.Node)):
            value = node.meta["val"]
            is_parameter = node.op == "placeholder" and node.name != "primals_1"
            if isinstance(value, Tensor) and not is_parameter:
                sizes[node.name] = value.numel() * value.itemsize
        return make_boxed_func(graph.forward)

    compiled = aot_function(
        forward,
        fw_compiler=note,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    x = torch.randn(32, 4, 256, dtype=torch.bfloat16, requires_grad=True)
    compiled(x, *values).sum().backward()
    attention = 32 * 4 * 256 * 2  # of an operator with several outputs, which has no size
    counted = sum(saved_tensors(config).values()) * 32 * 4
    assert sum(sizes.values()) + attention == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_in_place_are_the_bits_of_turned_elsewhere(part: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(8, 2, 3 * 12, generator=generator).to(dtype)
    dy = torch.randn(8, 2, 3, 4, generator=generator).to(dtype)
    scaling = Scaling("llama3", 8.0, 1.0, 4.0, 8)
    results = []
    for turn in (rotate, rotate_in_place):
        whole = product.clone().requires_grad_()
        q, _, v = (whole * 1).split(12, -1)  # a product's cuts, as in a block
        y = turn(q.view(8, 2, 3, 4), 50.0, scaling, part)
        (gradient,) = torch.autograd.grad((y * 1, v.view(8, 2, 3, 4)), whole, (dy, dy))
        results.append((y.detach(), gradient))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def trained(config: ModelConfig, **sections: Any) -> layout_ranks.Trained:
    job = job_of({}, {}, {})
    return layout_ranks.train(job.model_copy(update={"model": config, **sections}), 0, 2)


def same_bits(one: layout_ranks.Trained, two: layout_ranks.Trained) -> bool:
    pairs = zip([*one.gradients, one.parameters], [*two.gradients, two.parameters], strict=True)
    tensors = all(torch.equal(ours[name], theirs[name]) for ours, theirs in pairs for name in theirs)
    return tensors and (one.losses, one.norms, one.evaluation) == (two.losses, two.norms, two.evaluation)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param({}, "float32", id="gpt-float32"),
        pytest.param({"parallel_block": True}, "float32", id="parallel-float32"),
        pytest.param(LLAMA, "bfloat16", id="llama-bfloat16"),
        pytest.param({}, "bfloat16", id="gpt-bfloat16", marks=pytest.mark.slow),
        pytest.param({"parallel_block": True}, "bfloat16", id="parallel-bfloat16", marks=pytest.mark.slow),
        pytest.param(LLAMA, "float32", id="llama-float32", marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_no_bit(shape: dict[str, Any], dtype: str) -> None:
    base = job_of({}, {**shape, "dtype": dtype, "recompute": "none"}, {}).model
    expected = trained(base)
    for modules in MODULES:
        changed = base.model_copy(update={"recompute": "selective", "recompute_modules": modules})
        assert same_bits(trained(changed), expected), modules


def _beside_none(degrees: dict[str, int], model: dict[str, Any], overlap: dict[str, Any]) -> list[JobConfig]:
    levels: list[dict[str, Any]] = [
        {"recompute": "none"},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_modules": "mlp_act layernorm"},
    ]
    return [job_of(degrees, {"dtype": "bfloat16", **model, **level}, overlap) for level in levels]


ON_TWO = [
    _beside_none({"tp": 2}, {}, {}),
    _beside_none({"tp": 2}, {**LLAMA, "parallel_block": True}, {"save_gathered_input": True}),
    _beside_none({"dp": 2, "zero": 2}, LLAMA, {}),
    _beside_none({"dp": 2, "zero": 3}, {"parallel_block": True}, {"prefetch": 1}),
    _beside_none({"cp": 2}, LLAMA, {}),
    _beside_none({"pp": 2}, {}, {}),
    _beside_none({"tp": 2}, {"fp8": "tensorwise", "heads": 4, "hidden": 64, "seq_len": 32}, {}),
    _beside_none({"dp": 2}, {"fp8": "tensorwise", "heads": 4, "hidden": 64, "seq_len": 32}, {}),
]


@pytest.mark.slow
@on_ranks(2, layout_ranks.run_rank, list(itertools.chain(*ON_TWO)), 2)
def test_recomputation_changes_no_bit_in_any_layout(work: Work, by_rank: ByRank) -> None:
    found = by_rank(work)[0]
    for index, jobs in enumerate(ON_TWO):
        expected, *others = found[3 * index : 3 * index + 3]
        for job, got in zip(jobs[1:], others, strict=True):
            assert same_bits(got, expected), f"{job.parallel}; {job.model}"


@pytest.mark.parametrize("modules", ["mlp_act", "mlp_act layernorm"])
@pytest.mark.parametrize("shape", [{}, LLAMA, {"parallel_block": True}], ids=["gpt", "llama", "parallel"])
def test_weights_gradients_that_wait_keep_outputs_and_no_more_what_they_are_computed_from(
    shape: dict[str, Any], modules: str
) -> None:
    """After the backward pass that defers, linears hold what they did without recomputation: nothing twice."""
    held = {}
    for names in ("none", modules):
        level = {"recompute": "none"} if names == "none" else {"recompute": "selective", "recompute_modules": names}
        gpt = build_model(ModelConfig(**{**SHAPE, **shape}, **level), 0, CPU)
        sharded = ShardedDataParallel(gpt, units=gpt.units)
        tokens = torch.zeros(4, 32, dtype=torch.int64)
        with Held() as tensors:
            with sharded.no_sync(), sharded.defer_weight_grads() as deferred:
                loss = sharded(tokens, tokens)
                loss.backward()
            held[names] = tensors.num_bytes()
            deferred.compute()
    assert held[modules] == held["none"]


class Held(torch.utils._python_dispatch.TorchDispatchMode):
    """Storages that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_iter(result):
            if isinstance(each, Tensor) and each.numel() >= 32 * 4 * 64 and each.shape[-1] != 64 * 64:
                self._storages.append(torch.multiprocessing.reductions.StorageWeakRef(each.untyped_storage()))
        return result

    def num_bytes(self) -> int:
        alive = {ref.cdata: ref for ref in self._storages if not ref.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(cdata).nbytes() for cdata in alive)


def test_the_kernel_of_the_gradient_gives_the_output_and_runs_once() -> None:
    """No activation is computed a second time by itself, and its own backward takes what was left for it."""
    config = model_of("mlp_act")
    gpt = build_model(config, 0, CPU)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with mock.patch.object(activation, "_plain_backward", wraps=activation._plain_backward) as backward:
        gpt(tokens, tokens).backward()
    assert backward.call_count == config.layers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("layernorm,mlp_act", "mlp_act layernorm"),
        (["core_attn", "mlp_act"], "mlp_act core_attn"),
        ("mlp_act mlp_act", "mlp_act"),
    ],
)
def test_modules_are_read_as_a_list_or_a_line(value: object, expected: str) -> None:
    assert ModelConfig(recompute_modules=value).recompute_modules == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"), [("mlp", "mlp: is not one of mlp_act, layernorm"), ([], "recompute = none")]
)
def test_other_modules_are_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        JobConfig.model_validate({"model": {"recompute_modules": value}})
    assert words in str(refused.value)
