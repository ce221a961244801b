"""A transformer block of an FHE-friendly student: what it computes, once for all parties. n is normalisation.

    pre-normalised (ViT):    h = x + attention(n x),        y = h + feed_forward(n h)
    post-normalised (BERT):  h = n (g x + attention(x)),    y = n (g' h + feed_forward(h))

feed_forward(z) = W_2 quad(W_1 z + b_1) + b_2 with quad(z) = 0.125 z^2 + 0.25 z + 0.5 = (z + 1)^2 / 8 + 3/8 (BlindFed,
section 4.1). A batch has d channels in d ciphertexts. With them come the mask, 1 in the slots of real tokens and 0 in
those of padding, and the number of padded tokens of each sample: both encrypted, so that the oracle learns no lengths.
Channels are 0 in padded slots, before a block and after it, and have mean zero over channels.
"""

import math
from dataclasses import dataclass
from functools import reduce

from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.norm import Norm
from fm_oracle.encrypted.operations import B, Layer, Operations, Real
from fm_oracle.encrypted.polynomials import EXPONENTIAL_DEGREE, exponential
from fm_oracle.encrypted.softmax import goldschmidt

__all__ = ["Block", "Ranges", "Weights"]

EXPONENTIAL_LEVELS = 3
# What the stream has above the lowest: its squares take one, the normalised stream may have two and costs one.
STREAM_LEVELS = 3


@dataclass(frozen=True)
class Weights:
    """Of a block, float64: W [out, in] with its bias [out] as one more column.

    The gain and shift of normalisations, the scaling of layers, 1 / sqrt(d / heads) and the centring of what is added
    to the stream are in them, and of quad what is linear: hidden has the 1 inside the square in its bias, back the 1/8
    and, in its bias, the 3/8. Where a block is post-normalised, `gains` [2, d] are those of the normalisations whose
    outputs go around its two halves, g and g'; their shifts are in the biases of output and back.
    """

    query_key_value: Real  # [3 d, d + 1]
    output: Real  # [d, d + 1]
    hidden: Real  # [m, d + 1]
    back: Real  # [d, m + 1]
    gains: Real | None = None


@dataclass(frozen=True)
class Ranges:
    """Bounds that the student keeps on its data: recorded with it, checked at export."""

    stream: float
    query_key_value: float
    score: float
    row_sum: tuple[float, float]
    first_variance: tuple[float, float]
    second_variance: tuple[float, float]


