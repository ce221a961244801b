"""Residues as bytes: each in as many bits as its prime has, so a limb of n residues takes n / 8 bytes for each bit.

Residues are unsigned, in the order of veilfed.ckks.transform, the first one in the lowest bits of little-endian words.
"""

from typing import Any

import numpy as np
from numba import njit

from veilfed.ckks.basis import Basis
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["pack", "packed_bytes", "unpack"]

WORD_BITS = 64


def packed_bytes(polynomials: int, limbs: int, basis: Basis) -> int:
    """How long so many polynomials of so many limbs are."""
    return polynomials * sum(_words(basis.primes[limb], basis.n) for limb in range(limbs)) * WORD_BITS // 8


def pack(values: Float, basis: Basis) -> bytes:
    """The bytes of polynomials [..., limbs, n]."""
    limbs = values.shape[-2]
    polynomials = np.ascontiguousarray(values).reshape(-1, limbs, basis.n)
    words = np.zeros(packed_bytes(len(polynomials), limbs, basis) // 8, dtype="<u8")
    places = _places(len(polynomials), limbs, basis)
    basis.each(_pack, ((polynomials[i, k], basis.primes[k].bit_length(), basis.q[k], words[at]) for i, k, at in places))
    return words.tobytes()


def unpack(data: bytes, shape: tuple[int, ...], basis: Basis) -> Float:
    """The polynomials [..., limbs, n] of bytes that a stranger may have made.

    Raises VeilfedError(PROTOCOL_VIOLATION) for another length, and for a residue that is not below its prime.
    """
    limbs = shape[-2]
    out = np.empty(shape)
    polynomials = out.reshape(-1, limbs, basis.n)
    expected = packed_bytes(len(polynomials), limbs, basis)
    if len(data) != expected:
        raise VeilfedError(
            Code.PROTOCOL_VIOLATION, f"residues of shape {list(shape)} need {expected} bytes, there are {len(data)}"
        )
    words = np.frombuffer(data, dtype="<u8")
    inside = np.zeros((len(polynomials), limbs), dtype=np.bool_)

    def read(i: int, k: int, at: slice) -> None:
        inside[i, k] = _unpack(words[at], basis.primes[k].bit_length(), basis.primes[k], polynomials[i, k])

    basis.each(read, _places(len(polynomials), limbs, basis))
    if not inside.all():
        polynomial, limb = (int(value) for value in np.argwhere(~inside)[0])
        raise VeilfedError(
            Code.PROTOCOL_VIOLATION, f"polynomial {polynomial}, limb {limb}: a residue is not below its prime"
        )
    return out


def _words(prime: int, n: int) -> int:
    return prime.bit_length() * n // WORD_BITS


def _places(polynomials: int, limbs: int, basis: Basis) -> list[tuple[int, int, slice]]:
    """Where each limb of each polynomial is among the words."""
    places, start = [], 0
    for i in range(polynomials):
        for k in range(limbs):
            end = start + _words(basis.primes[k], basis.n)
            places.append((i, k, slice(start, end)))
            start = end
    return places


@njit(nogil=True, cache=True)
def _pack(values: Any, bits: int, q: float, words: Any) -> None:
    held, at, word = 0, 0, np.uint64(0)
    for j in range(values.size):
        value = np.uint64(np.int64(values[j] + q if values[j] < 0 else values[j]))
        word |= value << np.uint64(held)
        held += bits
        if held >= WORD_BITS:
            words[at] = word
            at += 1
            held -= WORD_BITS
            # What did not fit; a shift by all of a value's bits would be undefined only at 64.
            word = value >> np.uint64(bits - held)


@njit(nogil=True, cache=True)
def _unpack(words: Any, bits: int, q: int, out: Any) -> bool:
    """Balanced residues; whether all are below q."""
    mask, prime, half = (np.uint64(1) << np.uint64(bits)) - np.uint64(1), np.uint64(q), np.uint64(q >> 1)
    held, at, word, inside = 0, 0, np.uint64(0), True
    for j in range(out.size):
        if held >= bits:
            value = word & mask
            word >>= np.uint64(bits)
            held -= bits
        else:
            new = words[at]
            at += 1
            value = (word | (new << np.uint64(held))) & mask
            used = bits - held
            word = new >> np.uint64(used)
            held = WORD_BITS - used
        if value >= prime:
            inside = False
        out[j] = np.float64(np.int64(value)) - (np.float64(q) if value > half else 0.0)
    return inside
