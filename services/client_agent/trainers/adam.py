"""Adam (Kingma and Ba, 2015, algorithm 1): its whole state is two arrays and a count."""

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
    """One step, in place, on row-major arrays. `count` is t: 1 at the first step of the running means.

    By the operator of torch.optim.Adam(fused=True), which passes once over each array; the class itself takes longer
    than the operator where arrays are small.
    """
    time = torch.tensor(float(count))
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            torch._fused_adam_(
                [parameter.value],
                [gradient.contiguous()],  # the operator does not look at strides
                [parameter.mean],
                [parameter.square],
                [],
                [time],
                lr=parameter.rate,
                beta1=BETA_1,
                beta2=BETA_2,
                eps=EPSILON,
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
            )
