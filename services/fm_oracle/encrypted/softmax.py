"""What of a softmax is not slot by slot: the reciprocal of the row sums."""

from fm_oracle.encrypted.operations import B, Operations

__all__ = ["goldschmidt"]


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
