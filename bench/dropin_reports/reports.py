"""Table of the public reports, each with its program, and runs of a program in processes of its own."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.dropin_reports import programs, shard_programs
from bench.dropin_reports.sides import Side

_LIMIT_S = 60.0
_GRACE_S = 4.0
_TOLERANCE = 1e-6
_MESSAGE_CHARS = 240
_IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


@dataclass(frozen=True)
class Report:
    """A public report, and the program that stands for it."""

    address: str
    situation: str
    case: Callable[[Side], list[Tensor]]


_GITHUB = "https://github.com/"
REPORTS = [
    Report(f"{_GITHUB}{address}", situation, case)
    for address, situation, case in (
        ("pytorch/pytorch/issues/98501", "gradients of FSDP are not those of DDP", programs.plain_training),
        ("verl-project/verl/issues/7493", "gradients of other ranks do not count", programs.first_step_is_of_all_ranks),
        (
            "pytorch/pytorch/issues/110363",
            "two forward passes through a batch norm before one backward pass",
            programs.two_forward_passes_with_batch_norm,
        ),
        (
            "pytorch/pytorch/issues/175024",
            "a critic with a batch norm sees real and made-up inputs before one backward pass",
            programs.two_forward_passes_with_batch_norm,
        ),
        (
            "pytorch/pytorch/issues/63916",
            "buffers that forward() assigns anew differ by rank",
            programs.buffers_that_are_assigned_anew,
        ),
        ("pytorch/pytorch/issues/68862", "parameters that are never used", programs.unused_parameters),
        (
            "facebookresearch/moco/issues/14",
            "weight decay of parameters without gradients",
            programs.weight_decay_without_gradients,
        ),
        ("pytorch/pytorch/issues/57473", "parameters that only some steps use", programs.branches_that_take_turns),
        (
            "pytorch/pytorch/issues/82070",
            "copy.deepcopy of the wrapped model for a moving average",
            programs.a_copy_as_moving_average,
        ),
        (
            "facebookresearch/fairscale/issues/789",
            "torch's AveragedModel of the module during training",
            programs.averaged_model_of_torch,
        ),
        (
            "pytorch/pytorch/issues/117742",
            "parameters written by hand between steps",
            programs.parameters_written_by_hand,
        ),
        ("pytorch/pytorch/issues/148434", "masks of a weight's shape applied to it", programs.masks_on_weights),
        (
            "pytorch/pytorch/issues/170862",
            "torch's clip_grad_norm_ returns the norm of a shard",
            programs.clipping_by_torch,
        ),
        ("pytorch/pytorch/issues/72548", "clipping by the norm of sharded gradients", programs.clipping_by_torch),
        (
            "facebookresearch/fairscale/issues/605",
            ".grad = None of a layer for the first steps",
            programs.gradients_set_to_none_at_first,
        ),
        ("huggingface/accelerate/issues/807", "a layer is frozen before wrapping", programs.frozen_before_wrapping),
        ("pytorch/pytorch/issues/104148", "a layer is unfrozen during training", programs.unfrozen_after_some_steps),
        ("NVIDIA/apex/issues/647", "names in checkpoints begin with module.", programs.names_in_checkpoints),
        (
            "huggingface/accelerate/issues/3971",
            "an optimiser's distributed checkpoint cannot be loaded: the step is missing",
            programs.a_distributed_checkpoint_goes_on,
        ),
        (
            "pytorch/pytorch/issues/124546",
            "names of parameters in an optimiser's state",
            programs.names_of_optimizer_states,
        ),
        (
            "facebookresearch/fairscale/pull/537",
            "an optimiser's state is loaded on another number of ranks",
            programs.an_optimizer_state_for_one_rank,
        ),
        (
            "pytorch/pytorch/issues/136336",
            "a plain state dict is loaded into the wrapped module",
            programs.a_plain_state_is_loaded,
        ),
        ("pytorch/torchtitan/issues/1524", "first and last layer share a weight", programs.tied_weights),
        (
            "huggingface/transformers/issues/23018",
            "checkpoint(use_reentrant=True) of each block",
            programs.reentrant_recomputation,
        ),
        (
            "allenai/longformer/issues/63",
            "checkpoint(use_reentrant=True) of one block twice in a pass",
            programs.reentrant_recomputation_of_one_block_twice,
        ),
        (
            "huggingface/transformers/pull/34645",
            "accumulation without a reduction each pass",
            programs.accumulation_under_no_sync,
        ),
        (
            "NVIDIA/cosmos-framework/issues/161",
            "a helper that holds reductions back asks isinstance(model, DistributedDataParallel); it has no effect",
            programs.accumulation_by_a_helper_for_ddp,
        ),
        (
            "facebookresearch/fairscale/issues/918",
            "several forward passes, then their backward passes",
            programs.several_forward_passes_then_several_backward,
        ),
        (
            "pytorch/pytorch/issues/101335",
            "a method of the module other than forward() is called",
            programs.a_method_other_than_forward,
        ),
        (
            "PrimeIntellect-ai/prime-rl/pull/2636",
            "ranks evaluate different numbers of batches",
            programs.uneven_evaluation,
        ),
        (
            "pytorch/pytorch/issues/33148",
            "ranks train different numbers of batches (Join)",
            programs.uneven_training_under_join,
        ),
        (
            "pytorch/pytorch/pull/115710",
            "GradScaler: an infinity on one rank skips its step alone",
            programs.an_infinity_on_one_rank,
        ),
        (
            "pytorch/pytorch/issues/99174",
            "GradScaler: a rank holds no part of any parameter",
            programs.a_scaler_where_ranks_hold_nothing,
        ),
        ("pytorch/pytorch/issues/101343", "weight decay of matrices alone", programs.weight_decay_by_shape),
        ("pytorch/pytorch/issues/109581", "Adafactor over shards", programs.adafactor),
        ("NVIDIA/Megatron-LM/issues/5533", "Muon over shards, beside AdamW", programs.muon_beside_adamw),
        (
            "pytorch/pytorch/issues/132068",
            "generator and critic in one model take turns, an optimiser each",
            programs.adversaries_that_take_turns,
        ),
        ("deepspeedai/DeepSpeed/issues/1229", "two optimisers over one model", programs.two_optimizers_step_together),
        ("pytorch/pytorch/pull/28910", "optimizer.step(closure)", programs.a_closure),
        ("NeuroDiffGym/neurodiffeq/issues/159", "LBFGS, which calls its closure several times", programs.lbfgs),
        (
            "pytorch/pytorch/issues/134954",
            "a compiled model is compiled again",
            programs.a_compiled_model_is_compiled_once,
        ),
        ("pytorch/pytorch/issues/76927", "torch.save of the wrapped model", programs.the_model_is_pickled),
        ("pytorch/tutorials/issues/2610", "a kernel's dimensions outside of forward()", programs.a_penalty_on_kernels),
        (
            "facebookresearch/fairscale/issues/1101",
            "hooks on parameters that change gradients",
            programs.hooks_that_scale_gradients,
        ),
        (
            "pytorch/pytorch/issues/187437",
            "a recomputed block is called twice before one backward pass",
            shard_programs.recomputation_of_one_block_twice,
        ),
        (
            "pytorch/pytorch/issues/153354",
            "a recomputed model is called twice before one backward pass, as preferences are learned",
            shard_programs.recomputation_of_one_block_twice,
        ),
        (
            "pytorch/pytorch/issues/106637",
            "two losses of one graph, whose first gradients are dropped",
            shard_programs.two_losses_of_one_graph,
        ),
        (
            "pytorch/pytorch/issues/63812",
            "a penalty on gradients, which are differentiated themselves",
            shard_programs.a_penalty_on_gradients_of_inputs,
        ),
        ("pytorch/pytorch/pull/197327", "inference mode between steps", shard_programs.inference_mode_between_steps),
        (
            "huggingface/transformers/issues/37186",
            "some batches have no images: only some ranks use the vision part",
            shard_programs.images_on_some_ranks_alone,
        ),
        (
            "deepspeedai/DeepSpeed/issues/4808",
            "experts of a mixture run in another order on each rank",
            shard_programs.experts_in_another_order_on_each_rank,
        ),
        (
            "facebookresearch/fairscale/issues/796",
            "each rank drops layers at random",
            shard_programs.layers_dropped_at_random,
        ),
        (
            "huggingface/transformers/issues/40382",
            "the token table is resized after wrapping",
            shard_programs.embeddings_resized_after_wrapping,
        ),
        (
            "meta-pytorch/torchforge/issues/592",
            "adapters beside frozen matrices (LoRA) get no gradients",
            shard_programs.adapters_beside_frozen_matrices,
        ),
        (
            "pytorch/pytorch/issues/169448",
            "a full state of a model with frozen parameters",
            shard_programs.a_full_state_with_frozen_parameters,
        ),
        (
            "deepspeedai/DeepSpeed/issues/966",
            "the last layer has the first one's parameters",
            shard_programs.a_layer_that_ends_the_model_begins_it_too,
        ),
        (
            "pytorch/pytorch/pull/110948",
            "a frozen layer is used several times in a pass",
            shard_programs.a_frozen_layer_used_several_times,
        ),
        (
            "pytorch/pytorch/issues/117510",
            "a frozen layer gets an input with gradients that it does not read",
            shard_programs.a_frozen_layer_with_an_input_that_it_omits,
        ),
        (
            "meta-pytorch/torchrec/pull/3199",
            "clipping by the largest absolute value",
            shard_programs.clipping_by_the_largest_value,
        ),
        ("pytorch/pytorch/issues/77812", "layers return dataclasses", shard_programs.dataclasses_between_layers),
        (
            "pytorch/pytorch/issues/181832",
            "a view that a layer returns is changed in place",
            shard_programs.an_output_changed_in_place_by_a_view,
        ),
        (
            "facebookresearch/fairscale/issues/539",
            "groups of an optimiser by module",
            shard_programs.groups_of_an_optimizer_by_module,
        ),
        (
            "pytorch/pytorch/issues/149205",
            "the model is called before its optimiser is made",
            shard_programs.an_optimizer_made_after_a_forward_pass,
        ),
        (
            "ByteDance-Seed/VeOmni/pull/806",
            "a fused loss reads the head's weight itself, and keeps it for the backward pass",
            shard_programs.a_head_whose_weight_a_fused_loss_reads,
        ),
        (
            "pytorch/pytorch/issues/104187",
            "parameters are filled after a start on the meta device",
            shard_programs.values_given_after_a_start_on_the_meta_device,
        ),
    )
]


def outcome(case: Callable[[Side], list[Tensor]], name: str, rank: int, ranks: int) -> str:
    """Run the program on one side, and compare this rank's tensors with plain torch's."""
    expected = case(Side("plain"))
    try:
        actual = case(Side(name, rank, ranks))
    except Exception as exc:  # noqa: BLE001 - what is asked for
        message = " ".join(str(exc).split())
        return f"raises {type(exc).__name__}: {message[:_MESSAGE_CHARS]}"
    off = max(
        (float((a.double() - b.double()).abs().max()) for a, b in zip(actual, expected, strict=True) if a.numel()),
        default=0.0,
    )
    return "equal" if off < _TOLERANCE else f"differs by {off:.1e}"


def _run_rank(case: Callable[[Side], list[Tensor]], name: str, rank: int, ranks: int, folder: str) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    log = os.open(Path(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = f"file://{Path(folder, 'store')}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_LIMIT_S / 2)
    )
    text = outcome(case, name, rank, ranks)
    Path(folder, f"outcome{rank}").write_text(text)
    os._exit(0)  # a peer that waits is of no more use


def run(report: Report, name: str, ranks: int = 2) -> str:
    """Run a report's program on one side, and return the outcome of the rank that fares worst."""
    context = multiprocessing.get_context("fork")
    for module in _IMPORTED:  # once, and not by each process, to which it would be most of the time
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(report.case, name, rank, ranks, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end_s = time.monotonic() + _LIMIT_S
        while any(process.is_alive() for process in processes) and time.monotonic() < end_s:
            if not all(process.is_alive() for process in processes):  # the others may wait for what has failed
                end_s = min(end_s, time.monotonic() + _GRACE_S)
            time.sleep(0.05)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder, f"outcome{rank}") for rank in range(ranks)]
        outcomes = [file.read_text() for file in files if file.exists()]
    if not outcomes:
        return "does not end"
    # One that waits for a peer that has failed says so after a while, or never: that is no outcome of its own.
    waits = "does not end" if len(outcomes) < ranks and set(outcomes) == {"equal"} else ""
    return waits or max(outcomes, key=lambda text: (text != "equal", "imed out" not in text, "by peer" not in text))
