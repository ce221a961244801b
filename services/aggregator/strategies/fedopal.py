"""FedOPAL (arXiv 2607.08368) at the coordinator: AFL's solution, and the mean of the institutions' prompts.

    W = (sum_k R_k + lambda I)^-1 sum_k C_k                   (equation 2)
    P = sum_k w_k P_k / sum_k w_k                             w_k = 1, or n_k

Both are sums in the ring, the same in every order. An institution without samples has no part in the mean. With
`reextract` the first round has prompts and counts alone, and the second one statistics alone.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from aggregator import gate
from aggregator.statistics_gate import check_counts, check_statistics
from aggregator.strategies.analytic import Afl
from aggregator.strategies.base import Report, Update
from veilfed import wide_ring
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import COUNTS, FIRST_PROMPTS, FLOAT32, GRAM, PROMPTS, FedopalStrategy, JobSpec
from veilfed.wire.tensors import Array, Arrays

__all__ = ["Fedopal"]

Float = NDArray[np.float32]


class Fedopal(Afl):
    """Publishes the classifier, the mean prompt, and P_0, from which a later institution starts too."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.strategy, FedopalStrategy)  # noqa: S101  for mypy: the registry sees to it
        self._strategy = spec.strategy
        # Statistics with the mean prompt cannot be changed afterwards: the prompt would be another.
        self.sealed = not self._strategy.reextract

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        """W = 0, and P_0: standard normal deviates drawn from the job's seed, as prompts are in units of tokens."""
        first = np.random.Generator(np.random.PCG64(self.spec.seed)).standard_normal(self._strategy.prompts_shape)
        drawn = first.astype(np.float32)
        return {**super().initial(class_vectors), PROMPTS: drawn, FIRST_PROMPTS: drawn}

    def check(self, arrays: Arrays, number: int) -> None:
        shapes = self._strategy.round_shapes(number)
        gate.check_names(arrays, shapes)
        if GRAM in shapes:
            check_statistics({name: arrays[name] for name in self._strategy.statistics_shapes}, self._strategy)
        else:
            gate.check_form(COUNTS, arrays[COUNTS], shapes[COUNTS], self._strategy.dtype(COUNTS))
            check_counts(arrays[COUNTS])
        if PROMPTS in shapes:
            self._check_prompts(arrays[PROMPTS], int(arrays[COUNTS].sum()))

    def _check_prompts(self, prompts: Array, samples: int) -> None:
        gate.check_form(PROMPTS, prompts, self._strategy.prompts_shape, FLOAT32)
        largest = float(np.abs(prompts.astype(np.float64)).max())
        if not largest <= self.spec.fold.max_abs or largest * samples >= wide_ring.LARGEST:
            raise VeilfedError(
                Code.UPDATE_INVALID,
                f"{PROMPTS}: not finite, or an element is larger than max_abs ({self.spec.fold.max_abs:g})",
            )

    def fold(self, updates: Iterable[tuple[float, Arrays]], current: Callable[[], Arrays]) -> Arrays:
        """The next model. Raises VeilfedError(SINGULAR)."""
        return self.fold_reported([("", weight, arrays) for weight, arrays in updates], current)[0]

    def fold_reported(self, updates: Iterable[Update], current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        """The next model, and its card. Raises VeilfedError(SINGULAR)."""
        start, mean = current(), _Mean(self._strategy)
        if not _has_statistics(updates):
            for _, _, arrays in updates:
                mean.add(arrays)
            return {**start, PROMPTS: mean.value(start)}, {}

        def seen() -> Iterator[Arrays]:
            for _, _, arrays in updates:
                if PROMPTS in arrays:
                    mean.add(arrays)
                yield arrays

        total, model, told, factors = self._solved(seen())
        prompts = start[PROMPTS] if self._strategy.reextract else mean.value(start)
        report = self._report(total, model, told, factors, updates)
        return {**model, PROMPTS: prompts, FIRST_PROMPTS: start[FIRST_PROMPTS]}, report


def _has_statistics(updates: Iterable[Update]) -> bool:
    """The gate has seen to it that all updates of a round have the same tensors."""
    return any(GRAM in arrays for _, _, arrays in updates)


class _Mean:
    """The mean of the prompts of updates that have passed the gate."""

    def __init__(self, strategy: FedopalStrategy) -> None:
        self._by_samples = strategy.prompt_weighting == "samples"
        self._sum = wide_ring.Total(strategy.prompts_shape)
        self._weight = 0

    def add(self, arrays: Arrays) -> None:
        samples = int(arrays[COUNTS].sum())
        weight = samples if self._by_samples else min(samples, 1)
        if weight:
            self._sum.add(arrays[PROMPTS].astype(np.float64) * weight)
            self._weight += weight

    def value(self, start: Arrays) -> Float:
        """float32 [M, D]; P_0 where nobody has samples."""
        if not self._weight:
            return start[FIRST_PROMPTS].astype(np.float32)
        return (wide_ring.decode(self._sum.ring()) / self._weight).astype(np.float32)
