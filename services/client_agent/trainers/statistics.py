"""Sums over samples that the analytic methods send: R = sum h h^T, C = sum h y^T and the samples of each class.

    statistics = Statistics(dimension, classes)
    for features, labels in batches:
        statistics.add(features, labels)
    statistics.arrays()                      the tensors `gram`, `cross` and `counts` of an update

The memory is that of the sums and of one batch, whatever the number of samples. All in float64: h is the embedding
scaled to length 1 there, so that the trace of R is the number of samples.
"""

import numpy as np
from numpy.typing import NDArray

from client_agent.trainers.inputs import Float, Labels, check_labels
from veilfed import triangle
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import COUNTS, CROSS, GRAM
from veilfed.wire.tensors import Arrays

__all__ = ["Statistics", "released", "unit_rows"]

Double = NDArray[np.float64]


def released(labels: Labels, classes: int, least: int, least_in_all: int = 1) -> NDArray[np.intp]:
    """The rows whose class has at least `least` samples: a sum over fewer would tell about single samples.

    The others are left out altogether, as if the institution did not have them; all of them, where the rest is fewer
    than `least_in_all`.
    """
    counts = np.bincount(labels, minlength=classes)
    rows = np.flatnonzero(counts[labels] >= least)
    return rows if len(rows) >= least_in_all else rows[:0]


def unit_rows(features: Float, dimension: int) -> Double:
    """Embeddings [n, d] scaled to length 1, in float64. Raises VeilfedError(DATA_INVALID)."""
    if features.ndim != 2 or features.shape[1] != dimension:
        raise VeilfedError(
            Code.DATA_INVALID, f"embeddings have shape {list(features.shape)}; the job needs [n, {dimension}]"
        )
    h = features.astype(np.float64)
    lengths = np.linalg.norm(h, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise VeilfedError(Code.DATA_INVALID, f"embedding {bad[0]} of a batch is zero or not finite")
    h /= lengths
    return h


class Statistics:
    """Sums that grow by batches."""

    def __init__(self, dimension: int, classes: int) -> None:
        self._gram = np.zeros((dimension, dimension))
        # As [K, d], where a class is a row that lies together.
        self._sums = np.zeros((classes, dimension))
        self._counts = np.zeros(classes, dtype=np.int64)

    def add(self, features: Float, labels: Labels) -> None:
        """Adds samples: embeddings [b, d] as the oracle gave them, labels int64 [b]; b may be 0.

        Raises VeilfedError(DATA_INVALID) for other shapes, labels that are no class, or an embedding that is zero or
        not finite; nothing is added then.
        """
        h = unit_rows(features, len(self._gram))
        check_labels(labels, len(h), len(self._counts))
        self._gram += h.T @ h
        for label in np.unique(labels):
            self._sums[label] += h[labels == label].sum(axis=0)
        self._counts += np.bincount(labels, minlength=len(self._counts))

    def arrays(self) -> Arrays:
        """The sums so far: gram [d (d + 1) / 2] and cross [d, K] in float64, counts int64 [K]."""
        return {
            GRAM: triangle.pack(self._gram),
            CROSS: np.ascontiguousarray(self._sums.T),
            COUNTS: self._counts.copy(),
        }
