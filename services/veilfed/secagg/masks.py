"""Masks: vectors that look uniform to whoever has not their key, drawn from AES-256 in counter mode.

    y_u = x_u + m(b_u) + sum_(v > u) m(k_uv) - sum_(v < u) m(k_uv)            (Bonawitz et al. 2017, section 4)

k_uv comes from the X25519 keys of u and v, so both know it and their masks cancel in the sum; b_u is u's alone.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from veilfed.errors import Code, VeilfedError
from veilfed.secagg.vectors import BLOCK, Format, Words, add_block, subtract_block

__all__ = [
    "KEY_BYTES",
    "Stream",
    "agreed",
    "apply_masks",
    "commitment",
    "derive",
    "pair_mask_key",
    "scratch_space",
    "self_mask_key",
]

KEY_BYTES = 32
# AES-256 in counter mode, with a nonce of zero: each key is used for one stream.
_NONCE = bytes(16)
_ZEROS = bytes(16 * BLOCK)


def derive(secret: bytes, salt: bytes, purpose: str, *numbers: int) -> bytes:
    """A key of 32 bytes for one purpose (HKDF-SHA256)."""
    info = "|".join(["veilfed secagg 1", purpose, *map(str, numbers)]).encode()
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)


def agreed(private: X25519PrivateKey, peer: bytes) -> bytes:
    """What X25519 gives to both of two parties. Raises VeilfedError(COHORT_INVALID) for a key that is none."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise VeilfedError(Code.COHORT_INVALID, "a member's key is not a key of X25519") from None


def pair_mask_key(private: X25519PrivateKey, peer: bytes, salt: bytes, one: int, other: int) -> bytes:
    """The key of the mask that two members (by number) share. Errors as `agreed`."""
    return derive(agreed(private, peer), salt, "pair", min(one, other), max(one, other))


def self_mask_key(secret: bytes, salt: bytes, member: int) -> bytes:
    """The key of a member's own mask."""
    return derive(secret, salt, "self", member)


def commitment(secret: bytes, salt: bytes, member: int) -> bytes:
    """What a member says of the secret of its own mask beforehand, so that a wrong share shows."""
    return hashlib.sha256(derive(secret, salt, "commitment", member)).digest()


class Stream:
    """The words of one key, a block after the other."""

    def __init__(self, key: bytes) -> None:
        self._cipher: CipherContext = Cipher(algorithms.AES(key), modes.CTR(_NONCE)).encryptor()

    def fill(self, words: Words, scratch: bytearray) -> None:
        """Fills an array of at most 2 BLOCK words. `scratch` as `scratch_space`; several streams may share it."""
        size = words.nbytes
        self._cipher.update_into(memoryview(_ZEROS)[:size], scratch)
        words[:] = np.frombuffer(scratch, "<u8", words.size)


def scratch_space() -> bytearray:
    """Room for one block; the cipher wants to have a block of its own more."""
    return bytearray(len(_ZEROS) + 15)


def apply_masks(total: Words, form: Format, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """total += the masks of the keys `plus`, -= those of `minus`, in place."""
    form.check(total)
    added, taken = [Stream(key) for key in plus], [Stream(key) for key in minus]
    scratch, drawn = scratch_space(), np.empty(2 * BLOCK, np.uint64)
    for block in form.blocks():
        words = drawn[: block.words]
        half = block.words if block.high is None else block.words // 2
        low, high = words[:half], None if block.high is None else words[half:]
        for stream in added:
            stream.fill(words, scratch)
            add_block(total, block, low, high)
        for stream in taken:
            stream.fill(words, scratch)
            subtract_block(total, block, low, high)
