"""The exponential of ciphertexts: Taylor's polynomial of degree 6 (BlindFed, section 4.1).

It has no real root, so it is a product of three quadratics, and takes three levels and three relinearisations; its
constant factor 1/720 is left to whoever divides.
"""

import math

import numpy as np

from fm_oracle.encrypted.operations import B, Operations

__all__ = ["EXPONENTIAL_DEGREE", "exponential", "quadratic_factors"]

EXPONENTIAL_DEGREE = 6


def quadratic_factors(degree: int = EXPONENTIAL_DEGREE) -> list[tuple[float, float]]:
    """(a, b) of each x^2 + a x + b; their product is degree! times Taylor's polynomial of the exponential.

    The factors come in the order of their roots' real parts.
    """
    coefficients = [math.factorial(degree) / math.factorial(k) for k in range(degree, -1, -1)]
    roots = np.roots(coefficients)
    upper = sorted((root for root in roots if root.imag > 0), key=lambda root: float(root.real))
    return [(-2 * float(root.real), float(abs(root)) ** 2) for root in upper]


def exponential(x: B, operations: Operations[B]) -> B:
    """720 times Taylor's polynomial of degree 6, three levels lower."""
    square = operations.relinearise(operations.products(x, x))
    factors = [operations.rescale(_quadratic(square, x, a, b, operations)) for a, b in quadratic_factors()]
    product = factors[0]
    for factor in factors[1:]:
        product = operations.rescale(operations.relinearise(operations.products(product, factor.at(product.limbs))))
    return product


def _quadratic(square: B, x: B, a: float, b: float, operations: Operations[B]) -> B:
    """square + a x + b, at the scale of the square."""
    linear = operations.times(x, [a] * len(x), square.scale)
    return operations.plus(operations.add(square, linear), b)
