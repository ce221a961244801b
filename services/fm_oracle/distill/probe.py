"""How good embeddings are: the accuracy of a linear classifier on them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["LinearProbe", "fit_probe"]

# Weights' penalties, of which that one is taken that is best on a tenth of the examples.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
STEPS = 100


@dataclass(frozen=True)
class LinearProbe:
    """Logits W (h - mean) / deviation + b, of float32 embeddings [n, d]."""

    weight: Tensor  # [K, d]
    bias: Tensor  # [K]
    mean: Tensor
    deviation: Tensor

    def logits(self, embeddings: Tensor) -> Tensor:
        return ((embeddings - self.mean) / self.deviation) @ self.weight.T + self.bias

    def accuracy(self, embeddings: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        predicted = self.logits(torch.from_numpy(embeddings)).argmax(dim=1).numpy()
        return float((predicted == labels).mean())


def fit_probe(embeddings: NDArray[np.float32], labels: NDArray[np.int64], classes: int) -> LinearProbe:
    """Logistic regression on standardised embeddings [n, d]."""
    x, y = torch.from_numpy(embeddings), torch.from_numpy(labels)
    mean, deviation = x.mean(dim=0), x.std(dim=0) + 1e-6
    x = (x - mean) / deviation
    kept = torch.arange(len(x)) % 10 == 0

    def right(ridge: float) -> int:
        weight, bias = _logistic(x[~kept], y[~kept], classes, ridge)
        return int(((x[kept] @ weight.T + bias).argmax(dim=1) == y[kept]).sum())

    weight, bias = _logistic(x, y, classes, max(RIDGES, key=right))
    return LinearProbe(weight, bias, mean, deviation)


def _logistic(x: Tensor, y: Tensor, classes: int, ridge: float) -> tuple[Tensor, Tensor]:
    layer = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(layer(x), y) + ridge * layer.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return layer.weight.detach(), layer.bias.detach()
