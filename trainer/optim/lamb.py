"""LAMB, for large batches (You et al., arXiv 1904.00962, algorithm 2; MegaScale 3.1).

The step of each parameter is Adam's, with weight decay in it, scaled to the norm of the parameter: with
r = m' / (sqrt(v') + eps) of Adam's corrected moments and u = r + decay * w,

    w <- w - lr * (|w| / |u|) * u

The algorithm's layers are parameters here, a joined linear being one; its phi is the identity. Parameters of groups
with `adapt=False` have ratio 1, as vectors (norms, biases) have in the authors' code and in Apex' FusedLAMB: without
decay, they move as with Adam. Not covered: Nesterov's momentum.

[Note: norms of what is spread] A rank holds pieces. It puts the squared norms of its pieces of w and u into one tensor
with two numbers for every whole parameter, zeros for those that it holds nothing of; ranks add it up, and each scales
its pieces. The host waits for none of it.

Shapes: P whole parameters that are adapted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from collectives.sharded.gradient import each_norm

Group = dict[str, Any]
Move = tuple[Group, list[Tensor], list[Tensor]]
"""A group, its weights, and -u of each."""


@dataclass(frozen=True)
class WholeNorms:
    """Norms of whole parameters of which ranks hold pieces.

    Args:
        pieces: of the adapted parameters, in the same order on every rank; None where this rank holds nothing.
        device: of the pieces.
        add_up: sums squared norms over ranks, in place, [P, 2] in float64; every rank calls it once a step.
    """

    pieces: Sequence[Tensor | None]
    device: torch.device
    add_up: Callable[[Tensor], None]


class Lamb(torch.optim.Optimizer):
    """LAMB over tensors, or over this rank's pieces of them.

    The moments have the dtype of the weights. While it steps, it holds one more value of that dtype a weight.

    Args:
        params: tensors or groups; a group's own `lr`, `betas`, `eps`, `weight_decay` and `adapt` win.
        lr: learning rate; in a group it may be a tensor on the weights' device, which a CUDA graph reads anew.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, part of the update that is scaled.
        adapt: whether updates are scaled by |w| / |u|.
        norms: where ranks hold pieces; None: every tensor is whole.

    Raises:
        ValueError: a number is out of its range, weights are narrower than float32, or `norms` and the adapted
            parameters are not the same.
    """

    steps_shards = True  # the norms of whole matrices are added up over the ranks

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
        norms: WholeNorms | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        # torch loads the counters of a state onto the device of the weights where a group is fused, as it is here; that
        # its steps may be captured, `capturable` says as of torch's own.
        super().__init__(params, {**defaults, "fused": True, "capturable": False})
        adapted = [weight for group in self.param_groups if group["adapt"] for weight in group["params"]]
        if norms is None:
            device = adapted[0].device if adapted else torch.device("cpu")
            norms = WholeNorms(adapted, device, lambda _squared: None)
        self._norms = norms
        self._places = {piece: place for place, piece in enumerate(norms.pieces) if piece is not None}
        if self._places.keys() != set(adapted):
            odd = self._places.keys() ^ set(adapted)
            raise ValueError(f"norms.pieces: {len(odd)} are not the adapted parameters; give those, each once")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a state that was saved before there was such a thing
            group.setdefault("capturable", False)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group)
        places = getattr(self, "_places", None)
        if places is not None and group["adapt"] and any(weight not in places for weight in group["params"]):
            raise ValueError("a group of adapted parameters comes too late: give it to the constructor")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every weight that has a gradient; where ranks hold pieces, every rank calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moves: list[Move] = []
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not group["adapt"]:
                self._adam(group, weights, weights, lr=group["lr"], weight_decay=group["weight_decay"])
                continue
            minus_u = [torch.zeros_like(weight) for weight in weights]
            self._adam(group, weights, minus_u, lr=1.0, weight_decay=0.0)  # 0 - 1.0 * r
            if weights:
                torch._foreach_add_(minus_u, weights, alpha=-group["weight_decay"])
            moves.append((group, weights, minus_u))
        self._scale(moves)
        return loss

    def _adam(
        self, group: Group, weights: Sequence[Tensor], moved: list[Tensor], *, lr: float | Tensor, weight_decay: float
    ) -> None:
        """Advance the moments of `weights`, and move `moved` by AdamW's step of them: torch's fused one."""
        states = [self._state_of(weight) for weight in weights]
        beta1, beta2 = group["betas"]
        adamw(
            moved,
            [weight.grad for weight in weights if weight.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state

    def _scale(self, moves: Sequence[Move]) -> None:
        """Add lr * (|w| / |u|) * -u to every weight: see [Note: norms of what is spread]."""
        if not self._norms.pieces:
            return
        squared_P2 = self._squared_norms(moves)
        self._norms.add_up(squared_P2)
        w_P, u_P = squared_P2.sqrt().unbind(1)
        ratio_P = torch.where((w_P > 0) & (u_P > 0), w_P / u_P, 1.0)
        for group, weights, minus_u in moves:
            if weights:
                each = (ratio_P * group["lr"]).to(weights[0].dtype).unbind()
                ratios = [each[self._places[weight]] for weight in weights]
                torch._foreach_addcmul_(weights, minus_u, ratios)

    def _squared_norms(self, moves: Sequence[Move]) -> Tensor:
        """Return the squared norms of this rank's pieces of w and u, [P, 2]."""
        weights = list(itertools.chain.from_iterable(weights for _, weights, _ in moves))
        minus_u = list(itertools.chain.from_iterable(minus_u for _, _, minus_u in moves))
        nothing = torch.zeros((), device=self._norms.device)
        pairs = [nothing] * (2 * len(self._norms.pieces))
        if weights:
            norms = each_norm([*weights, *minus_u])
            for weight, w, u in zip(weights, norms[: len(weights)], norms[len(weights) :], strict=True):
                place = self._places[weight]
                pairs[2 * place : 2 * place + 2] = w, u
        return torch.stack(pairs).view(-1, 2).double().square()


def _check(group: Group) -> None:
    beta1, beta2 = group["betas"]
    for name, value, holds, rule in (
        ("lr", group["lr"], group["lr"] >= 0, "at least 0"),
        ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1, "in 0..1, 1 omitted"),
        ("eps", group["eps"], group["eps"] >= 0, "at least 0"),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "at least 0"),
    ):
        if not holds:
            raise ValueError(f"{name} = {value}: must be {rule}")
    narrow = {weight.dtype for weight in group["params"]} - {torch.float32, torch.float64}
    if narrow:
        raise ValueError(f"weights of {', '.join(map(str, narrow))}: give their masters, in float32 or float64")
