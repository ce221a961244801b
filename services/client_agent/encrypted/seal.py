"""SEAL's ciphertexts, plaintexts and secret keys, as Pyfhel serialises them without compression, and ours.

A serialised object is a header of 16 bytes, whose second half is its whole length, and its fields (little-endian).
Residues are in SEAL's order, [components, limbs, n].
"""

import struct

import numpy as np
from numpy.typing import NDArray

from veilfed.ckks.basis import Basis
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["ciphertext_bytes", "read_ciphertext", "read_polynomial", "residues"]

HEADER = 16
WORD = 8
# Of a ciphertext: SEALHeader, parms_id, NTT form (1 byte), components, degree, limbs, scale, correction factor, then
# the header and the number of its residues.
COMPONENTS_AT, LIMBS_AT, SCALE_AT = 49, 65, 73

Words = NDArray[np.uint64]


def residues(data: memoryview, shape: tuple[int, ...]) -> Words:
    """The residues at the end of a serialised object."""
    size = int(np.prod(shape)) * WORD
    if not HEADER < len(data) - size < 4096:
        raise VeilfedError(Code.INPUT_INVALID, f"{len(data)} bytes do not hold residues of shape {list(shape)}")
    return np.frombuffer(data, dtype="<u8", offset=len(data) - size).reshape(shape)


def read_ciphertext(data: bytes, basis: Basis) -> tuple[Float, float]:
    """A ciphertext's values [components, limbs, n] and scale. Raises VeilfedError(INPUT_INVALID)."""
    components, limbs = (int(struct.unpack_from("<Q", data, at)[0]) for at in (COMPONENTS_AT, LIMBS_AT))
    scale = float(struct.unpack_from("<d", data, SCALE_AT)[0])
    return basis.load(residues(memoryview(data), (components, limbs, basis.n))), scale


def ciphertext_bytes(values: Float, scale: float, like: bytes, basis: Basis) -> bytes:
    """What SEAL loads as a ciphertext [components, limbs, n]; `like` is one with as many components and limbs."""
    payload = basis.store(values).tobytes()
    header = bytearray(like[: len(like) - len(payload)])
    struct.pack_into("<d", header, SCALE_AT, scale)
    return bytes(header) + payload


def read_polynomial(data: bytes, limbs: int, basis: Basis) -> Float:
    """The values [limbs, n] of a serialised plaintext or secret key."""
    return basis.load(residues(memoryview(data), (limbs, basis.n)))
