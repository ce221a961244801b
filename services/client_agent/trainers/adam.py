"""Adam (Kingma and Ba, 2015, algorithm 1), written out: its whole state is two arrays and a count."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Parameter", "step"]

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Parameter:
    """A trained array with its rate and the running means of its gradient and of the gradient's square."""

    value: Tensor
    rate: float
    mean: Tensor
    square: Tensor


def step(parameters: Sequence[Parameter], gradients: Sequence[Tensor], count: int) -> None:
    """One step, in place. `count` is t: 1 at the first step of the running means."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.mean.lerp_(gradient, 1 - BETA_1)
            parameter.square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
            deviation = (parameter.square / (1 - BETA_2**count)).sqrt_().add_(EPSILON)
            parameter.value.addcdiv_(parameter.mean, deviation, value=-parameter.rate / (1 - BETA_1**count))
