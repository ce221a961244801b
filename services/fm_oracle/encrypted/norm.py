"""Layer normalisation without scale and shift, which belong to the linear layers after it.

The stream has mean zero over its channels: every layer that adds to it has the centring in its weights. So what is left
is x / sqrt(variance), where 1 / sqrt(v) starts from a quadratic, fitted to the range that the student keeps, and is
improved by Newton's steps s <- s (3 - v s^2) / 2. It is kept divided by the square root of 2.
"""

import math
from dataclasses import dataclass

import numpy as np

from fm_oracle.encrypted.operations import B, Operations
from veilfed.errors import Code, VeilfedError

__all__ = ["Norm", "newton_steps"]

MAX_STEPS = 20


def newton_steps(low: float, high: float, error: float) -> int:
    """The fewest steps after which 1 / sqrt(v) is right to a relative `error` for v from low to high.

    Raises VeilfedError(INPUT_INVALID) where even many steps do not get there.
    """
    v = np.geomspace(low, high, 1000)
    c0, c1, c2 = Norm(1, low, high, 0.0, 0).start
    s = c0 + c1 * v + c2 * v * v
    for step in range(MAX_STEPS):
        if np.abs(s * np.sqrt(v) - 1).max() <= error:
            return step
        s = s * (3 - v * s * s) / 2
    raise VeilfedError(
        Code.INPUT_INVALID, f"variances from {low:g} to {high:g} are too far apart for Newton's steps to one root"
    )


@dataclass(frozen=True)
class Norm:
    """For d channels whose variance plus epsilon is within low and high; `steps` of Newton."""

    channels: int
    low: float
    high: float
    epsilon: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise VeilfedError(Code.INPUT_INVALID, f"a variance from {self.low:g} to {self.high:g}")

    @property
    def start(self) -> tuple[float, float, float]:
        """(c0, c1, c2) of the quadratic that has the least relative error at Chebyshev points of the range."""
        angles = (np.arange(64) + 0.5) * np.pi / 64
        v = self.low + (self.high - self.low) * (1 + np.cos(angles)) / 2
        powers = np.stack([np.ones_like(v), v, v * v], axis=1) * np.sqrt(v)[:, None]
        c0, c1, c2 = np.linalg.lstsq(powers, np.ones_like(v), rcond=None)[0]
        return float(c0), float(c1), float(c2)

    def __call__(self, x: B, lowest: int, operations: Operations[B]) -> B:
        """x / sqrt(variance + epsilon) at `lowest` limbs, of a centred x that is higher."""
        channels = range(len(x))
        squares = operations.relinearise(operations.sum_products(x, [channels], x, [channels]))
        v = operations.rescale(squares)
        v = operations.brought(v, 1 / self.channels, self.high)
        halved = self._halved_root(operations.plus(v, self.epsilon), lowest, operations)
        inverse = halved.read_at(halved.scale / math.sqrt(2))
        return operations.multiplied(x.at(lowest + 1), inverse.at(lowest + 1))

    def _halved_root(self, v: B, lowest: int, operations: Operations[B]) -> B:
        """1 / sqrt(2 v), so that a step has no other constant: s (3/2 - v s^2)."""
        # Padding has a variance of 0, where the steps go on growing, by 3/2 each.
        largest = self.low**-0.5 * 1.5**self.steps
        c0, c1, c2 = (c / math.sqrt(2) for c in self.start)
        square = operations.relinearise(operations.products(v, v))
        s = operations.times(square, [c2], square.scale * FINE)
        s = operations.plus(operations.add(s, operations.times(v, [c1], s.scale)), c0)
        s = operations.rescale(operations.rescale(s))
        for _ in range(self.steps):
            if s.limbs < lowest + STEP_LEVELS + 1:
                s = operations.refresh(s, largest, 0)
            s = self._improved(s, v, operations)
        return s

    def _improved(self, s: B, v: B, operations: Operations[B]) -> B:
        w = operations.multiplied(operations.multiplied(s, s), v)
        return operations.multiplied(s, operations.plus(operations.negated(w), 1.5))


# Room for the digits of a coefficient: as much as a rescale takes.
FINE = 2.0**36
STEP_LEVELS = 3
