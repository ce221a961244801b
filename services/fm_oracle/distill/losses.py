"""What a student is trained for (BlindFed, section 4.1): first its teacher's streams and attention, then its classes.

To both is added a penalty for leaving the ranges in which the engine's polynomials are good: scores around the
exponential's, row sums and variances not too far from each other.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fm_oracle.distill.model import Passed
from fm_oracle.distill.teacher import Batch, Lesson

__all__ = ["Penalty", "hidden_loss", "label_loss"]

# Where Taylor's polynomial of degree 6 is near the exponential.
SCORES = (-2.0, 4.0)
# Largest over smallest: more costs the engine some steps of Goldschmidt and Newton, on single ciphertexts.
ROW_SUMS, VARIANCES = 100.0, 30.0
# The worst value counts besides the mean: a range has to hold for all.
WORST = 0.01
TEMPERATURE = 5.0


@dataclass
class Penalty:
    """Adds up what leaves the ranges, over all that it is told of."""

    total: Tensor

    @classmethod
    def none(cls) -> "Penalty":
        return cls(torch.zeros(()))

    def note(self, name: str, values: Tensor) -> None:
        if name == "score":
            low, high = SCORES
            self._add(nn.functional.relu(values - high) + nn.functional.relu(low - values))
        elif name == "row_sum":
            self._add(_apart(values, ROW_SUMS))
        elif name in {"first_variance", "second_variance"}:
            self._add(_apart(values, VARIANCES))

    def _add(self, excess: Tensor) -> None:
        squares = excess.square()
        self.total = self.total + squares.mean() + WORST * squares.amax()


def _apart(values: Tensor, ratio: float) -> Tensor:
    """How far the logarithms are from their middle, beyond what a ratio of largest to smallest allows."""
    logs = values.log()
    middle = logs.detach().mean()
    return nn.functional.relu((logs - middle).abs() - math.log(ratio) / 2)


def hidden_loss(passed: Passed, lesson: Lesson, batch: Batch) -> Tensor:
    """The mean squared error of the normalised streams, and of the attention (summed over keys)."""
    loss, real = torch.zeros(()), batch.mask > 0
    for ours, theirs in zip(passed.streams, lesson.streams, strict=True):
        loss = loss + (nn.functional.layer_norm(ours, ours.shape[-1:]) - theirs).square()[real].mean()
    for ours, theirs in zip(passed.attention, lesson.attention, strict=True):
        # [n, heads, t, t]: rows of padding are left out.
        loss = loss + (ours - theirs).square().sum(dim=-1).transpose(1, 2)[real].mean()
    return loss


def label_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The cross entropy of softened classes, from logits [n, K], times the square of the temperature."""
    soft = (teacher / TEMPERATURE).softmax(dim=-1)
    return TEMPERATURE**2 * nn.functional.cross_entropy(student / TEMPERATURE, soft)
