"""How an update becomes the vector that is masked, and what a sum of such vectors holds.

The same rounding as in the fold of plain updates, so the sum is the same, bit for bit:

    averages: weight x tensor and weight, in Z/2^64 with the job's fraction bits (veilfed.ring)
    statistics: gram and cross in Z/2^128 (veilfed.wide_ring), counts as integers in Z/2^64
    prompts: weight x prompts in Z/2^128 and weight, an integer in Z/2^64; weight = 1 or the number of samples
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilfed import ring, wide_ring
from veilfed.jobs import COUNTS, GRAM, PROMPTS, AnalyticSpec, FedopalStrategy, JobSpec, Shapes
from veilfed.secagg.vectors import Format, Words
from veilfed.wire.tensors import Arrays

__all__ = ["MASKED", "WEIGHT", "Encoding", "encoding_for", "prompt_weight"]

# The tensor of a masked update, and the name of the sum of the weights.
MASKED = "masked"
WEIGHT = "weight"


@dataclass(frozen=True)
class Encoding:
    """Which elements a vector has, in this order."""

    spec: JobSpec
    # Name and shape of what is in either ring.
    narrow: Shapes
    wide: Shapes

    @property
    def form(self) -> Format:
        return Format(_elements(self.narrow), _elements(self.wide))

    def encode(self, arrays: Arrays, weight: float) -> Words:
        """The vector of an update that fits the job. Raises VeilfedError(INPUT_INVALID) for what is not finite."""
        vector, strategy = self.form.zeros(), self.spec.strategy
        narrow, wide = self.form.parts(vector)
        bits = 0 if isinstance(strategy, AnalyticSpec) else self.spec.fold.fraction_bits
        if isinstance(strategy, FedopalStrategy):
            weight = prompt_weight(strategy, arrays[COUNTS])
        for name, part in _places(self.narrow).items():
            if name == WEIGHT:
                narrow[part] = ring.encode(np.asarray([weight], np.float64), bits)
            elif name == COUNTS:
                narrow[part] = arrays[COUNTS].astype(np.int64).view(np.uint64)
            else:
                narrow[part] = ring.encode(arrays[name].reshape(-1), bits, weight)
        for name, part in _places(self.wide).items():
            values = arrays[name].astype(np.float64).reshape(-1)
            wide[:, part] = wide_ring.encode(values * weight if name == PROMPTS else values)
        return vector

    def sums(self, total: Words) -> dict[str, Words]:
        """Ring elements by name: of the shape S of the tensor, or [2, *S] where they are wide."""
        narrow, wide = self.form.parts(total)
        found = {name: narrow[part].reshape(self.narrow[name]) for name, part in _places(self.narrow).items()}
        for name, part in _places(self.wide).items():
            found[name] = np.ascontiguousarray(wide[:, part]).reshape(2, *self.wide[name])
        return found


def encoding_for(spec: JobSpec, number: int) -> Encoding:
    """Of the updates of a training round."""
    shapes = spec.strategy.round_shapes(number)
    if not isinstance(spec.strategy, AnalyticSpec):
        return Encoding(spec, {**_sorted(shapes), WEIGHT: ()}, {})
    # In one round only: two sums of them over other institutions would tell those of one.
    narrow: dict[str, tuple[int, ...]] = {COUNTS: shapes[COUNTS]} if GRAM in shapes else {}
    if PROMPTS in shapes:
        narrow[WEIGHT] = ()
    return Encoding(spec, narrow, {name: shape for name, shape in _sorted(shapes).items() if name != COUNTS})


def prompt_weight(strategy: FedopalStrategy, counts: NDArray[np.generic]) -> int:
    """The weight of an institution's prompts in their mean; 0 without samples."""
    samples = int(counts.sum())
    return samples if strategy.prompt_weighting == "samples" else min(samples, 1)


def _sorted(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shapes[name] for name in sorted(shapes)}


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _places(shapes: Shapes) -> Mapping[str, slice]:
    """Where the elements of each tensor are."""
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = slice(start, start + math.prod(shape))
        start = places[name].stop
    return places
