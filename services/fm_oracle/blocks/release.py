"""Which blocks' outputs leave the oracle: stochastic block sampling (BlindFed, arXiv 2502.01289).

A block is released only if the one before it was not, and then with probability 1/2. The paper draws anew in each
round; then all blocks are known in the end, to anybody who asks often enough. Here one draw is for life: it follows
from a secret of the oracle, the student and the federation, so asking again, in another session or with other
ciphertexts, gives the same blocks. The first stream, before all blocks, is never released.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["fixed", "secret_of"]

SECRET_BYTES = 32


def secret_of(state: Path) -> bytes:
    """The oracle's long-term secret, made where there is none. Raises VeilfedError(FILE_UNUSABLE or STATE_CORRUPT)."""
    path = state / "release.key"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.read_bytes()
    except FileNotFoundError:
        found = secrets.token_bytes(SECRET_BYTES)
        write_atomic(path, found)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    if len(found) != SECRET_BYTES:
        # A new one would release other blocks.
        raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not {SECRET_BYTES} bytes", "Restore the file from a backup.")
    return found


def fixed(secret: bytes, version: str, federation: str, blocks: int) -> tuple[int, ...]:
    """The released blocks, by number from 1, for a student and a federation; at least one."""
    attempt = 0
    while True:
        coins = _bits(secret, f"{federation}\n{version}\n{attempt}", blocks)
        released: list[int] = []
        for block in range(1, blocks + 1):
            if (not released or released[-1] != block - 1) and coins[block - 1]:
                released.append(block)
        if released:  # without any, there would be nothing to adapt to
            return tuple(released)
        attempt += 1


def _bits(key: bytes, about: str, count: int) -> list[bool]:
    """Fair coins from a pseudorandom function."""
    return [bool(hmac.digest(key, f"{about}\n{number}".encode(), hashlib.sha256)[0] & 1) for number in range(count)]
