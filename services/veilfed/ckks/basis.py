"""The primes of a parameter set with their tables, and what is done to all residues of a polynomial.

A polynomial with L limbs is float64 [L, n]: balanced residues modulo the first L primes, transformed, in the order of
veilfed.ckks.transform. A ciphertext is [components, L, n]. The special prime comes last and is in no ciphertext.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.ckks import kernels, transform
from veilfed.ckks.parameters import Parameters, balanced
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["Basis"]

Words = NDArray[np.uint64]


# Of the calls of `each`, for each thread.
PARTS = 8


class Basis:
    """One for each parameter set and process. `threads` work on the limbs of many polynomials."""

    def __init__(self, parameters: Parameters, threads: int = 1) -> None:
        self.parameters = parameters
        self.n = parameters.n
        self.primes = parameters.primes
        # One row for each prime.
        self.tables = transform.stacked([transform.make_tables(q, self.n) for q in self.primes])
        self.q: Float = np.array(self.primes, dtype=np.float64)
        self.p: Float = 1.0 / self.q
        # inverses[k, j]: the inverse of prime k modulo prime j, balanced; 0 where k is j.
        self.inverses: Float = np.array(
            [[balanced(pow(k, -1, j), j) if k != j else 0 for j in self.primes] for k in self.primes], dtype=np.float64
        )
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "ckks") if threads > 1 else None

    @property
    def special(self) -> int:
        """The number of the special prime."""
        return len(self.primes) - 1

    def each(self, function: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Calls `function` with each tuple, in threads; kernels release the interpreter's lock."""
        if self._pool is None:
            _call(function, arguments)
            return
        calls = list(arguments)
        # Handing over a call costs as much as a small kernel: several at a time, but enough parts for the threads to
        # end together.
        size = -(-len(calls) // (PARTS * self._threads)) or 1
        parts = [calls[start : start + size] for start in range(0, len(calls), size)]
        for _ in self._pool.map(partial(_call, function), parts):
            pass

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def load(self, words: Words) -> Float:
        """SEAL's residues [..., L, n] as balanced doubles.

        Raises VeilfedError(INPUT_INVALID) for another shape, and for a residue that is not below its prime.
        """
        limbs = self._limbs(words.shape)
        if not all((words[..., limb, :] < self.primes[limb]).all() for limb in range(limbs)):
            raise VeilfedError(Code.INPUT_INVALID, "a residue is not below its prime")
        out = np.empty(words.shape)
        flat, into = words.reshape(-1, limbs, self.n), out.reshape(-1, limbs, self.n)
        self.each(kernels.load, ((flat[i, j], into[i, j], self.q[j]) for i in range(len(flat)) for j in range(limbs)))
        return out

    def store(self, values: Float) -> Words:
        """The inverse of `load`."""
        limbs = self._limbs(values.shape)
        out = np.empty(values.shape, dtype=np.uint64)
        flat, into = values.reshape(-1, limbs, self.n), out.reshape(-1, limbs, self.n)
        self.each(kernels.store, ((flat[i, j], into[i, j], self.q[j]) for i in range(len(flat)) for j in range(limbs)))
        return out

    def _limbs(self, shape: tuple[int, ...]) -> int:
        if len(shape) < 2 or shape[-1] != self.n or not 1 <= shape[-2] <= len(self.primes):
            raise VeilfedError(Code.INPUT_INVALID, f"residues of shape {list(shape)}, expected [..., limbs, {self.n}]")
        return shape[-2]

    def forward(self, coefficients: Float, limb: int, out: Float) -> None:
        """Transforms balanced coefficients [n], which are destroyed, modulo one prime."""
        w, tail, *_ = self.tables
        transform.forward(coefficients, self._rows(out), w[limb], tail[limb], self.q[limb], self.p[limb])

    def inverse(self, values: Float, limb: int, out: Float) -> None:
        """The balanced coefficients of transformed values [n], which are destroyed."""
        _, _, w, tail, n_inverse = self.tables
        q, p = self.q[limb], self.p[limb]
        transform.inverse(self._rows(values), out, w[limb], tail[limb], q, p, n_inverse[limb])

    def _rows(self, values: Float) -> Float:
        return values.reshape(16, self.n // 16)

    def from_integers(self, coefficients: NDArray[np.int64], limbs: int) -> Float:
        """Integers [n] that are small against all primes, such as noise, as a polynomial [limbs, n]."""
        out = np.empty((limbs, self.n))
        for limb in range(limbs):
            self.forward(coefficients.astype(np.float64), limb, out[limb])
        return out


def _call(function: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
    for each in arguments:
        function(*each)
