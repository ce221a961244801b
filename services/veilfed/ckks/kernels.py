"""Compiled arithmetic modulo a prime q below 2^48, on balanced doubles.

A residue is the double x with |x| <= q/2 that is congruent to it. Products are exact because a fused multiply-add
gives the part that rounding takes from them, and loops over doubles use the processor's vectors, where 64-bit
integers have no product. All functions release the interpreter's lock; none of them allocates more than it says.

`p` is 1 / q throughout. Bounds: for |a * b| < 2^53 * q / 4, `multiply` is right and returns |r| < 0.76 q + 2^44;
`reduce` returns |r| <= q/2 for |a| < 2^52. Within a transform values grow to at most 9 q < 2^52.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.extending import intrinsic

__all__ = [
    "add",
    "add_constant",
    "add_product",
    "ciphertext_product",
    "decrypt",
    "encrypt",
    "fma",
    "load",
    "multiply",
    "reduce",
    "rint",
    "scale_difference",
    "store",
    "subtract",
    "times_constant",
    "total",
]

_DOUBLE = ir.DoubleType()


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@intrinsic
def rint(typing_context: Any, a: Any) -> Any:
    """The nearest integer, half to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_DOUBLE]), arguments)

    return types.float64(types.float64), generate


@njit(inline="always", cache=True)
def multiply(a: float, b: float, q: float, p: float) -> Any:
    """a * b modulo q, balanced up to rounding of the quotient."""
    high = a * b
    low = fma(a, b, -high)
    return fma(-rint(high * p), q, high) + low


@njit(inline="always", cache=True)
def reduce(a: float, q: float, p: float) -> Any:
    """a modulo q, balanced."""
    return fma(-rint(a * p), q, a)


@njit(nogil=True, cache=True)
def add(x: Any, y: Any, out: Any, q: float, p: float) -> None:
    """out = x + y, element by element; out may be x."""
    for j in range(x.size):
        out[j] = reduce(x[j] + y[j], q, p)


@njit(nogil=True, cache=True)
def subtract(x: Any, y: Any, out: Any, q: float, p: float) -> None:
    """out = x - y, element by element; out may be x."""
    for j in range(x.size):
        out[j] = reduce(x[j] - y[j], q, p)


@njit(nogil=True, cache=True)
def add_constant(x: Any, constant: float, q: float, p: float) -> None:
    """x += constant."""
    for j in range(x.size):
        x[j] = reduce(x[j] + constant, q, p)


@njit(nogil=True, cache=True)
def times_constant(x: Any, constant: float, out: Any, q: float, p: float) -> None:
    """out = x * constant."""
    for j in range(x.size):
        out[j] = reduce(multiply(x[j], constant, q, p), q, p)


@njit(nogil=True, cache=True)
def ciphertext_product(x0: Any, x1: Any, y0: Any, y1: Any, out0: Any, out1: Any, out2: Any, q: float, p: float) -> None:
    """(out0, out1, out2) = the product of ciphertexts (x0, x1) and (y0, y1)."""
    for j in range(out0.size):
        out0[j] = reduce(multiply(x0[j], y0[j], q, p), q, p)
        out1[j] = reduce(multiply(x0[j], y1[j], q, p) + multiply(x1[j], y0[j], q, p), q, p)
        out2[j] = reduce(multiply(x1[j], y1[j], q, p), q, p)


@njit(nogil=True, cache=True)
def total(values: Any, component: int, limb: int, out: Any, q: float, p: float) -> None:
    """out = the sum of one limb of one component of all ciphertexts [C, components, limbs, n]."""
    out[:] = 0.0
    for i in range(values.shape[0]):
        x = values[i, component, limb]
        for j in range(out.size):
            out[j] = reduce(out[j] + x[j], q, p)


@njit(nogil=True, cache=True)
def encrypt(message: Any, error: Any, second: Any, secret: Any, out: Any, q: float, p: float) -> None:
    """out = message + error - second * secret."""
    for j in range(out.size):
        out[j] = reduce(message[j] + error[j] - multiply(second[j], secret[j], q, p), q, p)


@njit(nogil=True, cache=True)
def decrypt(first: Any, second: Any, secret: Any, out: Any, q: float, p: float) -> None:
    """out = first + second * secret."""
    for j in range(out.size):
        out[j] = reduce(first[j] + multiply(second[j], secret[j], q, p), q, p)


@njit(nogil=True, cache=True)
def add_product(x: Any, y: Any, a: Any, b: Any, out: Any, q: float, p: float) -> None:
    """out = x + y + a * b."""
    for j in range(out.size):
        out[j] = reduce(x[j] + y[j] + multiply(a[j], b[j], q, p), q, p)


@njit(nogil=True, cache=True)
def scale_difference(x: Any, y: Any, factor: float, q: float, p: float) -> None:
    """x = (x - y) * factor."""
    for j in range(x.size):
        x[j] = reduce(multiply(x[j] - y[j], factor, q, p), q, p)


@njit(nogil=True, cache=True)
def load(residues: Any, out: Any, q: float) -> None:
    """Unsigned residues below q, as SEAL orders them, become balanced doubles in the order of `transform`."""
    rows = residues.size // 16
    for c in range(16):
        for i in range(rows):
            value = np.float64(np.int64(residues[16 * i + c]))
            out[c * rows + i] = value - q if value > q * 0.5 else value


@njit(nogil=True, cache=True)
def store(values: Any, out: Any, q: float) -> None:
    """The inverse of `load`."""
    rows = values.size // 16
    for i in range(rows):
        for c in range(16):
            value = values[c * rows + i]
            out[16 * i + c] = np.uint64(np.int64(value + q if value < 0 else value))
