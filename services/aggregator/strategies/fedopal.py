"""FedOPAL (arXiv 2607.08368) at the coordinator: AFL's solution, and the mean of the institutions' prompts.

    W = (sum_k R_k + lambda I)^-1 sum_k C_k                   (equation 2)
    P = sum_k w_k P_k / sum_k w_k                             w_k = 1, or n_k

Both are sums in the ring, the same in every order. An institution without samples has no part in the mean. With
`reextract` the first round has prompts and counts alone, and the second one statistics alone.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies.analytic import Afl
from aggregator.strategies.base import Report, Update
from veilfed import wide_ring
from veilfed.jobs import COUNTS, FIRST_PROMPTS, GRAM, PROMPTS, FedopalStrategy, JobSpec
from veilfed.secagg import Words
from veilfed.secagg.encoding import WEIGHT, encoding_for, prompt_weight
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
        self.sealed = self.sealed and not self._strategy.reextract

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        """W = 0, and P_0: standard normal deviates drawn from the job's seed, as prompts are in units of tokens."""
        first = np.random.Generator(np.random.PCG64(self.spec.seed)).standard_normal(self._strategy.prompts_shape)
        drawn = first.astype(np.float32)
        return {**super().initial(class_vectors), PROMPTS: drawn, FIRST_PROMPTS: drawn}

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

        total = self._total(seen())
        model, told, factors = self._solved(total)
        prompts = start[PROMPTS] if self._strategy.reextract else mean.value(start)
        report = self._report(total, told, factors, updates)
        return {**model, PROMPTS: prompts, FIRST_PROMPTS: start[FIRST_PROMPTS]}, report

    def fold_sum(self, total: Words, count: int, number: int, current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        start, sums = current(), encoding_for(self.spec, number).sums(total)
        prompts = start[PROMPTS].astype(np.float32)
        if PROMPTS in sums:
            prompts = _mean_prompts(sums[PROMPTS], int(sums[WEIGHT].view(np.int64)), start)
        if GRAM not in sums:
            return {**start, PROMPTS: prompts}, {}
        statistics = self._summed(sums)
        model, told, factors = self._solved(statistics)
        published = {**model, PROMPTS: prompts, FIRST_PROMPTS: start[FIRST_PROMPTS]}
        return published, self._card(statistics, told, factors)


def _has_statistics(updates: Iterable[Update]) -> bool:
    """The gate has seen to it that all updates of a round have the same tensors."""
    return any(GRAM in arrays for _, _, arrays in updates)


class _Mean:
    """The mean of the prompts of updates that have passed the gate."""

    def __init__(self, strategy: FedopalStrategy) -> None:
        self._strategy = strategy
        self._sum = wide_ring.Total(strategy.prompts_shape)
        self._weight = 0

    def add(self, arrays: Arrays) -> None:
        weight = prompt_weight(self._strategy, arrays[COUNTS])
        if weight:
            self._sum.add(arrays[PROMPTS].astype(np.float64) * weight)
            self._weight += weight

    def value(self, start: Arrays) -> Float:
        """float32 [M, D]; P_0 where nobody has samples."""
        return _mean_prompts(self._sum.ring(), self._weight, start)


def _mean_prompts(total: wide_ring.WideRing, weight: int, start: Arrays) -> Float:
    if not weight:
        return start[FIRST_PROMPTS].astype(np.float32)
    return (wide_ring.decode(total) / weight).astype(np.float32)
