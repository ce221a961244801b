"""AFL's ridge regression (CVPR 2025) from the statistics alone, and what else they say.

    W = (R + lambda I)^-1 C                                              [d, K]

Generalised cross-validation (Golub, Heath and Wahba, 1979) needs no sample either: with R = V diag(s) V^T, one-hot
labels and n samples,

    RSS(lambda) = n - 2 tr(W^T C) + tr(W^T R W) = n - sum_i b_i (s_i + 2 lambda) / (s_i + lambda)^2
    b_i         = |(V^T C)_i|^2
    df(lambda)  = sum_i s_i / (s_i + lambda)
    GCV(lambda) = (RSS / n) / (1 - df / n)^2
"""

from dataclasses import dataclass

import numpy as np

from aggregator.solve.cholesky import Cholesky, shifted
from aggregator.solve.statistics import Double, Statistics
from veilfed.errors import Code, VeilfedError

__all__ = ["Ridge", "Spectrum", "solve_ridge"]

# Of the largest eigenvalue: the interval that is searched, in steps, and then more closely around the best of them.
LOWEST, HIGHEST, STEPS, ROUNDS = 1e-10, 1e2, 49, 3


@dataclass(frozen=True, eq=False)
class Ridge:
    """`weights` [d, K], and the factorisation of R + lambda I that they come from."""

    weights: Double
    ridge: float
    factors: Cholesky


def solve_ridge(statistics: Statistics, ridge: float) -> Ridge:
    """The ridge regression with this lambda. Raises VeilfedError(SINGULAR)."""
    if statistics.samples == 0:
        raise _no_samples()
    factors = Cholesky(shifted(statistics.gram, ridge), f"the sum of the statistics with ridge {ridge:g}")
    return Ridge(factors.solve(statistics.cross), ridge, factors)


def _no_samples() -> VeilfedError:
    return VeilfedError(Code.SINGULAR, "the statistics are of no sample", "Give the job institutions with samples.")


class Spectrum:
    """The statistics in the eigenvectors of R: every lambda is cheap once they are found."""

    def __init__(self, statistics: Statistics) -> None:
        values, vectors = np.linalg.eigh(statistics.gram)
        # R has no negative eigenvalues but for rounding.
        self._values = np.maximum(values, 0.0)
        self._energies = np.square(vectors.T @ statistics.cross).sum(axis=1)
        self._samples = statistics.samples

    def degrees(self, ridge: float) -> float:
        """df: how many parameters of each class the fit uses."""
        return float((self._values / (self._values + ridge)).sum())

    def residual(self, ridge: float) -> float:
        """RSS, of all classes together."""
        fitted = self._energies * (self._values + 2 * ridge) / np.square(self._values + ridge)
        return max(0.0, self._samples - float(fitted.sum()))

    def gcv(self, ridge: float) -> float:
        """The criterion; infinite where the fit has as many parameters as samples."""
        left = 1 - self.degrees(ridge) / self._samples
        return self.residual(ridge) / self._samples / left**2 if left > 0 else np.inf

    def best(self) -> float:
        """The lambda of the least GCV, between 1e-10 and 100 times the largest eigenvalue."""
        top = float(self._values[-1])
        if top <= 0:
            raise _no_samples()
        low, high = np.log(LOWEST * top), np.log(HIGHEST * top)
        for _ in range(ROUNDS):
            grid = np.linspace(low, high, STEPS)
            at = int(np.argmin([self.gcv(float(np.exp(point))) for point in grid]))
            low, high = grid[max(0, at - 1)], grid[min(STEPS - 1, at + 1)]
        return float(np.exp(grid[at]))
