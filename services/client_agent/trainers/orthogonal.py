"""The orthogonal transform of FEDOT (CVPR 2026, design 1, 3 and 4), which several methods have.

    z = w_l h,   w_l = Cayley(X)

w_l keeps lengths and h has length 1, so the division by ||w_l h|| is left out.
"""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from client_agent.trainers.cayley import rotate
from client_agent.trainers.method import Method, Tensors
from veilfed.jobs import TRANSFORM, OrthogonalSpec

__all__ = ["Orthogonal"]

Spec = TypeVar("Spec", bound=OrthogonalSpec)


class Orthogonal(Method[Spec]):
    """Trains classifier and X [r, m, m]. Where X is kept is the method's own; X = 0 is the identity."""

    @property
    def rates(self) -> Mapping[str, float]:
        return {**super().rates, TRANSFORM: self.strategy.transform_rate}

    def transformed(self, tensors: Tensors, h: Tensor) -> Tensor:
        return rotate(tensors[TRANSFORM], h) if TRANSFORM in tensors else h
