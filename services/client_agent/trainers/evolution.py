"""CMA-ES (Hansen and Ostermeier, 2001; Hansen, arXiv 1604.00772) over the prompts of a random subspace.

    P = P_0 + A z,   A [M D, s] with elements N(0, 1 / s),   z [s]
    minimise   L(P) + mu/2 ||P - P_0||^2

In each generation all candidates are tried on one batch. With z ~ N(0, c^2 I) an element of P - P_0 has the standard
deviation c. The first step is

    c / sqrt(1 + mu M D c^2 / 2)

so that the second term of a first candidate is 1 at most on average, whatever mu is: for mu -> infinity no candidate
differs from P_0 in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_agent.trainers.inputs import Float

__all__ = ["Evolution", "Subspace"]

Double = NDArray[np.float64]


@dataclass(frozen=True)
class Subspace:
    """`dimension` is s; `population` is how many candidates a generation has."""

    dimension: int
    population: int


class Evolution:
    """One search from P_0, `first` [M, D], of so many generations.

    What it comes to depends on the random numbers and on the losses alone, float32 [generations, population]: they are
    all that is to be kept of it, zeros where it has not been yet.
    """

    def __init__(
        self,
        first: Double,
        subspace: Subspace,
        step: float,
        mu: float,
        random: np.random.Generator,
        generations: int,
    ) -> None:
        import cma  # noqa: PLC0415  takes long to import, and few jobs need it

        self._first = first
        self._root = np.sqrt(mu / 2)  # of mu itself the squares below would leave the range of float64
        self._map = random.standard_normal((first.size, subspace.dimension)) / np.sqrt(subspace.dimension)
        self._search = cma.CMAEvolutionStrategy(
            np.zeros(subspace.dimension),
            step / np.hypot(1, self._root * np.sqrt(first.size) * step),
            {
                "popsize": subspace.population,
                "randn": lambda *shape: random.standard_normal(shape),
                "seed": np.nan,  # the generator of all other code is left alone
                "verbose": -10,  # reads no file of options and writes none
                "verb_log": 0,
            },
        )
        self._asked: list[Double] | None = None
        self._taken = 0
        self.losses: Float = np.zeros((generations, subspace.population), np.float32)

    @property
    def prompts(self) -> Float:
        """Those in the middle of the next generation, float32 [M, D]."""
        return self._prompts(self._search.mean)

    def candidates(self) -> list[Float]:
        """Those of this generation; the same until `take`."""
        return [self._prompts(z) for z in self._generation()]

    def take(self, losses: Sequence[float]) -> None:
        """L of each candidate, float32 numbers."""
        self.losses[self._taken] = losses
        self._taken += 1
        generation = self._generation()
        values = [
            loss + float(np.sum((self._root * (self._map @ z)) ** 2))
            for loss, z in zip(losses, generation, strict=True)
        ]
        self._search.tell(generation, values)
        self._asked = None

    def replay(self, losses: Float) -> None:
        """Goes through the first generations again, with the losses that they had."""
        for generation in losses:
            self.take(generation.tolist())

    def _generation(self) -> list[Double]:
        if self._asked is None:
            self._asked = self._search.ask()
        return self._asked

    def _prompts(self, z: Double) -> Float:
        moved: Double = self._first + (self._map @ z).reshape(self._first.shape)
        return moved.astype(np.float32)
