"""FedLT, of the comparison in FEDOT (CVPR 2026): a private linear transform without any constraint.

z = w_l h / ||w_l h||,   w_l [d, d]
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from client_agent.trainers.inputs import unit
from client_agent.trainers.method import Stepwise, Tensors
from veilfed.jobs import TRANSFORM, FedltStrategy, Shapes
from veilfed.wire.tensors import Arrays

__all__ = ["Fedlt"]


class Fedlt(Stepwise[FedltStrategy]):
    """w_l starts as the identity."""

    @property
    def rates(self) -> Mapping[str, float]:
        return {**super().rates, TRANSFORM: self.strategy.transform_rate}

    @property
    def private_shapes(self) -> Shapes:
        return {TRANSFORM: (self.strategy.dimension, self.strategy.dimension)}

    def first_private(self, model: Arrays, random: np.random.Generator) -> Arrays:
        return {TRANSFORM: np.eye(self.strategy.dimension, dtype=np.float32)}

    def transformed(self, tensors: Tensors, h: Tensor) -> Tensor:
        return unit(h @ tensors[TRANSFORM].T) if TRANSFORM in tensors else h

    def linear_map(self, tensors: Tensors) -> Tensor | None:
        return tensors[TRANSFORM].double() if TRANSFORM in tensors else super().linear_map(tensors)
