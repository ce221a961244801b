"""A linear layer on ciphertexts: one matrix product of floats for each limb, exact modulo its prime.

With one feature in each ciphertext (veilfed.ckks: column packing) a layer is out = W in for every coefficient of the
residues. Weights are integers; residues are cut into pieces so short that no sum of products leaves the integers that
a double holds, and the processor's matrix product does the rest.
"""

from typing import Any

import numpy as np
from numba import njit
from threadpoolctl import threadpool_limits

from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.operations import EXACT_BITS, Layer, Real
from veilfed.ckks.basis import Basis
from veilfed.ckks.kernels import fma, multiply, reduce, rint
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["linear_layer"]

# Columns of a matrix product: its operands stay below some 50 MB with 768 features.
COLUMNS = 2048


def linear_layer(layer: Layer, x: Ciphertexts, basis: Basis) -> Ciphertexts:
    """The layer's outputs, at the scale of x times the layer's; any number of components.

    Raises VeilfedError(INPUT_INVALID) for another number of features.
    """
    if len(x) != layer.integers.shape[1]:
        raise VeilfedError(Code.INPUT_INVALID, f"{len(x)} features, expected {layer.integers.shape[1]}")
    # |piece| <= 2^(piece_bits - 1) + 1, so that any sum of products is at most 2^53.
    piece_bits = 1 + int(np.floor(np.log2(2.0**EXACT_BITS / layer.largest_row - 1)))
    values, out = np.ascontiguousarray(x.values), np.empty((len(layer.integers), *x.values.shape[1:]))
    blocks = [
        (values, layer.integers, out, component, limb, start, piece_bits, basis)
        for limb in range(x.limbs)
        for component in range(x.components)
        for start in range(0, basis.n, COLUMNS)
    ]
    # Blocks of columns in our threads, so that cutting and combining run in all of them too, not in BLAS's.
    with threadpool_limits(limits=1, user_api="blas"):
        basis.each(_columns, blocks)
    return Ciphertexts(out, x.scale * layer.scale)


def _columns(
    values: Float,
    integers: Real,
    out: Float,
    component: int,
    limb: int,
    start: int,
    piece_bits: int,
    basis: Basis,
) -> None:
    """Some columns of a limb of a component."""
    prime_bits = basis.primes[limb].bit_length()
    count = -(-prime_bits // piece_bits)
    base = 2.0 ** -(-prime_bits // count)
    pieces = np.empty((count, len(values), min(COLUMNS, basis.n)))
    _split(values, component, limb, start, pieces, base)
    products = np.matmul(integers, pieces)
    _combine(products, base, out, component, limb, start, basis.q[limb], basis.p[limb])


@njit(nogil=True, cache=True)
def _split(values: Any, component: int, limb: int, start: int, pieces: Any, base: float) -> None:
    """pieces[k] are the balanced digits to a base of some columns of a limb; the last takes what is left."""
    last, inverse = pieces.shape[0] - 1, 1.0 / base
    for i in range(values.shape[0]):
        rest = pieces[last, i]
        row = values[i, component, limb, start : start + rest.size]
        for j in range(rest.size):
            rest[j] = row[j]
        for k in range(last):
            digits = pieces[k, i]
            for j in range(rest.size):
                quotient = rint(rest[j] * inverse)
                digits[j] = fma(-quotient, base, rest[j])
                rest[j] = quotient


@njit(nogil=True, cache=True)
def _combine(products: Any, base: float, out: Any, component: int, limb: int, start: int, q: float, p: float) -> None:
    """Those columns of `out` are the sum of products[k] * base^k modulo q, balanced."""
    last = products.shape[0] - 1
    factor = reduce(base, q, p)
    for i in range(out.shape[0]):
        highest = products[last, i]
        row = out[i, component, limb, start : start + highest.size]
        for j in range(highest.size):
            row[j] = reduce(highest[j], q, p)
        for k in range(last - 1, -1, -1):
            digits = products[k, i]
            for j in range(highest.size):
                row[j] = reduce(multiply(row[j], factor, q, p) + reduce(digits[j], q, p), q, p)
