"""Fixed-point numbers in the ring Z/2^64: sums that do not depend on the order, bit for bit.

A real x is the integer round(x * 2^f) modulo 2^64, read as two's complement, where f is the number of fraction bits.
Addition of integers is exact and wraps, so any order and any grouping of the terms gives the same sum, which floating
point does not promise. Whoever chooses f sees to it that the true sum stays inside (-2^63, 2^63).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["HALF", "Ring", "add", "decode", "encode", "zeros"]

Ring = NDArray[np.uint64]

HALF = 2.0**63
MAX_FRACTION_BITS = 62


def _scale(fraction_bits: int) -> float:
    if not 0 <= fraction_bits <= MAX_FRACTION_BITS:
        raise VeilfedError(
            Code.INPUT_INVALID, f"fraction bits must be within 0 and {MAX_FRACTION_BITS}, not {fraction_bits}"
        )
    return float(2**fraction_bits)


def zeros(shape: tuple[int, ...]) -> Ring:
    """The neutral element of `add`."""
    return np.zeros(shape, dtype=np.uint64)


def encode(values: NDArray[Any], fraction_bits: int, factor: float = 1.0) -> Ring:
    """Rounds factor * values (half to even) to fixed point; any shape, uint64 of the same shape.

    Raises VeilfedError(INPUT_INVALID) for values that are not finite or not below 2^(63 - fraction_bits).
    """
    # A power of two changes no digit of the factor: one product is as good as two.
    scaled = np.asarray(np.multiply(values, factor * _scale(fraction_bits), dtype=np.float64))
    np.rint(scaled, out=scaled)
    # With NaN among them, the extremes are NaN, and every comparison fails.
    if scaled.size and not (scaled.min() > -HALF and scaled.max() < HALF):
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"values must be finite and below 2^{63 - fraction_bits} to be fixed point with {fraction_bits}"
            " fraction bits",
        )
    return scaled.astype(np.int64).view(np.uint64)


def add(total: Ring, term: Ring) -> None:
    """Adds `term` to `total` in place, modulo 2^64. Raises VeilfedError(INPUT_INVALID) when the shapes differ."""
    if total.shape != term.shape:
        raise VeilfedError(Code.INPUT_INVALID, f"cannot add shape {list(term.shape)} to {list(total.shape)}")
    np.add(total, term, out=total)


def decode(total: Ring, fraction_bits: int) -> NDArray[np.float64]:
    """The real numbers of ring elements, float64 of the same shape; the inverse of `encode` up to 2^-(f + 1)."""
    return np.asarray(total.view(np.int64).astype(np.float64) / _scale(fraction_bits), dtype=np.float64)
