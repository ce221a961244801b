"""What all methods have in common: classes, dimension, and how their tensors are described."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from veilfed.config import Strict

__all__ = ["CLASSIFIER", "FLOAT32", "Shapes", "StrategySpec", "TrainedSpec", "payload_bytes"]

# w_g [K, d], of the models of all methods.
CLASSIFIER = "classifier"
FLOAT32 = np.dtype(np.float32)

Shapes = Mapping[str, tuple[int, ...]]


class StrategySpec(Strict):
    """What all methods have: a linear classifier on embeddings, p = softmax(tau w_g z)."""

    name: str
    classes: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field(min_length=2, max_length=100_000)
    dimension: int = Field(ge=2, le=65_536, description="d, the length of an embedding")
    temperature: float = Field(20.0, gt=0, le=1000, description="tau")
    weighting: Literal["uniform", "samples"] = Field("uniform", description="uniform is the paper's mean")

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes must be distinct")
        return self

    @property
    def classifier_shape(self) -> tuple[int, int]:
        """[K, d]."""
        return len(self.classes), self.dimension

    @property
    def model_shapes(self) -> Shapes:
        """Name and shape of each tensor of a model."""
        return {CLASSIFIER: self.classifier_shape}

    @property
    def update_shapes(self) -> Shapes:
        """Name and shape of each tensor of an update."""
        return self.model_shapes

    def round_shapes(self, number: int) -> Shapes:
        """Those of the updates of one training round of the job: all of them, unless rounds differ."""
        return self.update_shapes

    def dtype(self, name: str) -> np.dtype[Any]:
        """The element type of a tensor of a model or an update."""
        return FLOAT32

    @property
    def takes_class_vectors(self) -> bool:
        """Whether class vectors come with the submission."""
        return False

    @property
    def changes(self) -> int:
        """How often a job that has ended may be changed, see JobSpec.last_round."""
        return 0

    @property
    def sums(self) -> bool:
        """Whether the sum of the updates is all that the next model needs, as secure aggregation gives it."""
        return True

    @property
    def masked_only(self) -> bool:
        """Whether the job must have secure aggregation, as the update of one institution could tell of its data."""
        return False


class TrainedSpec(StrategySpec):
    """A method that is trained by steps of Adam."""

    initial: Literal["random", "class_vectors"] = Field(
        "random", description="the first w_g: random rows, or class vectors that come with the submission"
    )
    init_norm: float = Field(0.1, gt=0, le=100, description="norm of the rows of w_g at the start")
    epochs: int = Field(1, ge=1, le=1000, description="E, passes over the training split in a round")
    batch_size: int = Field(64, ge=1, le=65_536)
    classifier_rate: float = Field(5e-3, gt=0, le=10, description="Adam's rate for w_g")

    @property
    def takes_class_vectors(self) -> bool:
        return self.initial == "class_vectors"


def payload_bytes(strategy: StrategySpec, shapes: Shapes) -> int:
    """The bytes of the elements of these tensors of a method."""
    return sum(int(np.prod(shape)) * strategy.dtype(name).itemsize for name, shape in shapes.items())
