"""Sampler of a run: each sample's tokens are a function of (seed, sample) alone, for any layout and micro-batch.

A run's samples count up from 0 over all steps and ranks. A blend says of which dataset sample k is; that dataset's
samples go through its windows in epochs, each window once an epoch, in an order of the epoch's own. So nothing is
carried from step to step: a run that resumes computes what it would have had.

A window is T + 1 tokens of the stream of all documents, T from the next. With `packing` "documents" the row is cut
where documents begin: each piece is a segment, for attention within it, and the token that begins a document is no
target.

Not covered: packing documents whole (one that crosses a window's end goes on in another sample), and the few tokens
at the end of a stream that fill no window.

Shapes: N samples, T positions, D datasets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import BatchConfig
from netlayer.errors import ConfigError
from trainer.data.order import Blend, Permutation
from trainer.data.source import TokenDataset
from trainer.ramps import batch_size, samples_before

Packing = Literal["stream", "documents"]
DATASETS = "job.data.datasets"


@dataclass(frozen=True)
class Source:
    """One dataset of a blend.

    Args:
        weight: of its share of the samples.
        loss_mask: as many tokens as `dataset` has, 0 for each that is no target; None: all are.
        section: of the job that names the dataset, for errors.
    """

    dataset: TokenDataset
    weight: float = 1.0
    loss_mask: TokenDataset | None = None
    section: str = DATASETS

    @property
    def field(self) -> str:
        """Key of the job that names the dataset."""
        return f"{self.section}.{self.dataset.name}"


@dataclass
class Rows:
    """Samples as the model takes them.

    Args:
        tokens: [N, T + 1], inputs and the token behind the last.
        segments: [N, T], which of the row's segments each position is in, from 0; None: all are in one.
        mask: [N, T], 0 where the token that follows is no target; None: all are targets.
    """

    tokens: NDArray[np.int32]
    segments: NDArray[np.int32] | None = None
    mask: NDArray[np.uint8] | None = None

    @property
    def positions(self) -> NDArray[np.int32]:
        """Return the position of each token in its segment, [N, T]."""
        return positions_of(self.segments) if self.segments is not None else _same_rows(self.tokens)

    def part(self, place: slice) -> Rows:
        """Return some of the samples, as views."""
        segments = None if self.segments is None else self.segments[place]
        return Rows(self.tokens[place], segments, None if self.mask is None else self.mask[place])

    def arrays(self) -> Iterator[NDArray[Any]]:
        """Return the arrays that are there, in a fixed order."""
        return (array for array in (self.tokens, self.segments, self.mask) if array is not None)


class Windows(NamedTuple):
    """Place of each sample: its dataset, its epoch there (from 0), and its first token; shape (N,) each."""

    dataset: NDArray[np.int64]
    epoch: NDArray[np.int64]
    start: NDArray[np.int64]


class Sampler:
    """The samples of a run.

    Args:
        sources: datasets, in any order; the same ones give the same samples.
        seq_len: T.
        seed: chooses the order in every epoch.
        packing: stream: windows regardless of documents; documents: with segments, and a mask where they meet.

    Raises:
        ConfigError: two datasets have one name, one has no whole window, or its mask another length.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int, packing: Packing = "stream") -> None:
        self.sources = tuple(sorted(sources, key=lambda source: source.dataset.name))
        self.seq_len, self.seed, self.packing = seq_len, seed, packing
        names = [source.dataset.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(DATASETS, name, "is the name of two datasets", "give each a name of its own")
        for source in self.sources:
            self._check(source)
        self.num_windows_D = np.array([num_windows(source.dataset, seq_len) for source in self.sources])
        self.blend = Blend([source.weight for source in self.sources])
        self.tokens_read = 0
        self.bytes_read = 0
        """Of files, as they were read: a token's width is the dataset's `itemsize`, or 4."""
        self._order = functools.lru_cache(maxsize=4 * len(self.sources))(self._permutation)

    @property
    def has_segments(self) -> bool:
        return self.packing == "documents"

    @property
    def has_mask(self) -> bool:
        return self.has_segments or any(source.loss_mask is not None for source in self.sources)

    def locate(self, sample_N: NDArray[np.int64]) -> Windows:
        """Return where each sample lies; constant time a sample, whatever the size of the datasets."""
        dataset_N, own_N = self.blend.locate(sample_N)
        epoch_N, index_N = np.divmod(own_N, self.num_windows_D[dataset_N])
        window_N = np.empty_like(index_N)
        for dataset, epoch in sorted(set(zip(dataset_N.tolist(), epoch_N.tolist(), strict=True))):
            is_here_N = (dataset_N == dataset) & (epoch_N == epoch)
            window_N[is_here_N] = self._order(dataset, epoch)(index_N[is_here_N])
        return Windows(dataset_N, epoch_N, window_N * self.seq_len)

    def read(self, samples: range | NDArray[np.int64]) -> Rows:
        """Read samples."""
        rows = self.empty_rows(len(samples))
        self.read_into(rows, samples)
        return rows

    def empty_rows(self, num_samples: int) -> Rows:
        """Return arrays for so many samples."""
        shape = (num_samples, self.seq_len)
        tokens = np.empty((num_samples, self.seq_len + 1), dtype=np.int32)
        segments = np.empty(shape, dtype=np.int32) if self.has_segments else None
        return Rows(tokens, segments, np.empty(shape, dtype=np.uint8) if self.has_mask else None)

    def read_into(self, rows: Rows, samples: range | NDArray[np.int64]) -> None:
        """Read samples into the first rows of arrays that are there.

        Raises:
            ConfigError: a file cannot be read, or holds a token beyond its vocabulary.
        """
        windows = self.locate(np.asarray(samples, dtype=np.int64))
        for row, (dataset, start) in enumerate(zip(windows.dataset.tolist(), windows.start.tolist(), strict=True)):
            self._fill(rows, row, self.sources[dataset], start)

    def read_evenly(self, samples: range, num_samples: int) -> Rows:
        """Read some of `num_samples` windows that are spread evenly over the first dataset: always the same ones."""
        rows = self.empty_rows(len(samples))
        self.read_evenly_into(rows, samples, num_samples)
        return rows

    def read_evenly_into(self, rows: Rows, samples: range, num_samples: int) -> None:
        """Read them into arrays that are there."""
        source = self.sources[0]
        last = source.dataset.num_tokens - self.seq_len - 1
        for row, sample in enumerate(samples):
            self._fill(rows, row, source, sample * last // max(1, num_samples - 1))

    def check_length(self, num_samples: int, max_epochs: float, sequences: int) -> None:
        """Refuse a run that would read a dataset more often than it may.

        Args:
            num_samples: of the whole run.
            max_epochs: 0: no limit.
            sequences: of a step, for the remedy.

        Raises:
            ConfigError: names the dataset and the number of steps that it is good for.
        """
        if not max_epochs:
            return
        limits_D = [int(max_epochs * count) for count in self.num_windows_D.tolist()]
        # After so many samples each has had its limit; the first to run out decides.
        samples_D = [int(limit / share) for limit, share in zip(limits_D, self.blend.shares, strict=True)]
        first = samples_D.index(min(samples_D))
        if (count := int(self.blend.counts(num_samples)[first])) > limits_D[first]:
            epochs, name = count / self.num_windows_D[first], self.sources[first].dataset.name
            rule = f"is less than the {epochs:.2f} times that this job reads dataset {name}"
            remedy = f"set job.optimizer.steps to {samples_D[first] // sequences:,} or less, or raise it"
            raise ConfigError("job.data.max_epochs", f"{max_epochs:g}", rule, remedy)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: with the seed and the step it says all there is to say about the samples."""
        datasets = {
            source.dataset.name: {
                "fingerprint": source.dataset.fingerprint,
                "num_tokens": int(source.dataset.num_tokens),
                "num_documents": int(source.dataset.num_documents),
                "share": str(share),
                "loss_mask": "" if source.loss_mask is None else source.loss_mask.fingerprint,
            }
            for source, share in zip(self.sources, self.blend.shares, strict=True)
        }
        return {"seq_len": self.seq_len, "packing": self.packing, "datasets": datasets}

    def _permutation(self, dataset: int, epoch: int) -> Permutation:
        size, name = int(self.num_windows_D[dataset]), self.sources[dataset].dataset.name
        return Permutation(size, self.seed, name, epoch)

    def _check(self, source: Source) -> None:
        dataset, mask = source.dataset, source.loss_mask
        if num_windows(dataset, self.seq_len) < 1:
            rule = f"holds {dataset.num_tokens} tokens, and one sequence takes {self.seq_len + 1}"
            raise ConfigError(source.field, None, rule, "give more of it, or lower job.model.seq_len")
        if mask is not None and mask.num_tokens != dataset.num_tokens:
            rule = f"is of {mask.num_tokens} tokens, and the dataset of {dataset.num_tokens}"
            raise ConfigError(f"{source.field}.loss_mask", None, rule, "give a mask with one number a token")

    def _fill(self, rows: Rows, row: int, source: Source, start: int) -> None:
        rows.tokens[row] = self._read(source, source.dataset, start)
        if rows.mask is not None:
            rows.mask[row] = 1
            if source.loss_mask is not None:
                rows.mask[row] = self._read(source, source.loss_mask, start)[1:] != 0
        if rows.segments is not None:
            self._cut(rows, row, source.dataset, start)

    def _read(self, source: Source, dataset: TokenDataset, start: int) -> NDArray[np.int32]:
        tokens = dataset.read(start, self.seq_len + 1)
        self.tokens_read += len(tokens)
        self.bytes_read += len(tokens) * int(getattr(dataset, "itemsize", 4))
        highest = int(tokens.max())
        # Before a GPU reads it: there it would be an assertion of a kernel, far from its cause.
        if highest >= dataset.vocab_size or int(tokens.min()) < 0:
            where = f"between {start} and {start + self.seq_len}"
            rule = f"holds a token outside the vocabulary of {dataset.vocab_size} {where}"
            raise ConfigError(source.field, None, rule, "prepare it again")
        return tokens

    def _cut(self, rows: Rows, row: int, dataset: TokenDataset, start: int) -> None:
        """Number the segments of a row, and mask the targets that begin a document."""
        assert rows.segments is not None
        assert rows.mask is not None
        segments_T, mask_T = rows.segments[row], rows.mask[row]
        segments_T[:] = 0
        document, last = dataset.document_at(start) + 1, -1
        while document < dataset.num_documents and (begin := dataset.document_start(document) - start) <= self.seq_len:
            document += 1
            if begin == last or begin <= 0:  # an empty document lies between: one boundary, not two
                continue
            last = begin
            segments_T[begin:] += 1
            mask_T[begin - 1] = 0


@dataclass(frozen=True)
class BatchPlan:
    """Samples of every step for every data-parallel rank: contiguous shares of contiguous batches.

    Args:
        batch: sizes, which may ramp up.
        dp: data-parallel ranks.
        first_step, first_sample: where the count begins: a resumed run resumes after the samples that it has had,
            whatever its batch size was until then.
    """

    batch: BatchConfig
    dp: int
    first_step: int = 1
    first_sample: int = 0

    def start(self, step: int) -> int:
        """Return the first sample of a step; of the step behind the last, how many there were."""
        return self.first_sample + samples_before(self.batch, step) - samples_before(self.batch, self.first_step)

    def samples(self, step: int, dp: int) -> range:
        """Return the samples of one data-parallel rank in a step."""
        share = batch_size(self.batch, step) // self.dp
        first = self.start(step) + dp * share
        return range(first, first + share)

    @property
    def most_samples(self) -> int:
        """Return the most samples that a data-parallel rank has in a step."""
        return self.batch.global_batch_size // self.dp


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler that another process opens: datasets travel as calls that open them.

    Args:
        sources: each call gives one dataset of the blend.
    """

    sources: tuple[Callable[[], Source], ...]
    seq_len: int
    seed: int
    packing: Packing = "stream"

    def open(self) -> Sampler:
        return Sampler([source() for source in self.sources], self.seq_len, self.seed, self.packing)


def num_windows(dataset: TokenDataset, seq_len: int) -> int:
    """Return how many windows of seq_len inputs and the targets behind them there are."""
    return max(0, dataset.num_tokens - 1) // seq_len


def positions_of(segments_NT: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the position of each token in its segment, [N, T]."""
    index_T = np.arange(segments_NT.shape[1], dtype=np.int32)
    begins_NT = np.zeros(segments_NT.shape, dtype=bool)
    begins_NT[:, 1:] = segments_NT[:, 1:] != segments_NT[:, :-1]
    return index_T - np.maximum.accumulate(np.where(begins_NT, index_T, 0), axis=1)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each dataset, and each other fact of `Sampler.state`, that is another than it was."""
    lines = []
    old, new = before["datasets"], after["datasets"]
    for name in sorted({*old, *new}):
        if name not in new:
            lines.append(f"dataset {name} is gone")
        elif name not in old:
            lines.append(f"dataset {name} is new")
        else:
            lines += _dataset_changes(name, old[name], new[name])
    for key in ("packing", "seq_len"):
        if before[key] != after[key]:
            lines.append(f"{key} is {after[key]}, and was {before[key]}")
    return lines


def _dataset_changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = []
    if old["num_tokens"] != new["num_tokens"]:
        verb = "grew" if new["num_tokens"] > old["num_tokens"] else "shrank"
        lines.append(f"dataset {name} {verb} from {old['num_tokens']:,} to {new['num_tokens']:,} tokens")
    elif old["fingerprint"] != new["fingerprint"]:
        lines.append(f"dataset {name} has as many tokens, and others")
    if old["loss_mask"] != new["loss_mask"]:
        lines.append(f"the loss mask of dataset {name} is another")
    if old["share"] != new["share"]:
        lines.append(f"the share of dataset {name} is {new['share']}, and was {old['share']}")
    return lines


def _same_rows(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    num_samples, width = tokens.shape
    return np.broadcast_to(np.arange(width - 1, dtype=np.int32), (num_samples, width - 1))