@dataclass(frozen=True)
class Block:
    """A block for ciphertexts that have `lowest` limbs when they are refreshed.

    `newton` are the steps of each square root, `goldschmidt` is the degree of reciprocals: how many are needed follows
    from the ranges.
    """

    weights: Weights
    ranges: Ranges
    heads: int
    diagonals: Diagonals
    epsilon: float = 1e-6
    newton: int = 4
    goldschmidt: int = 7
    weight_bits: int = 12
    lowest: int = 4
    # Hidden channels that are in memory at a time.
    together: int = 256

    def __call__(self, x: B, mask: B, padding: B, operations: Operations[B]) -> B:
        """The stream after the block from the stream before it.

        Pre-normalised, both are three limbs above the lowest, or higher, and at the parameters' scale. Post-normalised,
        the stream is one that normalisation has left, two limbs above the lowest or higher, and its scale is its own.
        """
        return self.second_half(self.first_half(x, mask, padding, operations), mask, operations)

    def first_half(self, x: B, mask: B, padding: B, operations: Operations[B]) -> B:
        """h of the stream x."""
        if self.weights.gains is None:
            normed = self._first(x, self.lowest, operations)
            return self._around(x, self._attention(normed, mask, padding, operations), operations)
        attended = self._attention(x.at(self.lowest), mask, padding, operations)
        total = self._around(x, attended, operations, self.weights.gains[0])
        return self._first(total, self.lowest + 2, operations)

    def second_half(self, h: B, mask: B, operations: Operations[B]) -> B:
        """y of h."""
        if self.weights.gains is None:
            return self._around(h, self._feed_forward(self._second(h, operations), mask, operations), operations)
        fed = self._feed_forward(h, mask, operations)
        return self._second(self._around(h, fed, operations, self.weights.gains[1]), operations)

    def _first(self, x: B, limbs: int, operations: Operations[B]) -> B:
        operations.phase("first norm")
        return self._norm(self.ranges.first_variance, x, limbs, operations)

    def _second(self, x: B, operations: Operations[B]) -> B:
        operations.phase("second norm")
        # Two more limbs than a refresh needs: for the scale of the hidden layer's squares, and what a rescale takes.
        return self._norm(self.ranges.second_variance, x, self.lowest + 2, operations)

    def _norm(self, variance: tuple[float, float], x: B, limbs: int, operations: Operations[B]) -> B:
        return Norm(len(x), *variance, epsilon=self.epsilon, steps=self.newton)(x, limbs, operations)

    def _around(self, stream: B, added: B, operations: Operations[B], gain: Real | None = None) -> B:
        """What goes around a half of the block, and what the half adds to it: refreshed."""
        if gain is None:
            kept = operations.times(stream.at(added.limbs), [1.0] * len(stream), added.scale)
        else:
            kept = self._centred(stream.at(added.limbs), gain, added.scale, operations)
        operations.phase("refresh")
        scale = operations.parameters.scale
        total = operations.add(added, kept)
        return operations.refresh(total, self.ranges.stream, self._shift(added, scale), self.lowest + STREAM_LEVELS)

    def _centred(self, x: B, gain: Real, scale: float, operations: Operations[B]) -> B:
        """gain x minus its mean over channels, for no level: d times each less the sum, read at d times the scale."""
        channels = len(x)
        scaled = operations.times(x, list(gain), scale / channels)
        total = operations.times(operations.total(scaled), [-1.0] * channels, scaled.scale)
        difference = operations.add(operations.times(scaled, [float(channels)] * channels, scaled.scale), total)
        return difference.read_at(scale)

    def _attention(self, normed: B, mask: B, padding: B, operations: Operations[B]) -> B:
        """W_o attention + b_o of a normalised stream at the lowest level; not refreshed."""
        channels, ranges = len(normed), self.ranges
        head, scale = channels // self.heads, operations.parameters.scale
        weighted, sums = [], []
        for number in range(self.heads):
            operations.phase(f"head {number + 1}: queries, keys, values")
            rows = [part * channels + number * head + row for part in range(3) for row in range(head)]
            qkv = self._layer(self.weights.query_key_value[rows], normed, mask, operations)
            qkv = operations.refresh(qkv, ranges.query_key_value, self._shift(qkv, scale), self.lowest + 2)
            q, k, v = (qkv[part * head : (part + 1) * head] for part in range(3))
            operations.phase(f"head {number + 1}: scores")
            # A rotation at twice the limbs costs four times as much: as low as can be, and a refresh after it.
            limbs = self.lowest + 1
            scores = self.diagonals.scores(q.at(limbs), k.at(limbs), operations)
            limbs = self.lowest + 2 + EXPONENTIAL_LEVELS
            scores = operations.refresh(scores, ranges.score, self._shift(scores, scale), limbs)
            operations.phase(f"head {number + 1}: exponential")
            weights = exponential(scores, operations)
            # Without the factor that the exponential has: the same ciphertexts, read at a larger scale.
            weights = weights.read_at(weights.scale * math.factorial(EXPONENTIAL_DEGREE))
            operations.phase(f"head {number + 1}: sums")
            sums.append(self.diagonals.row_sums(weights, operations))
            weighted.append(self.diagonals.apply(weights, v.at(weights.limbs), operations).at(self.lowest + 1))
        operations.phase("softmax")
        inverse = self._inverses(operations.join(sums), mask, padding, operations)
        parts = [
            operations.multiplied(part, inverse[number : number + 1].at(part.limbs))
            for number, part in enumerate(weighted)
        ]
        operations.phase("output")
        joined = operations.join(parts)
        # Reciprocals over a wide range have left a large scale: weights have as many bits as the refresh has room for.
        room = operations.largest_scale(joined.limbs, ranges.stream) - math.log2(operations.parameters.scale)
        bits = min(self.weight_bits, math.floor(room) - self._shift(joined, operations.parameters.scale))
        return self._layer(self.weights.output, joined, mask, operations, bits)

    def _inverses(self, sums: B, mask: B, padding: B, operations: Operations[B]) -> B:
        """1 / row sums, one for each head; 0 in padded slots."""
        low, high = self.ranges.row_sum
        # exp(0) = 1 for each padded key, whose channels are all 0.
        extra = operations.times(padding.at(sums.limbs), [-1.0] * self.heads, sums.scale)
        sums = operations.add(sums, extra)
        # Goldschmidt's range is (0, 2): divided by the middle, so that both ends are as far from 1.
        middle = (low + high) / 2
        scaled = operations.brought(sums, 1 / middle, 2.0)
        inverse = goldschmidt(scaled, self.goldschmidt, operations, 2 * middle / low, self.lowest)
        inverse = operations.refresh(inverse, 2 * middle / low, 0)
        masked = operations.multiplied(inverse, mask)
        return masked.read_at(masked.scale * middle)

    def _feed_forward(self, normed: B, mask: B, operations: Operations[B]) -> B:
        """W_2 quad(W_1 z + b_1) + b_2 of a normalised stream two limbs above the lowest; not refreshed."""
        parts = (
            self._fed(slice(first, first + self.together), normed, mask, operations)
            for first in range(0, len(self.weights.hidden), self.together)
        )
        total = reduce(operations.add, parts)
        return self._biased(operations.relinearise(total), self.weights.back[:, -1], mask, operations)

    def _fed(self, hidden: slice, normed: B, mask: B, operations: Operations[B]) -> B:
        """What some hidden channels add to the outputs, without the bias: three components."""
        operations.phase(f"from channel {hidden.start}: hidden layer")
        z = self._layer(self.weights.hidden[hidden], normed, mask, operations)
        # Squares stay in three components: the next layer is linear in them, and has fewer outputs to relinearise.
        squares = operations.rescale(operations.products(z, z))
        operations.phase(f"from channel {hidden.start}: back")
        back = self.weights.back[:, :-1][:, hidden]
        return operations.linear(self._rounded(back, squares, operations), squares)

    def _shift(self, x: B, scale: float) -> int:
        """How many bits a refresh takes from the scale of x, to come near another."""
        return round(math.log2(x.scale / scale))

    def _layer(self, weights: Real, x: B, mask: B, operations: Operations[B], bits: int | None = None) -> B:
        """W x + b, of two components."""
        out = operations.linear(self._rounded(weights[:, :-1], x, operations, bits), x)
        return self._biased(out, weights[:, -1], mask, operations)

    def _rounded(self, weights: Real, x: B, operations: Operations[B], bits: int | None = None) -> Layer:
        """W at a scale so that a refresh brings the outputs to exactly that of the parameters by a shift."""
        scale = operations.parameters.scale
        bits = self.weight_bits if bits is None else bits
        return Layer.rounded(weights, scale * 2.0 ** (bits + self._shift(x, scale)) / x.scale)

    def _biased(self, x: B, bias: Real, mask: B, operations: Operations[B]) -> B:
        """x + b in the slots of real tokens."""
        return operations.add(x, operations.times(mask.at(x.limbs), list(bias), x.scale))
