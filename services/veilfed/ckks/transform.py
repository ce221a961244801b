"""The negacyclic number-theoretic transform of SEAL, on balanced doubles (see veilfed.ckks.kernels).

Values are those of SEAL: psi is the smallest primitive 2n-th root of unity modulo q, outputs come in bit-reversed
order. They are stored transposed, position c * (n / 16) + i has SEAL's index 16 i + c, so that the last four of the
log2 n stages, whose partners are less than a vector apart, run along vectors as well. Two stages are one pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from veilfed.ckks.kernels import multiply, reduce
from veilfed.ckks.parameters import balanced

__all__ = ["Float", "Tables", "bit_reversed", "forward", "inverse", "make_tables", "seal_index", "stacked"]

Float = NDArray[np.float64]


@njit(inline="always", cache=True)
def _same(twiddles: Any, j: int) -> Any:
    return twiddles


@njit(inline="always", cache=True)
def _each(twiddles: Any, j: int) -> Any:
    return twiddles[j]


def _passes(at: Any, balanced: bool) -> tuple[Any, Any]:
    """Two stages on four rows: forward and inverse. `at` gives the twiddle of column j: one for all, or each its own.

    Of a forward pass the outputs grow by at most 1.9 q unless they are to be balanced.
    """

    @njit(nogil=True, cache=True)
    def there(x0: Any, x1: Any, x2: Any, x3: Any, w1: Any, w2: Any, w3: Any, q: float, p: float) -> None:
        for j in range(x0.size):
            a0, a1 = x0[j], x1[j]
            a2, a3 = multiply(x2[j], at(w1, j), q, p), multiply(x3[j], at(w1, j), q, p)
            b0, b2 = a0 + a2, a0 - a2
            b1, b3 = multiply(a1 + a3, at(w2, j), q, p), multiply(a1 - a3, at(w3, j), q, p)
            if balanced:
                x0[j], x1[j] = reduce(b0 + b1, q, p), reduce(b0 - b1, q, p)
                x2[j], x3[j] = reduce(b2 + b3, q, p), reduce(b2 - b3, q, p)
            else:
                x0[j], x1[j], x2[j], x3[j] = b0 + b1, b0 - b1, b2 + b3, b2 - b3

    @njit(nogil=True, cache=True)
    def back(x0: Any, x1: Any, x2: Any, x3: Any, w1: Any, w2: Any, w3: Any, q: float, p: float) -> None:
        for j in range(x0.size):
            a0, a1, a2, a3 = x0[j], x1[j], x2[j], x3[j]
            b0, b1 = a0 + a1, multiply(a0 - a1, at(w2, j), q, p)
            b2, b3 = a2 + a3, multiply(a2 - a3, at(w3, j), q, p)
            x0[j], x2[j] = reduce(b0 + b2, q, p), multiply(b0 - b2, at(w1, j), q, p)
            x1[j], x3[j] = b1 + b3, multiply(b1 - b3, at(w1, j), q, p)

    return there, back


_there, _back = _passes(_same, False)
_there_last, _back_first = _passes(_each, True)


@njit(nogil=True, cache=True)
def forward(a: Any, out: Any, w: Any, tail: Any, q: float, p: float) -> None:
    """`a` [n], coefficients in their natural order, is destroyed; `out` [16, n / 16] is its transform."""
    n = a.size
    blocks, length = 1, n
    if _odd_stages(n):
        half = n // 2
        for j in range(half):
            x, y = a[j], multiply(a[half + j], w[1], q, p)
            a[j], a[half + j] = x + y, x - y
        blocks, length = 2, half
    while length > 16:
        h = length // 4
        for i in range(blocks):
            s = i * length
            _there(
                a[s : s + h],
                a[s + h : s + 2 * h],
                a[s + 2 * h : s + 3 * h],
                a[s + 3 * h : s + length],
                w[blocks + i],
                w[2 * blocks + 2 * i],
                w[2 * blocks + 2 * i + 1],
                q,
                p,
            )
        blocks, length = 4 * blocks, h
    _scatter(a, out)
    for c in range(4):
        _there_last(out[c], out[c + 4], out[c + 8], out[c + 12], tail[0], tail[1], tail[2], q, p)
    for c in range(4):
        r = 4 * c
        _there_last(out[r], out[r + 1], out[r + 2], out[r + 3], tail[3 + c], tail[7 + 2 * c], tail[8 + 2 * c], q, p)


@njit(nogil=True, cache=True)
def inverse(values: Any, a: Any, w: Any, tail: Any, q: float, p: float, n_inverse: float) -> None:
    """`values` [16, n / 16] is destroyed; `a` [n] are the coefficients, balanced, in their natural order."""
    n = a.size
    for c in range(4):
        r = 4 * c
        _back_first(
            values[r],
            values[r + 1],
            values[r + 2],
            values[r + 3],
            tail[3 + c],
            tail[7 + 2 * c],
            tail[8 + 2 * c],
            q,
            p,
        )
    for c in range(4):
        _back_first(values[c], values[c + 4], values[c + 8], values[c + 12], tail[0], tail[1], tail[2], q, p)
    _gather(values, a)
    h = 16
    blocks = n // 64
    while blocks >= 1:
        for i in range(blocks):
            s = 4 * h * i
            _back(
                a[s : s + h],
                a[s + h : s + 2 * h],
                a[s + 2 * h : s + 3 * h],
                a[s + 3 * h : s + 4 * h],
                w[blocks + i],
                w[2 * blocks + 2 * i],
                w[2 * blocks + 2 * i + 1],
                q,
                p,
            )
        h, blocks = 4 * h, blocks // 4
    if _odd_stages(n):
        half = n // 2
        for j in range(half):
            x, y = a[j], a[half + j]
            a[j], a[half + j] = x + y, multiply(x - y, w[1], q, p)
    for j in range(n):
        a[j] = reduce(multiply(a[j], n_inverse, q, p), q, p)


@njit(inline="always", cache=True)
def _odd_stages(n: int) -> bool:
    return (n & 0xAAAAAAAA) != 0


@njit(nogil=True, cache=True)
def _scatter(a: Any, out: Any) -> None:
    """[n / 16, 16] to [16, n / 16], in tiles that stay in the cache."""
    rows = a.size // 16
    for start in range(0, rows, 16):
        for c in range(16):
            for i in range(start, min(start + 16, rows)):
                out[c, i] = a[16 * i + c]


@njit(nogil=True, cache=True)
def _gather(values: Any, a: Any) -> None:
    """[16, n / 16] to [n / 16, 16]."""
    for i in range(a.size // 16):
        for c in range(16):
            a[16 * i + c] = values[c, i]


# Of one prime w [n], tail [15, n / 16], both of the inverse, and 1 / n; stacked, with an axis for the primes before.
Tables = tuple[Float, Float, Float, Float, Float]


def stacked(tables: Sequence[Tables]) -> Tables:
    """The tables of several primes as one."""
    w, tail, w_inverse, tail_inverse, n_inverse = (np.stack(column) for column in zip(*tables, strict=True))
    return w, tail, w_inverse, tail_inverse, n_inverse


def make_tables(q: int, n: int) -> Tables:
    """The twiddles of SEAL for the prime q, which is 1 modulo 2n; n >= 64 is a power of two."""
    psi = _smallest_root(q, n)
    w, tail = _twiddles(psi, q, n)
    w_inverse, tail_inverse = _twiddles(pow(psi, -1, q), q, n)
    return w, tail, w_inverse, tail_inverse, np.array(float(balanced(pow(n, -1, q), q)))


def _smallest_root(q: int, n: int) -> int:
    """The smallest primitive 2n-th root of unity modulo q."""
    root = next(r for g in range(2, q) if pow(r := pow(g, (q - 1) // (2 * n), q), n, q) == q - 1)
    smallest = current = root
    square = root * root % q
    for _ in range(n):  # the odd powers are all primitive ones
        current = current * square % q
        smallest = min(smallest, current)
    return smallest


def _twiddles(psi: int, q: int, n: int) -> tuple[Float, Float]:
    """Powers of psi in bit-reversed order [n]; and those of the last four stages, [15, n / 16], one row for each."""
    powers = [1] * n
    for i in range(1, n):
        powers[i] = powers[i - 1] * psi % q
    w = np.array([balanced(power, q) for power in powers], dtype=np.float64)[bit_reversed(n)]
    rows = n // 16
    tail = np.empty((15, rows))
    for first, count in ((0, 1), (1, 2), (3, 4), (7, 8)):
        stage = count * rows
        tail[first : first + count] = w[stage : 2 * stage].reshape(rows, count).T
    return w, tail


def bit_reversed(n: int) -> NDArray[np.int64]:
    """For each index below n, a power of two, the index with its bits in the other order."""
    order = np.zeros(1, dtype=np.int64)
    while order.size < n:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order


def seal_index(n: int) -> NDArray[np.int64]:
    """SEAL's index of each stored position [n]."""
    return np.arange(n, dtype=np.int64).reshape(n // 16, 16).T.ravel()
