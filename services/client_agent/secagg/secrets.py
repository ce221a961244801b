"""The secrets of one attempt: all of them follow from one seed, so that a restarted agent says the same again."""

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from veilfed.errors import Code, VeilfedError
from veilfed.secagg import Cohort, Words, threshold
from veilfed.secagg.cohort import holders_of
from veilfed.secagg.masks import Stream, agreed, derive, scratch_space
from veilfed.secagg.shamir import PRIME, SHARE_BYTES, coefficients_needed, split
from veilfed.secagg.vectors import BLOCK

__all__ = ["Secrets"]

# Each key seals one message.
_NONCE = bytes(12)


class Secrets:
    """Keys from the start; shares once the cohort is known."""

    def __init__(self, seed: bytes, salt: bytes) -> None:
        self._seed = seed
        self.self_mask = derive(seed, salt, "self mask secret")
        self.mask_private = X25519PrivateKey.from_private_bytes(derive(seed, salt, "mask key"))
        self._seal_private = X25519PrivateKey.from_private_bytes(derive(seed, salt, "seal key"))
        self.mask_key = self.mask_private.public_key().public_bytes_raw()
        self.seal_key = self._seal_private.public_key().public_bytes_raw()
        # By the other's key: shares go both ways.
        self._agreed: dict[bytes, bytes] = {}

    def holders(self, cohort: Cohort, own: int) -> list[int]:
        """Who gets shares: this member itself, and others that it chooses at random; in ascending order.

        The aggregator has no part in the choice, so it cannot surround a member with its own.
        """
        others = [number for number in range(len(cohort.members)) if number != own]
        count = holders_of(len(cohort.members))
        if count < len(others):
            words = _words(derive(self._seed, cohort.digest, "holders"), len(others))
            others = [others[place] for place in np.argsort(words, kind="stable")[:count]]
        return sorted([own, *others])

    def shares(self, cohort: Cohort, own: int) -> dict[int, bytes]:
        """For each holder its share of the self mask's secret, and after it that of the private mask key."""
        holders = self.holders(cohort, own)
        least = threshold(len(holders))
        needed = coefficients_needed(least)
        drawn = _field(derive(self._seed, cohort.digest, "coefficients"), 2 * needed)
        points = [holder + 1 for holder in holders]
        of_self = split(self.self_mask, points, least, drawn[:needed])
        of_key = split(self.mask_private.private_bytes_raw(), points, least, drawn[needed:])
        return {holder: one + other for holder, one, other in zip(holders, of_self, of_key, strict=True)}

    def seal(self, cohort: Cohort, own: int, holder: int, shares: bytes) -> bytes:
        """Shares that only the holder can read. Raises VeilfedError(COHORT_INVALID) for a key that is none."""
        return self._cipher(cohort, holder, own, holder).encrypt(_NONCE, shares, None)

    def open(self, cohort: Cohort, own: int, sender: int, data: bytes) -> tuple[bytes, bytes]:
        """(share of the self mask's secret, of the private mask key). Raises VeilfedError(COHORT_INVALID)."""
        try:
            shares = self._cipher(cohort, sender, sender, own).decrypt(_NONCE, data, None)
        except InvalidTag:
            shares = b""
        if len(shares) != 2 * SHARE_BYTES:
            raise VeilfedError(Code.COHORT_INVALID, "a share is not what its owner has sealed for this institution")
        return shares[:SHARE_BYTES], shares[SHARE_BYTES:]

    def _cipher(self, cohort: Cohort, peer: int, sender: int, holder: int) -> ChaCha20Poly1305:
        key = cohort.members[peer].seal_key
        if key not in self._agreed:
            self._agreed[key] = agreed(self._seal_private, key)
        return ChaCha20Poly1305(derive(self._agreed[key], cohort.digest, "seal", sender, holder))


def _words(key: bytes, count: int) -> Words:
    """Uniform 64-bit words."""
    stream, scratch, words = Stream(key), scratch_space(), np.empty(count, np.uint64)
    for start in range(0, count, BLOCK):
        stream.fill(words[start : start + BLOCK], scratch)
    return words


def _field(key: bytes, count: int) -> Words:
    """Uniform elements of the field of veilfed.secagg.shamir."""
    # Of 31 random bits one value in 2^31 is none: a few more are drawn.
    drawn = _words(key, count + 64) & np.uint64(PRIME)
    return drawn[drawn < PRIME][:count]
