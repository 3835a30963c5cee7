"""Datasets that a job trains on where its samples count up through epochs: those of job.data, or its text as one.

Read before any rank starts, so that a dataset that cannot be used, or is another than the checkpoint's, costs a line
and no rank's traceback. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from trainer.checkpoint.meta import Meta
from trainer.data.arrays import corpus_dataset, open_dataset
from trainer.data.dataset import TokenFolder
from trainer.data.prepare import Corpus, CorpusFacts
from trainer.data.sampler import DATASETS, BatchPlan, SamplerSpec, Source, changes
from trainer.data.source import check_some_ids

EVALUATION = "job.data.evaluation"
TEXT = ""
"""Name of the held-out text where it is no dataset of job.data.evaluation."""


@dataclass(frozen=True)
class Mixture:
    """Datasets of a job: takes the place of a `Corpus` where job.data.datasets has some.

    Args:
        facts: for the record.
        identity: digest of all datasets and their shares; there is no tokenizer.
    """

    facts: CorpusFacts
    identity: Mapping[str, str]

    def note_in_use(self) -> None:
        """Do nothing: no cache drops them."""


def sampler_spec(job: JobConfig, corpus: Corpus | Mixture, seed: int) -> SamplerSpec:
    """Return the samples of a job, for whoever reads them."""
    model, data = job.model, job.data
    sources: list[Callable[[], Source]] = [
        partial(_open_source, name, config.path, config.weight, config.loss_mask, model.vocab_size)
        for name, config in data.datasets.items()
    ]
    if isinstance(corpus, Corpus):
        sources = [partial(_open_text, corpus, "train", model.vocab_size)]
    return SamplerSpec(tuple(sources), model.seq_len, seed, data.packing)


def evaluation_specs(job: JobConfig, corpus: Corpus | Mixture) -> dict[str, SamplerSpec]:
    """Return the evaluation sets by name."""
    model, data = job.model, job.data
    if isinstance(corpus, Corpus):
        sources: dict[str, Callable[[], Source]] = {TEXT: partial(_open_text, corpus, "validation", model.vocab_size)}
    else:
        sources = {
            name: partial(_open_source, name, path, 1.0, "", model.vocab_size, EVALUATION)
            for name, path in data.evaluation.items()
        }
    return {name: SamplerSpec((source,), model.seq_len, 0, data.packing) for name, source in sources.items()}


def prepare_mixture(job: JobConfig) -> Mixture:
    """Open the datasets of job.data.

    Raises:
        ConfigError: one cannot be read, is too short, holds a token that the model lacks, or is of another tokenizer.
    """
    empty = Mixture(CorpusFacts(0, 0, 0, 0, 0, 0, 0, cache_hit=True), {})
    sampler = sampler_spec(job, empty, seed=0).open()
    held_out = {name: spec.open() for name, spec in evaluation_specs(job, empty).items()}
    sources = [*sampler.sources, *(each.sources[0] for each in held_out.values())]
    _check_tokenizers(sources)
    for source in sources:
        check_some_ids(source.dataset, job.model.vocab_size, source.field)
    state = {"train": sampler.state(), "evaluation": {name: each.state() for name, each in held_out.items()}}
    digest = hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
    facts = CorpusFacts(
        train_files=len(job.data.datasets),
        validation_files=len(held_out),
        skipped_files=0,
        text_bytes=0,
        train_tokens=sum(source.dataset.num_tokens for source in sampler.sources),
        validation_tokens=sum(each.sources[0].dataset.num_tokens for each in held_out.values()),
        vocab_size=job.model.vocab_size,
        cache_hit=True,
    )
    return Mixture(facts, {"text": digest, "tokenizer": "none"})


def check_samples(job: JobConfig, corpus: Corpus | Mixture, before: Meta | None) -> None:
    """Check what a run will read, and that one which resumes reads what its checkpoint was trained on.

    Args:
        before: the checkpoint.

    Raises:
        ConfigError: a dataset grew, shrank, changed, came or went since the checkpoint, and the job does not say that
            it means to go on; or the run would read one more often than job.data.max_epochs.
    """
    if before is not None and before.is_fresh:
        before = None
    if not job.data.counts_samples:
        if before is not None and before.data is not None and not job.checkpoint.allow_dataset_change:
            raise _another(before, "it counted its samples through epochs, and this job draws them with replacement")
        return
    sampler = sampler_spec(job, corpus, seed=0).open()
    plan = batch_plan(job, before)
    num_samples = plan.start(job.optimizer.steps + 1)
    sampler.check_length(num_samples, job.data.max_epochs, job.batch.global_batch_size)
    if before is None or job.checkpoint.allow_dataset_change:
        return
    if before.data is None:
        raise _another(before, "it drew its samples with replacement, and this job counts them through epochs")
    if lines := changes(before.data, sampler.state()):
        raise _another(before, "; ".join(lines))


def batch_plan(job: JobConfig, before: Meta | None) -> BatchPlan:
    """Return the samples of each step; a run that resumes counts on where its checkpoint stopped."""
    if before is None:
        return BatchPlan(job.batch, job.parallel.data_ranks)
    had = 0 if before.data is None else int(before.data["num_samples"])
    return BatchPlan(job.batch, job.parallel.data_ranks, before.step + 1, had)


def _open_source(
    name: str, path: str, weight: float, loss_mask: str, vocab_size: int, section: str = DATASETS
) -> Source:
    field = f"{section}.{name}"
    dataset = open_dataset(Path(path), name, vocab_size, field)
    mask_field = f"{field}.loss_mask"
    mask = open_dataset(Path(loss_mask), f"{name}.loss_mask", 2**31 - 1, mask_field) if loss_mask else None
    return Source(dataset, weight, mask, section)


def _check_tokenizers(sources: Sequence[Source]) -> None:
    """Raise ConfigError where two datasets were made by two tokenizers: an id would stand for two texts.

    Of files that do not say by which, nothing is known.
    """
    first: tuple[Source, str] | None = None
    for source in sources:
        digest = source.dataset.tokenizer_digest if isinstance(source.dataset, TokenFolder) else None
        if digest is None:
            continue
        if first is not None and first[1] != digest:
            rule = f"was made by another tokenizer than {first[0].field}"
            raise ConfigError(source.field, None, rule, "prepare both with one tokenizer.json")
        first = first or (source, digest)


def _open_text(corpus: Corpus, side: str, vocab_size: int) -> Source:
    return Source(corpus_dataset(corpus, side, vocab_size))


def _another(before: Meta, rule: str) -> ConfigError:
    remedy = (
        "give what it was trained on, or set job.checkpoint.allow_dataset_change to true: samples then go on by "
        "their number, so that of what changed some come again and some do not"
    )
    return ConfigError(DATASETS, None, f"{rule}, since {before.path}", remedy)
