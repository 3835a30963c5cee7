import torch

import netlayer.init_method  # redis://, rediss:// and unix:// addresses as init_method
from collectives.sharded import ShardedDataParallel

# Rank and world size come from RANK and WORLD_SIZE, as torchrun sets them, or from rank= and world_size=.
torch.distributed.init_process_group("gloo", init_method="redis://127.0.0.1:6379/my-run")
model = ShardedDataParallel(torch.nn.Linear(64, 64), bucket_bytes=64 << 20)
optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)
for _ in range(10):  # your loop stays as it is
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)  # in one collective; torch.nn.utils.clip_grad_norm_ works too
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
