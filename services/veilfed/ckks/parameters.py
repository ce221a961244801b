"""Parameter sets of CKKS: ring degree, primes, scale. A set below 128 bits of security cannot be made."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from veilfed.errors import Code, VeilfedError

__all__ = ["MAX_LOG_MODULUS", "MAX_PRIME_BITS", "Parameters", "balanced"]

# Largest bits of the whole modulus, special prime included, by log2 of the ring degree: 128 bits of classical security
# with a ternary secret (HomomorphicEncryption.org security standard, 2018, table 1).
MAX_LOG_MODULUS = {10: 27, 11: 54, 12: 109, 13: 218, 14: 438, 15: 881}

# Above, the sums of veilfed.ckks.kernels would leave the integers that doubles hold exactly.
MAX_PRIME_BITS = 48
# Bits that a refresh takes from integers at most: so many fit a signed word of 64.
MAX_SHIFT = 62
MIN_PRIME_BITS = 25


@dataclass(frozen=True)
class Parameters:
    """`data_bits` are the bit lengths of the primes that ciphertexts have, the first one is the last to be dropped.

    `special_bits` is that of the prime that key switching alone uses. Raises VeilfedError(INPUT_INVALID) for a set
    that is insecure, that the kernels cannot compute with, or that has too few primes of a length.
    """

    log_n: int
    data_bits: tuple[int, ...]
    special_bits: int
    scale_bits: int

    def __post_init__(self) -> None:
        if self.log_n not in MAX_LOG_MODULUS:
            raise _invalid(f"a ring of degree 2^{self.log_n}; possible are 2^{sorted(MAX_LOG_MODULUS)}")
        bits = [*self.data_bits, self.special_bits]
        if not self.data_bits or not all(MIN_PRIME_BITS <= b <= MAX_PRIME_BITS for b in bits):
            raise _invalid(f"primes of {bits} bits; possible are {MIN_PRIME_BITS} to {MAX_PRIME_BITS}")
        if self.special_bits < max(self.data_bits):
            raise _invalid("the special prime is shorter than another: key switching would be too noisy")
        if self.log_modulus > MAX_LOG_MODULUS[self.log_n]:
            raise _invalid(
                f"a modulus of {self.log_modulus} bits with a ring of degree 2^{self.log_n}: 128 bits of security "
                f"allow {MAX_LOG_MODULUS[self.log_n]}"
            )
        if not 1 <= self.scale_bits <= sum(self.data_bits) - 1:
            raise _invalid(f"a scale of {self.scale_bits} bits")
        self.primes  # noqa: B018  raises where there are too few

    @property
    def n(self) -> int:
        """The ring's degree; a ciphertext has n / 2 slots."""
        return 1 << self.log_n

    @property
    def slots(self) -> int:
        return self.n // 2

    @property
    def scale(self) -> float:
        return 2.0**self.scale_bits

    @property
    def limbs(self) -> int:
        """Primes of a fresh ciphertext."""
        return len(self.data_bits)

    @property
    def log_modulus(self) -> int:
        """Bits of the product of all primes, at most."""
        return sum(self.data_bits) + self.special_bits

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the set is, lower-case hexadecimal: ciphertexts and keys say by it what they are made for."""
        fields = [self.log_n, *self.primes, self.scale_bits]
        return hashlib.sha256(" ".join(map(str, fields)).encode()).hexdigest()

    @cached_property
    def primes(self) -> tuple[int, ...]:
        """Data primes and, last, the special prime: those that SEAL's CoeffModulus::Create chooses."""
        bits = [*self.data_bits, self.special_bits]
        found = {b: _primes_below(b, 2 * self.n, bits.count(b)) for b in set(bits)}
        return tuple(found[b].pop() for b in bits)


def balanced(value: int, q: int) -> int:
    """The integer between -q/2 and q/2 that is congruent to a value modulo the odd q."""
    remainder = value % q
    return remainder - q if remainder > q // 2 else remainder


def _primes_below(bits: int, factor: int, count: int) -> list[int]:
    """The largest `count` primes of so many bits that are 1 modulo `factor`, in falling order."""
    found: list[int] = []
    candidate = (1 << bits) - factor + 1
    while len(found) < count:
        if candidate < 1 << (bits - 1):
            raise _invalid(f"there are not {count} primes of {bits} bits for this ring")
        if _is_prime(candidate):
            found.append(candidate)
        candidate -= factor
    return found


def _is_prime(n: int) -> bool:
    """Miller-Rabin with bases that decide every n below 3.3e24 (Sorenson and Webster, 2015)."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        if n % base == 0:
            return n == base
        power = pow(base, odd, n)
        if power in {1, n - 1}:
            continue
        for _ in range(twos - 1):
            power = power * power % n
            if power == n - 1:
                break
        else:
            return False
    return True


def _invalid(what: str) -> VeilfedError:
    return VeilfedError(Code.INPUT_INVALID, f"CKKS parameters: {what}")
