"""FedCGS (AAAI 2025) from the statistics alone: class means, one covariance, and the classifier of Gaussian classes.

With A = sum_c n_c mu_c the sum of all embeddings and B = R,

    Sigma = (B - sum_c n_c mu_c mu_c^T) / (n - K)       `within`: around the means of the K classes that have samples
    Sigma = (B - n mu mu^T) / (n - 1)                   `paper`: around the mean of all, mu = A / n
    w_c = Sigma^-1 mu_c,   b_c = -mu_c^T w_c / 2 + log(n_c / n)

Sigma is replaced by (1 - rho) Sigma + rho tr(Sigma) / d I. The estimate of rho is that of Chen, Wiesel, Eldar and Hero
(2010, eq. 23): it needs Sigma and the number of samples alone.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from aggregator.solve.cholesky import Cholesky, shifted
from aggregator.solve.statistics import Double, Statistics, positive
from veilfed.errors import Code, VeilfedError

__all__ = ["Gaussian", "oas", "solve_gaussian"]


@dataclass(frozen=True, eq=False)
class Gaussian:
    """`weights` [d, K] and `biases` [K], zero for classes without samples; the shrinkage and the factors of Sigma."""

    weights: Double
    biases: Double
    shrinkage: float
    factors: Cholesky


def solve_gaussian(
    statistics: Statistics,
    covariance: Literal["within", "paper"],
    shrinkage: float | Literal["oas"],
    noisy: bool = False,
) -> Gaussian:
    """The classifier. Of `noisy` statistics, Sigma is replaced by the nearest without negative eigenvalues first.

    Raises VeilfedError(SINGULAR), also where there are too few samples for a covariance."""
    there = statistics.counts > 0
    means = statistics.cross[:, there] / statistics.counts[there]
    samples = statistics.samples
    free = samples - (int(there.sum()) if covariance == "within" else 1)
    if free < 1:
        raise VeilfedError(Code.SINGULAR, f"{samples} samples are too few for a covariance")
    if covariance == "within":
        between = (means * statistics.counts[there]) @ means.T
    else:
        mean = statistics.cross.sum(axis=1) / samples
        between = samples * np.outer(mean, mean)
    sigma = (statistics.gram - between) / free
    if noisy:
        sigma = positive(sigma)
    rho = oas(sigma, free) if shrinkage == "oas" else shrinkage
    shrunk = shifted((1 - rho) * sigma, rho * float(np.trace(sigma)) / len(sigma))
    factors = Cholesky(shrunk, f"the covariance with shrinkage {rho:g}")
    weights, biases = np.zeros_like(statistics.cross), np.zeros(len(there))
    weights[:, there] = factors.solve(means)
    biases[there] = np.log(statistics.counts[there] / samples) - (means * weights[:, there]).sum(axis=0) / 2
    return Gaussian(weights, biases, float(rho), factors)


def oas(sigma: Double, samples: int) -> float:
    """rho of the covariance [d, d] of so many samples, between 0 and 1."""
    d = len(sigma)
    trace, square = float(np.trace(sigma)) ** 2, float(np.square(sigma).sum())
    above = (1 - 2 / d) * square + trace
    below = (samples + 1 - 2 / d) * (square - trace / d)
    return min(1.0, above / below) if below > 0 else 1.0
