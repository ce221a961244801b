"""FedOPAL (arXiv 2607.08368): prompt tokens tuned at each institution, then the analytic solution on what they give."""

from typing import Literal

from pydantic import Field

from veilfed import protocol
from veilfed.jobs.analytic import COUNTS, RidgeSpec
from veilfed.jobs.base import Shapes

__all__ = ["FIRST_PROMPTS", "PROMPTS", "FedopalStrategy"]

# P_k of an update, the mean prompt of a model: float32 [M, D]. And P_0, from which all institutions start.
PROMPTS = "prompts"
FIRST_PROMPTS = "first_prompts"


class FedopalStrategy(RidgeSpec):
    """One round: each institution tunes prompts P_k and sends them with its statistics of the features that they give.

    With `reextract` there are two: the prompts alone, then the statistics with their mean.
    """

    name: Literal["fedopal"]
    prompts: int = Field(10, ge=1, le=protocol.MAX_PROMPTS, description="M, the number of prompt tokens")
    prompt_width: int = Field(ge=1, le=65_536, description="D, as the oracle's model card says")
    reextract: bool = Field(
        False, description="true: prompts are averaged first, and the statistics are made with their mean"
    )
    mu: float = Field(0.1, ge=0, le=1e300, description="weight of the squared distance of P_k from P_0")
    epochs: int = Field(1, ge=1, le=1000, description="E, passes over the training split")
    batch_size: int = Field(64, ge=1, le=65_536)
    prompt_rate: float | None = Field(
        None, gt=0, le=1e6, description="eta, the rate of the prompts; by default 10, forward-only 0.05"
    )
    head_rate: float = Field(5e-3, gt=0, le=10, description="Adam's rate for the temporary classifier")
    tuning: Literal["gradients", "forward-only", "cma-es"] = Field(
        "gradients",
        description="gradients of the oracle; estimates from embeddings alone; or an evolution strategy on those",
    )
    perturbation: float = Field(
        0.5, gt=0, le=1e3, description="c, how far forward-only and cma-es move an element of the prompts to try it"
    )
    subspace: int = Field(20, ge=2, le=1000, description="s, the dimension of the random subspace that cma-es searches")
    population: int = Field(12, ge=4, le=1000, description="prompts that cma-es tries on each batch")
    prompt_weighting: Literal["uniform", "samples"] = Field(
        "uniform", description="of the mean prompt: uniform is the paper's mean"
    )

    @property
    def eta(self) -> float:
        """The rate of the prompts. Estimates of the gradient are longer by the root of M x D: 62 at 10 x 384."""
        return self.prompt_rate or (0.05 if self.tuning == "forward-only" else 10.0)

    @property
    def rounds_needed(self) -> int:
        return 2 if self.reextract else 1

    @property
    def changes(self) -> int:
        # The statistics of those who stay were made with the prompts of those who leave.
        return 0 if self.reextract else super().changes

    @property
    def prompts_shape(self) -> tuple[int, int]:
        """[M, D]."""
        return self.prompts, self.prompt_width

    @property
    def model_shapes(self) -> Shapes:
        return {**super().model_shapes, PROMPTS: self.prompts_shape, FIRST_PROMPTS: self.prompts_shape}

    @property
    def update_shapes(self) -> Shapes:
        return {**super().update_shapes, PROMPTS: self.prompts_shape}

    def tunes(self, number: int) -> bool:
        """Whether prompts are tuned in a training round; else the statistics are made with the model's."""
        return not self.reextract or number == 0

    def round_shapes(self, number: int) -> Shapes:
        if not self.reextract:
            return self.update_shapes
        return (
            {PROMPTS: self.prompts_shape, COUNTS: self.classifier_shape[:1]} if number == 0 else self.statistics_shapes
        )
