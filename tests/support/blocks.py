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
DIAGONALS = Diagonals(tokens=8, samples=1024, baby=4)
EPSILON = 1e-6
SCALE, PADDING_SCALE = 2.0**36, 2.0**24


@dataclass
class Case:
    """A block with random weights, and inputs [channels, tokens, samples] of different lengths."""

    block: Block
    x: Real
    mask: Real
    expected: Real


def centred(matrix: Real) -> Real:
    return np.asarray(matrix - matrix.mean(axis=0, keepdims=True))


def taylor(x: Real) -> Real:
    return np.asarray(sum(x**k / math.factorial(k) for k in range(7)))


def make_case() -> Case:
    random = np.random.default_rng(11)

    def layer(out: int, fan_in: int, size: float = 1.0) -> Real:
        return np.asarray(random.standard_normal((out, fan_in + 1)) * size / np.sqrt(fan_in))

    qkv = layer(3 * CHANNELS, CHANNELS, 0.3)
    output, hidden, back = layer(CHANNELS, CHANNELS), layer(HIDDEN, CHANNELS), layer(CHANNELS, HIDDEN)
    lengths = random.integers(2, DIAGONALS.tokens + 1, DIAGONALS.samples)
    mask = (np.arange(DIAGONALS.tokens)[:, None] < lengths).astype(np.float64)
    x = centred(random.standard_normal((CHANNELS, DIAGONALS.tokens, DIAGONALS.samples))) * mask
    found: dict[str, list[Real]] = {"variance": [], "sum": []}
    expected = plain_block(x, mask, qkv, centred(output), hidden, centred(back), found)
    folded_hidden = hidden.copy()
    folded_hidden[:, -1] += 1
    folded_back = centred(back)
    folded_back[:, -1] += 3 / 8 * folded_back[:, :-1].sum(axis=1)
    folded_back[:, :-1] /= 8
    variances = [(float(v.min()) * 0.9, float(v.max()) * 1.1) for v in found["variance"]]
    sums = (float(min(s.min() for s in found["sum"])), float(max(s.max() for s in found["sum"])))
    ranges = Ranges(32.0, 16.0, 8.0, sums, variances[0], variances[1])
    weights = Weights(qkv, centred(output), folded_hidden, folded_back)
    return Case(Block(weights, ranges, HEADS, DIAGONALS, EPSILON), x, mask, expected)


def plain_block(
    x: Real, mask: Real, qkv: Real, output: Real, hidden: Real, back: Real, found: dict[str, list[Real]]
) -> Real:
    """The formulas, sample by sample of [channels, tokens, samples]; notes the ranges that occur."""
    real = mask > 0

    def apply(layer: Real, values: Real) -> Real:
        return np.asarray(np.einsum("oc,ctb->otb", layer[:, :-1], values) + layer[:, -1, None, None])

    def norm(values: Real) -> Real:
        variance = (values**2).mean(axis=0)
        found["variance"].append(variance[real] + EPSILON)
        return np.asarray(values / np.sqrt(variance + EPSILON))

    q, k, v = np.split(apply(qkv, norm(x)) * mask, 3)
    size = CHANNELS // HEADS
    attended = np.empty_like(x)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        weights = taylor(np.einsum("ctb,csb->tsb", q[part], k[part])) * mask[None]
        sums = weights.sum(axis=1)
        found["sum"].append(sums[real])
        attended[part] = np.einsum("tsb,csb->ctb", weights, v[part]) / sums
    h = x + apply(output, attended) * mask
    z = apply(hidden, norm(h))
    return np.asarray((h + apply(back, 0.125 * z**2 + 0.25 * z + 0.5)) * mask)


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
