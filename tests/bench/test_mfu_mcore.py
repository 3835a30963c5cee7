"""`bench.peers.mcore` as far as it goes without GPUs: its settings, and our initial values in its order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.mfu.run import by_processes, in_turn
from bench.mfu.systems import PEERS, Entry
from bench.peers.mcore import (
    TorchAttention,
    TorchNorm,
    check,
    data_parallel_settings,
    is_installed,
    optimizer_settings,
    transformer_settings,
)
from bench.peers.mcore_values import by_head, copy_values, renamed
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import ConfigError
from netlayer.workload.stages import half_blocks
from trainer.model.gpt import build_model
from trainer.ops.attention import attention

CPU = torch.device("cpu")


def job(**changes: object) -> JobConfig:
    model = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 64, "vocab_size": 32, "seq_len": 8}
    tree = {
        "model": model | {"dtype": "bfloat16"} | changes,
        "parallel": {"tp": 2, "pp": 2, "dp": 1, "vpp": 2},
        "batch": {"micro_batch_size": 1, "global_batch_size": 4},
        "optimizer": {"lr": 1e-4, "max_grad_norm": 0.5, "weight_decay": 0.2},
    }
    return build_config({"cluster": {"gpus_per_server": 4}, "job": tree}).job


def test_overlap_is_of_parameters_gradients_and_messages() -> None:
    on, off = (transformer_settings(job(), overlap=overlap) for overlap in (True, False))
    assert (on["overlap_p2p_comm"], on["batch_p2p_comm"]) == (True, False)
    assert (off["overlap_p2p_comm"], off["batch_p2p_comm"]) == (False, False)
    assert (on["deallocate_pipeline_outputs"], off["deallocate_pipeline_outputs"]) == (False, True)
    assert on["sequence_parallel"]
    assert on["virtual_pipeline_model_parallel_size"] == 2
    spread = job().model_copy(update={"parallel": job().parallel.model_copy(update={"dp": 2})})
    assert data_parallel_settings(spread)["overlap_param_gather"]
    assert not data_parallel_settings(job())["overlap_grad_reduce"]  # of one rank: there is nothing to reduce
    settings = optimizer_settings(job())
    assert (settings["clip_grad"], settings["weight_decay"], settings["bf16"]) == (0.5, 0.2, True)


def test_messages_both_ways_between_two_stages_are_no_batch() -> None:
    """Sends and receives of a batch between the same two ranks match in order, and theirs are in different orders."""
    plain = job().model_copy(update={"parallel": job().parallel.model_copy(update={"vpp": 1})})
    assert transformer_settings(plain, overlap=False)["batch_p2p_comm"]
    assert not transformer_settings(job(), overlap=False)["batch_p2p_comm"]


def test_its_processes_have_one_hardware_queue_and_are_its_own() -> None:
    own_entry, mcore = Entry("ours", job()), Entry("mcore", job())
    assert dict(mcore.env) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert mcore.processes != own_entry.processes
    assert mcore.processes == Entry("mcore_no_overlap", job()).processes
    assert set(PEERS) > {"mcore", "mcore_no_overlap"}


def test_without_interleaved_stages_there_is_no_overlap_to_leave_out() -> None:
    plain = job().model_copy(update={"parallel": job().parallel.model_copy(update={"vpp": 1})})
    with pytest.raises(ConfigError, match=r"--peers mcore_no_overlap = vp 1: has no interleaved stages.*; name mcore"):
        check(plain, "nccl", overlap=False)


def test_changes_of_ours_share_its_processes_and_take_their_turns_beside_it() -> None:
    entries = [Entry("ours", job()), Entry("mcore", job()), Entry("ours", job(), "loop.cuda_graph=true")]
    turns = in_turn(entries, 5)
    assert [entry.name for _, entry in turns[:3]] == ["ours", "ours: loop.cuda_graph=true", "mcore"]
    assert [entry.name for run, entry in turns if run == 2] == ["mcore", "ours: loop.cuda_graph=true", "ours"]
    assert len(list(by_processes(turns))) == 6


def test_gelu_is_of_the_tanh_form_with_a_bias_and_without() -> None:
    with_bias, without = (transformer_settings(job(bias=bias), overlap=True) for bias in (True, False))
    assert with_bias["bias_activation_fusion"]
    assert not without["bias_activation_fusion"]
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(without["activation_func"](x), nn.functional.gelu(x, approximate="tanh"))


def test_heads_of_queries_stand_beside_their_key() -> None:
    """Two heads of keys, each of two queries; a row says what it is: 100s queries, 200s keys, 300s values."""
    config = job().model  # a head has 8 rows
    queries, keys, values = torch.arange(100, 132), torch.arange(200, 216), torch.arange(300, 316)
    grouped = by_head(torch.cat([queries, keys, values])[:, None], config).flatten()
    first = torch.cat([queries[:16], keys[:8], values[:8]])
    assert torch.equal(grouped, torch.cat([first, torch.cat([queries[16:], keys[8:], values[8:]])]))


def test_layers_count_from_0_in_a_run_and_matrices_are_cut() -> None:
    gpt = build_model(job().model, 0, CPU, half_blocks(range(2, 4)))
    parameters = dict(renamed(gpt, rank=1, world_size=2))
    assert parameters["decoder.layers.0.mlp.linear_fc1.weight"].shape == (32, 32)
    assert torch.equal(parameters["decoder.layers.1.mlp.linear_fc2.weight"], gpt.blocks["3"].down.weights[0][:, 32:])
    assert parameters["decoder.layers.0.self_attention.linear_proj.bias"].shape == (32,)
    assert parameters["output_layer.weight"].shape == (16, 32)
    assert not [name for name in parameters if name.startswith("embedding")]


def test_a_parameter_without_values_is_an_error() -> None:
    gpt, module = build_model(job().model, 0, CPU, half_blocks(range(1, 2))), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="has no such parameter"):
        copy_values(gpt, module, 0, 1)


def test_attention_and_norm_are_ours() -> None:
    q, k, v = torch.randn(8, 1, 4, 8), torch.randn(8, 1, 2, 8), torch.randn(8, 1, 2, 8)
    expected = attention(*(each.permute(1, 2, 0, 3) for each in (q, k, v)))
    output = TorchAttention(config=None)(q, k, v, None, attn_mask_type=None)
    assert torch.equal(output.view(8, 1, 4, 8), expected.permute(2, 0, 1, 3))
    norm = TorchNorm(SimpleNamespace(sequence_parallel=True), hidden_size=8, persist_layer_norm=False)
    assert norm.weight.sequence_parallel


@pytest.mark.skipif(not is_installed(), reason="there is no megatron.core")
@pytest.mark.filterwarnings("ignore")  # what it warns of as it is imported
def test_its_config_takes_our_settings() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert TransformerConfig(**transformer_settings(job(), overlap=True)).kv_channels == 8
    DistributedDataParallelConfig(**data_parallel_settings(job()))
    OptimizerConfig(**optimizer_settings(job()))
