"""FEDOT (CVPR 2026) at the coordinator: the mean of the institutions' classifiers w_g. Transforms never come here."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from veilfed import ring
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import Arrays

__all__ = ["CLASSIFIER", "Fedot"]

CLASSIFIER = "classifier"
# Elements that are folded at a time: intermediate arrays stay small.
BLOCK = 2**18


class Fedot:
    """One job's strategy. Models and updates have one tensor, "classifier", float32 [K, d]."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._shape = (len(spec.strategy.classes), spec.strategy.dimension)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each float32 tensor of a model and of an update."""
        return {CLASSIFIER: self._shape}

    @property
    def model_bytes(self) -> int:
        """Bound on the bytes of a model as a serialised TensorMap."""
        return sum(4 * int(np.prod(shape)) + len(name) + 256 for name, shape in self.shapes.items())

    def initial(self) -> Arrays:
        """Model 0: rows of normal deviates, each scaled to the norm init_norm; the same for the same seed."""
        generator = np.random.Generator(np.random.PCG64(self._spec.seed))
        rows = generator.standard_normal(self._shape)
        rows *= self._spec.strategy.init_norm / np.linalg.norm(rows, axis=1, keepdims=True)
        return {CLASSIFIER: rows.astype(np.float32)}

    def trains(self, institution: str, round_number: int) -> bool:
        """Whether an institution trains in a round; if not, it evaluates. The closing round evaluates only."""
        return round_number < self._spec.rounds and institution in self._spec.cohort.train

    def fold(self, updates: Iterable[tuple[float, Arrays]]) -> Arrays:
        """The weighted mean of (weight, arrays): w_g <- sum_i weight_i w_g^i / sum_i weight_i.

        Each term is rounded to the job's fixed point and added in the ring, so the result is the same, bit for bit,
        in every order of the updates. Memory is that of the sum (two models) and of one update, whatever their
        number. Raises VeilfedError(INPUT_INVALID) when there are none.
        """
        bits = self._spec.fold.fraction_bits
        totals = {name: ring.zeros((math.prod(shape),)) for name, shape in self.shapes.items()}
        weights = ring.zeros(())
        for weight, arrays in updates:
            for name, total in totals.items():
                _accumulate(total, arrays[name].reshape(-1), weight, bits)
            ring.add(weights, ring.encode(np.asarray(weight, dtype=np.float64), bits))
        divisor = float(ring.decode(weights, bits))
        if divisor <= 0:
            raise VeilfedError(Code.INPUT_INVALID, "nothing to average: the weights sum to zero")
        return {name: _mean(totals[name], divisor, bits).reshape(shape) for name, shape in self.shapes.items()}


def _accumulate(total: ring.Ring, values: NDArray[np.generic], weight: float, bits: int) -> None:
    """total += weight * values, both flat, block by block."""
    for start in range(0, total.size, BLOCK):
        block = slice(start, start + BLOCK)
        ring.add(total[block], ring.encode(values[block].astype(np.float64) * weight, bits))


def _mean(total: ring.Ring, divisor: float, bits: int) -> NDArray[np.float32]:
    """total / divisor, flat, block by block."""
    mean = np.empty(total.size, dtype=np.float32)
    for start in range(0, total.size, BLOCK):
        block = slice(start, start + BLOCK)
        mean[block] = ring.decode(total[block], bits) / divisor
    return mean
