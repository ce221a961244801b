"""What is masked and summed: a vector of elements of Z/2^64 (veilfed.ring) and of Z/2^128 (veilfed.wide_ring).

It is one flat array of 64-bit words: the narrow elements, then the low limbs of the wide ones, then their high limbs.
On the wire it is these words, little-endian.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["BLOCK", "Block", "Format", "Words"]

Words = NDArray[np.uint64]

# Elements that are handled at a time: what is added stays in the processor's cache. Masks are drawn block by block, so
# both parties need the same number.
BLOCK = 2**14


@dataclass(frozen=True)
class Block:
    """Elements that are handled together: of `low`, and of `high` if they are wide."""

    low: slice
    high: slice | None

    @property
    def words(self) -> int:
        count = int(self.low.stop - self.low.start)
        return count if self.high is None else 2 * count


@dataclass(frozen=True)
class Format:
    """How many elements a vector has of either kind."""

    narrow: int
    wide: int

    @property
    def words(self) -> int:
        return self.narrow + 2 * self.wide

    def zeros(self) -> Words:
        return np.zeros(self.words, np.uint64)

    def parts(self, vector: Words) -> tuple[Words, Words]:
        """Views of the narrow elements [narrow] and of the wide ones [2, wide]. Errors as `check`."""
        self.check(vector)
        return vector[: self.narrow], vector[self.narrow :].reshape(2, self.wide)

    def check(self, vector: Words) -> None:
        """Raises VeilfedError(INPUT_INVALID) for an array that is no such vector."""
        if vector.shape != (self.words,) or vector.dtype != np.uint64:
            raise VeilfedError(
                Code.INPUT_INVALID, f"expected {self.words} words, got {vector.dtype} {list(vector.shape)}"
            )

    def blocks(self) -> Iterator[Block]:
        """All elements, in the order in which masks are drawn."""
        for start in range(0, self.narrow, BLOCK):
            yield Block(slice(start, min(start + BLOCK, self.narrow)), None)
        for start in range(0, self.wide, BLOCK):
            end, low, high = min(start + BLOCK, self.wide), self.narrow, self.narrow + self.wide
            yield Block(slice(low + start, low + end), slice(high + start, high + end))

    def add(self, total: Words, term: Words) -> None:
        """total += term, each element in its ring. Errors as `check`."""
        self.check(total)
        self.check(term)
        for block in self.blocks():
            add_block(total, block, term[block.low], None if block.high is None else term[block.high])

    def to_bytes(self, vector: Words) -> bytes:
        self.check(vector)
        return vector.astype("<u8", copy=False).tobytes()

    def from_bytes(self, data: bytes) -> Words:
        """Raises VeilfedError(INPUT_INVALID) for another length."""
        if len(data) != 8 * self.words:
            raise VeilfedError(Code.INPUT_INVALID, f"expected {8 * self.words} bytes, got {len(data)}")
        return np.frombuffer(data, "<u8").astype(np.uint64)


def add_block(total: Words, block: Block, low: Words, high: Words | None) -> None:
    """total += (low, high) in one block."""
    target = total[block.low]
    target += low
    if block.high is not None and high is not None:
        upper = total[block.high]
        upper += high
        upper += target < low  # the carry


def subtract_block(total: Words, block: Block, low: Words, high: Words | None) -> None:
    """total -= (low, high) in one block."""
    target = total[block.low]
    if block.high is not None and high is not None:
        upper = total[block.high]
        upper -= high
        upper -= target < low  # the borrow
    target -= low
