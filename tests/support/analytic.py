"""Statistics of institutions from pooled samples, and plain references for what is solved from them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies import Strategy, strategy_for
from client_agent.trainers.statistics import Statistics
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import Arrays

__all__ = ["analytic", "difference", "normalised", "pool", "ridge", "sums"]

Double = NDArray[np.float64]
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


def analytic(dimension: int, classes: int, institutions: int = 2, **strategy: Any) -> Strategy:
    """The coordinator of a small analytic job; every class is published unless the strategy says otherwise."""
    names = [f"i{number}" for number in range(institutions)]
    values = {"name": "afl", "min_class_count": 1, **strategy}
    document = {
        "name": "small",
        "strategy": {**values, "classes": [f"c{c}" for c in range(classes)], "dimension": dimension},
        "cohort": {"train": names},
        "rounds": 1,
        "quorum": 1,
    }
    return strategy_for(JobSpec.model_validate(document))


def pool(samples: int, dimension: int, classes: int, seed: int = 0) -> Samples:
    """Embeddings around a direction for each class, of any length, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    centres = rng.standard_normal((classes, dimension))
    rows = centres[labels] + rng.standard_normal((samples, dimension))
    return (rows * rng.uniform(0.5, 20, (samples, 1))).astype(np.float32), labels.astype(np.int64)


def normalised(features: NDArray[np.float32]) -> Double:
    h = features.astype(np.float64)
    return np.asarray(h / np.linalg.norm(h, axis=1, keepdims=True), np.float64)


def sums(samples: Samples, dimension: int, classes: int, parts: Sequence[NDArray[Any]]) -> list[Arrays]:
    """The update of each institution: part i are the rows of the pool that are its own."""
    found = []
    for rows in parts:
        statistics = Statistics(dimension, classes)
        statistics.add(samples[0][rows], samples[1][rows])
        found.append(statistics.arrays())
    return found


def ridge(samples: Samples, classes: int, shift: float) -> tuple[Double, float]:
    """Ridge regression on all samples at once: W [K, d], and the condition number of its matrix."""
    h, y = normalised(samples[0]), np.eye(classes)[samples[1]]
    matrix = h.T @ h + shift * np.eye(h.shape[1])
    return np.asarray(np.linalg.solve(matrix, h.T @ y).T, np.float64), float(np.linalg.cond(matrix, 1))


def difference(found: Any, expected: Double) -> float:
    """Relative, in the Frobenius norm."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))
