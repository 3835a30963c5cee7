"""Programs of reports about parameters that come and go (FSDP, FSDP2, ZeRO stage 3), as those of `programs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.dropin_reports.sides import STEPS, WIDTH, Side, net, train, train_step


class _Twice(nn.Module):
    """A block that is recomputed, called twice before one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = net(1, 4), net(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        once: Tensor = checkpoint(self.body, x, use_reentrant=False)
        again: Tensor = checkpoint(self.body, x + 1, use_reentrant=False)
        return once * again


def recomputation_of_one_block_twice(side: Side) -> list[Tensor]:
    model = side.wrap(_Twice())
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def two_losses_of_one_graph(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        y = model(side.batch())
        y.square().mean().backward(retain_graph=True)
        optimizer.zero_grad()  # the first one counts for nothing
        (y - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def a_penalty_on_gradients_of_inputs(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(STEPS):
        x = side.batch().requires_grad_()
        y = model(x).square().mean()
        [slope] = torch.autograd.grad(y, x, create_graph=True)
        # Each row's part of the mean over this rank's rows, so that ranks' penalties have the whole batch's mean.
        (y + (slope * len(x)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def inference_mode_between_steps(side: Side) -> list[Tensor]:
    model, seen = side.wrap(net()), list[Tensor]()
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        model.eval()
        with torch.inference_mode():
            seen.append(model(torch.ones(2, WIDTH)).clone())
        model.train()
        train_step(side, model, optimizer)
    return [*side.values(model.parameters()), *seen]


class _Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = net(2, 4), net(2, 5)

    def forward(self, x: Tensor, has_image: bool) -> Tensor:
        if has_image:
            x = x + self.vision(x)
        y: Tensor = self.text(x)
        return y


def images_on_some_ranks_alone(side: Side) -> list[Tensor]:
    torch.manual_seed(5)
    model = side.wrap(_Multimodal())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        if side.name == "plain":
            x = side.batch(whole=True)
            parts = [model(x[rank::2], (step + rank) % 3 == 0).square().mean() / 2 for rank in range(2)]
            sum(parts, torch.zeros(())).backward()
        else:
            model(side.batch(), (step + side.rank) % 3 == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([net(1, seed) for seed in (4, 5, 6)])

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for expert in order:
            x = x + self.experts[expert](x)
        return x


def experts_in_another_order_on_each_rank(side: Side) -> list[Tensor]:
    model = side.wrap(_Experts())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    orders = [(0, 1), (1, 0), (2,), (2, 0, 1), (1,)]
    for step in range(STEPS):
        if side.name == "plain":
            x = side.batch(whole=True)
            parts = [model(x[rank::2], orders[(step + 2 * rank) % 5]).square().mean() / 2 for rank in range(2)]
            sum(parts, torch.zeros(())).backward()
        else:
            model(side.batch(), orders[(step + 2 * side.rank) % 5]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def embeddings_resized_after_wrapping(side: Side) -> list[Tensor]:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(4, WIDTH), net(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x + self.table(torch.arange(len(x)) % self.table.num_embeddings))
            return y

    torch.manual_seed(5)
    model = side.wrap(Tokens())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    train_step(side, model, optimizer)
    table = nn.Embedding(6, WIDTH)
    with torch.no_grad():
        table.weight.fill_(0.1)
        table.weight[:4] = side.whole(side.inner(model).table.weight)
    side.inner(model).table = table
    train_step(side, model, optimizer)
    return side.values(model.parameters())


class _Adapted(nn.Module):
    """A frozen matrix with a trained low-rank pair, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return y


def _adapted() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*[_Adapted() for _ in range(3)])


def _trained(side: Side, model: Any) -> torch.optim.Optimizer:
    """An optimiser of what is not frozen."""
    if side.is_ours:
        return side.optimizer(model, torch.optim.AdamW, lr=0.01)  # type: ignore[no-any-return]
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def adapters_beside_frozen_matrices(side: Side) -> list[Tensor]:
    model = side.wrap(_adapted())
    return train(side, model, _trained(side, model))


def a_full_state_with_frozen_parameters(side: Side) -> list[Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = side.wrap(_adapted())
    train(side, model, _trained(side, model), steps=3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if side.name == "plain":
        return list(model.state_dict().values())
    box: list[dict[str, Any]] = [dict(get_model_state_dict(model, options=options))]
    if side.ranks > 1:  # rank 0 alone has it
        dist.broadcast_object_list(box)
    return [value.clone() for value in box[0].values()]


def a_layer_that_ends_the_model_begins_it_too(side: Side) -> list[Tensor]:
    torch.manual_seed(5)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight, last.bias = first.weight, first.bias
    model = side.wrap(nn.Sequential(first, net(2), last))
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def a_frozen_layer_used_several_times(side: Side) -> list[Tensor]:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.last = net(1, 4), net(1, 5), net(1, 6)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.frozen(self.frozen(self.first(x))))
            return y

    model = side.wrap(Reusing())
    return train(side, model, _trained(side, model))


def clipping_by_the_largest_value(side: Side) -> list[Tensor]:
    model, norms = side.wrap(net()), list[Tensor]()

    def clip(_step: int) -> None:
        norms.append(side.whole(nn.utils.clip_grad_norm_(model.parameters(), 0.001, norm_type=torch.inf)))

    values = train(side, model, side.optimizer(model, torch.optim.SGD, lr=0.5), before=clip)
    return [*norms, *values]


@dataclasses.dataclass
class _Hidden:
    x: Tensor
    depth: int = 0


class _OfDataclasses(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = net(1, seed)

    def forward(self, hidden: _Hidden) -> _Hidden:
        return _Hidden(self.body(hidden.x), hidden.depth + 1)


def dataclasses_between_layers(side: Side) -> list[Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([_OfDataclasses(seed) for seed in (4, 5, 6)])

        def forward(self, x: Tensor) -> Tensor:
            hidden = _Hidden(x)
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden.x

    model = side.wrap(Model())
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def an_output_changed_in_place_by_a_view(side: Side) -> list[Tensor]:
    """Train where a unit returns a view of its input, which the caller changes in place."""

    class Viewing(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.body = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x.tanh().unsqueeze(0))
            return y.squeeze(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Viewing(seed) for seed in (4, 5, 6)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                before = x
                x = layer(x)
                x += before
            return x

    model = side.wrap(Model())
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def groups_of_an_optimizer_by_module(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    if side.is_ours:
        rates = {"0": 0.01, "1": 0.02}
        options = lambda name, _shape: {"lr": rates.get(name[0], 0.03)}  # noqa: E731
        return train(side, model, model.optimizer(torch.optim.AdamW, options=options, lr=0.01))
    groups = [{"params": list(part.parameters()), "lr": 0.01 * (1 + i)} for i, part in enumerate(side.inner(model))]
    return train(side, model, torch.optim.AdamW(groups, lr=0.01))


def an_optimizer_made_after_a_forward_pass(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    model(torch.ones(2, WIDTH)).sum()
    return train(side, model, side.optimizer(model, torch.optim.SGD, lr=0.1))


def a_frozen_layer_with_an_input_that_it_omits(side: Side) -> list[Tensor]:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(1, 5)
            self.requires_grad_(False)

        def forward(self, x: Tensor, _learned: Tensor) -> Tensor:
            y: Tensor = self.body(x)
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.last = net(1, 4), Frozen(), net(1, 6)

        def forward(self, x: Tensor) -> Tensor:
            learned = self.first(x)
            y: Tensor = self.last(self.frozen(x, learned) + learned)
            return y

    model = side.wrap(Model())
    return train(side, model, _trained(side, model))


class _Fused(torch.autograd.Function):
    """Logits and the mean of their squares, part by part, with the weight kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.t()).square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        logits = x @ weight.t()
        slope = 2 * logits / logits.numel() * grads[0]
        return slope @ weight, slope.t() @ x


def a_head_whose_weight_a_fused_loss_reads(side: Side) -> list[Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(2), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = _Fused.apply(self.body(x), self.head.weight)  # type: ignore[no-untyped-call]
            return loss

    torch.manual_seed(5)
    model = side.wrap(Model())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        model(side.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def values_given_after_a_start_on_the_meta_device(side: Side) -> list[Tensor]:
    def fill(name: str, parameter: Tensor) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    if side.is_ours:
        with torch.device("meta"):
            module = net()
        model = side.wrap(module, init=fill, device="cpu")
    else:
        with torch.device("meta"):
            module = net()
        module.to_empty(device="cpu")
        for name, parameter in module.named_parameters():
            fill(name, parameter)
        model = side.wrap(module)
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def layers_dropped_at_random(side: Side) -> list[Tensor]:
    """Train where each rank skips other layers in each step."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([net(1, seed) for seed in (4, 5, 6, 7)])

        def forward(self, x: Tensor, keeps: Sequence[bool]) -> Tensor:
            for layer, is_kept in zip(self.layers, keeps, strict=True):
                x = x + layer(x) if is_kept else x
            return x

    def keeps(step: int, rank: int) -> list[bool]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return (torch.rand(4, generator=generator) > 0.4).tolist()

    model = side.wrap(Dropping())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        if side.name == "plain":
            x = side.batch(whole=True)
            losses = [model(x[rank::2], keeps(step, rank)).square().mean() / 2 for rank in range(2)]
            if any(loss.requires_grad for loss in losses):
                sum(losses, torch.zeros(())).backward()
        else:
            loss = model(side.batch(), keeps(step, side.rank)).square().mean()
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())
