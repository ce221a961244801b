"""The discrete Gaussian one sample at a time, in fractions: Canonne, Kamath and Steinke (2020), algorithms 1 to 3."""

import math
from collections.abc import Callable
from fractions import Fraction

__all__ = ["sample"]

Source = Callable[[int], bytes]


def sample(variance: Fraction, source: Source) -> int:
    scale = math.isqrt(math.floor(variance)) + 1
    while True:
        y = _laplace(scale, source)
        if _exp((abs(y) - variance / scale) ** 2 / (2 * variance), source):
            return y


def _laplace(scale: int, source: Source) -> int:
    while True:
        rest = _uniform(scale, source)
        if not _exp(Fraction(rest, scale), source):
            continue
        times = 0
        while _exp(Fraction(1), source):
            times += 1
        negative, value = _uniform(2, source), rest + scale * times
        if not (negative and value == 0):
            return -value if negative else value


def _exp(gamma: Fraction, source: Source) -> bool:
    """True with probability exp(-gamma)."""
    while gamma > 1:
        if not _exp(Fraction(1), source):
            return False
        gamma -= 1
    k = 1
    while _uniform(gamma.denominator * k, source) < gamma.numerator:
        k += 1
    return k % 2 == 1


def _uniform(limit: int, source: Source) -> int:
    bits = (limit - 1).bit_length()
    while True:
        value = int.from_bytes(source(8 + bits // 8), "little") & ((1 << bits) - 1)
        if value < limit:
            return value
