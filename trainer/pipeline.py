"""Drives one pipeline stage through its schedule: receive, compute, send.

`run_schedule` knows order and messages and nothing of models; `StageModel` is the autograd of a stage whose chunks are
modules. Not covered: parameters that several stages share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from collectives.pipeline.channel import PipelineChannel
from collectives.sharded.slot import DeferredWeightGrads
from collectives.watch.recorder import Recorder
from netlayer.workload.messages import Message
from netlayer.workload.schedule import Action, Schedule


class Stage(Protocol):
    """Computation of a pipeline stage."""

    def forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """The activation for the next virtual stage; None in, at the first; None out, at the last."""

    def backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """The gradient for the virtual stage before; None in, at the last; None out, at the first."""

    def weights(self, action: Action) -> None:
        """Gradients of weights that this micro-batch's backward pass has left; called where the schedule has them."""


def run_schedule(schedule: Schedule, channel: PipelineChannel, stage: Stage, recorder: Recorder | None = None) -> None:
    """Run one step of the stage that `channel` belongs to; every stage of the pipeline calls it.

    Coupled communication (`overlap=False` of the channel) exchanges once a round of the schedule.

    Raises:
        ValueError: the channel has another number of stages, or the stage returned no tensor where one is sent.
    """
    if channel.num_stages != schedule.num_stages:
        raise ValueError(
            f"schedule is for {schedule.num_stages} stages, and the channel joins {channel.num_stages}; make both alike"
        )
    channel.begin_step()
    run = _Run(schedule, channel, stage, recorder)
    if channel.overlap:
        run.decoupled()
    else:
        run.coupled()
    channel.finish()


