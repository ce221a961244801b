"""From residues modulo a few primes to the integer between -Q/2 and Q/2 that has them, and its residues modulo others.

Exact: balanced mixed-radix digits (Garner) of odd moduli name each integer of that range once.
"""

from typing import Any

import numpy as np
from numba import njit

from veilfed.ckks.basis import Basis
from veilfed.ckks.kernels import multiply, reduce, scale_difference
from veilfed.ckks.parameters import MAX_SHIFT, balanced
from veilfed.ckks.transform import Float, forward, inverse
from veilfed.errors import Code, VeilfedError

__all__ = ["lift"]

# What is taken from a residue must leave the difference an exact double: beyond this it is reduced before.
SMALL_SHIFT = 48


def lift(values: Float, limbs: int, basis: Basis, shift: int = 0) -> Float:
    """Polynomials [C, L, n], as integers modulo their L primes nearest to 0, at a higher level: [C, limbs, n].

    The integers are divided by 2^shift, rounded down. Two that are lifted apart and then added may so lose one.
    """
    count, low, n = values.shape
    if not low <= limbs <= basis.special or not 0 <= shift <= MAX_SHIFT:
        raise VeilfedError(Code.INPUT_INVALID, f"a polynomial of {low} limbs cannot be lifted to {limbs}, by 2^{shift}")
    out = np.empty((count, limbs, n))
    remainders = np.array([[balanced(i, j) for i in basis.primes] for j in basis.primes], dtype=np.float64)
    halves = np.array([balanced(pow(2, -shift, q), q) for q in basis.primes], dtype=np.float64)
    whole = np.array([q % 2**shift for q in basis.primes], dtype=np.int64)
    basis.each(
        _lift,
        (
            (values[c], out[c], remainders, basis.inverses, halves, whole, shift, basis.tables, basis.q, basis.p)
            for c in range(count)
        ),
    )
    return out


@njit(nogil=True, cache=True)
def _mixed_radix(values: Any, digits: Any, inverses: Any, tables: Any, q: Any, p: Any) -> None:
    """Balanced digits [L, n]: the integer is digits[0] + q[0] (digits[1] + q[1] (digits[2] + ...))."""
    low, n = values.shape
    for i in range(low):
        copy = values[i].copy()
        inverse(copy.reshape(16, n // 16), digits[i], tables[2][i], tables[3][i], q[i], p[i], tables[4][i])
    for j in range(1, low):
        for i in range(j):
            for k in range(n):
                digits[j, k] = reduce(multiply(digits[j, k] - digits[i, k], inverses[i, j], q[j], p[j]), q[j], p[j])


@njit(nogil=True, cache=True)
def _modulo_power(digits: Any, shift: int, whole: Any, out: Any) -> None:
    """The integers modulo 2^shift, not negative; `whole[i]` is prime i modulo it. Products may wrap at 2^64."""
    low, n = digits.shape
    mask = (1 << shift) - 1
    for k in range(n):
        value = np.int64(digits[low - 1, k]) & mask
        for i in range(low - 2, -1, -1):
            value = (value * whole[i] + np.int64(digits[i, k])) & mask
        out[k] = value


@njit(nogil=True, cache=True)
def _modulo_prime(digits: Any, remainders: Any, out: Any, q: float, p: float) -> None:
    """The integers modulo a prime, balanced; `remainders[i]` is prime i modulo it."""
    low, n = digits.shape
    for k in range(n):
        out[k] = reduce(digits[low - 1, k], q, p)
    for i in range(low - 2, -1, -1):
        for k in range(n):
            out[k] = reduce(multiply(out[k], remainders[i], q, p) + digits[i, k], q, p)


@njit(nogil=True, cache=True)
def _lift(
    values: Any,
    out: Any,
    remainders: Any,
    inverses: Any,
    halves: Any,
    whole: Any,
    shift: int,
    tables: Any,
    q: Any,
    p: Any,
) -> None:
    """One polynomial. `remainders[j, i]` is prime i modulo prime j, `halves[j]` is 2^-shift modulo it."""
    low, n = values.shape
    digits, residue, rest, less = np.empty((low, n)), np.empty(n), np.empty(n, np.int64), np.empty(n)
    _mixed_radix(values, digits, inverses, tables, q, p)
    _modulo_power(digits, shift, whole, rest)
    for j in range(out.shape[0]):
        if shift == 0 and j < low:
            out[j] = values[j]
            continue
        _modulo_prime(digits, remainders[j], residue, q[j], p[j])
        for k in range(n):
            less[k] = np.float64(rest[k] if shift <= SMALL_SHIFT else rest[k] % np.int64(q[j]))
        scale_difference(residue, less, halves[j], q[j], p[j])
        forward(residue, out[j].reshape(16, n // 16), tables[0][j], tables[1][j], q[j], p[j])
