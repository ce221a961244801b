"""What every strategy is: the first model, who trains when, and how the updates of a round become the next model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.jobs import CLASSIFIER, JobSpec, Shapes, StrategySpec, TrainedSpec, payload_bytes
from veilfed.secagg import Words
from veilfed.secagg.encoding import encoding_for
from veilfed.updates import check_update
from veilfed.wire.tensors import Array, Arrays

__all__ = ["Report", "Strategy", "Update"]

# Who sent it, its weight, and its tensors.
Update = tuple[str, float, Arrays]
# What an administrator is told of a published model, as JSON values; nothing for most strategies.
Report = Mapping[str, Any]


class Strategy(ABC):
    """One job's strategy."""

    # Whether the updates are kept after their round, for changes of the job: see aggregator.artifacts.
    sealed = False
    # Whether the first model is worth an evaluation, by those who only evaluate.
    evaluates_first = True

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec

    @property
    def shapes(self) -> Shapes:
        """Name and shape of each tensor of an update; without any, institutions send counts alone."""
        return self.spec.strategy.update_shapes

    @property
    def model_bytes(self) -> int:
        """Bound on the bytes of a model, and of an update, masked or not, as a serialised TensorMap."""
        strategy = self.spec.strategy
        plain = max(_bytes(strategy, strategy.model_shapes), _bytes(strategy, self.shapes))
        if self.spec.secure_aggregation is None:
            return plain
        masked = max(8 * encoding_for(self.spec, number).form.words for number in (0, self.spec.rounds - 1))
        return max(plain, masked + 256)

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        """Model 0. `class_vectors` [K, d] where the job says `initial: class_vectors`, else None.

        Raises VeilfedError(JOB_INVALID) where they are missing, unasked for, or of another shape.
        """
        return {CLASSIFIER: self._first_classifier(class_vectors)}

    def _first_classifier(self, class_vectors: Array | None) -> NDArray[np.float32]:
        """Rows of normal deviates or the class vectors, each scaled to the norm init_norm; the same for one seed."""
        strategy = self.spec.strategy
        assert isinstance(strategy, TrainedSpec)  # noqa: S101  for mypy: the others have first models of their own
        if (class_vectors is not None) != strategy.takes_class_vectors:
            which = "needs class vectors" if class_vectors is None else "takes no class vectors"
            raise VeilfedError(Code.JOB_INVALID, f"job: strategy.initial is {strategy.initial}, which {which}")
        if class_vectors is None:
            rows = np.random.Generator(np.random.PCG64(self.spec.seed)).standard_normal(strategy.classifier_shape)
        else:
            rows = _checked(class_vectors, strategy.classifier_shape).astype(np.float64)
        rows *= strategy.init_norm / np.linalg.norm(rows, axis=1, keepdims=True)
        return rows.astype(np.float32)

    def trains(self, institution: str, round_number: int) -> bool:
        """Whether an institution trains in a round; if not, it evaluates. The closing round evaluates only."""
        return round_number < self.spec.rounds and institution in self.spec.cohort.train

    def check(self, arrays: Arrays, number: int) -> None:
        """The update gate for the tensors of an update of a round. Raises VeilfedError(UPDATE_INVALID)."""
        check_update(arrays, self.spec, number)

    @abstractmethod
    def fold(self, updates: Iterable[tuple[float, Arrays]], current: Callable[[], Arrays]) -> Arrays:
        """The next model, of (weight, tensors) of each institution and, where it is asked for, the current model.

        The result is the same, bit for bit, in every order of the updates.
        """

    def fold_sum(self, total: Words, count: int, number: int, current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        """The next model, of the sum of the vectors of `count` institutions (veilfed.secagg.encoding).

        The same, bit for bit, as `fold` makes of their updates. The sum is all that can be checked. Raises
        VeilfedError(UPDATE_INVALID) for one that no updates can have, and what `fold` raises.
        """
        raise NotImplementedError  # a job of such a method is refused by its specification

    def fold_reported(self, updates: Iterable[Update], current: Callable[[], Arrays]) -> tuple[Arrays, Report]:
        """The next model as `fold`, and what is to be told of it. `updates` may be gone through several times."""
        return self.fold(((weight, arrays) for _, weight, arrays in updates), current), {}


def _bytes(strategy: StrategySpec, shapes: Shapes) -> int:
    return payload_bytes(strategy, shapes) + sum(len(name) + 256 for name in shapes)


def _checked(vectors: Array, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Raises VeilfedError(JOB_INVALID) unless the vectors are float32 of this shape, finite, and none is zero."""
    if vectors.shape != shape or vectors.dtype != np.float32:
        raise VeilfedError(
            Code.JOB_INVALID,
            f"class vectors: expected float32 {list(shape)}, got {vectors.dtype} {list(vectors.shape)}",
        )
    rows: NDArray[np.float32] = vectors.astype(np.float32)
    if not np.isfinite(rows).all() or not rows.any(axis=1).all():
        raise VeilfedError(Code.JOB_INVALID, "class vectors: not finite, or one of them is zero")
    return rows
