"""Lightning's Trainer over ShardedDataParallel: `python examples/lightning_sharded.py` trains on two CPU processes.

The strategy wraps the module, and saves optimiser states that any number of ranks loads. The module takes its optimiser
from the wrapper, and clips through it: Lightning's own clipping would see one rank's pieces of the gradients.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from collectives import ShardedDataParallel


class ShardedStrategy(DDPStrategy):
    """As DDPStrategy, with another wrapper."""

    def _setup_model(self, model: nn.Module) -> ShardedDataParallel:
        self.sharded = ShardedDataParallel(model)  # kept: `self.model` is the bare module again once fit() is through
        return self.sharded

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """By names and whole: every rank calls it, and rank 0 saves it."""
        return self.sharded.full_optimizer_state_dict(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.sharded.load_full_optimizer_state_dict(optimizer, state)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = (self.body(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.trainer.strategy.sharded.optimizer(torch.optim.AdamW, lr=0.01)

    def configure_gradient_clipping(self, _optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        if gradient_clip_val is not None:
            self.trainer.strategy.sharded.clip_grad_norm_(gradient_clip_val)


def train(folder: str, epochs: int, checkpoint: str | None = None, **settings: Any) -> tuple[Regression, Any]:
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=ShardedStrategy(start_method="popen", **settings),
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Regression()
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module, trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        module, trainer = train(folder, 10)
        assert module.losses[-1] < 0.5 * module.losses[0], module.losses
        path = trainer.strategy.broadcast(f"{folder}/last.ckpt")
        trainer.save_checkpoint(path)
        resumed, _ = train(folder, 12, path)
        straight, trainer = train(folder, 12)  # without the interruption
        for parameter, other in zip(resumed.parameters(), straight.parameters(), strict=True):
            assert torch.allclose(parameter, other, rtol=0, atol=1e-6)
        trainer.strategy.barrier()
