"""The peer of Megatron-core with its local spec: its layers, schedules, distributed optimiser and overlap.

Attention is torch's as ours chooses it, norms are torch's, for neither Transformer Engine nor Apex is asked for: call
it "mcore, local spec". It has tensor with sequence parallelism, 1F1B and interleaved 1F1B, and shards the optimiser
over data-parallel ranks. Gathers of parameters and reductions of gradients run under the computation, and so do, with
`overlap`, the messages of an interleaved pipeline (on four H200 it was faster without). In bfloat16 its float32 masters
start from values rounded to bfloat16, as it makes them; so do all others, for its sake. Learnt of release 0.16.1.

Shapes: B sequences, T positions, H heads of this rank, K values a head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers.mcore_values import copy_values
from bench.peers.plain import check_plain, layers_of
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.workload.stages import half_blocks
from trainer.model.gpt import build_model
from trainer.ops.attention import attention
from trainer.ops.norm import EPS
from trainer.parallel import MicroBatch

ENV: Mapping[str, str] = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""One hardware queue: kernels of communication start in the order of their launch, which its overlap counts on."""


def check(job: JobConfig, backend: str, *, overlap: bool = True) -> None:
    """Refuse jobs that Megatron-core cannot run; it supports every layout except mcore_no_overlap without vpp.

    Raises:
        ConfigError: a model that `check_plain` rejects, float64, or no messages that could overlap.
        HardwareMissing: the package is not installed, or there is no GPU.
    """
    name = "mcore" if overlap else "mcore_no_overlap"
    check_plain(name, job)
    if not overlap and job.parallel.vpp == 1:
        rule = "has no interleaved stages, and Megatron-core overlaps messages of no others"
        raise ConfigError("--peers mcore_no_overlap", f"vp {job.parallel.vpp}", rule, "name mcore")
    if job.model.dtype == "float64":
        raise ConfigError("job.model.dtype", "float64", f"is none of --peers {name}", "give bfloat16 or float32")
    if not is_installed():
        raise HardwareMissing(f"--peers {name}: there is no megatron.core; pip install megatron-core==0.16.1")
    if backend != "nccl":
        raise HardwareMissing(f"--peers {name}: Megatron-core needs GPUs, and this runs on {backend}; omit it")


def transformer_settings(job: JobConfig, *, overlap: bool) -> dict[str, Any]:
    """Return the arguments of Megatron-core's `TransformerConfig`."""
    model, layout = job.model, job.parallel.layout
    is_bf16, is_interleaved = model.dtype == "bfloat16", layout.vpp > 1
    dtype = getattr(torch, model.dtype)
    # Between the same two ranks a batch of messages that goes both ways round has them taken for each other.
    are_batched = not (is_interleaved and (overlap or layout.pp == 2))
    # The fused bias and GeLU is of the tanh form, ours; its plain GeLU is not.
    activation = F.gelu if model.bias else functools.partial(F.gelu, approximate="tanh")
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.num_kv_heads,
        "ffn_hidden_size": model.ffn_hidden,
        "layernorm_epsilon": model.norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": model.bias,
        "activation_func": activation,
        "bias_activation_fusion": model.bias,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if is_interleaved else None,
        "bf16": is_bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Its interleaved schedule would give an output's memory back while a message under way still reads it.
        "deallocate_pipeline_outputs": not (overlap and is_interleaved),
        "overlap_p2p_comm": overlap and is_interleaved,
        "batch_p2p_comm": are_batched,
    }


def data_parallel_settings(job: JobConfig) -> dict[str, Any]:
    """Arguments of Megatron-core's `DistributedDataParallelConfig`."""
    return {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": job.parallel.dp > 1,
        "overlap_param_gather": job.parallel.dp > 1,
        "grad_reduce_in_fp32": job.overlap.reduce_dtype == "float32",
    }


def optimizer_settings(job: JobConfig) -> dict[str, Any]:
    """Arguments of Megatron-core's `OptimizerConfig`."""
    config = job.optimizer
    return {
        "optimizer": "adam",
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.beta1,
        "adam_beta2": config.beta2,
        "adam_eps": config.eps,
        "clip_grad": config.max_grad_norm,
        "bf16": job.model.dtype == "bfloat16",
        "params_dtype": getattr(torch, job.model.dtype),
        "use_distributed_optimizer": True,
        "overlap_param_gather": job.parallel.dp > 1,
    }


