"""Random polynomials from a stream cipher: uniform residues that a seed repeats, secrets and noise that none does."""

import secrets
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numba import njit
from numpy.typing import NDArray

from veilfed.ckks.basis import Basis
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["SEED_BYTES", "Stream", "uniform"]

SEED_BYTES = 32

# Noise as SEAL's: the difference of the numbers of ones in 21 and 21 bits has a standard deviation of 3.24.
NOISE_BITS = 21
# Words that are drawn beyond those that are needed, for those that are refused.
RESERVE = 64


class Stream:
    """AES-256 in counter mode under a key of 32 bytes; a fresh secret one without."""

    def __init__(self, key: bytes | None = None, nonce: int = 0) -> None:
        key = secrets.token_bytes(SEED_BYTES) if key is None else key
        if len(key) != SEED_BYTES:
            raise VeilfedError(Code.INPUT_INVALID, f"a seed of {len(key)} bytes, expected {SEED_BYTES}")
        # The upper half of the counter's block names the stream, the lower half counts.
        start = nonce.to_bytes(8, "big") + bytes(8)
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(start)).encryptor()

    def bytes(self, count: int) -> bytes:
        return self._encryptor.update(bytes(count))

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self.bytes(8 * count), dtype="<u8")

    def below(self, bound: int, count: int) -> NDArray[np.uint64]:
        """Uniform integers in [0, bound): words cut to its bits, those that are not below it left out."""
        mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
        kept = np.empty(0, dtype=np.uint64)
        while kept.size < count:
            drawn = self.words(count - kept.size + RESERVE) & mask
            kept = np.concatenate([kept, drawn[drawn < bound]])
        return kept[:count]

    def ternary(self, n: int) -> NDArray[np.int64]:
        """Uniform in {-1, 0, 1}."""
        return self.below(3, n).astype(np.int64) - 1

    def noise(self, n: int) -> NDArray[np.int64]:
        """Centred binomial."""
        drawn = self.words(n)
        ones = np.uint64((1 << NOISE_BITS) - 1)
        first, second = drawn & ones, (drawn >> np.uint64(NOISE_BITS)) & ones
        difference: NDArray[np.int64] = np.bitwise_count(first).astype(np.int64) - np.bitwise_count(second)
        return difference


def uniform(basis: Basis, limbs: int, key: bytes | None = None, nonce: int = 0) -> Float:
    """A uniform polynomial [limbs, n], transformed: the same for the same key and nonce, else a secret one."""
    out = np.empty((limbs, basis.n))
    stream = Stream(key, nonce)
    for limb in range(limbs):
        q, filled = basis.primes[limb], 0
        while filled < basis.n:
            filled = _fill(stream.words(basis.n - filled + RESERVE), np.uint64(q), q.bit_length(), out[limb], filled)
    return out


@njit(nogil=True, cache=True)
def _fill(words: Any, q: Any, bits: int, out: Any, filled: int) -> int:
    """Balanced residues from words cut to the bits of q, those not below it left out; how many there are now."""
    shift, size = np.uint64(64 - bits), out.size
    half = q >> np.uint64(1)
    for word in words:
        value = word >> shift
        if value < q and filled < size:
            out[filled] = np.float64(np.int64(value)) - (np.float64(np.int64(q)) if value > half else 0.0)
            filled += 1
    return filled
