"""The engine's arithmetic on real slots: the same integers for weights and constants, no encryption and no noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fm_oracle.encrypted.operations import Layer, Operations, Real
from veilfed.errors import Code, VeilfedError

__all__ = ["PlainEvaluator", "Slots"]


@dataclass(frozen=True)
class Slots:
    """What ciphertexts of this level and scale have in them: values [C, slots]."""

    values: Real
    scale: float
    limbs: int
    components: int = 2

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: slice) -> "Slots":
        return replace(self, values=self.values[which])

    def read_at(self, scale: float) -> "Slots":
        return replace(self, values=self.values * (self.scale / scale), scale=scale)

    def at(self, limbs: int) -> "Slots":
        if not 1 <= limbs <= self.limbs:
            raise VeilfedError(Code.INPUT_INVALID, f"{limbs} limbs are not within 1 and {self.limbs}")
        return replace(self, limbs=limbs)


class PlainEvaluator(Operations[Slots]):
    """For the student's accuracy without encryption, and for tests of the encrypted engine."""

    def join(self, parts: Sequence[Slots]) -> Slots:
        for part in parts[1:]:
            self.matching(parts[0], part)
        return replace(parts[0], values=np.concatenate([part.values for part in parts]))

    def add(self, x: Slots, y: Slots) -> Slots:
        self.matching(x, y)
        return replace(x, values=x.values + y.values)

    def plus(self, x: Slots, constant: float) -> Slots:
        return replace(x, values=x.values + round(constant * x.scale) / x.scale)

    def times(self, x: Slots, constants: Sequence[float], scale: float) -> Slots:
        ratio = scale / x.scale
        integers = np.array([round(constant * ratio) for constant in constants], dtype=np.float64)
        return replace(x, values=x.values * (integers / ratio)[:, None], scale=scale)

    def total(self, x: Slots) -> Slots:
        return replace(x, values=x.values.sum(axis=0, keepdims=True))

    def products(self, x: Slots, y: Slots) -> Slots:
        return replace(x, values=x.values * y.values, scale=x.scale * y.scale, components=3)

    def sum_products(self, x: Slots, of_x: Sequence[Sequence[int]], y: Slots, of_y: Sequence[Sequence[int]]) -> Slots:
        pairs = ((x.values[list(left)], y.values[list(right)]) for right in of_y for left in of_x)
        values = np.stack([np.einsum("ts,ts->s", left, right) for left, right in pairs])
        return replace(x, values=values, scale=x.scale * y.scale, components=3)

    def relinearise(self, x: Slots) -> Slots:
        return replace(x, components=2)

    def rescale(self, x: Slots) -> Slots:
        return replace(x, scale=x.scale / self.parameters.primes[x.limbs - 1], limbs=x.limbs - 1)

    def rotate(self, x: Slots, steps: Sequence[int]) -> Slots:
        return replace(x, values=np.concatenate([np.roll(x.values, -step, axis=1) for step in steps]))

    def linear(self, layer: Layer, x: Slots) -> Slots:
        return replace(x, values=(layer.integers / layer.scale) @ x.values, scale=x.scale * layer.scale)

    def refresh(self, x: Slots, largest: float, shift: int, limbs: int | None = None) -> Slots:
        limbs = self.refreshed_limbs(x, largest, shift, limbs)
        return replace(x, scale=x.scale / 2**shift, limbs=limbs)
