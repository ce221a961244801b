"""What of a softmax is not slot by slot: the reciprocal of the row sums."""

import math

from fm_oracle.encrypted.operations import B, Operations

__all__ = ["goldschmidt", "goldschmidt_degree"]


def goldschmidt_degree(low: float, high: float, error: float) -> int:
    """The least degree with a relative error of at most `error` for x from low to high, divided by their middle.

    BlindFed (section 4.1) takes 7, which is right to 1e-3 where high is up to 74 times low.
    """
    nearest = 2 * low / (low + high)
    if nearest >= 1:
        return 1
    doublings = math.log2(math.log(error) / math.log1p(-nearest))
    return max(1, math.ceil(doublings - 1))


def goldschmidt(x: B, degree: int, operations: Operations[B], largest: float, lowest: int) -> B:
    """1 / x for 0 < x < 2: prod over i <= degree of (1 + (1 - x)^(2^i)).

    The error is (1 - x)^(2^(degree + 1)) / x. Values are refreshed before they come to `lowest` limbs, which a refresh
    needs; `largest` bounds them.
    """
    y = operations.plus(operations.negated(x), 1.0)
    product = operations.plus(y, 1.0)
    for _ in range(degree):
        if product.limbs <= lowest + 1:
            y, product = operations.refresh(y, largest, 0), operations.refresh(product, largest, 0)
        y = operations.multiplied(y, y)
        product = operations.multiplied(product, operations.plus(y, 1.0))
    return product
