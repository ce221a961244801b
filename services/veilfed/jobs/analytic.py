"""The analytic methods: institutions send sums over their samples once, and the aggregator solves for the classifier.

With embeddings h of length 1 and labels y as one-hot vectors, institution k sends of its training split

    R_k = sum h h^T [d, d],   C_k = sum h y^T [d, K],   n_k [K] (samples of each class)

R_k is symmetric: `gram` is its upper triangle with the diagonal, row by row (veilfed.triangle).
"""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from veilfed.jobs.base import CLASSIFIER, Shapes, StrategySpec

__all__ = ["BIAS", "COUNTS", "CROSS", "GRAM", "AflStrategy", "AnalyticSpec", "FedcgsStrategy", "RidgeSpec"]

# Tensors of updates: float64 [d (d + 1) / 2], float64 [d, K] and int64 [K].
GRAM = "gram"
CROSS = "cross"
COUNTS = "counts"
# FedCGS's b [K] of a model, float64.
BIAS = "bias"

_TYPES = {name: np.dtype(kind) for name, kind in {GRAM: "f8", CROSS: "f8", CLASSIFIER: "f8", BIAS: "f8"}.items()}
_TYPES[COUNTS] = np.dtype(np.int64)


class AnalyticSpec(StrategySpec):
    """One round of statistics, then the closing evaluation. The aggregator keeps the statistics, see `changes`."""

    weighting: Literal["uniform"] = "uniform"
    min_class_count: int = Field(
        5, ge=1, description="a class with fewer samples in all institutions together gets no weights"
    )
    max_changes: int = Field(
        16,
        ge=0,
        le=10_000,
        description="how often an institution may be added or the model solved anew, with an evaluation each",
    )

    @property
    def rounds_needed(self) -> int:
        """Training rounds of a job."""
        return 1

    @property
    def changes(self) -> int:
        return self.max_changes

    @property
    def statistics_shapes(self) -> Shapes:
        """Name and shape of the sums that an institution sends."""
        classes, dimension = self.classifier_shape
        return {GRAM: (dimension * (dimension + 1) // 2,), CROSS: (dimension, classes), COUNTS: (classes,)}

    @property
    def update_shapes(self) -> Shapes:
        return self.statistics_shapes

    def dtype(self, name: str) -> np.dtype[Any]:
        return _TYPES[name] if name in _TYPES else super().dtype(name)


class RidgeSpec(AnalyticSpec):
    """A method that solves a ridge regression."""

    ridge: float | Literal["gcv"] = Field(
        1.0, description="lambda; gcv: the one that generalised cross-validation chooses"
    )

    @model_validator(mode="after")
    def _check_ridge(self) -> Self:
        if self.ridge != "gcv" and not 0 <= self.ridge <= 1e12:
            raise ValueError("ridge must be gcv or a number from 0 to 1e12")
        return self


class AflStrategy(RidgeSpec):
    """AFL (CVPR 2025): the ridge regression on the embeddings of all institutions, in one round."""

    name: Literal["afl"]


class FedcgsStrategy(AnalyticSpec):
    """FedCGS (AAAI 2025): a Gaussian classifier of class means and one covariance, in one round."""

    name: Literal["fedcgs"]
    temperature: float = Field(1.0, gt=0, le=1000, description="tau; with 1 the scores are log probabilities")
    covariance: Literal["within", "paper"] = Field(
        "within", description="within: of samples around the mean of their class; paper: around the mean of all"
    )
    shrinkage: float | Literal["oas"] = Field(
        "oas", description="part of the covariance that is replaced by its mean variance; oas: estimated"
    )

    @model_validator(mode="after")
    def _check_shrinkage(self) -> Self:
        if self.shrinkage != "oas" and not 0 <= self.shrinkage <= 1:
            raise ValueError("shrinkage must be oas or a number from 0 to 1")
        return self

    @property
    def model_shapes(self) -> Shapes:
        return {CLASSIFIER: self.classifier_shape, BIAS: self.classifier_shape[:1]}
