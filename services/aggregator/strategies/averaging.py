"""The mean of what the institutions send, such as FEDOT's classifiers w_g (CVPR 2026). Private tensors never come here.

w_g <- sum_i weight_i w_g^i / sum_i weight_i
"""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies.base import Report, Strategy
from veilfed import ring
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import TRANSFORM
from veilfed.secagg import Words
from veilfed.secagg.encoding import WEIGHT, encoding_for
from veilfed.updates import check_parameters
from veilfed.wire.tensors import Array, Arrays

__all__ = ["AllGlobal", "Averaging"]

# Elements that are folded at a time: intermediate arrays stay in the processor's cache.
BLOCK = 2**15


class Averaging(Strategy):
    """Averages each tensor of the updates; tensors of the model that no update has stay as they are."""

    def fold(self, updates: Iterable[tuple[float, Arrays]], current: Callable[[], Arrays]) -> Arrays:
        """The weighted mean of each tensor.

        Each term is rounded to the job's fixed point and added in the ring, so the result is the same, bit for bit,
        in every order of the updates. Memory is that of the sum (two models) and of one update, whatever their
        number. Raises VeilfedError(INPUT_INVALID) when there are none.
        """
        bits = self.spec.fold.fraction_bits
        totals = {name: ring.zeros((math.prod(shape),)) for name, shape in self.shapes.items()}
        weights = ring.zeros(())
        for weight, arrays in updates:
            for name, total in totals.items():
                _accumulate(total, arrays[name].reshape(-1), weight, bits)
            ring.add(weights, ring.encode(np.asarray(weight, dtype=np.float64), bits))
        return self._with_fixed(self._means(totals, weights), current)

    def fold_sum(self, total: Words, count: int, number: int, current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        sums = encoding_for(self.spec, number).sums(total)
        weights = sums.pop(WEIGHT)
        self._check_weights(float(ring.decode(weights, self.spec.fold.fraction_bits)), count)
        means = self._means({name: part.reshape(-1) for name, part in sums.items()}, weights)
        check_parameters(means, self.shapes, self.spec)  # a mean is within the limits of each
        return self._with_fixed(means, current), {}

    def _check_weights(self, weights: float, count: int) -> None:
        """Raises VeilfedError(UPDATE_INVALID) unless so many updates can have weights of this sum."""
        uniform = self.spec.strategy.weighting == "uniform"
        if not (weights == count if uniform else 0 < weights <= count * self.spec.fold.max_weight):
            raise VeilfedError(Code.UPDATE_INVALID, f"the weights of {count} updates cannot have the sum {weights:g}")

    def _means(self, totals: Mapping[str, ring.Ring], weights: ring.Ring) -> Arrays:
        """Of flat sums. Raises VeilfedError(INPUT_INVALID) when the weights sum to zero."""
        bits = self.spec.fold.fraction_bits
        divisor = float(ring.decode(weights, bits))
        if divisor <= 0:
            raise VeilfedError(Code.INPUT_INVALID, "nothing to average: the weights sum to zero")
        return {name: _mean(totals[name], divisor, bits).reshape(shape) for name, shape in self.shapes.items()}

    def _with_fixed(self, means: Arrays, current: Callable[[], Arrays]) -> Arrays:
        """With the tensors of the model that no update has."""
        fixed = self.spec.strategy.model_shapes.keys() - self.shapes.keys()
        return means | {name: current()[name] for name in sorted(fixed)}


class AllGlobal(Averaging):
    """For `all-global`: X is a tensor of the model; X = 0 is the identity."""

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        shape = self.spec.strategy.model_shapes[TRANSFORM]
        return {**super().initial(class_vectors), TRANSFORM: np.zeros(shape, np.float32)}


def _accumulate(total: ring.Ring, values: Array, weight: float, bits: int) -> None:
    """total += weight * values, both flat, block by block."""
    for start in range(0, total.size, BLOCK):
        block = slice(start, start + BLOCK)
        ring.add(total[block], ring.encode(values[block], bits, weight))


def _mean(total: ring.Ring, divisor: float, bits: int) -> NDArray[np.float32]:
    """total / divisor, flat, block by block."""
    mean = np.empty(total.size, dtype=np.float32)
    for start in range(0, total.size, BLOCK):
        block = slice(start, start + BLOCK)
        mean[block] = ring.decode(total[block], bits) / divisor
    return mean
