"""BlindFed (ICCV 2025, arXiv 2502.01289): adapters beside a foundation model that is computed on encrypted inputs.

The foundation model gives b_l, the outputs of its released blocks; those of the others count as zero. For each token

    h_0 = 0,   h_l = g_l(b_l + h_{l-1}) + h_{l-1},   g_l(z) = alpha W_u GELU(W_d z)        (parallel adapters, LoSA)

for the blocks l = 1 to L, and p = softmax(tau (W h + b)) with h the mean of h_L over the tokens of a sample. No
gradient goes through the foundation model: an institution that has the b_l trains with them alone.

In the paper h_0 is the embedding b_0. It is never released here, so the b_l reach the classifier through the adapters
alone, and an adapter before the first released block sees zeros, gives zeros and keeps its first values.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from veilfed.jobs.base import CLASSIFIER, Shapes, StrategySpec

__all__ = ["ADAPTER_DOWN", "ADAPTER_UP", "CLASSIFIER_BIAS", "BlindfedStrategy"]

# W_d [L, r, d], W_u [L, d, r] and b [K], of models and updates.
ADAPTER_DOWN = "adapter_down"
ADAPTER_UP = "adapter_up"
CLASSIFIER_BIAS = "classifier_bias"

MAX_BLOCKS = 1000


class BlindfedStrategy(StrategySpec):
    """Adapters and classifier are averaged, under masks alone: see `masked_only`."""

    name: Literal["blindfed"]
    temperature: float = Field(1.0, gt=0, le=1000, description="tau")
    blocks: int = Field(ge=1, le=MAX_BLOCKS, description="L, the blocks of the oracle's student")
    released: list[int] = Field(
        min_length=1, max_length=MAX_BLOCKS, description="the blocks whose outputs are released, from 1 on, ascending"
    )
    tokens: int = Field(ge=1, le=65_536, description="t, the most tokens of a sample")
    rank: int = Field(16, ge=1, le=65_536, description="r, the width of an adapter's hidden layer")
    alpha: float = Field(1.0, gt=0, le=1000, description="scale of what an adapter adds")
    rate: float = Field(1e-3, gt=0, le=10, description="SGD's rate")
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        [0.5, 0.8], max_length=100, description="parts of the job's rounds; after each the rate is a tenth"
    )
    epochs: int = Field(1, ge=1, le=1000, description="E, passes over the training split in a round")
    batch_size: int = Field(64, ge=1, le=65_536)

    @model_validator(mode="after")
    def _check_released(self) -> Self:
        pairs = list(zip(self.released, self.released[1:], strict=False))
        if self.released[0] < 1 or self.released[-1] > self.blocks or any(one >= other for one, other in pairs):
            raise ValueError(f"released must be distinct blocks from 1 to {self.blocks}, in ascending order")
        # Outputs of neighbours tell what the block between them computes (stochastic block sampling).
        if any(other == one + 1 for one, other in pairs):
            raise ValueError("released must not have two neighbouring blocks")
        return self

    @property
    def width(self) -> int:
        """1 + R d: for each token 1, or 0 for padding, then b_l [d] of each of the R released blocks."""
        return 1 + len(self.released) * self.dimension

    @property
    def model_shapes(self) -> Shapes:
        return {
            ADAPTER_DOWN: (self.blocks, self.rank, self.dimension),
            ADAPTER_UP: (self.blocks, self.dimension, self.rank),
            CLASSIFIER: self.classifier_shape,
            CLASSIFIER_BIAS: self.classifier_shape[:1],
        }

    @property
    def masked_only(self) -> bool:
        return True

    def rate_of(self, number: int, rounds: int) -> float:
        """The rate in round `number` of a job of so many; in the paper's 50 a tenth from 25 on, a hundredth from 40."""
        return self.rate * 0.1 ** sum(number / rounds >= part for part in self.milestones)