class Mcore:
    """One rank of it; one optimiser step at a time."""

    def __init__(self, job: JobConfig, seed: int, device: torch.device, *, overlap: bool = True) -> None:
        distributed = _megatron("distributed")
        self.job, self.device = job, device
        _open_groups(job, seed, device)
        config = _megatron("transformer.transformer_config").TransformerConfig(
            **transformer_settings(job, overlap=overlap)
        )
        wrapping = distributed.DistributedDataParallelConfig(**data_parallel_settings(job))
        stage = _megatron("parallel_state").get_pipeline_model_parallel_rank()
        modules = [_build(job, config, seed, device, stage, chunk) for chunk in range(job.parallel.vpp)]
        self.chunks = [
            distributed.DistributedDataParallel(config, wrapping, module, disable_bucketing=chunk > 0)
            for chunk, module in enumerate(modules)
        ]
        self.optimizer = _build_optimizer(job, self.chunks)
        config.no_sync_func = self._of_chunks([chunk.no_sync for chunk in self.chunks])
        if job.parallel.dp > 1:
            config.grad_sync_func = self._of_chunks([chunk.start_grad_sync for chunk in self.chunks])
            config.param_sync_func = self._of_chunks([chunk.start_param_sync for chunk in self.chunks])
        config.finalize_model_grads_func = distributed.finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self._forward_backward = _megatron("pipeline_parallel").get_forward_backward_func()
        self._position_1T = torch.arange(job.model.seq_len, device=device)[None]

    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run a step and return this rank's part of the mean loss, on the device; zero on all but the last stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=self._of_chunks([iter(batches) for _ in self.chunks]),
            model=self._of_chunks(self.chunks),
            num_microbatches=len(batches),
            seq_length=self.job.model.seq_len,
            micro_batch_size=self.job.batch.micro_batch_size,
            forward_only=False,
        )
        self.optimizer.step()
        return sum((each["loss"] / len(batches) for each in losses), torch.zeros((), device=self.device))

    def masters(self) -> Sequence[Tensor]:
        """None: they are made of what it computes with."""
        return ()

    def close(self) -> None:
        """Nothing: all of it is memory, and its groups serve the next one."""

    def _of_chunks(self, each: list[Any]) -> Any:
        """One where the pipeline is not interleaved, as its functions want it."""
        return each if self.job.parallel.vpp > 1 else each[0]

    def _forward(self, batches: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        tokens_BT, targets_BT = next(batches)
        position_BT = self._position_1T.expand_as(tokens_BT)
        output: Tensor = chunk(tokens_BT, position_BT, None, labels=targets_BT)
        return output, _mean_loss


def _mean_loss(loss_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_BT.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first one in place


def is_installed() -> bool:
    """Return True if Megatron-core is installed."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def _megatron(module: str) -> Any:
    """A module of its package, which ours does not depend on and no type is known of."""
    return importlib.import_module(f"megatron.core.{module}")


def _open_groups(job: JobConfig, seed: int, device: torch.device) -> None:
    """Make Megatron-core's process groups, with our order of ranks; once a process."""
    parallel_state = _megatron("parallel_state")
    if parallel_state.model_parallel_is_initialized():
        return
    layout = job.parallel.layout
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, create_gloo_process_groups=False
    )
    if device.type == "cuda":
        _megatron("tensor_parallel").model_parallel_cuda_manual_seed(seed)


def _build(job: JobConfig, config: Any, seed: int, device: torch.device, stage: int, chunk: int) -> nn.Module:
    """The run of layers of a chunk, with our initial values."""
    layout = job.parallel.layout
    layers = layers_of(job, stage, chunk)
    module = (
        _megatron("models.gpt.gpt_model")
        .GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(len(layers)),
            vocab_size=job.model.vocab_size,
            max_sequence_length=job.model.seq_len,
            pre_process=layers.start == 0,
            post_process=layers.stop == job.model.layers,
            share_embeddings_and_output_weights=False,
            position_embedding_type="learned_absolute",
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        .to(device)
    )
    rank = _megatron("parallel_state").get_tensor_model_parallel_rank()
    copy_values(build_model(job.model, seed, device, half_blocks(layers)), module, rank, layout.tp)
    if not config.bf16:
        return module  # type: ignore[no-any-return]
    return _megatron("transformer.module").Float16Module(config, module)  # type: ignore[no-any-return]


def _block_spec(num_layers: int) -> Any:
    """Return the specification of Megatron-core's own layers, with other attention and norms."""
    layer = _megatron("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    layer.submodules.self_attention.submodules.core_attention = TorchAttention
    block = _megatron("transformer.transformer_block")
    return block.TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TorchNorm)


def _build_optimizer(job: JobConfig, chunks: Sequence[nn.Module]) -> Any:
    package = _megatron("optimizer")
    config = package.OptimizerConfig(**optimizer_settings(job))
    optimizer = package.get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Its schedule of learning rates would do this each step: vectors have factor 0.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        group["fused"] = True  # torch's AdamW stands in for Apex's, which is
    if not job.optimizer.max_grad_norm:  # it would take the norm all the same, and let the host wait for every gradient
        optimizer.get_grad_norm = lambda: 0.0
    return optimizer


class TorchAttention(nn.Module):
    """Core attention as ours has it: the best that torch has for the device."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q_TBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q_TBHK, k_TBGK, v_TBGK))
        return attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


class TorchNorm(nn.LayerNorm):
    """torch's LayerNorm, whose gradients are added up over ranks that have some of the positions."""

    def __init__(self, config: Any, hidden_size: int, eps: float = EPS, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
