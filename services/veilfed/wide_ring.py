"""Fixed-point numbers of 128 bits, 64 of them after the point: exact sums of statistics, in any order.

A real x is the integer round(x * 2^64) modulo 2^128, read as two's complement; it is kept as two 64-bit limbs, so an
array of shape S is uint64 [2, *S]: the low limbs, then the high ones. As in veilfed.ring, addition is exact and wraps.
Whoever adds sees to it that the true sum stays inside (-2^63, 2^63).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["LARGEST", "MAX_TERMS", "Total", "WideRing", "add", "decode", "encode", "zeros"]

WideRing = NDArray[np.uint64]

HALF = 2.0**63
SCALE = 2.0**64
# Of a Total: so many terms, each of them smaller in magnitude than this.
MAX_TERMS = 2**14
LARGEST = 2.0**38
# Elements that are handled at a time: few calls, and intermediate arrays that stay in the processor's cache.
BLOCK = 2**16


def zeros(shape: tuple[int, ...]) -> WideRing:
    """The neutral element of `add`."""
    return np.zeros((2, *shape), dtype=np.uint64)


def encode(values: NDArray[Any]) -> WideRing:
    """Rounds values (half to even) to fixed point: error at most 2^-65. Any shape S, uint64 [2, *S].

    Raises VeilfedError(INPUT_INVALID) for values that are not finite or not below 2^63 in magnitude.
    """
    limbs = zeros(values.shape)
    flat, reals = limbs.reshape(2, -1), values.reshape(-1)
    for start in range(0, reals.size, BLOCK):
        block = slice(start, start + BLOCK)
        flat[0, block], flat[1, block] = _limbs(reals[block])
    return limbs


def add(total: WideRing, term: WideRing) -> None:
    """Adds `term` to `total` in place, modulo 2^128. Raises VeilfedError(INPUT_INVALID) when the shapes differ."""
    _same_shape(total.shape, term.shape)
    flat, other = total.reshape(2, -1), term.reshape(2, -1)
    for start in range(0, flat.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        _add(flat[:, block], other[0, block], other[1, block])


def decode(total: WideRing) -> NDArray[np.float64]:
    """The real numbers, float64 of shape S; relative error at most 2^-52."""
    low, high = total[0], total[1]
    reals = np.empty(total.shape[1:], dtype=np.float64)
    flat, low, high = reals.reshape(-1), low.reshape(-1), high.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        block = slice(start, start + BLOCK)
        flat[block] = _reals(low[block], high[block])
    return reals


def _same_shape(total: tuple[int, ...], term: tuple[int, ...]) -> None:
    if total != term:
        raise VeilfedError(Code.INPUT_INVALID, f"cannot add shape {list(term)} to {list(total)}")


class Total:
    """The sum of encode(values) of arrays of one shape, without encoding each: several times as fast, and as exact.

    A term x is a + b / 2^32 + c / 2^64 with integers a, b, c, of which b and c are at most 2^31 in magnitude. The sums
    of each are integers below 2^53: exact in floating point, in any order.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._sums = np.zeros((3, int(np.prod(shape))))
        self._terms = 0

    def add(self, values: NDArray[Any]) -> None:
        """Adds an array of the shape.

        Raises VeilfedError(INPUT_INVALID) for another shape, for values that are not finite or not below LARGEST in
        magnitude, and after MAX_TERMS terms; the total is of no use then.
        """
        _same_shape(self._shape, values.shape)
        self._terms += 1
        if self._terms > MAX_TERMS:
            raise VeilfedError(Code.INPUT_INVALID, f"more than {MAX_TERMS} terms in a sum")
        reals = values.reshape(-1)
        rest, digits = np.empty(BLOCK), np.empty(BLOCK)
        for start in range(0, reals.size, BLOCK):
            part = reals[start : start + BLOCK]
            block = slice(start, start + len(part))
            self._add(self._sums[:, block], part, rest[: len(part)], digits[: len(part)])

    def _add(
        self, sums: NDArray[np.float64], part: NDArray[Any], rest: NDArray[np.float64], digits: NDArray[np.float64]
    ) -> None:
        # With NaN among them, the extremes are NaN, and every comparison fails.
        if not (part.min() > -LARGEST and part.max() < LARGEST):
            raise VeilfedError(Code.INPUT_INVALID, f"values must be finite and below {LARGEST:g} to be added")
        np.rint(part, out=digits)
        sums[0] += digits
        np.subtract(part, digits, out=rest)
        rest *= 2.0**32
        np.rint(rest, out=digits)
        sums[1] += digits
        rest -= digits
        rest *= 2.0**32
        np.rint(rest, out=rest)
        sums[2] += rest

    def ring(self) -> WideRing:
        """The sum as ring elements."""
        total = zeros((self._sums.shape[1],))
        for start in range(0, total.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            whole, middle, last = self._sums[:, block].astype(np.int64)
            _add(total[:, block], last.view(np.uint64), (last >> 63).view(np.uint64))
            middle_low = (middle << 32).view(np.uint64)
            _add(total[:, block], middle_low, ((middle >> 32) + whole).view(np.uint64))
        return total.reshape(2, *self._shape)


def _limbs(values: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(low, high) of each value of a flat array.

    x = a + r with an integer a and r in [-1/2, 1/2) is exact in floating point, whatever the sign of x; so is r * 2^64,
    which is then rounded (half to even).
    """
    reals = np.asarray(values, dtype=np.float64)
    whole = np.rint(reals)
    # With NaN among them, the extremes are NaN, and every comparison fails.
    if whole.size and not (whole.min() > -HALF and whole.max() < HALF):
        raise VeilfedError(Code.INPUT_INVALID, "values must be finite and below 2^63 to be added as fixed point")
    part = reals - whole
    half = part == 0.5
    whole[half] += 1
    part[half] = -0.5
    part *= SCALE
    np.rint(part, out=part)
    low = part.astype(np.int64)
    high = whole.astype(np.int64)
    high += low >> 63  # -1 where the low limb is negative
    return low.view(np.uint64), high.view(np.uint64)


def _add(total: WideRing, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> None:
    total[0] += low
    total[1] += high
    total[1] += total[0] < low  # the carry


def _reals(low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Of the magnitude, so that small negative numbers lose no digits; then the sign."""
    negative = high >= np.uint64(2**63)
    low = np.where(negative, ~low + np.uint64(1), low)
    high = np.where(negative, ~high + (low == 0), high)
    magnitude = low.astype(np.float64) / SCALE + high.astype(np.float64)
    return np.where(negative, -magnitude, magnitude)
