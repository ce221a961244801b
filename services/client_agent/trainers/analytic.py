"""AFL and FedCGS at one institution: it sends its statistics once, and classifies by the solved classifier.

    scores = tau (W h + b),   W [K, d], b [K]; AFL has no b

A class of which the aggregator published nothing has a row of zeros, and is never the answer.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_agent.privacy.mechanisms import Noise, PrivateStatistics
from client_agent.trainers.inputs import Float, Labels, check_labels
from client_agent.trainers.method import Method, Spec, Tensors
from client_agent.trainers.statistics import Statistics, released, unit_rows
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import BIAS, CLASSIFIER, AnalyticSpec, StatisticsPrivacy
from veilfed.wire.tensors import Arrays

__all__ = ["Analytic", "Summer"]

# Samples that are summed at a time: bounds memory.
BATCH = 1024


class Analytic(Method[Spec]):
    """Nothing is private, and nothing is trained by steps."""

    # A first model of zeros has no accuracy that is worth a look at the test split.
    evaluates_first = False
    # The difference of two sums would tell about the samples that came or went in between.
    sends_once = True

    def logits(self, tensors: Tensors, h: Tensor) -> Tensor:
        weights = tensors[CLASSIFIER]
        scores = h.to(weights.dtype) @ weights.T
        if BIAS in tensors:
            scores = scores + tensors[BIAS]
        known = weights.any(dim=1)
        return (self.strategy.temperature * scores).masked_fill(~known, torch.finfo(scores.dtype).min)


class Summer:
    """The training split of one institution in an analytic job; the counterpart of Trainer.

    `features` float32 [n, d] as the oracle gave them, `labels` int64 [n] in [0, K). Classes with fewer than
    `min_class_samples` samples are left out; where fewer than `min_samples` are left, nothing is given out. With
    `noise` all samples count: it protects each of them. Raises VeilfedError(DATA_INVALID).
    """

    def __init__(
        self,
        method: Method[Any],
        features: Float,
        labels: Labels,
        *,
        min_class_samples: int = 5,
        min_samples: int = 1,
        noise: Noise | None = None,
    ) -> None:
        assert isinstance(method.strategy, AnalyticSpec)  # noqa: S101  for mypy: the registry sees to it
        self._classes, self._dimension = method.strategy.classifier_shape
        check_labels(labels, len(features), self._classes)
        self._features, self._labels = features, labels
        self._noise = noise
        if noise is not None:
            min_class_samples = min_samples = 1
        self._rows = released(labels, self._classes, min_class_samples, min_samples)

    def initial_state(self, model: Arrays) -> None:
        """There is none."""

    def train(
        self, model: Arrays, state: None, round_number: int, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[Arrays, None]:
        """The statistics, whatever the model. `cancelled` is asked before each batch.

        Raises VeilfedError: CANCELLED; DATA_INVALID for an embedding that is zero or not finite.
        """
        if self._noise is not None:
            return self._noisy(self._noise, cancelled), None
        statistics = Statistics(self._dimension, self._classes)
        for features, labels in self._batches(cancelled):
            statistics.add(features, labels)
        return statistics.arrays(), None

    def _batches(self, cancelled: Callable[[], bool]) -> Iterator[tuple[Float, Labels]]:
        for start in range(0, len(self._rows), BATCH):
            if cancelled():
                raise VeilfedError(Code.CANCELLED, "the sums were stopped")
            rows = self._rows[start : start + BATCH]
            yield self._features[rows], np.asarray(self._labels[rows])

    def _noisy(self, noise: Noise, cancelled: Callable[[], bool]) -> Arrays:
        assert isinstance(noise.privacy, StatisticsPrivacy)  # noqa: S101  for mypy: the job's check sees to it
        statistics = PrivateStatistics(self._dimension, self._classes)
        for features, labels in self._batches(cancelled):
            statistics.add(unit_rows(features, self._dimension), labels)
        return statistics.noisy(noise.privacy, noise)
