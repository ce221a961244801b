"""SEAL's keys and ciphertexts, as Pyfhel serialises them without compression, and ours.

A serialised object is a header of 16 bytes, whose second half is its whole length, and its fields (little-endian).
Residues are in SEAL's order, [components, limbs, n].
"""

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import EvaluationKeys, galois_element, galois_order
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["ciphertext_bytes", "read_ciphertext", "read_evaluation_keys", "read_polynomial", "read_public_key"]

HEADER = 16
PARMS_ID = 32
WORD = 8
# Of a ciphertext: SEALHeader, parms_id, NTT form (1 byte), components, degree, limbs, scale, correction factor, then
# the header and the number of its residues.
COMPONENTS_AT, LIMBS_AT, SCALE_AT = 49, 65, 73

Words = NDArray[np.uint64]


def _length(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at + WORD)[0])


def _residues(data: memoryview, shape: tuple[int, ...]) -> Words:
    """The residues at the end of a serialised object."""
    size = int(np.prod(shape)) * WORD
    if not HEADER < len(data) - size < 4096:
        raise VeilfedError(Code.INPUT_INVALID, f"{len(data)} bytes do not hold residues of shape {list(shape)}")
    return np.frombuffer(data, dtype="<u8", offset=len(data) - size).reshape(shape)


def read_ciphertext(data: bytes, basis: Basis) -> tuple[Float, float]:
    """A ciphertext's values [components, limbs, n] and scale. Raises VeilfedError(INPUT_INVALID)."""
    components, limbs = (int(struct.unpack_from("<Q", data, at)[0]) for at in (COMPONENTS_AT, LIMBS_AT))
    scale = float(struct.unpack_from("<d", data, SCALE_AT)[0])
    return basis.load(_residues(memoryview(data), (components, limbs, basis.n))), scale


def ciphertext_bytes(values: Float, scale: float, like: bytes, basis: Basis) -> bytes:
    """What SEAL loads as a ciphertext [components, limbs, n]; `like` is one with as many components and limbs."""
    payload = basis.store(values).tobytes()
    header = bytearray(like[: len(like) - len(payload)])
    struct.pack_into("<d", header, SCALE_AT, scale)
    return bytes(header) + payload


def read_polynomial(data: bytes, limbs: int, basis: Basis) -> Float:
    """The values [limbs, n] of a serialised plaintext or secret key."""
    return basis.load(_residues(memoryview(data), (limbs, basis.n)))


def read_public_key(data: bytes, basis: Basis) -> Float:
    """The values [2, limbs + 1, n] of a serialised public key, which has the special prime too."""
    return basis.load(_residues(memoryview(data), (2, basis.special + 1, basis.n)))


def read_evaluation_keys(
    rotations: bytes, relinearisation: bytes, steps: tuple[int, ...], basis: Basis
) -> EvaluationKeys:
    """The keys for rotations by `steps` to the left, distinct modulo the number of slots, and for relinearisation.

    Raises VeilfedError(INPUT_INVALID) when one is not there.
    """
    n, data_primes = basis.n, basis.special
    values = np.empty((len(steps) + 1, 2, data_primes, data_primes + 1, n))
    orders = np.empty((len(steps) + 1, n), dtype=np.int32)
    orders[-1] = np.arange(n)
    # A key of the automorphism by an odd element e is in slot (e - 1) / 2.
    wanted = {(galois_element(step, n) - 1) // 2: number for number, step in enumerate(steps)}
    for slot, digits in _switching_keys(memoryview(rotations)) if steps else ():
        if slot in wanted:
            number = wanted.pop(slot)
            orders[number] = order = galois_order(steps[number], n)
            _read_key(digits, basis, values[number])
            values[number][..., order] = values[number].copy()
    if wanted:
        missing = sorted(steps[number] for number in wanted.values())
        raise VeilfedError(Code.INPUT_INVALID, f"there are no keys for rotations by {missing}")
    for _, digits in _switching_keys(memoryview(relinearisation)):
        _read_key(digits, basis, values[-1])
    return EvaluationKeys(values, orders, steps)


def _switching_keys(data: memoryview) -> Iterator[tuple[int, list[memoryview]]]:
    """The slots that have a key, each with the serialised ciphertexts of its digits."""
    at = HEADER + PARMS_ID
    slots = int(struct.unpack_from("<Q", data, at)[0])
    at += WORD
    for slot in range(slots):
        count = int(struct.unpack_from("<Q", data, at)[0])
        at += WORD
        digits = []
        for _ in range(count):
            length = _length(data, at)
            digits.append(data[at : at + length])
            at += length
        if digits:
            yield slot, digits


def _read_key(digits: list[memoryview], basis: Basis, out: Float) -> None:
    """out [2, K, K + 1, n] of the ciphertexts of K digits."""
    for number, digit in enumerate(digits):
        out[:, number] = basis.load(_residues(digit, (2, basis.special + 1, basis.n)))