class StageModel:
    """Chunks of a model on one stage, and the activations that wait for their backward; without gradients, none.

    Gradients add up in the parameters; the loss of a micro-batch is divided by the number of those whose gradients are
    added, on this pipeline and its replicas.

    Args:
        chunks: the stage's modules, chunk 0 first; each turns one tensor into one.
        schedule: what it will be driven through.
        stage: which one this is.
        inputs: the model's input of a micro-batch; called on the first stage only.
        loss: runs the model's last chunk on its input, and gives the loss of the micro-batch: `loss(micro_batch, chunk,
            x)`; called on the last stage only.
        last_backward: around what computes the last gradients of each chunk in a step: `last_backward(chunk)`.
        num_replicas: pipelines whose gradients are summed.
        deferring: around a backward pass that may leave weights' gradients: `deferring(chunk)`; None: it leaves none,
            and their actions of the schedule do nothing.
        beside: further arguments of every chunk but the last, by micro-batch; None: there are none.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        schedule: Schedule,
        stage: int,
        inputs: Callable[[int], Tensor],
        loss: Callable[[int, Any, Tensor], Tensor],
        last_backward: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        num_replicas: int = 1,
        deferring: Callable[[Any], contextlib.AbstractContextManager[DeferredWeightGrads]] | None = None,
        beside: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        if len(chunks) != schedule.num_chunks:
            raise ValueError(
                f"chunks: {len(chunks)} given, the schedule has {schedule.num_chunks} a stage; give as many"
            )
        self.chunks, self.schedule, self.stage, self.inputs, self.loss = chunks, schedule, stage, inputs, loss
        self._last_backward, self._num_added = last_backward, schedule.num_micro_batches * num_replicas
        self._deferring, self._beside = deferring, beside or (lambda _micro_batch: {})
        self._deferred = schedule.deferred[stage] if deferring is not None else frozenset[tuple[int, int]]()
        computes = [action for action in schedule.stages[stage] if self._computes_weights(action)]
        self._last = {action.chunk: action for action in computes}
        self.losses: dict[int, Tensor] = {}
        """Of this step so far, by micro-batch, before the division; empty on all but the last stage."""
        self._activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._waiting: dict[tuple[int, int], DeferredWeightGrads] = {}

    def zero_grad(self) -> None:
        """Drop the gradients and the losses of the last step."""
        self.losses.clear()
        for chunk in self.chunks:
            chunk.zero_grad()

    def forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        trains, chunk = torch.is_grad_enabled(), self.chunks[action.chunk]
        x = self.inputs(action.micro_batch) if received is None else received.requires_grad_(trains)
        is_last = self.schedule.outgoing(self.stage, action) is None
        if is_last:
            loss = self.loss(action.micro_batch, chunk, x)
            self.losses[action.micro_batch] = loss.detach()
            output = loss / self._num_added
        else:
            output = chunk(x, **self._beside(action.micro_batch))
        if trains:
            self._activations[action.micro_batch, action.chunk] = received, output
        return None if is_last else output

    def backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        pair, chunk = (action.micro_batch, action.chunk), self.chunks[action.chunk]
        x, output = self._activations.pop(pair)
        if self._deferring is not None and pair in self._deferred:
            with self._deferring(chunk) as self._waiting[pair]:
                torch.autograd.backward(output, received)
        else:
            with self._closing(action):
                torch.autograd.backward(output, received)
        return None if x is None else x.grad

    def weights(self, action: Action) -> None:
        deferred = self._waiting.pop((action.micro_batch, action.chunk), None)
        if deferred is not None:
            with self._closing(action):
                deferred.compute()

    def _closing(self, action: Action) -> contextlib.AbstractContextManager[None]:
        is_last = self._last[action.chunk] is action
        return self._last_backward(self.chunks[action.chunk]) if is_last else contextlib.nullcontext()

    def _computes_weights(self, action: Action) -> bool:
        if action.kind == "backward":
            return (action.micro_batch, action.chunk) not in self._deferred
        return action.kind == "weights" and self._deferring is not None


class _Run:
    """One step of one stage."""

    def __init__(self, schedule: Schedule, channel: PipelineChannel, stage: Stage, recorder: Recorder | None) -> None:
        self.schedule, self.channel, self.stage, self.recorder = schedule, channel, stage, recorder
        self.number = channel.stage

    def decoupled(self) -> None:
        """Run the step action by action, and send each message as soon as it is computed."""
        for action in self.schedule.stages[self.number]:
            for message, tensor in self._compute(action):
                self.channel.send(message, tensor)

    def coupled(self) -> None:
        """Run the step in rounds: compute one's actions, then exchange its messages together with those of the next."""
        rounds = self.schedule.rounds(self.number)
        self.channel.exchange([], self._needs(rounds[0]))
        for actions, following in zip(rounds, [*rounds[1:], []], strict=True):
            sends = [send for action in actions for send in self._compute(action)]
            self.channel.exchange(sends, self._needs(following))

    def _compute(self, action: Action) -> list[tuple[Message, Tensor]]:
        """Run one action; what is to be sent of it."""
        need, give = self.schedule.incoming(self.number, action), self.schedule.outgoing(self.number, action)
        received = None if need is None else self.channel.receive(need)
        with self._recorded(action):
            if action.kind == "weights":
                self.stage.weights(action)
                return []
            compute = self.stage.forward if action.kind == "forward" else self.stage.backward
            tensor = compute(action, received)
        if give is None:
            return []
        if tensor is None:
            raise ValueError(
                f"stage {self.number}: the {action} returned None, and the next virtual stage needs a tensor"
            )
        return [(give, tensor)]

    def _needs(self, actions: Sequence[Action]) -> list[Message]:
        needs = (self.schedule.incoming(self.number, action) for action in actions)
        return [message for message in needs if message is not None]

    def _recorded(self, action: Action) -> contextlib.AbstractContextManager[None]:
        if self.recorder is None:
            return contextlib.nullcontext()
        labels = {"micro_batch": action.micro_batch, "chunk": action.chunk, "phase": action.phase}
        return self.recorder.computing(action.kind, **labels)
