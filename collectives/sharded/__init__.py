"""Sharded data parallel: buckets, gathers, reductions, optimiser steps and states.

Names load on first use, so that importing one module of the room does not import the others.

[Note: states] `state_dict()` of the wrapper or its module needs other ranks only where shards have changed and nothing
has launched their gathers (an optimiser of one's own, a `prefetch` of a number). `full_state_dict()` and the `load_` of
each are collective calls: every rank calls them, whoever keeps the result. `optimizer.state_dict()` is local, and holds
the state of this rank's shard alone: save it on every rank, a file each, and load it on as many ranks, wrapped with the
same arguments; it is refused elsewhere. `full_optimizer_state_dict()`, and what torch's `get_optimizer_state_dict` and
its kin give, is by names and loads in any layout (`collectives.sharded.optimizer_state`).

[Note: GradScaler] torch's scalers work as they are: reading the gradients finishes them, and an infinity on one rank is
one on all (`collectives.sharded.optimizer_steps`). bfloat16 needs no scaler.

[Note: torch.compile] Give `units`, and compile each of them (`unit.compile()`, or `unit.forward = torch.compile(...)`):
the wait is then outside the compiled region, and does not break its graph. Modules outside the units wait for
themselves: a graph around one of these, or of the whole wrapper, breaks there.

[Note: whole matrices] What Muon, SOAP or Shampoo steps must not be cut: `whole=lambda name, shape: ...` picks it. Each
of these parameters lies in the shard of one rank, who steps it for all, and who has it in its shape. They have buckets
of their own, padded to the rank that holds most: let a bucket hold several matrices for each rank (`bucket_bytes`), or
padding travels. Omit what is large and elementwise (embeddings). Two optimisers then share the wrapper:

    muon = model.optimizer(torch.optim.Muon, only=is_hidden_matrix, lr=0.02)
    adamw = model.optimizer(torch.optim.AdamW, only=lambda name, shape: not is_hidden_matrix(name, shape), lr=3e-4)

[Note: gradients without copies] An operator may write a parameter's gradient straight to where it travels from, or
where the optimiser reads it, and keep it wide (`collectives.sharded.slot`); what comes by autograd is copied there.

[Note: CUDA graphs] A step can be captured: warm up, `wait_parameters()`, then capture forward, backward, `step()` (of a
`capturable` optimiser), `zero_grad()`, and `wait_parameters()` as the last call, which joins every stream. Gathers then
run at the graph's end, with nothing to hide them. They run under the forward pass where the capture follows
`note_shards_changed()` and stands in `no_gathers_after_step()`, without `wait_parameters()` at its end; every replay is
followed by `note_shards_changed()`. Let go of a graph before its process groups: NCCL ends a communicator only when no
graph holds a call of it, and waits for that without end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.sharded.data_parallel import ShardedDataParallel as ShardedDataParallel
    from collectives.sharded.policies import MixedPrecision as MixedPrecision
    from collectives.sharded.policies import Overlap as Overlap
    from collectives.sharded.policies import Reshard as Reshard

__all__ = ["MixedPrecision", "Overlap", "Reshard", "ShardedDataParallel"]

__getattr__ = lazy_names(
    __name__,
    {
        "MixedPrecision": ".policies",
        "Overlap": ".policies",
        "Reshard": ".policies",
        "ShardedDataParallel": ".data_parallel",
    },
)
