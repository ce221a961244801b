"""Differential privacy of a job: what is protected, and how much noise the institutions add.

z = `noise_multiplier` is the noise's standard deviation over the sensitivity, the largest distance that the protected
thing can move what is released. The sensitivities are those of docs/explanation/differential-privacy.md.
"""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from veilfed.config import Strict
from veilfed.privacy import Release

__all__ = ["Privacy", "SamplePrivacy", "StatisticsPrivacy", "UpdatePrivacy"]


class _Privacy(Strict):
    """What all modes have."""

    mode: str
    noise_multiplier: float = Field(
        gt=0, le=8192, description="z: standard deviation of the noise over the sensitivity"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which the job's report tells epsilon")

    def release(self, epochs: int = 1) -> Release:
        """What one update of an institution spends."""
        return Release(self.noise_multiplier)


class UpdatePrivacy(_Privacy):
    """Protects everything that an institution trains on: its whole update is clipped and noised.

    The clipped change of the model has norm `clip` or less, so two of them differ by 2 clip or less, whatever the data.
    """

    mode: Literal["update"]
    clip: float = Field(gt=0, le=1e6, description="largest norm of the change of the model, all tensors together")

    def variance(self, fraction_bits: int) -> int:
        """Of the noise on each element, in units of 2^-fraction_bits squared."""
        return _up((Fraction(self.noise_multiplier) * 2 * Fraction(self.clip)) ** 2, fraction_bits)


class StatisticsPrivacy(_Privacy):
    """Protects one training sample, added or removed, in the sums of the analytic methods.

    With ||h|| <= 1, (R, C, counts) moves by sqrt(||h||^4 + ||h||^2 + 1) or less, which is sqrt 3.
    """

    mode: Literal["statistics"]
    colluders: int = Field(
        1,
        ge=0,
        description="with secure aggregation: so many institutions may tell their noise; each knows its own at least",
    )

    def variance(self, fraction_bits: int) -> int:
        """Of the noise, in units of 2^-fraction_bits squared."""
        return _up(3 * Fraction(self.noise_multiplier) ** 2, fraction_bits)


class SamplePrivacy(_Privacy):
    """Protects one training sample, added or removed, in what is trained by steps: DP-SGD (Abadi et al., 2016).

    In each step every sample takes part with probability q, and its gradient is clipped, of all trained tensors
    jointly; the sum of the gradients moves by `clip` or less.
    """

    mode: Literal["sample"]
    clip: float = Field(gt=0, le=1e6, description="largest norm of a sample's gradient, all trained tensors together")
    sampling_rate: float = Field(gt=0, le=1, description="q: how likely each sample is to take part in a step")

    def steps(self, epochs: int) -> int:
        """Steps of a round: a sample takes part `epochs` times on average, or a little more."""
        return math.ceil(epochs / self.sampling_rate)

    def release(self, epochs: int = 1) -> Release:
        return Release(self.noise_multiplier, self.sampling_rate, self.steps(epochs))


def _up(variance: Fraction, fraction_bits: int) -> int:
    return math.ceil(variance * int(4**fraction_bits))


Privacy = Annotated[UpdatePrivacy | StatisticsPrivacy | SamplePrivacy, Field(discriminator="mode")]
