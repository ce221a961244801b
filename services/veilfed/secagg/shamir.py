"""Shamir's secret sharing (1979) of 32-byte secrets over GF(2^31 - 1), many at a time.

A secret is cut into limbs of 30 bits, each of them the constant term of a polynomial f of its own with t - 1 uniform
coefficients. The share of the holder x is f(x); any t of them give f(0) = sum_j f(x_j) prod_(m != j) x_m / (x_m - x_j),
fewer say nothing at all.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["SECRET_BYTES", "SHARE_BYTES", "coefficients_needed", "join", "split"]

PRIME = 2**31 - 1
LIMB_BITS = 30
SECRET_BYTES = 32
LIMBS = -(-8 * SECRET_BYTES // LIMB_BITS)
SHARE_BYTES = 4 * LIMBS

Words = NDArray[np.uint64]


def coefficients_needed(threshold: int) -> int:
    """How many uniform elements of the field `split` needs for one secret."""
    return (threshold - 1) * LIMBS


def split(secret: bytes, holders: Sequence[int], threshold: int, coefficients: Words) -> list[bytes]:
    """The share of each holder, SHARE_BYTES long. Any `threshold` of them give the secret.

    `holders` are distinct, from 1 to PRIME - 1; `coefficients` are uniform in [0, PRIME), `coefficients_needed` of
    them, used for nothing else. Raises VeilfedError(INPUT_INVALID).
    """
    if not 1 <= threshold <= len(holders) or len(set(holders)) != len(holders):
        raise VeilfedError(Code.INPUT_INVALID, f"{len(holders)} holders, not all distinct, for threshold {threshold}")
    rows = [*coefficients.reshape(threshold - 1, LIMBS), _limbs(secret)]
    points = np.asarray(holders, np.uint64)[:, None]
    values = np.zeros((len(holders), LIMBS), np.uint64)
    for row in rows:  # Horner: below 2^62 + 2^31 before each reduction
        values = (values * points + row) % PRIME
    return [share.astype("<u4").tobytes() for share in values]


def join(holders: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The secret of as many shares as the threshold says, each with its holder; in any order.

    Raises VeilfedError(INPUT_INVALID) for what are not shares of one secret, as far as that shows.
    """
    if not shares or any(len(share) != SHARE_BYTES for share in shares) or len(set(holders)) != len(shares):
        raise VeilfedError(Code.INPUT_INVALID, "shares: none, of another length, or two of one holder")
    values = np.frombuffer(b"".join(shares), "<u4").reshape(-1, LIMBS).astype(np.uint64)
    if (values >= PRIME).any():
        raise VeilfedError(Code.INPUT_INVALID, "shares: not elements of the field")
    weights = _weights(np.asarray(holders, np.uint64))
    limbs = (weights[:, None] * values % PRIME).sum(axis=0) % PRIME
    number = sum(int(limb) << (LIMB_BITS * place) for place, limb in enumerate(limbs))
    if number >> (8 * SECRET_BYTES) or (limbs >> np.uint64(LIMB_BITS)).any():
        raise VeilfedError(Code.INPUT_INVALID, "shares: not of one secret")
    return number.to_bytes(SECRET_BYTES, "little")


def _limbs(secret: bytes) -> Words:
    if len(secret) != SECRET_BYTES:
        raise VeilfedError(Code.INPUT_INVALID, f"a secret of {len(secret)} bytes; it must have {SECRET_BYTES}")
    number, mask = int.from_bytes(secret, "little"), 2**LIMB_BITS - 1
    return np.array([number >> (LIMB_BITS * place) & mask for place in range(LIMBS)], np.uint64)


def _weights(points: Words) -> Words:
    """prod_(m != j) x_m / (x_m - x_j) for each j, modulo PRIME."""
    count = len(points)
    differences = (points[None, :] + (PRIME - points[:, None])) % PRIME
    np.fill_diagonal(differences, 1)
    others = np.broadcast_to(points, (count, count)).copy()
    np.fill_diagonal(others, 1)
    above, below = _products(others), _products(differences)
    inverses = np.array([pow(int(value), -1, PRIME) for value in below], np.uint64)
    return above * inverses % PRIME


def _products(rows: Words) -> Words:
    """The product of each row, modulo PRIME: by halves, so that it takes few steps."""
    while rows.shape[1] > 1:
        if rows.shape[1] % 2:
            rows = np.concatenate([rows, np.ones((len(rows), 1), np.uint64)], axis=1)
        rows = rows[:, 0::2] * rows[:, 1::2] % PRIME
    return rows[:, 0]
