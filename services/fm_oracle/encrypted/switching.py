"""Key switching (hybrid, one special prime, as SEAL's) and sums of products, as compiled kernels.

Sums are lazy: many products are added before one is reduced. A product of balanced residues has up to 94 bits, more
than a double; a sum is kept as two doubles, `high`, which starts at a constant so large that all additions to it round
to multiples of one power of two, and `low`, the exact remainders of these roundings (fma gives them). `terms` is how
many products of two residues fit; `fit` says how many that are for a prime.
"""

from typing import Any

import numpy as np
from numba import njit

from veilfed.ckks.kernels import fma, reduce, rint, scale_difference
from veilfed.ckks.transform import forward, inverse

__all__ = ["decompose", "divide_by_last", "finish_switch", "fit", "inner_products", "product_sums"]

# Columns that are worked on at a time: digits and accumulators stay in the first-level cache, keys are read once.
BLOCK = 1024
# The same for sums of products, which have three accumulators for each of several sums.
SUM_BLOCK = 256


def fit(bits: int) -> int:
    """How many products of residues modulo primes of so many bits a lazy sum holds."""
    return 1 << (53 - bits)


@njit(inline="always", cache=True)
def _start(terms: int) -> Any:
    """What `high` starts from: it stays in one binade, so each addition to it rounds to the same power of two."""
    return 1.5 * 2.0 ** (105.0 - np.ceil(np.log2(terms)))


@njit(nogil=True, cache=True)
def _accumulate_two(high: Any, low: Any, a: Any, x: Any, b: Any, y: Any) -> None:
    """(high, low) += a x + b y, exactly."""
    for j in range(high.size):
        h0 = high[j]
        h1 = fma(a[j], x[j], h0)
        h2 = fma(b[j], y[j], h1)
        low[j] += fma(a[j], x[j], h0 - h1) + fma(b[j], y[j], h1 - h2)
        high[j] = h2


@njit(nogil=True, cache=True)
def _accumulate(high: Any, low: Any, a: Any, x: Any) -> None:
    """(high, low) += a x, exactly."""
    for j in range(high.size):
        h0 = high[j]
        h1 = fma(a[j], x[j], h0)
        low[j] += fma(a[j], x[j], h0 - h1)
        high[j] = h1


@njit(nogil=True, cache=True)
def _flush(high: Any, low: Any, out: Any, start: float, q: float, p: float) -> None:
    """out = the sum modulo q, balanced; `high` starts anew. `out` may be `low`."""
    for j in range(high.size):
        h = high[j] - start
        out[j] = reduce(fma(-rint(h * p), q, h) + low[j], q, p)
        high[j] = start


