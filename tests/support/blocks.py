"""A small block with random weights, its inputs, and the formulas that it stands for."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.block import Block, Ranges, Weights
from fm_oracle.encrypted.plain import PlainEvaluator, Slots
from veilfed.ckks.parameters import Parameters

Real = NDArray[np.float64]

PARAMETERS = Parameters(14, (48, *[36] * 9), 48, 36)
CHANNELS, HIDDEN, HEADS = 8, 16, 2
TOGETHER = 12  # hidden channels: the last part is a shorter one
DIAGONALS = Diagonals(tokens=8, samples=1024, baby=4)
EPSILON = 1e-6
SCALE, PADDING_SCALE = 2.0**36, 2.0**24


@dataclass
class Case:
    """A block with random weights, and inputs [channels, tokens, samples] of different lengths."""

    block: Block
    formulas: "Formulas"
    x: Real
    mask: Real
    expected: Real


def centred(matrix: Real) -> Real:
    return np.asarray(matrix - matrix.mean(axis=0, keepdims=True))


def taylor(x: Real) -> Real:
    return np.asarray(sum(x**k / math.factorial(k) for k in range(7)))


def make_case(post: bool = False) -> Case:
    random = np.random.default_rng(11)

    def layer(out: int, fan_in: int, size: float = 1.0) -> Real:
        return np.asarray(random.standard_normal((out, fan_in + 1)) * size / np.sqrt(fan_in))

    made = Formulas(
        layer(3 * CHANNELS, CHANNELS, 0.3),
        layer(CHANNELS, CHANNELS),
        layer(HIDDEN, CHANNELS),
        layer(CHANNELS, HIDDEN),
        random.uniform(0.5, 1.5, (2, CHANNELS)) if post else None,
    )
    lengths = random.integers(2, DIAGONALS.tokens + 1, DIAGONALS.samples)
    mask = (np.arange(DIAGONALS.tokens)[:, None] < lengths).astype(np.float64)
    x = centred(random.standard_normal((CHANNELS, DIAGONALS.tokens, DIAGONALS.samples))) * mask
    expected = made(x, mask)
    block = Block(made.weights, made.ranges, HEADS, DIAGONALS, EPSILON, together=TOGETHER)
    return Case(block, made, x, mask, expected)


class Formulas:
    """The block as it is written, on [channels, tokens, samples]; notes the ranges that occur."""

    def __init__(self, qkv: Real, output: Real, hidden: Real, back: Real, gains: Real | None) -> None:
        self.qkv, self.output, self.hidden, self.back, self.gains = qkv, output, hidden, back, gains
        self.variances: list[Real] = []
        self.sums: list[Real] = []

    @property
    def weights(self) -> Weights:
        """As the engine takes them."""
        hidden, back = self.hidden.copy(), centred(self.back)
        hidden[:, -1] += 1
        back[:, -1] += 3 / 8 * back[:, :-1].sum(axis=1)
        back[:, :-1] /= 8
        return Weights(self.qkv, centred(self.output), hidden, back, self.gains)

    @property
    def ranges(self) -> Ranges:
        first, second = ((float(v.min()) * 0.9, float(v.max()) * 1.1) for v in self.variances)
        sums = (float(min(s.min() for s in self.sums)), float(max(s.max() for s in self.sums)))
        return Ranges(32.0, 16.0, 8.0, sums, first, second)

    def __call__(self, x: Real, mask: Real) -> Real:
        if self.gains is None:
            h = x + centred(self.attention(self.norm(x, mask), mask))
            return np.asarray(h + centred(self.feed_forward(self.norm(h, mask), mask)))
        before, between = self.gains[:, :, None, None]
        h = self.norm(centred(before * x + self.attention(x, mask)), mask)
        return self.norm(centred(between * h + self.feed_forward(h, mask)), mask)

    def apply(self, layer: Real, values: Real, mask: Real) -> Real:
        return np.asarray((np.einsum("oc,ctb->otb", layer[:, :-1], values) + layer[:, -1, None, None]) * mask)

    def norm(self, values: Real, mask: Real) -> Real:
        variance = (values**2).mean(axis=0)
        self.variances.append(variance[mask > 0] + EPSILON)
        return np.asarray(values / np.sqrt(variance + EPSILON))

    def attention(self, x: Real, mask: Real) -> Real:
        q, k, v = np.split(self.apply(self.qkv, x, mask), 3)
        size = CHANNELS // HEADS
        attended = np.empty_like(x)
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            weights = taylor(np.einsum("ctb,csb->tsb", q[part], k[part])) * mask[None]
            sums = weights.sum(axis=1)
            self.sums.append(sums[mask > 0])
            attended[part] = np.einsum("tsb,csb->ctb", weights, v[part]) / sums
        return self.apply(self.output, attended, mask)

    def feed_forward(self, x: Real, mask: Real) -> Real:
        z = self.apply(self.hidden, x, mask)
        return self.apply(self.back, 0.125 * z**2 + 0.25 * z + 0.5, mask)


def flat(values: Real) -> Real:
    return values.reshape(-1, PARAMETERS.slots)


def padding(case: Case) -> Real:
    """Padded tokens of each sample, in all of its slots."""
    missing = DIAGONALS.tokens - case.mask.sum(axis=0)
    return np.broadcast_to(missing, case.mask.shape)


def on_plain_slots(case: Case) -> Slots:
    """The block's arithmetic without encryption."""
    limbs = PARAMETERS.limbs
    return case.block(
        Slots(flat(case.x), SCALE, limbs),
        Slots(flat(case.mask[None]), SCALE, limbs),
        Slots(flat(padding(case)[None]), PADDING_SCALE, limbs),
        PlainEvaluator(PARAMETERS),
    )
