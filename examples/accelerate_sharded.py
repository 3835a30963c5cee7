"""Accelerate over ShardedDataParallel: `torchrun --nproc-per-node 2 examples/accelerate_sharded.py` trains on CPUs.

Wrap the model yourself, take the optimiser from the wrapper, and have Accelerate prepare the optimiser and the data,
but not the model, which it would wrap once more. The loop stays as it is.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from collectives import ShardedDataParallel

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(accelerator.device)
model = ShardedDataParallel(module)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
optimizer, loader = accelerator.prepare(model.optimizer(torch.optim.AdamW, lr=0.01), loader)
losses = []
for _epoch in range(20):
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
assert losses[-1] < 0.5 * losses[0], losses
assert accelerator.unwrap_model(model) is module
state = model.full_optimizer_state_dict(optimizer.optimizer)  # by names: it loads on any number of ranks
assert set(state["state"]) == {name for name, _ in module.named_parameters()}
accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
accelerator.end_training()
