"""FedAdapter, of the comparison in FEDOT (CVPR 2026): a private residual network of one hidden layer.

z = a / ||a||,   a = h + U relu(D h + b)
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from client_agent.trainers.inputs import unit
from client_agent.trainers.method import Stepwise, Tensors
from veilfed.jobs import FedadapterStrategy, Shapes
from veilfed.wire.tensors import Arrays

__all__ = ["Fedadapter"]

# D [m, d], b [m], U [d, m].
DOWN, BIAS, UP = "adapter_down", "adapter_bias", "adapter_up"


class Fedadapter(Stepwise[FedadapterStrategy]):
    """U and b start at zero, so z starts as h. D's elements have variance 1: so have its outputs, as h has length 1."""

    @property
    def rates(self) -> Mapping[str, float]:
        return {**super().rates, **dict.fromkeys(self.private_shapes, self.strategy.adapter_rate)}

    @property
    def private_shapes(self) -> Shapes:
        width, dimension = self.strategy.hidden, self.strategy.dimension
        return {DOWN: (width, dimension), BIAS: (width,), UP: (dimension, width)}

    def first_private(self, model: Arrays, random: np.random.Generator) -> Arrays:
        down = random.standard_normal(self.private_shapes[DOWN]).astype(np.float32)
        return {**super().first_private(model, random), DOWN: down}

    def transformed(self, tensors: Tensors, h: Tensor) -> Tensor:
        if DOWN not in tensors:
            return h
        return unit(h + torch.relu(h @ tensors[DOWN].T + tensors[BIAS]) @ tensors[UP].T)

    def linear_map(self, tensors: Tensors) -> Tensor | None:
        return None
