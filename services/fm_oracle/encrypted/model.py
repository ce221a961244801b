"""A student on ciphertexts: its embedding, where it has one, and its blocks.

Where the features are pixels, the agent encrypts one ciphertext for each of a patch's pixels and colours, and one for
each token, which is 1 in that token's slots: so the embedding, positions and class token included, is one linear layer
without a bias. Where they are the first stream itself (texts) there is nothing to compute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.block import STREAM_LEVELS, Block, Ranges, Weights
from fm_oracle.encrypted.norm import newton_steps
from fm_oracle.encrypted.operations import B, Layer, Operations, Real
from fm_oracle.encrypted.softmax import goldschmidt_degree

__all__ = ["EncryptedModel", "make_block"]

# Relative errors that reciprocals and roots may have at the ends of their ranges.
RECIPROCAL_ERROR = 1e-4
ROOT_ERROR = 1e-5
# Of the embedding's weights: many pixels make a small first stream.
EMBEDDING_BITS = 16


def make_block(weights: Weights, ranges: Ranges, heads: int, diagonals: Diagonals, epsilon: float) -> Block:
    """A block with as many of Goldschmidt's and Newton's steps as its ranges ask for."""
    steps = [newton_steps(*variance, ROOT_ERROR) for variance in (ranges.first_variance, ranges.second_variance)]
    degree = goldschmidt_degree(*ranges.row_sum, RECIPROCAL_ERROR)
    return Block(weights, ranges, heads, diagonals, epsilon, newton=max(steps), goldschmidt=degree)


@dataclass(frozen=True)
class EncryptedModel:
    """`embedding` [d, f + t] or None; the streams after all blocks come one after the other."""

    embedding: Real | None
    blocks: Sequence[Block]

    def __call__(self, features: B, mask: B, padding: B, operations: Operations[B]) -> Iterator[B]:
        x = self.start(features, operations)
        for half in range(2 * len(self.blocks)):
            x = self.half(half, x, mask, padding, operations)
            if half % 2:
                yield x

    def half(self, number: int, x: B, mask: B, padding: B, operations: Operations[B]) -> B:
        """Half of a block: those of block b, from 0, are 2 b and 2 b + 1."""
        block = self.blocks[number // 2]
        return block.second_half(x, mask, operations) if number % 2 else block.first_half(x, mask, padding, operations)

    def start(self, features: B, operations: Operations[B]) -> B:
        """The first stream of f + t features, at the scale of the parameters."""
        if self.embedding is None:
            return features
        operations.phase("embedding")
        first, scale = self.blocks[0], operations.parameters.scale
        layer = Layer.rounded(self.embedding, scale * 2.0**EMBEDDING_BITS / features.scale)
        x = operations.linear(layer, features.at(first.lowest))
        return operations.refresh(x, first.ranges.stream, EMBEDDING_BITS, first.lowest + STREAM_LEVELS)
