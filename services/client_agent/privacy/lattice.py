"""Vectors of bounded length as integers, so that the bound holds exactly.

A vector is clipped, and each element is rounded towards zero to a multiple of 2^-f: no element grows, so the length
stays within the bound, whatever floating point did before. The noise is added to these integers.
"""

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["clipped"]

# More than the error of a length in floating point (for up to 2^24 elements), as a part of it.
SLACK = 2.0**-28


def clipped(rows: NDArray[np.float64], bound: float, fraction_bits: int) -> NDArray[np.int64]:
    """The rows [n, p] in units of 2^-fraction_bits; each has a Euclidean norm of `bound` or less, exactly.

    Rows that are longer are scaled down. Raises VeilfedError(INPUT_INVALID) for values that are not finite, or a bound
    of 2^62 units or more.
    """
    units = bound * 2.0**fraction_bits
    if not units < 2.0**62:
        raise VeilfedError(Code.INPUT_INVALID, "the bound is too large for the grid")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        raise VeilfedError(Code.INPUT_INVALID, "what is to be clipped is not finite")
    factors = units * (1 - SLACK) / np.maximum(norms, bound)
    units_of_rows: NDArray[np.int64] = np.trunc(rows * factors).astype(np.int64)
    return units_of_rows
