"""The orthogonal transform of FEDOT (CVPR 2026, design 1, 3 and 4), which several methods have.

    z = w_l h,   w_l = Cayley(X)

w_l keeps lengths and h has length 1, so the division by ||w_l h|| is left out.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from client_agent.trainers.cayley import rotate
from client_agent.trainers.method import Stepwise, Tensors
from veilfed.jobs import CLASSIFIER, TRANSFORM, FedghStrategy, FedotStrategy, OrthogonalSpec, Shapes

__all__ = ["Orthogonal", "PrivateTransform"]

Spec = TypeVar("Spec", bound=OrthogonalSpec)
PrivateSpec = TypeVar("PrivateSpec", FedotStrategy, FedghStrategy)


class Orthogonal(Stepwise[Spec]):
    """Trains classifier and X [r, m, m]. Where X is kept is the method's own; X = 0 is the identity."""

    @property
    def rates(self) -> Mapping[str, float]:
        return {**super().rates, TRANSFORM: self.strategy.transform_rate}

    def transformed(self, tensors: Tensors, h: Tensor) -> Tensor:
        return rotate(tensors[TRANSFORM], h) if TRANSFORM in tensors else h

    def linear_map(self, tensors: Tensors) -> Tensor | None:
        identity = torch.eye(self.strategy.dimension, dtype=torch.float64)
        return rotate(tensors[TRANSFORM].double(), identity).T if TRANSFORM in tensors else identity


class PrivateTransform(Orthogonal[PrivateSpec]):
    """X stays with the institution. With `transform: identity`, and for newcomers, there is none."""

    @property
    def rates(self) -> Mapping[str, float]:
        rates = super().rates
        return rates if self.private_shapes else {CLASSIFIER: rates[CLASSIFIER]}

    @property
    def private_shapes(self) -> Shapes:
        return {TRANSFORM: self.strategy.transform_shape} if self.strategy.transform == "orthogonal" else {}
