"""What a block is computed with. The same block runs on ciphertexts, on plain slots, and on shapes alone.

`Evaluator` computes on ciphertexts, `plain.PlainEvaluator` does exactly that arithmetic on real slots, and
`plan.Planner` only follows levels, scales and costs: none of the three can differ in what the block does.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilfed.ckks.parameters import MAX_SHIFT, Parameters
from veilfed.errors import Code, VeilfedError

__all__ = ["EXACT_BITS", "MARGIN_BITS", "SAME_SCALE", "B", "Batch", "Layer", "Operations"]

Real = NDArray[np.float64]

# Integers up to this are exact in doubles: what a sum of products of weights and pieces of residues must not exceed.
EXACT_BITS = 53
# Scales that differ by less, relatively, are one: what that costs is far below the noise.
SAME_SCALE = 1e-9
# Of constants that bring values to a range, and are taken from the scale again by a refresh.
CONSTANT_BITS = 30
# log2 of Q / (2 B) that a refresh demands of a signal of at most B: so the mask hides it, and the reply is right.
MARGIN_BITS = 80


class Batch(Protocol):
    """Several ciphertexts of one level and scale, one channel each; or what stands for them."""

    @property
    def scale(self) -> float: ...

    @property
    def limbs(self) -> int: ...

    @property
    def components(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, which: slice) -> Self: ...

    def at(self, limbs: int) -> Self:
        """The same at a lower level: the last primes are dropped, the scale stays."""

    def read_at(self, scale: float) -> Self:
        """The same ciphertexts, read at another scale: the slots are larger by the old scale over the new one."""


B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Layer:
    """A linear layer of integers [out, in]; `scale` is what a weight of 1 is."""

    integers: Real
    scale: float

    def __post_init__(self) -> None:
        if not 0 < self.largest_row < 2.0 ** (EXACT_BITS - 10):
            raise VeilfedError(Code.INPUT_INVALID, "weights that are zero, not finite, or too large to be exact")

    @classmethod
    def rounded(cls, weights: Real, scale: float) -> Self:
        return cls(np.rint(np.asarray(weights, dtype=np.float64) * scale), scale)

    @property
    def largest_row(self) -> float:
        """The largest sum of absolute weights of one output."""
        return float(np.abs(self.integers).sum(axis=1).max())


class Operations(ABC, Generic[B]):
    """Arguments stay as they are; results are new. All raise VeilfedError(INPUT_INVALID) for what does not match."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def phase(self, name: str) -> None:
        """What comes next, for who follows."""

    @abstractmethod
    def join(self, parts: Sequence[B]) -> B:
        """Several batches of one level and scale as one."""

    @abstractmethod
    def add(self, x: B, y: B) -> B:
        """x + y, of one level and scale."""

    @abstractmethod
    def plus(self, x: B, constant: float) -> B:
        """x + constant in every slot."""

    @abstractmethod
    def times(self, x: B, constants: Sequence[float], scale: float) -> B:
        """Each channel, or the only one, times each constant, at a larger scale.

        The constants become integers, and no level is lost.
        """

    @abstractmethod
    def total(self, x: B) -> B:
        """The sum of the channels, one."""

    @abstractmethod
    def products(self, x: B, y: B) -> B:
        """Channel by channel, or by y's only one: three components."""

    @abstractmethod
    def sum_products(self, x: B, of_x: Sequence[Sequence[int]], y: B, of_y: Sequence[Sequence[int]]) -> B:
        """For each c and each g the sum over t of x[of_x[g][t]] * y[of_y[c][t]]: channels of three components."""

    @abstractmethod
    def relinearise(self, x: B) -> B:
        """Two components of three."""

    @abstractmethod
    def rescale(self, x: B) -> B:
        """x divided by its last prime: one limb fewer, the scale divided too."""

    @abstractmethod
    def rotate(self, x: B, steps: Sequence[int]) -> B:
        """The slots of x moved to the left by each number of steps, which may be 0: one batch after the other."""

    @abstractmethod
    def linear(self, layer: Layer, x: B) -> B:
        """The layer's outputs, at the scale of x times the layer's."""

    @abstractmethod
    def refresh(self, x: B, largest: float, shift: int, limbs: int | None = None) -> B:
        """x with so many limbs, else all, its scale divided by 2^shift; `largest` bounds what is in the slots.

        Fewer limbs than all are fewer bytes and less work for both sides.
        """

    def brought(self, x: B, constant: float, largest: float) -> B:
        """x times a constant, refreshed, at exactly the scale of the parameters.

        Where values are squared again and again, so is what their scale has too much: it must be right at the start.
        """
        scale = self.parameters.scale * 2.0**CONSTANT_BITS
        scaled = self.times(x, [constant] * len(x), scale)
        return self.refresh(scaled, largest, CONSTANT_BITS)

    def refreshed_limbs(self, x: B, largest: float, shift: int, limbs: int | None) -> int:
        """The limbs that a refresh gives.

        Raises VeilfedError(INPUT_INVALID) where there are fewer, where the modulus of x is too small to hide it, and
        for a shift that nobody can do.
        """
        if not 0 <= shift <= MAX_SHIFT:
            raise VeilfedError(Code.INPUT_INVALID, f"a refresh that shifts by {shift} bits; {MAX_SHIFT} are possible")
        limbs = self.parameters.limbs if limbs is None else limbs
        if not x.limbs <= limbs <= self.parameters.limbs:
            raise VeilfedError(
                Code.INPUT_INVALID, f"a refresh from {x.limbs} to {limbs} limbs: there are {self.parameters.limbs}"
            )
        signal, modulus = math.log2(largest * x.scale) + 1, self._modulus(x.limbs)
        if modulus - 1 - signal < MARGIN_BITS:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"a modulus of {modulus:.0f} bits does not hide a signal of {signal:.0f}:"
                f" a refresh needs {MARGIN_BITS} bits more than it",
                "Refresh earlier, or at a smaller scale.",
            )
        return limbs

    def largest_scale(self, limbs: int, largest: float) -> float:
        """log2 of the largest scale at which a refresh from so many limbs hides values up to `largest`."""
        return self._modulus(limbs) - 2 - MARGIN_BITS - math.log2(largest)

    def _modulus(self, limbs: int) -> float:
        """Its bits."""
        return sum(math.log2(q) for q in self.parameters.primes[:limbs])

    def matching(self, x: B, y: B) -> None:
        """Raises VeilfedError(INPUT_INVALID) where x and y differ in level, components or scale."""
        if x.limbs != y.limbs or x.components != y.components or abs(x.scale / y.scale - 1) > SAME_SCALE:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"{x.components} x {x.limbs} limbs at scale {x.scale:g} do not match {y.components} x {y.limbs}"
                f" at {y.scale:g}",
            )

    def negated(self, x: B) -> B:
        """-x at the same level and scale."""
        return self.times(x, [-1.0] * len(x), x.scale)

    def multiplied(self, x: B, y: B) -> B:
        """Channel by channel, or by y's only one: relinearised, one level lower."""
        limbs = min(x.limbs, y.limbs)
        return self.rescale(self.relinearise(self.products(x.at(limbs), y.at(limbs))))
