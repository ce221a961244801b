"""FedGH (Yi et al., 2023) at the coordinator: the classifier ("header") is trained here, on the class means that came.

    minimise the mean over all means z of -log softmax(tau w_g z)[its class]

from the current w_g, by `header_steps` steps of Adam over all of them at once, in float64.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies.base import Strategy
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import CLASSIFIER, MEANS, FedghStrategy, JobSpec
from veilfed.wire.tensors import Arrays

__all__ = ["Fedgh", "train_header"]

Double = NDArray[np.float64]

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
# Of all means of a round, in float64. They are in memory together, unlike what is averaged.
MAX_MEANS_BYTES = 1024**3


class Fedgh(Strategy):
    """Publishes the trained classifier. Rows of zeros are classes that an institution has no mean of."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        classes, dimension = spec.strategy.classifier_shape
        if len(spec.cohort.train) * classes * dimension * 8 > MAX_MEANS_BYTES:
            raise VeilfedError(
                Code.JOB_INVALID, f"job: institutions x classes x dimension x 8 bytes is more than {MAX_MEANS_BYTES}"
            )

    def fold(self, updates: Iterable[tuple[float, Arrays]], current: Callable[[], Arrays]) -> Arrays:
        """The trained classifier; the current one if no mean came."""
        strategy = self.spec.strategy
        assert isinstance(strategy, FedghStrategy)  # noqa: S101  for mypy: the registry sees to it
        # In an order of their own, so that it does not matter in which they came.
        pairs = sorted(
            ((label, row) for _, arrays in updates for label, row in enumerate(arrays[MEANS]) if row.any()),
            key=lambda pair: (pair[0], pair[1].tobytes()),
        )
        if not pairs:
            return current()
        means = np.array([row for _, row in pairs], np.float64)
        labels = np.array([label for label, _ in pairs])
        start = current()[CLASSIFIER].astype(np.float64)
        trained = train_header(start, means, labels, strategy.temperature, strategy.header_rate, strategy.header_steps)
        return {CLASSIFIER: trained.astype(np.float32)}


def train_header(
    classifier: Double, means: Double, labels: NDArray[np.intp], temperature: float, rate: float, steps: int
) -> Double:
    """w_g [K, d] after so many steps of Adam, started anew, on means [n, d] of the classes `labels` [n]."""
    w, mean, square = classifier.copy(), np.zeros_like(classifier), np.zeros_like(classifier)
    for count in range(1, steps + 1):
        gradient = _gradient(w, means, labels, temperature)
        mean += (1 - BETA_1) * (gradient - mean)
        square += (1 - BETA_2) * (gradient**2 - square)
        w -= rate * (mean / (1 - BETA_1**count)) / (np.sqrt(square / (1 - BETA_2**count)) + EPSILON)
    return w


def _gradient(w: Double, means: Double, labels: NDArray[np.intp], temperature: float) -> Double:
    """Of the mean cross entropy: tau / n sum_i (p_i - y_i) z_i^T."""
    logits = temperature * (means @ w.T)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    gradient: Double = temperature / len(labels) * (shares.T @ means)
    return gradient
