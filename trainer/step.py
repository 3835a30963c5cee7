"""One optimiser step of a rank, launched operation by operation, or replayed as one CUDA graph.

A step is thousands of kernels, each launched by the host in some microseconds: where the device has less to do than
that, as in tensor-parallel layouts, the host bounds the step. A graph is launched in one call. Not covered: graphs of
pipeline stages (their messages count their rounds on the host).

[Note: what a graph holds] Gathers of the parameters, forward, backward, reduction, clipping and the optimiser, in this
order: gathers after the optimiser would have to end in the same graph, with nothing to hide them. Tokens and learning
rate are copied to where the graph reads them. The steps before a capture are launched by operation, WARM_UP for each
number of micro-batches: windows grow then, and kernels are compiled and chosen.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.watch.recorder import Recorder
from trainer.parallel import Batches, Optimizers, ParallelModel

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Steps launched by operation before one is captured."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True)
class Stepped:
    """Results of a step on the device; the next one may overwrite them.

    Args:
        loss: mean of this data-parallel rank, zero but on the last stage.
        grad_norm: of all gradients, before clipping; None where it is not taken.
        is_replayed: whether it was a graph's, of whose collectives nothing is recorded.
    """

    loss: Tensor
    grad_norm: Tensor | None
    is_replayed: bool = False


class Steps:
    """The steps of a model. Every rank calls the same methods in the same order.

    Args:
        model: this rank's part.
        optimizer: over its shards.
        max_norm: of all gradients; infinity: it is only taken; None: nor that.
    """

    def __init__(self, model: ParallelModel, optimizer: Optimizers, max_norm: float | None = None) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        if model.job.overlap.step_in_backward and max_norm is not None:
            model.measure_in_backward(optimizer)

    def begin(self, step: int) -> None:
        """Launch what needs no data: call it before the data is loaded."""
        self.model.start_step(step)

    def run(self, step: int, batches: Batches, lr: float) -> Stepped:  # noqa: ARG002  (as GraphedSteps)
        """Step `step`, counted from 1, over this rank's micro-batches. The host does not wait for it."""
        self.optimizer.set_learning_rate(lr)
        self.model.release_gradients()
        return self._launch(batches)

    def close(self) -> None:
        """Let go of what was captured, before process groups end: NCCL's end waits for graphs that hold its calls."""

    def _launch(self, batches: Batches) -> Stepped:
        loss = self.model.accumulate(batches)
        # Norm and optimiser work on the first gradients while the last ones are still reduced.
        self.model.finish_gradients(waits=False)
        grad_norm = None
        if self.max_norm is not None:
            grad_norm = self.model.grad_norm()
            self.optimizer.clip(grad_norm, self.max_norm)
        with self._computing("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Stepped(loss, grad_norm)

    def _computing(self, name: str) -> contextlib.AbstractContextManager[None]:
        recorder: Recorder | None = self.model.recorder
        return contextlib.nullcontext() if recorder is None else recorder.computing(name)


class GraphedSteps(Steps):
    """The same, one launch a step; see [Note: what a graph holds].

    Args:
        model: without pipeline stages.
        optimizer: whose counters are on the device, and whose learning rate may be there.
        max_norm: as in `Steps`.
        capture: gives a call that repeats the one which it was given.

    Raises:
        ValueError: the model is a pipeline's stage, or the optimiser has no capturable step.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizers,
        max_norm: float | None = None,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, optimizer, max_norm)
        if model.pipeline is not None:
            raise ValueError("a pipeline's stage cannot be captured: its messages count their rounds on the host")
        groups = [group for each in optimizer.each for group in each.param_groups]
        if not all("capturable" in group for group in groups):
            raise ValueError("the optimiser cannot be captured: give AdamW or LAMB")
        self._capture = capture or capture_on_cuda
        # A tensor, for the graph reads it at each replay: a number would be captured as it is now.
        self._lr = torch.zeros((), device=model.device)
        for group in groups:
            group["capturable"], group["lr"] = True, self._lr
        self._num_launched = 0
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._replay: Replay | None = None
        self._captured: list[Stepped] = []

    def begin(self, step: int) -> None:
        # A graph holds its own gathers.
        if self._replay is None:
            super().begin(step)

    def run(self, step: int, batches: Batches, lr: float) -> Stepped:
        """Take the step: launched for the first few and whenever the number of micro-batches changes, then replayed."""
        self._lr.fill_(lr)
        if len(batches) != len(self._inputs):  # the graph before goes, and its memory, before a new one is made
            self.close()
            self._inputs = [(tokens_BT.clone(), targets_BT.clone()) for tokens_BT, targets_BT, *_ in batches]
        # The first WARM_UP steps are launched: windows grow and kernels are compiled, which a capture cannot do.
        if self._num_launched < WARM_UP:
            self._num_launched += 1
            # `begin` started no step while a graph existed.
            self.model.start_step(step)
            return self._launch(batches)
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for place_BT, values_BT in zip(inputs, batch[:2], strict=True):
                # Where the graph reads them: it knows addresses and no values.
                place_BT.copy_(values_BT)
        if self._replay is None:
            self._replay = self._captured_step(step)
        track = self.model.world.track  # its collectives are in the graph, where the watch does not see them
        watched = contextlib.nullcontext() if track is None else track.around("replay", 0, "of a step's CUDA graph")
        with watched, self._computing("replay"):
            self._replay()
        for chunk in self.model.chunks:
            # The replay has stepped them, which no version shows.
            chunk.note_shards_changed()
        # The graph's own tensors, which each replay writes anew.
        [stepped] = self._captured
        return Stepped(stepped.loss, stepped.grad_norm, is_replayed=True)

    def close(self) -> None:
        self._replay, self._num_launched = None, 0
        self._captured.clear()

    def _captured_step(self, step: int) -> Replay:
        """Capture a step as a CUDA graph, and return what replays it.

        Nothing runs on the device meanwhile, but the host counts the step: so the first replay must be that step.
        """
        self.model.wait_parameters()  # no stream has anything under way
        for chunk in self.model.chunks:
            chunk.note_shards_changed()  # so that the graph begins with their gathers
        with contextlib.ExitStack() as apart:
            for chunk in self.model.chunks:
                # Gathers after the step would have to end within the graph, with nothing to hide them.
                apart.enter_context(chunk.no_gathers_after_step())
            return self._capture(lambda: self._capture_one(step))

    def _capture_one(self, step: int) -> None:
        self._captured.clear()
        self.model.start_step(step)
        self._captured.append(self._launch(self._inputs))


def open_steps(model: ParallelModel, optimizer: Optimizers, max_norm: float | None) -> Steps:
    """Return steps that are replayed as a CUDA graph if job.loop.cuda_graph says so, and there is CUDA."""
    if not model.job.loop.cuda_graph:
        return Steps(model, optimizer, max_norm)
    if model.device.type != "cuda":
        if model.world.rank == 0:
            logger.warning("job.loop.cuda_graph has no effect on a CPU")
        return Steps(model, optimizer, max_norm)
    return GraphedSteps(model, optimizer, max_norm)


def capture_on_cuda(launch: Callable[[], None]) -> Replay:
    """Capture what `launch` launches as a CUDA graph: nothing runs yet.

    Other threads (NCCL's watchdog, a collective watch) go on to ask the device for events meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    # `global`, torch's default, would fail the capture for what those threads ask.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    return graph.replay
