"""Decoupled send and receive of a pipeline stage (MegaScale 3.2).

A stage exchanges activations and gradients with the stages before and behind it. Sent and received together, the slower
of the two blocks both. Here each direction of each link has a communicator and a stream of its own, sends never block
receives, and receives are posted ahead of their use, so that a computation waits for nothing but its own input. Two
stages and two micro-batches, to be run by `torchrun --nproc-per-node 2 example.py`:

    import torch
    import torch.distributed as dist
    from collectives import Message, PipelineChannel, Traffic

    dist.init_process_group("gloo")
    stage, layer = dist.get_rank(), torch.nn.Linear(8, 8)
    activations = tuple(Message("forward", micro_batch) for micro_batch in range(2))
    gradients = tuple(Message("backward", micro_batch) for micro_batch in range(2))
    traffic = Traffic(gradients, sends=activations) if stage == 0 else Traffic(activations, sends=gradients)
    channel = PipelineChannel((4, 8), torch.float32, traffic)
    for step in range(3):
        channel.begin_step()  # posts the first receives
        if stage == 0:
            outputs = [layer(torch.randn(4, 8)) for _ in activations]
            for message, y in zip(activations, outputs):
                channel.send(message, y)  # returns at once
            for message, y in zip(gradients, outputs):
                y.backward(channel.receive(message))
        else:
            for activation, gradient in zip(activations, gradients):
                x = channel.receive(activation).requires_grad_()  # was posted while the one before it was in use
                layer(x).square().mean().backward()
                channel.send(gradient, x.grad)
        channel.finish()
    dist.destroy_process_group()

A schedule (`netlayer.workload.schedule`) makes the traffic of many stages, and `trainer.pipeline` drives a channel
through it. With `overlap=False` sends and receives go together and are waited for at once (`exchange`), as Megatron-LM
does without overlap: the same numbers, for comparison.

Not covered: shapes that change from message to message, and recovery: after an error neither a channel nor its links
are used again.

[Note: hardware queues] A GPU feeds its streams from a few queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and what
waits at the head of one holds up every stream behind it. A receive that is posted and runs holds up nothing, but a
second one behind it on the same stream waits for the peer, and may hold up the very send that the peer waits for. So on
CUDA one receive is posted ahead: one buffer is in use, one is on its way. Every instruction then waits, if at all, for
what was issued before it, on all stages: `netlayer.workload.schedule_check` proves for a schedule that this ends even
with a single queue. More depth would not make it faster, as long as a message takes less time than a computation.
Through the memory of the peers none is posted ahead: `collectives.pipeline.peer_link`, [Note: nothing is posted ahead].

[Note: first step] CUDA loads a kernel when it is first launched, and may wait until the device is idle for that; cuBLAS
allocates in its first product. A host that waits so behind a posted receive never launches what the peer needs in order
to send. So on CUDA a channel's first step is not overlapped, whatever was asked for. What launches
other kernels in a later step (another shape, say) launches them once outside a step, or sets CUDA_MODULE_LOADING=EAGER.

[Note: what is faster] Over NCCL a posted receive takes multiprocessors from the computation; on two H200 the coupled
exchange was then the faster one. Over the memory of the peers it was not. `bench.overlap --technique pp` tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import as_dtype
from collectives.pipeline.link import Link, Transfer
from collectives.pipeline.links import PipelineLinks
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch
from netlayer.workload.messages import DIRECTIONS, Direction, Message, Traffic

EndT = TypeVar("EndT")


class PipelineChannel:
    """Messages that one stage exchanges with its neighbours in each step. Every stage of the pipeline constructs it.

    Args:
        shape: of every activation, and so of every gradient; the same on all stages.
        dtype: likewise; or its name.
        traffic: this stage's messages of a step, in order; see `netlayer.workload.schedule`.
        group: the ranks of the pipeline in the order of its stages; None: all ranks.
        device: of every tensor; where there are `links`, theirs.
        depth: receives posted ahead of the one in use, in each direction; 1 is double-buffered, and CUDA's limit.
            Through the memory of the peers none is.
        overlap: False: see `exchange`.
        recorder: notes every message.
        watch: says who is late where a message does not come.
        links: made beforehand with `PipelineLinks`; several channels may use them one after the other, and share
            their streams.

    Raises:
        ValueError: stages disagree on shape, dtype or messages, or an argument is wrong.
        RuntimeError: a step over these links was left unfinished, by this stage or another.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str,
        traffic: Traffic,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        depth: int = 1,
        overlap: bool = True,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        links: PipelineLinks | None = None,
    ) -> None:
        on_cuda = torch.device(device if links is None else links.device).type == "cuda"
        if depth < 1:
            raise ValueError(f"depth = {depth}: at least one receive must be posted ahead; use 1")
        if depth > 1 and on_cuda:
            raise ValueError(f"depth = {depth}: on CUDA one receive is posted ahead, or streams may deadlock; use 1")
        self.shape, self.dtype, self.traffic = torch.Size(shape), as_dtype(dtype, "dtype"), traffic
        self.depth, self._overlap = depth, overlap
        self._is_warm = not on_cuda
        self.links = links or PipelineLinks(group, device, traffic.wraps)
        self.device, self.stage, self.num_stages = self.links.device, self.links.stage, self.links.num_stages
        self.links.agree(self.shape, self.dtype, traffic)
        self._into = {
            d: _Incoming(self, self.links.receiver(d, recorder, watch)) for d in DIRECTIONS if traffic.incoming(d)
        }
        self._out = {
            d: _Outgoing(self, self.links.sender(d, recorder, watch)) for d in DIRECTIONS if traffic.outgoing(d)
        }

    @property
    def overlap(self) -> bool:
        """Whether messages run under the computation in this step; on CUDA from the second one on."""
        return self._overlap and self._is_warm

    def begin_step(self) -> None:
        """Start the messages of a step; posts the first receives, after what the compute stream does by now.

        Raises:
            RuntimeError: the last step was not finished.
        """
        self.links.is_in_step = True
        for end in (*self._into.values(), *self._out.values()):
            end.begin_step()

    def receive(self, message: Message) -> Tensor:
        """The tensor of `message`, shape `shape`, to be used on the current stream; it is the caller's own.

        On CUDA the current stream waits for it, not the host.

        Raises:
            ValueError: the traffic has another message next.
            CollectiveTimeout, PeerLost: it did not come (gloo). On NCCL the watchdog ends the process; through the
                memory of the peers only a `watch` notices.
        """
        return self._end(self._into, message).receive(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send `tensor`, as the current stream leaves it. Returns at once; it may be dropped, but not be changed.

        Raises:
            ValueError: the traffic has another message next, or the tensor is not what was agreed upon.
        """
        self._end(self._out, message).send(message, tensor)

    def exchange(self, sends: Sequence[tuple[Message, Tensor]], receives: Sequence[Message]) -> None:
        """Coupled: send and receive together, and make the computation wait for all of it.

        Needs `overlap=False`; `receive` then hands over what has come.
        """
        if self.overlap:
            raise ValueError("exchange() is for channels with overlap=False; this one sends and receives by itself")
        for message, tensor in sends:
            self.send(message, tensor)
        for message in receives:
            self._end(self._into, message).post()
        for end in (*self._out.values(), *self._into.values()):
            end.link.wait_all()

    def finish(self) -> None:
        """End the step: the computation waits until all that was sent has left.

        Raises:
            RuntimeError: messages of the step are missing.
        """
        for end in (*self._out.values(), *self._into.values()):
            end.finish_step()
        self._is_warm, self.links.is_in_step = True, False

    @property
    def muted(self) -> bool:
        """Whether messages are omitted, for measurements: see `Link`. Channels that share links share this."""
        return any(end.link.muted for end in (*self._into.values(), *self._out.values()))

    @muted.setter
    def muted(self, muted: bool) -> None:
        for end in (*self._into.values(), *self._out.values()):
            end.link.muted = muted

    def check(self, message: Message, tensor: Tensor) -> None:
        """Raise ValueError unless `tensor` is what both stages agreed upon."""
        for name, value, agreed in (
            ("shape", list(tensor.shape), list(self.shape)),
            ("dtype", tensor.dtype, self.dtype),
            ("device", tensor.device.type, self.device.type),
        ):
            if value != agreed:
                raise ValueError(
                    f"{name} = {value}: stage {self.stage} and its neighbours agreed on {agreed}, and the {message} "
                    "differs; every message of a channel is alike"
                )

    def _end(self, ends: dict[Direction, EndT], message: Message) -> EndT:
        if message.direction not in ends:
            raise ValueError(f"stage {self.stage} has no {message.direction} messages here, and not the {message}")
        return ends[message.direction]


class _End:
    """One direction's messages of a step, on one side."""

    def __init__(self, channel: PipelineChannel, link: Link, messages: Sequence[Message]) -> None:
        self.channel, self.link, self.messages = channel, link, messages
        self.num_done = len(messages)

    def begin_step(self) -> None:
        self._check_finished()
        self.num_done = 0

    def finish_step(self) -> None:
        self._check_finished()
        self.link.wait_all()

    def take(self, message: Message) -> None:
        """Check that `message` is the next one, and count it."""
        expected = self.messages[self.num_done] if self.num_done < len(self.messages) else None
        if message != expected:
            raise ValueError(
                f"stage {self.channel.stage}: {self.link.kind} of the {message} out of order: the traffic has "
                f"{f'the {expected}' if expected else 'nothing'} next; follow one schedule on all stages"
            )
        self.num_done += 1

    def _check_finished(self) -> None:
        if self.num_done < len(self.messages):
            missing = self.messages[self.num_done]
            raise RuntimeError(f"the step is not finished: {self.link.describe(missing)} has not been called for")


class _Outgoing(_End):
    def __init__(self, channel: PipelineChannel, link: Link) -> None:
        super().__init__(channel, link, channel.traffic.outgoing(link.direction))

    def send(self, message: Message, tensor: Tensor) -> None:
        self.channel.check(message, tensor)
        self.take(message)
        self.link.launch(tensor.detach().contiguous(), self.messages[self.num_done - 1])


class _Incoming(_End):
    def __init__(self, channel: PipelineChannel, link: Link) -> None:
        super().__init__(channel, link, channel.traffic.incoming(link.direction))
        self._posted: deque[tuple[Tensor, Transfer]] = deque()
        self._num_posted = len(self.messages)

    def begin_step(self) -> None:
        super().begin_step()
        self._num_posted = 0
        self._post_ahead()

    def receive(self, message: Message) -> Tensor:
        self.take(message)
        if not self._posted:
            self.post()
        buffer, transfer = self._posted.popleft()
        transfer.wait()
        self._post_ahead()
        return buffer

    def post(self) -> None:
        """Post the next receive."""
        buffer = torch.empty(self.channel.shape, dtype=self.channel.dtype, device=self.channel.device)
        transfer = self.link.launch(buffer, self.messages[self._num_posted])
        self._num_posted += 1
        self._posted.append((buffer, transfer))

    def _post_ahead(self) -> None:
        """Post receives as early as possible: they overlap with the computation that is launched next."""
        if not (self.channel.overlap and self.link.posts_ahead):
            return
        while len(self._posted) < self.channel.depth and self._num_posted < len(self.messages):
            self.post()
