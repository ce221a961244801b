"""AFL by its pairwise law (CVPR 2025, theorems 1 and 2): solved classifiers are merged two by two.

Client k has C_k = X_k^T X_k + gamma I and W_k = C_k^-1 X_k^T Y_k. With R = C^-1, the merged one of u and v is

    W = (I - R_u C_v + R_u C_v (C_u + C_v)^-1 C_v) W_u + (I - R_v C_u + R_v C_u (C_u + C_v)^-1 C_u) W_v
    C = C_u + C_v

and after all K clients the intermediary gamma is taken out of it again:

    W <- (C - K gamma I)^-1 C W

The sum of the statistics gives the same in one solution: this is here to show that.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from aggregator.solve.cholesky import shifted
from aggregator.solve.statistics import Double, Statistics

__all__ = ["Local", "local", "merge", "without_intermediary"]


@dataclass(frozen=True, eq=False)
class Local:
    """W [d, K], C [d, d] with `terms` times gamma on its diagonal, and R = C^-1."""

    weights: Double
    gram: Double
    inverse: Double
    terms: int = 1


def local(statistics: Statistics, gamma: float) -> Local:
    """What a client of AFL sends."""
    gram = shifted(statistics.gram, gamma)
    inverse = np.asarray(np.linalg.inv(gram), np.float64)
    return Local(inverse @ statistics.cross, gram, inverse)


def merge(clients: Iterable[Local]) -> Local:
    """The clients merged one after the other; there is one at least."""
    first, *others = clients
    for other in others:
        first = _merged(first, other)
    return first


def _merged(u: Local, v: Local) -> Local:
    gram = u.gram + v.gram
    inverse = np.asarray(np.linalg.inv(gram), np.float64)
    unit, u_v, v_u = np.eye(len(gram)), u.inverse @ v.gram, v.inverse @ u.gram
    weights = (unit - u_v + u_v @ inverse @ v.gram) @ u.weights + (unit - v_u + v_u @ inverse @ u.gram) @ v.weights
    return Local(weights, gram, inverse, u.terms + v.terms)


def without_intermediary(merged: Local, gamma: float, ridge: float = 0.0) -> Double:
    """W [d, K] with `ridge` in place of the intermediaries."""
    right = merged.gram @ merged.weights
    return np.asarray(np.linalg.solve(shifted(merged.gram, ridge - merged.terms * gamma), right), np.float64)
