"""Exact samples of the discrete Gaussian (Canonne, Kamath and Steinke, NeurIPS 2020, algorithms 1 to 3).

P[X = x] is proportional to exp(-x^2 / (2 V)) on the integers. Noise made of floating-point numbers is not what its
formula says: the gaps between the numbers tell what it was added to (Mironov, 2012). Here every decision is one of
"is a uniform real number below exp(-gamma)", with a rational gamma. 64 bits of the number decide it almost always, in
floating point and with a margin that covers its errors; where they do not, more bits are drawn and exp is computed to
as many digits as it takes. So the distribution is the exact one, at the speed of arrays.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.privacy import MAX_DEVIATION

__all__ = ["Source", "bernoulli", "discrete_gaussian", "seeded"]

# So many random bytes. The default everywhere is the operating system's.
Source = Callable[[int], bytes]
Integers = NDArray[np.int64]
Reals = NDArray[np.float64]

# Far above the errors of gamma, exp and a 64-bit word as floats, which are below 2^-48.
MARGIN = 2.0**-40
# Samples that are made at a time: bounds memory.
BLOCK = 2**18


def seeded(seed: int | Sequence[int]) -> Source:
    """A source for studies and tests, the same for one seed: no protection."""
    return np.random.default_rng(seed).bytes


def discrete_gaussian(variance: int, size: int, source: Source = secrets.token_bytes) -> Integers:
    """`size` independent samples, int64, with V = `variance` > 0.

    Raises VeilfedError(INPUT_INVALID) where V is not positive, or its root is not below MAX_DEVIATION.
    """
    if not 0 < variance < MAX_DEVIATION**2:
        raise VeilfedError(Code.INPUT_INVALID, "noise must have a deviation above 0 and below 2^46 on its grid")
    found = np.empty(size, np.int64)
    done = 0
    while done < size:
        # Four of ten candidates are accepted, or more.
        drawn = _accepted(variance, min(BLOCK, 3 * (size - done) + 16), source)[: size - done]
        found[done : done + len(drawn)] = drawn
        done += len(drawn)
    return found


def bernoulli(probability: float, size: int, source: Source = secrets.token_bytes) -> NDArray[np.bool_]:
    """`size` independent decisions, true with this probability, or up to 2^-64 more rarely."""
    if probability >= 1:
        return np.ones(size, np.bool_)
    return _words(size, source) < np.uint64(int(Fraction(probability) * 2**64))


def _accepted(variance: int, size: int, source: Source) -> Integers:
    """What is left of about `size` samples of the discrete Laplace distribution (algorithm 3)."""
    scale = math.isqrt(variance) + 1
    y = _laplace(scale, size, source)
    centre, root = variance / scale, math.sqrt(2 * variance)
    gamma = np.square((np.abs(y) - centre) / root)

    def exactly(index: int) -> Fraction:
        return (abs(int(y[index])) - Fraction(variance, scale)) ** 2 / (2 * variance)

    accepted: Integers = y[_below_exp(gamma, exactly, source)]
    return accepted


def _laplace(scale: int, size: int, source: Source) -> Integers:
    """What is left of `size` candidates: P[x] proportional to exp(-|x| / scale) (algorithm 2)."""
    rest = _below(scale, size, source)
    rest = rest[_below_exp(rest / scale, lambda index: Fraction(int(rest[index]), scale), source)]
    y = rest + scale * _geometric(len(rest), source)
    negative = (_words(len(y), source) & np.uint64(1)).astype(np.bool_)
    drawn: Integers = np.where(negative, -y, y)[~(negative & (y == 0))]
    return drawn


def _geometric(size: int, source: Source) -> Integers:
    """How many decisions with probability 1/e in a row were true."""
    counts = np.zeros(size, np.int64)
    alive = np.arange(size)
    while len(alive):
        alive = alive[_below_exp(np.ones(len(alive)), lambda index: Fraction(1), source)]
        counts[alive] += 1
    return counts


def _below(limit: int, size: int, source: Source) -> Integers:
    """Uniform on 0 .. limit - 1."""
    mask = np.uint64((1 << (limit - 1).bit_length()) - 1)
    found = _words(size, source) & mask
    while len(again := np.flatnonzero(found >= limit)):
        found[again] = _words(len(again), source) & mask
    return found.astype(np.int64)


def _words(size: int, source: Source) -> NDArray[np.uint64]:
    return np.frombuffer(source(8 * size), np.uint64)


def _below_exp(gamma: Reals, exactly: Callable[[int], Fraction], source: Source) -> NDArray[np.bool_]:
    """For each gamma >= 0, whether a uniform number of [0, 1) is below exp(-gamma); `exactly` gives it by its index."""
    words = _words(len(gamma), source)
    difference = words * 2.0**-64 - np.exp(-gamma)
    below = difference < 0
    for index in np.flatnonzero(np.abs(difference) < MARGIN):
        below[index] = _decided(int(words[index]), exactly(int(index)), source)
    return np.asarray(below)


def _decided(word: int, gamma: Fraction, source: Source) -> bool:
    """Whether the number with these first 64 bits, and more that are drawn here, is below exp(-gamma)."""
    bits, digits = 64, 40
    while True:
        with localcontext() as context:
            context.prec = digits
            near = Fraction((-(Decimal(gamma.numerator) / Decimal(gamma.denominator))).exp())
        # Both operations are rounded correctly to so many digits.
        error = (gamma + 2) * Fraction(1, 10 ** (digits - 2)) * near
        while bits < 4 * digits:
            word, bits = (word << 64) | int.from_bytes(source(8), "little"), bits + 64
        if word + 1 <= (near - error) * 2**bits:
            return True
        if word >= (near + error) * 2**bits:
            return False
        digits *= 2
