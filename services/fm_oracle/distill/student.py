"""A student's blocks in torch: the formulas of fm_oracle.encrypted.block, differentiable, with the ranges they keep.

Weights are those that the engine takes, but for quad's constants: gains and shifts of normalisations, scalings and
1 / sqrt(d / heads) are in the linear layers (`fold_pre`, `fold_post` make them from a teacher's block).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fm_oracle.encrypted.block import Ranges, Weights
from fm_oracle.encrypted.polynomials import EXPONENTIAL_DEGREE

__all__ = ["Observer", "Seen", "StudentBlock", "taylor"]

# Room around what was seen: data to come may go a little beyond.
ROOM = 1.25


def taylor(x: Tensor) -> Tensor:
    """The exponential's polynomial of degree 6 (BlindFed, section 4.1)."""
    total = torch.ones_like(x)
    for k in range(EXPONENTIAL_DEGREE, 0, -1):
        total = 1 + total * x / k
    return total


class Observer(Protocol):
    """Is told what goes through a block, of real tokens alone, by the names of `Seen`."""

    def note(self, name: str, values: Tensor) -> None: ...


@dataclass
class Seen:
    """The extremes of what went through a block, over all real tokens: what `Ranges` are made of."""

    stream: float = 0.0
    query_key_value: float = 0.0
    score: float = 0.0
    row_sum: tuple[float, float] = (math.inf, 0.0)
    first_variance: tuple[float, float] = (math.inf, 0.0)
    second_variance: tuple[float, float] = (math.inf, 0.0)

    def note(self, name: str, values: Tensor) -> None:
        """Widens one of the extremes."""
        values = values.detach()
        before = getattr(self, name)
        if isinstance(before, tuple):
            setattr(self, name, (min(before[0], float(values.min())), max(before[1], float(values.max()))))
        else:
            setattr(self, name, max(before, float(values.abs().max())))

    def ranges(self) -> Ranges:
        """With some room around them."""

        def wider(low: float, high: float) -> tuple[float, float]:
            return low / ROOM, high * ROOM

        return Ranges(
            stream=self.stream * ROOM,
            query_key_value=self.query_key_value * ROOM,
            score=self.score * ROOM,
            row_sum=wider(*self.row_sum),
            first_variance=wider(*self.first_variance),
            second_variance=wider(*self.second_variance),
        )


class StudentBlock(nn.Module):
    """On a stream [n, t, d] that is 0 for padding and has mean zero over channels; gives another one."""

    def __init__(self, dimension: int, heads: int, hidden: int, *, post: bool, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.heads, self.epsilon = heads, epsilon
        self.qkv = nn.Linear(dimension, 3 * dimension)
        self.out = nn.Linear(dimension, dimension)
        self.up = nn.Linear(dimension, hidden)
        self.down = nn.Linear(hidden, dimension)
        self.gains = nn.Parameter(torch.ones(2, dimension)) if post else None

    def forward(self, x: Tensor, mask: Tensor, seen: Observer | None = None) -> tuple[Tensor, Tensor]:
        """The stream after the block, and the attention [n, heads, t, t]; `mask` [n, t] is 1 for real tokens."""
        if self.gains is None:
            added, attention = self._attention(self._norm(x, mask, "first_variance", seen), mask, seen)
            h = self._noted("stream", x + _centred(added), mask, seen)
            fed = self._feed_forward(self._norm(h, mask, "second_variance", seen), mask)
            return self._noted("stream", h + _centred(fed), mask, seen), attention
        added, attention = self._attention(x, mask, seen)
        h = self._noted("stream", _centred(self.gains[0] * x + added), mask, seen)
        h = self._norm(h, mask, "first_variance", seen)
        y = self._noted("stream", _centred(self.gains[1] * h + self._feed_forward(h, mask)), mask, seen)
        return self._norm(y, mask, "second_variance", seen), attention

    def _noted(self, name: str, values: Tensor, mask: Tensor, seen: Observer | None) -> Tensor:
        if seen is not None:
            seen.note(name, values[mask > 0])
        return values

    def _norm(self, x: Tensor, mask: Tensor, name: str, seen: Observer | None) -> Tensor:
        variance = x.square().mean(dim=-1, keepdim=True) + self.epsilon
        self._noted(name, variance, mask, seen)
        return x / variance.sqrt()

    def _attention(self, x: Tensor, mask: Tensor, seen: Observer | None) -> tuple[Tensor, Tensor]:
        n, tokens, dimension = x.shape
        qkv = self._noted("query_key_value", self.qkv(x) * mask[..., None], mask, seen)
        q, k, v = qkv.view(n, tokens, 3, self.heads, dimension // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        weights = taylor(scores) * mask[:, None, None, :]
        sums = weights.sum(dim=-1, keepdim=True)
        if seen is not None:
            pairs = mask[:, None, :, None] * mask[:, None, None, :]
            seen.note("score", scores * pairs)
            seen.note("row_sum", sums.transpose(1, 2)[mask > 0])
        attention = weights / sums
        mixed = (attention @ v).transpose(1, 2).reshape(n, tokens, dimension)
        return self.out(mixed) * mask[..., None], attention

    def _feed_forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.up(x) * mask[..., None]
        out: Tensor = self.down(0.125 * z.square() + 0.25 * z + 0.5) * mask[..., None]
        return out

    def weights(self) -> Weights:
        """For the engine, in float64."""
        hidden, back = _matrix(self.up), _centred_rows(_matrix(self.down))
        hidden[:, -1] += 1
        back[:, -1] += 3 / 8 * back[:, :-1].sum(axis=1)
        back[:, :-1] /= 8
        gains = None if self.gains is None else self.gains.detach().double().numpy()
        return Weights(_matrix(self.qkv), _centred_rows(_matrix(self.out)), hidden, back, gains)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=-1, keepdim=True)


def _centred_rows(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The layer whose outputs are those of `matrix` less their mean."""
    return np.asarray(matrix - matrix.mean(axis=0, keepdims=True))


def _matrix(layer: nn.Linear) -> NDArray[np.float64]:
    """The weights with the bias as one more column."""
    joined = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
    return np.array(joined.detach().double().numpy())
