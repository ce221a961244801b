"""AFL and FedCGS at the coordinator: statistics are summed exactly, and one solution gives the classifier."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from aggregator.solve.cholesky import Cholesky
from aggregator.solve.gaussian import solve_gaussian
from aggregator.solve.ridge import Spectrum, solve_ridge
from aggregator.solve.statistics import Double, Statistics, Sums
from aggregator.strategies.base import Report, Strategy, Update
from veilfed import wide_ring
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import BIAS, CLASSIFIER, COUNTS, CROSS, GRAM, AnalyticSpec, FedcgsStrategy, JobSpec, RidgeSpec
from veilfed.secagg import Words
from veilfed.secagg.encoding import encoding_for
from veilfed.updates import check_sums
from veilfed.wire.tensors import Array, Arrays

__all__ = ["Afl", "Analytic", "Fedcgs"]


class Analytic(Strategy):
    """Publishes the classifier of the summed statistics, and tells what it was made of."""

    evaluates_first = False

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        # A sum is not kept: a change would give another, and the difference of the two.
        self.sealed = spec.secure_aggregation is None

    @property
    def analytic(self) -> AnalyticSpec:
        """The job's parameters."""
        assert isinstance(self.spec.strategy, AnalyticSpec)  # noqa: S101  for mypy: the registry sees to it
        return self.spec.strategy

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        """Zeros: nothing is known before the statistics."""
        if class_vectors is not None:
            raise VeilfedError(Code.JOB_INVALID, f"job: {self.analytic.name} takes no class vectors")
        shapes, dtype = self.analytic.model_shapes, self.analytic.dtype
        return {name: np.zeros(shape, dtype(name)) for name, shape in shapes.items()}

    def fold(self, updates: Iterable[tuple[float, Arrays]], current: Callable[[], Arrays]) -> Arrays:
        """The classifier. Raises VeilfedError(SINGULAR)."""
        return self._solved(self._total(arrays for _, arrays in updates))[0]

    def fold_sum(self, total: Words, count: int, number: int, current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        statistics = self._summed(encoding_for(self.spec, number).sums(total))
        model, told, factors = self._solved(statistics)
        return model, self._card(statistics, told, factors)

    def _summed(self, sums: Mapping[str, Words]) -> Statistics:
        """Raises VeilfedError(UPDATE_INVALID) for what cannot be sums of samples."""
        arrays: Arrays = {name: wide_ring.decode(sums[name]) for name in (GRAM, CROSS)}
        arrays[COUNTS] = sums[COUNTS].view(np.int64)
        check_sums(arrays, self.analytic, noisy=self.spec.privacy is not None)
        return self._repaired(Statistics.of(arrays))

    def fold_reported(self, updates: Iterable[Update], current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        total = self._total(arrays for _, _, arrays in updates)
        model, told, factors = self._solved(total)
        return model, self._report(total, told, factors, updates)

    def _total(self, updates: Iterable[Arrays]) -> Statistics:
        classes, dimension = self.analytic.classifier_shape
        sums = Sums(dimension, classes)
        for arrays in updates:
            sums.add(arrays)
        return self._repaired(sums.total())

    def _repaired(self, total: Statistics) -> Statistics:
        return total if self.spec.privacy is None else total.repaired()

    def _solved(self, total: Statistics) -> tuple[Arrays, dict[str, Any], Cholesky]:
        model, told, factors = self.solve(total)
        published: Arrays = {}
        for name, tensor in model.items():
            tensor[total.counts < self.analytic.min_class_count] = 0
            published[name] = tensor
        return published, told, factors

    @abstractmethod
    def solve(self, total: Statistics) -> tuple[dict[str, Double], dict[str, Any], Cholesky]:
        """The model, what is to be told of the solution, and the factors of the matrix that was solved.

        Raises VeilfedError(SINGULAR).
        """

    def _card(self, total: Statistics, told: dict[str, Any], factors: Cholesky) -> dict[str, Any]:
        """What the model was made of. Lists named class_ have a value for each class."""
        return {
            "method": self.analytic.name,
            "samples": total.samples,
            "condition": factors.condition,
            **told,
            "class_samples": total.counts.tolist(),
            "class_published": (total.counts >= self.analytic.min_class_count).tolist(),
        }

    def _report(self, total: Statistics, told: dict[str, Any], factors: Cholesky, updates: Iterable[Update]) -> Report:
        """The model card, with what each institution brought.

        An institution's `share` is tr(M^-1 R_k) / tr(M^-1 R) with the matrix M that was solved: the part of the fit's
        degrees of freedom that its samples account for. The shares sum to 1.
        """
        inverse = factors.solve(np.eye(len(total.gram)))
        whole, holders = float(np.vdot(inverse, total.gram)), np.zeros(len(total.counts), np.int64)
        institutions = []
        for institution, _, arrays in updates:
            brought = Statistics.of(arrays)
            there = brought.counts > 0
            holders += there
            share = float(np.vdot(inverse, brought.gram)) / whole
            institutions.append(
                {
                    "institution": institution,
                    "samples": brought.samples,
                    "classes": int(there.sum()),
                    "share": _short(share),
                }
            )
        card = self._card(total, told, factors)
        return {**card, "class_institutions": holders.tolist(), "institutions": institutions}


def _short(value: float) -> float:
    """With as many digits as are worth telling: a report is one message, whatever the number of classes."""
    return float(f"{value:.6g}")


class Afl(Analytic):
    """The ridge regression."""

    def solve(self, total: Statistics) -> tuple[dict[str, Double], dict[str, Any], Cholesky]:
        strategy = self.analytic
        assert isinstance(strategy, RidgeSpec)  # noqa: S101  for mypy: the registry sees to it
        told: dict[str, Any] = {"chosen_by": "job"}
        if strategy.ridge == "gcv":
            spectrum = Spectrum(total)
            ridge = spectrum.best()
            told = {"chosen_by": "gcv", "gcv": spectrum.gcv(ridge), "degrees_of_freedom": spectrum.degrees(ridge)}
        else:
            ridge = strategy.ridge
        solution = solve_ridge(total, ridge)
        told = {"ridge": ridge, **told, "class_residual": _residuals(total, solution.weights)}
        return {CLASSIFIER: solution.weights.T.copy()}, told, solution.factors


def _residuals(total: Statistics, weights: Double) -> list[float]:
    """Of each class, the part of its squares that the fit leaves: |H w_c - y_c|^2 / n_c; 0 without samples."""
    left = total.counts - 2 * (weights * total.cross).sum(axis=0) + (weights * (total.gram @ weights)).sum(axis=0)
    return [_short(part) for part in np.maximum(left, 0) / np.maximum(total.counts, 1)]


class Fedcgs(Analytic):
    """The Gaussian classifier."""

    def solve(self, total: Statistics) -> tuple[dict[str, Double], dict[str, Any], Cholesky]:
        strategy = self.analytic
        assert isinstance(strategy, FedcgsStrategy)  # noqa: S101  for mypy: the registry sees to it
        solution = solve_gaussian(total, strategy.covariance, strategy.shrinkage, noisy=self.spec.privacy is not None)
        model = {CLASSIFIER: solution.weights.T.copy(), BIAS: solution.biases}
        return model, {"covariance": strategy.covariance, "shrinkage": solution.shrinkage}, solution.factors
