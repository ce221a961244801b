"""Evaluation keys in the form that the kernels read, and the automorphisms behind rotations."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilfed.ckks.basis import Basis
from veilfed.ckks.transform import Float, bit_reversed, seal_index
from veilfed.errors import Code, VeilfedError

__all__ = ["EvaluationKeys", "KeyDigit", "digit_nonce", "galois_element", "galois_order"]


@dataclass(frozen=True)
class KeyDigit:
    """One digit of the key for a rotation to the left, or of that for relinearisation, which is rotation 0.

    `first` [K + 1, n] is its first component; the second follows from a seed.
    """

    rotation: int
    digit: int
    first: Float


def digit_nonce(rotation: int, digit: int, basis: Basis) -> int:
    """Which polynomial of a seed (`veilfed.ckks.sampling.uniform`) is a digit's second component."""
    return rotation * basis.special + digit


@dataclass(frozen=True)
class EvaluationKeys:
    """Key-switching keys: values [R, 2, K, K + 1, n] for K data primes, K digits, and the special prime.

    `orders` [R, n] are the columns' new order after each switch. The columns of a rotation's key are in the order
    before it, so that only results are reordered. `steps` are the rotations' steps to the left, distinct and between 0
    and the number of slots; the key after theirs relinearises.
    """

    values: Float
    orders: NDArray[np.int32]
    steps: tuple[int, ...]

    @property
    def relinearisation(self) -> int:
        return len(self.steps)

    def rotation(self, step: int) -> int:
        """The number of a rotation's key; any step, around the end. Raises VeilfedError(INPUT_INVALID) without one."""
        left = step % (self.orders.shape[1] // 2)
        if left not in self.steps:
            raise VeilfedError(
                Code.INPUT_INVALID, f"there is no key for a rotation by {step}", f"Keys are there for {self.steps}."
            )
        return self.steps.index(left)


def galois_element(step: int, n: int) -> int:
    """The exponent of the automorphism that rotates the slots to the left: 3^step modulo 2n."""
    return pow(3, step % (n // 2), 2 * n)


def galois_order(step: int, n: int) -> NDArray[np.int32]:
    """order [n]: the automorphism makes value[order[i]] of each stored position i."""
    reversed_ = bit_reversed(n)
    exponents = (galois_element(step, n) * (2 * reversed_ + 1)) >> 1
    table = reversed_[exponents & (n - 1)]
    index = seal_index(n)
    position = np.empty(n, dtype=np.int64)
    position[index] = np.arange(n)
    order: NDArray[np.int32] = position[table[index]].astype(np.int32)
    return order
