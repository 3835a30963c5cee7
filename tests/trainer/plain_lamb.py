"""LAMB as its paper writes it (arXiv 1904.00962, algorithm 2), one whole parameter after the other: the reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from netlayer.config.tree import OptimizerConfig


class PlainLamb:
    """Moves `weights` in place; matrices are decayed and adapted, vectors are not."""

    def __init__(self, weights: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.weights, self.config, self.t = weights, config, 0
        self.m = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.v = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        self.t += 1
        beta1, beta2 = self.config.beta1, self.config.beta2
        for name, x in self.weights.items():
            g = gradients[name]
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * g * g
            m = self.m[name] / (1 - beta1**self.t)
            v = self.v[name] / (1 - beta2**self.t)
            u, ratio = m / (v.sqrt() + self.config.eps), 1.0
            if x.ndim > 1:
                u += self.config.weight_decay * x
                of_x, of_u = float(torch.linalg.vector_norm(x)), float(torch.linalg.vector_norm(u))
                ratio = of_x / of_u if of_x > 0 and of_u > 0 else 1.0
            x -= self.config.lr * ratio * u
