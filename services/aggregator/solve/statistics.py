"""What the analytic methods sum: R = sum h h^T, C = sum h y^T, and the samples of each class."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilfed import triangle, wide_ring
from veilfed.jobs import COUNTS, CROSS, GRAM
from veilfed.wire.tensors import Arrays

__all__ = ["Double", "Statistics", "Sums", "positive"]

Double = NDArray[np.float64]


def positive(matrix: Double) -> Double:
    """The nearest symmetric matrix without negative eigenvalues, in the Frobenius norm (Higham, 1988)."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T, np.float64)


@dataclass(frozen=True, eq=False)
class Statistics:
    """gram [d, d] (symmetric), cross [d, K], counts int64 [K]."""

    gram: Double
    cross: Double
    counts: NDArray[np.int64]

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def repaired(self) -> "Statistics":
        """Of sums with noise, what could be sums: no negative eigenvalue of R, no negative count."""
        counts = np.maximum(self.counts, 0)
        cross = np.where(counts > 0, self.cross, 0.0)
        return Statistics(positive(self.gram), cross, counts)

    @classmethod
    def of(cls, arrays: Arrays) -> "Statistics":
        """Those of one update."""
        gram, cross, counts = triangle.unpack(arrays[GRAM]), arrays[CROSS], arrays[COUNTS]
        return cls(gram, np.asarray(cross, np.float64), np.asarray(counts, np.int64))


class Sums:
    """The exact total of updates: the same, bit for bit, in every order of them.

    Memory is that of the total, whatever the number of updates.
    """

    def __init__(self, dimension: int, classes: int) -> None:
        self._gram = wide_ring.Total((dimension * (dimension + 1) // 2,))
        self._cross = wide_ring.Total((dimension, classes))
        self._counts = np.zeros(classes, np.int64)

    def add(self, arrays: Arrays) -> None:
        """Adds the statistics of an update that has passed the gate. Raises VeilfedError(INPUT_INVALID)."""
        self._gram.add(arrays[GRAM])
        self._cross.add(arrays[CROSS])
        self._counts += np.asarray(arrays[COUNTS], np.int64)

    def total(self) -> Statistics:
        gram = triangle.unpack(wide_ring.decode(self._gram.ring()))
        return Statistics(gram, wide_ring.decode(self._cross.ring()), self._counts.copy())
