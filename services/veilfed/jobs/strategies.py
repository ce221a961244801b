"""The methods, one class each: their parameters, and the tensors of their models and updates.

`model_shapes` are the tensors that an institution gets with each task, `update_shapes` those that it sends back, with
elements of type `dtype`. What is in neither never leaves the institution.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from veilfed.jobs.analytic import AflStrategy, FedcgsStrategy
from veilfed.jobs.base import CLASSIFIER, Shapes, TrainedSpec
from veilfed.jobs.blindfed import BlindfedStrategy
from veilfed.jobs.fedopal import FedopalStrategy

__all__ = [
    "ATTENTION_IN",
    "ATTENTION_OUT",
    "MEANS",
    "TRANSFORM",
    "AllGlobalStrategy",
    "AllLocalStrategy",
    "FedadapterStrategy",
    "FedclipStrategy",
    "FedghStrategy",
    "FedltStrategy",
    "FedotStrategy",
    "OrthogonalSpec",
    "Strategy",
    "StrategyName",
]

# Names of tensors of models and updates. Several methods have X [r, m, m].
TRANSFORM = "transform"
# FedCLIP's W1 [m, d] and W2 [d, m].
ATTENTION_IN = "attention_in"
ATTENTION_OUT = "attention_out"
# FedGH's class means [K, d]; a row of zeros is a class without one.
MEANS = "means"


class OrthogonalSpec(TrainedSpec):
    """A method with an orthogonal transform w_l = Cayley(X) in front of the classifier."""

    blocks: int = Field(1, ge=1, description="r: diagonal blocks of the transform; 1 is plain FEDOT, more is FEDOT(+B)")
    transform_rate: float = Field(5e-4, gt=0, le=10, description="Adam's rate for X")

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.dimension % self.blocks:
            raise ValueError(f"blocks ({self.blocks}) must divide dimension ({self.dimension})")
        return self

    @property
    def transform_shape(self) -> tuple[int, int, int]:
        """[r, d / r, d / r]: the shape of X."""
        side = self.dimension // self.blocks
        return self.blocks, side, side


class FedotStrategy(OrthogonalSpec):
    """FEDOT (CVPR 2026): a shared classifier w_g that is averaged, a private orthogonal transform per client.

    `transform: identity` is plain averaging of the classifier: the baseline.
    """

    name: Literal["fedot"]
    transform: Literal["orthogonal", "identity"] = "orthogonal"


class AllLocalStrategy(OrthogonalSpec):
    """FEDOT without aggregation: classifier and transform stay with the institution, which gives out counts alone."""

    name: Literal["all-local"]
    weighting: Literal["uniform"] = "uniform"

    @property
    def update_shapes(self) -> Shapes:
        return {}

    @property
    def sums(self) -> bool:
        return False


class AllGlobalStrategy(OrthogonalSpec):
    """FEDOT without anything private: the transform is averaged like the classifier, so it leaves the institutions."""

    name: Literal["all-global"]

    @property
    def model_shapes(self) -> Shapes:
        return {CLASSIFIER: self.classifier_shape, TRANSFORM: self.transform_shape}


class FedltStrategy(TrainedSpec):
    """FedLT: a private linear transform without any constraint, w_l [d, d], where FEDOT's is orthogonal."""

    name: Literal["fedlt"]
    transform_rate: float = Field(5e-4, gt=0, le=10, description="Adam's rate for w_l")


class FedadapterStrategy(TrainedSpec):
    """FedAdapter: a private residual network of one hidden layer in front of the classifier."""

    name: Literal["fedadapter"]
    hidden: int = Field(64, ge=1, le=65_536, description="m, the width of the hidden layer")
    adapter_rate: float = Field(5e-4, gt=0, le=10, description="Adam's rate for the network")


class FedclipStrategy(TrainedSpec):
    """FedCLIP (Lu et al., 2023): an attention over the features, averaged; in the paper on fixed class vectors."""

    name: Literal["fedclip"]
    hidden: int = Field(64, ge=1, le=65_536, description="m, the width of the attention's hidden layer")
    attention_rate: float = Field(5e-4, gt=0, le=10, description="Adam's rate for the attention")
    train_classifier: bool = Field(
        True, description="false is the paper's, with `initial: class_vectors`; true where there are no class vectors"
    )

    @model_validator(mode="after")
    def _check_classifier(self) -> Self:
        if not self.train_classifier and self.initial == "random":
            raise ValueError("train_classifier: false needs initial: class_vectors, or the classifier stays random")
        return self

    @property
    def attention_shapes(self) -> Shapes:
        """W1 and W2."""
        return {ATTENTION_IN: (self.hidden, self.dimension), ATTENTION_OUT: (self.dimension, self.hidden)}

    @property
    def model_shapes(self) -> Shapes:
        return {CLASSIFIER: self.classifier_shape, **self.attention_shapes}

    @property
    def update_shapes(self) -> Shapes:
        return self.model_shapes if self.train_classifier else self.attention_shapes


class FedghStrategy(OrthogonalSpec):
    """FedGH (Yi et al., 2023): institutions send class means; the aggregator trains the classifier on them."""

    name: Literal["fedgh"]
    transform: Literal["orthogonal", "identity"] = "orthogonal"
    weighting: Literal["uniform"] = "uniform"
    header_steps: int = Field(100, ge=1, le=10_000, description="the aggregator's steps in a round")
    header_rate: float = Field(5e-3, gt=0, le=10, description="Adam's rate for w_g at the aggregator")

    @property
    def update_shapes(self) -> Shapes:
        return {MEANS: self.classifier_shape}

    @property
    def sums(self) -> bool:
        return False


Strategy = Annotated[
    FedotStrategy
    | AllGlobalStrategy
    | AllLocalStrategy
    | FedltStrategy
    | FedadapterStrategy
    | FedclipStrategy
    | FedghStrategy
    | AflStrategy
    | FedcgsStrategy
    | FedopalStrategy
    | BlindfedStrategy,
    Field(discriminator="name"),
]
StrategyName = Literal[
    "fedot",
    "all-global",
    "all-local",
    "fedlt",
    "fedadapter",
    "fedclip",
    "fedgh",
    "afl",
    "fedcgs",
    "fedopal",
    "blindfed",
]