@njit(nogil=True, cache=True)
def decompose(values: Any, digit: int, out: Any, tables: Any, q: Any, p: Any) -> None:
    """One digit of a polynomial [L, n] for key switching: its residue modulo prime `digit`, modulo all primes.

    `out` [L + 1, n]; its last limb is of the special prime.
    """
    limbs, n = values.shape
    special = q.size - 1
    coefficients, lifted = np.empty(n), np.empty(n)
    copy = values[digit].copy()
    inverse(
        copy.reshape(16, n // 16),
        coefficients,
        tables[2][digit],
        tables[3][digit],
        q[digit],
        p[digit],
        tables[4][digit],
    )
    for j in range(limbs + 1):
        if j == digit:
            out[j] = values[digit]
            continue
        k = j if j < limbs else special
        for i in range(n):
            lifted[i] = reduce(coefficients[i], q[k], p[k])
        forward(lifted, out[j].reshape(16, n // 16), tables[0][k], tables[1][k], q[k], p[k])


@njit(nogil=True, cache=True)
def inner_products(
    digits: Any, keys: Any, which: Any, out: Any, limb: int, prime: int, q: float, p: float, terms: int
) -> None:
    """out[c, r, m, limb] = sum over i of digits[c, i, limb] * keys[which[r], m, i, prime].

    Digits [C, L, L + 1, n] of C polynomials; keys [.., 2, limbs, limbs + 1, n]; out [C, R, 2, L + 1, n].
    """
    count, limbs, _, n = digits.shape
    start = _start(terms)
    high, low = np.empty(BLOCK), np.empty(BLOCK)
    for s in range(0, n, BLOCK):
        e = s + BLOCK
        for r in range(which.size):
            key = keys[which[r]]
            for m in range(2):
                for c in range(count):
                    high[:] = start
                    low[:] = 0.0
                    held, i = 0, 0
                    while i < limbs:
                        if held + 2 > terms:
                            _flush(high, low, low, start, q, p)
                            held = 1
                        if i + 1 < limbs:
                            _accumulate_two(
                                high,
                                low,
                                digits[c, i, limb, s:e],
                                key[m, i, prime, s:e],
                                digits[c, i + 1, limb, s:e],
                                key[m, i + 1, prime, s:e],
                            )
                        else:
                            _accumulate(high, low, digits[c, i, limb, s:e], key[m, i, prime, s:e])
                        i += 2
                        held += 2
                    _flush(high, low, out[c, r, m, limb, s:e], start, q, p)


@njit(nogil=True, cache=True)
def divide_by_last(x: Any, last: int, prime: int, inverses: Any, tables: Any, q: Any, p: Any) -> None:
    """x[:last] = round(x / q_prime), where limb `last` of x [> last, n] has the residues modulo that prime.

    For a rescale the last limb's own prime, at the end of a key switch the special one. Limb `last` is destroyed.
    """
    n = x.shape[1]
    coefficients, lifted, values = np.empty(n), np.empty(n), np.empty((16, n // 16))
    inverse(
        x[last].reshape(16, n // 16),
        coefficients,
        tables[2][prime],
        tables[3][prime],
        q[prime],
        p[prime],
        tables[4][prime],
    )
    for j in range(last):
        for i in range(n):
            lifted[i] = reduce(coefficients[i], q[j], p[j])
        forward(lifted, values, tables[0][j], tables[1][j], q[j], p[j])
        scale_difference(x[j], values.reshape(n), inverses[prime, j], q[j], p[j])


@njit(nogil=True, cache=True)
def finish_switch(
    x: Any, added: Any, adds: bool, order: Any, out: Any, inverses: Any, tables: Any, q: Any, p: Any
) -> None:
    """One component of a switched ciphertext: the special prime is divided off, `added` is added, columns reordered.

    x [L + 1, n] is destroyed; added and out [L, n]; out[:, i] = x[:, order[i]].
    """
    limbs, n = out.shape
    divide_by_last(x, limbs, q.size - 1, inverses, tables, q, p)
    for j in range(limbs):
        if adds:
            for i in range(n):
                x[j, i] = reduce(x[j, i] + added[j, i], q[j], p[j])
        for i in range(n):
            out[j, i] = x[j, order[i]]


@njit(nogil=True, cache=True)
def product_sums(
    x: Any, of_x: Any, y: Any, of_y: Any, out: Any, limb: int, first: int, end: int, q: float, p: float, terms: int
) -> None:
    """Columns from `first` to `end` of out[c G + g, :, limb]: the sum over t of x[of_x[g, t]] * y[of_y[c, t]].

    x and y are ciphertexts [.., 2, L, n], out has three components [C G, 3, L, n]; of_x [G, T], of_y [C, T]. Of some
    columns, x stays in the second-level cache while all c are done.
    """
    groups = of_x.shape[0]
    start = _start(terms)
    high, low = np.empty((groups, 3, SUM_BLOCK)), np.empty((groups, 3, SUM_BLOCK))
    for s in range(first, end, SUM_BLOCK):
        e = s + SUM_BLOCK
        for c in range(of_y.shape[0]):
            high[:] = start
            low[:] = 0.0
            held = 0
            for t in range(of_y.shape[1]):
                b0, b1 = y[of_y[c, t], 0, limb, s:e], y[of_y[c, t], 1, limb, s:e]
                full = held + 2 > terms
                for g in range(groups):
                    a0, a1 = x[of_x[g, t], 0, limb, s:e], x[of_x[g, t], 1, limb, s:e]
                    if full:
                        for m in range(3):
                            _flush(high[g, m], low[g, m], low[g, m], start, q, p)
                    _accumulate(high[g, 0], low[g, 0], a0, b0)
                    _accumulate_two(high[g, 1], low[g, 1], a0, b1, a1, b0)
                    _accumulate(high[g, 2], low[g, 2], a1, b1)
                held = 3 if full else held + 2
            for g in range(groups):
                for m in range(3):
                    _flush(high[g, m], low[g, m], out[c * groups + g, m, limb, s:e], start, q, p)
