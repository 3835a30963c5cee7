"""Systems that `bench.data_idle` compares: each gives the trainer its batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bench.data_idle.rows import WEIGHTS, Order
from trainer.checkpoint.meta import Meta
from trainer.data.mixture import Mixture, batch_plan, sampler_spec
from trainer.data.sampler import BatchPlan, SamplerSpec
from trainer.feed import Feed, SampleFeed
from trainer.loss_scale import LossScale
from trainer.model.packed import NO_TARGET, Packed
from trainer.parallel import Batches, ParallelModel


def _open_ours(order: Order, mixture: Mixture, model: ParallelModel, *, loader: bool) -> Feed:
    data = order.job.data.model_copy(update={"loader": loader})
    return SampleFeed(order.job.model_copy(update={"data": data}), mixture, model)


class SampleDataset(Dataset[dict[str, torch.Tensor]]):
    """The samples of our sampler, one by one: what a user of torch's `DataLoader` would write."""

    def __init__(self, spec: SamplerSpec) -> None:
        self._sampler = spec.open()

    def __len__(self) -> int:
        return 2**62  # it goes through epochs by itself

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = self._sampler.read(range(index, index + 1))
        assert rows.segments is not None
        assert rows.mask is not None
        return {
            "tokens": torch.from_numpy(rows.tokens[0]),
            "segments": torch.from_numpy(rows.segments[0]),
            "mask": torch.from_numpy(rows.mask[0]),
        }


class LoaderFeed:
    """Batches of a dataset behind torch's `DataLoader`, with one worker and pinned memory.

    Args:
        read: makes tokens [B, T + 1], segments [B, T] and mask [B, T] of what the loader gives, on the device.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        model: ParallelModel,
        read: Callable[[dict[str, torch.Tensor], torch.device], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> None:
        self._plan, self._model, self._read = plan, model, read
        size = model.job.batch.micro_batch_size
        dp = model.place.dp
        self._count = plan.most_samples // size
        indices = (
            list(plan.samples(step, dp))[first : first + size]
            for step in range(1, 2**31)
            for first in range(0, plan.most_samples, size)
        )
        self._loader: DataLoader[dict[str, torch.Tensor]] | None = DataLoader(
            dataset,
            batch_sampler=_Batches(indices),
            num_workers=1,
            pin_memory=model.device.type == "cuda",
            persistent_workers=True,
        )
        self._batches: Iterator[dict[str, torch.Tensor]] = iter(self._loader)

    def open(self, seed: int, steps_done: int, resumed: Meta | None) -> None:
        """Do nothing: the worker has begun."""

    def training(self, step: int) -> Batches:  # noqa: ARG002  (they come in order)
        device, model = self._model.device, self._model
        rows = [self._read(next(self._batches), device) for _ in range(self._count)]
        # As ours: the loss is the mean over the targets that count.
        counts_2 = model.zero().new_zeros(2)
        if model.is_last and model.place.tp == 0:
            counts_2[0] = sum(mask.numel() for _, _, mask in rows)
            counts_2[1] = torch.stack([mask.sum() for *_, mask in rows]).sum()
        scale = LossScale()
        scale.add_up(model, counts_2)
        return [
            (tokens[:, :-1], tokens[:, 1:].masked_fill(~mask, NO_TARGET), Packed(segments, scale))
            for tokens, segments, mask in rows
        ]

    def next_counts(self, step: int) -> None:
        """Return nothing: each batch is added up as it is handed out."""

    def note_counts(self, counts_2: torch.Tensor | None) -> None:
        """Do nothing: there are none."""

    waits = False

    def evaluation(self, global_batches: int) -> Iterator[tuple[str, Batches]]:
        raise NotImplementedError

    def state(self, steps_done: int) -> None:
        """Return nothing."""

    def close(self) -> None:
        # Its workers end with its iterator.
        self._batches = iter(())
        self._loader = None


class _Batches:
    """A batch sampler of an iterator."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices


def _open_torch(order: Order, mixture: Mixture, model: ParallelModel) -> Feed:
    def read(batch: dict[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, segments, mask = (batch[key].to(device, non_blocking=True) for key in ("tokens", "segments", "mask"))
        return tokens.to(torch.int64), segments, mask.to(torch.bool)

    dataset = SampleDataset(sampler_spec(order.job, mixture, order.seed))
    return LoaderFeed(dataset, batch_plan(order.job, None), model, read)


def _open_megatron(order: Order, mixture: Mixture, model: ParallelModel) -> Feed:  # noqa: ARG001  (it reads the files)
    """Open its blended dataset; rank 0 builds the indices first, as Megatron does."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    job = order.job
    blend = [str(order.prefixes[name]) for name in WEIGHTS], list(WEIGHTS.values())
    config = GPTDatasetConfig(
        random_seed=order.seed,
        sequence_length=job.model.seq_len,
        blend=blend,
        split="1,0,0",
        path_to_cache=str(order.cache / "megatron"),
        tokenizer=_Tokenizer(job.model.vocab_size),
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,  # of T x T values a sample: positions say the same
    )
    num_samples = (order.warmup + order.steps + 4) * job.batch.global_batch_size
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config)
    [dataset, *_] = builder.build()

    def read(batch: dict[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, labels, positions, mask = (
            batch[key].to(device, non_blocking=True) for key in ("tokens", "labels", "position_ids", "loss_mask")
        )
        segments = (positions == 0).cumsum(1, dtype=torch.int32) - 1
        return torch.cat([tokens, labels[:, -1:]], 1), segments, mask.to(torch.bool)

    return LoaderFeed(dataset, batch_plan(job, None), model, read)


class _Tokenizer:
    """Answers to what Megatron's dataset asks of a tokenizer."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod, self.pad = vocab_size, 0, 0
        self.unique_identifiers = {"class": "random tokens"}


OPENERS: dict[str, Callable[[Order, Mixture, ParallelModel], Feed]] = {
    "loader": functools.partial(_open_ours, loader=True),
    "no_prefetch": functools.partial(_open_ours, loader=False),
    "torch": _open_torch,
    "megatron": _open_megatron,
}
