"""Operations on ciphertexts without a secret: rotations, products, relinearisation, rescaling, linear layers.

The scheme is CKKS as SEAL has it, and results load back into SEAL. What is faster: rotations of one ciphertext share
their decomposition, sums of products are reduced and relinearised once, kernels run on vectors and in threads.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fm_oracle.encrypted import switching
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.linear import linear_layer
from fm_oracle.encrypted.masks import hide, reveal
from fm_oracle.encrypted.operations import Layer, Operations
from veilfed.ckks import kernels
from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import EvaluationKeys
from veilfed.ckks.parameters import balanced
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["Evaluator"]

# The agent: opens masked ciphertexts [C, 2, limbs, n], shifts what it finds to the right, and encrypts it again with so
# many limbs.
Agent = Callable[[Float, int, int], Float]
REFRESHED_TOGETHER = 64
# Parts of the columns of a sum of products, so that all threads have some.
SUM_PARTS = 4


class Evaluator(Operations[Ciphertexts]):
    """For one institution's keys; `agent` answers refreshes."""

    def __init__(self, basis: Basis, keys: EvaluationKeys, public_key: Float, agent: Agent) -> None:
        super().__init__(basis.parameters)
        self.basis = basis
        self.keys = keys
        self.public_key = public_key
        self._agent = agent
        self._terms = switching.fit(max(q.bit_length() for q in basis.primes))

    def join(self, parts: Sequence[Ciphertexts]) -> Ciphertexts:
        for part in parts[1:]:
            self.matching(parts[0], part)
        return Ciphertexts(np.concatenate([part.values for part in parts]), parts[0].scale)

    def add(self, x: Ciphertexts, y: Ciphertexts) -> Ciphertexts:
        self.matching(x, y)
        out = np.empty_like(x.values)
        self._each(kernels.add, x, lambda i: (x.values[i], y.values[i], out[i]))
        return Ciphertexts(out, x.scale)

    def plus(self, x: Ciphertexts, constant: float) -> Ciphertexts:
        out = x.values.copy()
        constants = self._residues(constant * x.scale, x.limbs)
        basis = self.basis
        basis.each(
            kernels.add_constant,
            ((out[c, 0, k], constants[k], basis.q[k], basis.p[k]) for c in range(len(x)) for k in range(x.limbs)),
        )
        return Ciphertexts(out, x.scale)

    def times(self, x: Ciphertexts, constants: Sequence[float], scale: float) -> Ciphertexts:
        factors = np.stack([self._residues(constant * scale / x.scale, x.limbs) for constant in constants])
        if len(x) not in {1, len(factors)}:
            raise VeilfedError(Code.INPUT_INVALID, f"{len(factors)} constants for {len(x)} channels")
        out, shared = Ciphertexts(np.empty((len(factors), *x.values.shape[1:])), scale), len(x) == 1
        self._each(
            kernels.times_constant,
            out,
            lambda i: (x.values[(0, *i[1:]) if shared else i], factors[i[0], i[2]], out.values[i]),
        )
        return out

    def _residues(self, value: float, limbs: int) -> Float:
        """A constant polynomial's residues, of the nearest integer to a value: its transform is constant too."""
        integer = round(value)
        return np.array([balanced(integer, q) for q in self.basis.primes[:limbs]], dtype=np.float64)

    def _each(
        self, kernel: Callable[..., None], x: Ciphertexts, arguments: Callable[[tuple[int, int, int]], tuple[Any, ...]]
    ) -> None:
        """Calls a kernel for each limb of each component of each ciphertext, with its prime after the arguments."""
        basis = self.basis
        places = [(c, m, k) for c in range(len(x)) for m in range(x.components) for k in range(x.limbs)]
        basis.each(kernel, ((*arguments(place), basis.q[place[2]], basis.p[place[2]]) for place in places))

    def total(self, x: Ciphertexts) -> Ciphertexts:
        out = np.empty((1, *x.values.shape[1:]))
        basis = self.basis
        places = [(m, k) for m in range(x.components) for k in range(x.limbs)]
        values = np.ascontiguousarray(x.values)
        basis.each(kernels.total, ((values, m, k, out[0, m, k], basis.q[k], basis.p[k]) for m, k in places))
        return Ciphertexts(out, x.scale)

    def products(self, x: Ciphertexts, y: Ciphertexts) -> Ciphertexts:
        if x.limbs != y.limbs or len(y) not in {1, len(x)}:
            raise VeilfedError(Code.INPUT_INVALID, "products of different levels or numbers of ciphertexts")
        out = np.empty((len(x), 3, *x.values.shape[2:]))
        basis, shared = self.basis, len(y) == 1
        basis.each(
            kernels.ciphertext_product,
            (
                (
                    x.values[c, 0, k],
                    x.values[c, 1, k],
                    y.values[0 if shared else c, 0, k],
                    y.values[0 if shared else c, 1, k],
                    *out[c, :, k],
                    basis.q[k],
                    basis.p[k],
                )
                for c in range(len(x))
                for k in range(x.limbs)
            ),
        )
        return Ciphertexts(out, x.scale * y.scale)

    def sum_products(
        self, x: Ciphertexts, of_x: Sequence[Sequence[int]], y: Ciphertexts, of_y: Sequence[Sequence[int]]
    ) -> Ciphertexts:
        if x.limbs != y.limbs or len({len(terms) for terms in (*of_x, *of_y)}) != 1 or not of_x or not of_y:
            raise VeilfedError(Code.INPUT_INVALID, "products of different levels or numbers")
        out = np.empty((len(of_x) * len(of_y), 3, *x.values.shape[2:]))
        left, right = np.array(of_x, dtype=np.int64), np.array(of_y, dtype=np.int64)
        a, b = np.ascontiguousarray(x.values), np.ascontiguousarray(y.values)
        basis, size = self.basis, self.basis.n // SUM_PARTS
        basis.each(
            switching.product_sums,
            (
                (a, left, b, right, out, limb, start, start + size, basis.q[limb], basis.p[limb], self._terms)
                for limb in range(x.limbs)
                for start in range(0, basis.n, size)
            ),
        )
        return Ciphertexts(out, x.scale * y.scale)

    def relinearise(self, x: Ciphertexts) -> Ciphertexts:
        if x.components != 3:
            raise VeilfedError(Code.INPUT_INVALID, f"{x.components} components, expected three")
        out = np.empty((1, len(x), 2, *x.values.shape[2:]))
        self._switch(x.values[:, 2], x.values, {0: self.keys.relinearisation}, out)
        return Ciphertexts(out[0], x.scale)

    def rotate(self, x: Ciphertexts, steps: Sequence[int]) -> Ciphertexts:
        which = {number: self.keys.rotation(step) for number, step in enumerate(steps) if step != 0}
        out = np.empty((len(steps), *x.values.shape))
        if which:
            self._switch(x.values[:, 1], x.values, which, out)
        for number in set(range(len(steps))) - which.keys():
            out[number] = x.values
        return Ciphertexts(out.reshape(-1, *x.values.shape[1:]), x.scale)

    def _switch(self, values: Float, rest: Float, places: Mapping[int, int], out: Float) -> None:
        """out[r] [C, 2, L, n] of each place r with a key are the values [C, L, n] switched by it.

        The first component of `rest` is added, for relinearisation (whose columns keep their order) the second too.
        """
        basis, keys = self.basis, self.keys
        count, limbs, n = values.shape
        tables, q, p = basis.tables, basis.q, basis.p
        which = np.array(list(places.values()), dtype=np.int64)
        primes = [*range(limbs), basis.special]

        def digits_of(chunk: range, digits: Float) -> Iterable[tuple[Any, ...]]:
            return ((values[c], i, digits[c - chunk[0], i], tables, q, p) for c in chunk for i in range(limbs))

        def ends_of(chunk: range, sums: Float) -> Iterable[tuple[Any, ...]]:
            for c in chunk:
                for r, (place, key) in enumerate(places.items()):
                    for m in (0, 1):
                        adds = m == 0 or key == keys.relinearisation
                        x = sums[c - chunk[0], r, m]
                        yield x, rest[c, m], adds, keys.orders[key], out[place, c, m], basis.inverses, tables, q, p

        size = max(1, SWITCHED_BYTES // ((limbs + 1) * n * 8 * (limbs + 2 * which.size)))
        for start in range(0, count, size):
            chunk = range(start, min(start + size, count))
            digits = np.empty((len(chunk), limbs, limbs + 1, n))
            sums = np.empty((len(chunk), which.size, 2, limbs + 1, n))
            basis.each(switching.decompose, digits_of(chunk, digits))
            basis.each(
                switching.inner_products,
                ((digits, keys.values, which, sums, j, k, q[k], p[k], self._terms) for j, k in enumerate(primes)),
            )
            basis.each(switching.finish_switch, ends_of(chunk, sums))

    def rescale(self, x: Ciphertexts) -> Ciphertexts:
        if x.limbs < 2:
            raise VeilfedError(Code.INPUT_INVALID, "no level is left for a rescale")
        basis, last = self.basis, x.limbs - 1
        copy = x.values.copy()
        basis.each(
            switching.divide_by_last,
            (
                (copy[c, m], last, last, basis.inverses, basis.tables, basis.q, basis.p)
                for c in range(len(x))
                for m in range(x.components)
            ),
        )
        return Ciphertexts(np.ascontiguousarray(copy[:, :, :last]), x.scale / basis.primes[last])

    def linear(self, layer: Layer, x: Ciphertexts) -> Ciphertexts:
        return linear_layer(layer, x, self.basis)

    def refresh(self, x: Ciphertexts, largest: float, shift: int, limbs: int | None = None) -> Ciphertexts:
        limbs = self.refreshed_limbs(x, largest, shift, limbs)
        out = np.empty((len(x), 2, limbs, self.basis.n))
        # A part at a time: both sides hold several copies of what is on its way.
        for start in range(0, len(x), REFRESHED_TOGETHER):
            part = x[start : start + REFRESHED_TOGETHER]
            masked, masks = hide(part, self.public_key, self.basis)
            fresh = self._agent(masked.values, shift, limbs)
            out[start : start + len(part)] = reveal(fresh, masks, shift, self.basis)
        return Ciphertexts(out, x.scale / 2**shift)


# Digits and sums of a key switch that are in memory at a time.
SWITCHED_BYTES = 256 * 1024 * 1024
