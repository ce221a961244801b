"""Transforms and lifting, against their definitions in integers."""

from typing import Any

import numpy as np
import pytest

from veilfed.ckks.basis import Basis
from veilfed.ckks.lifting import lift
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.transform import bit_reversed, make_tables
from veilfed.errors import Code, VeilfedError

pytestmark = pytest.mark.encrypted


@pytest.fixture(scope="module", params=[12, 13], ids=["even", "odd"])
def basis(request: pytest.FixtureRequest) -> Basis:
    """Rings whose number of stages is even and odd."""
    return Basis(Parameters(request.param, (25, 27), 48, 20))


def balanced(values: list[int], q: int) -> Any:
    return np.array([r - q if (r := value % q) > q // 2 else r for value in values], dtype=np.float64)


def test_a_transform_is_the_polynomial_at_the_roots(basis: Basis) -> None:
    random = np.random.default_rng(0)
    for limb, q in enumerate(basis.primes):
        coefficients = [int(value) for value in random.integers(0, q, basis.n)]
        out = np.empty(basis.n)
        basis.forward(balanced(coefficients, q), limb, out)
        words = np.empty(basis.n, dtype=np.uint64)
        words[:] = basis.store(np.broadcast_to(out, (limb + 1, basis.n)).copy())[limb]
        root = round(float(make_tables(q, basis.n)[0][bit_reversed(basis.n)][1])) % q
        for place in (0, 1, 2, 5, 777, basis.n - 1):
            point = pow(root, int(2 * bit_reversed(basis.n)[place] + 1), q)
            value = 0
            for coefficient in reversed(coefficients):
                value = (value * point + coefficient) % q
            assert value == int(words[place])
        back = np.empty(basis.n)
        basis.inverse(out.copy(), limb, back)
        assert np.array_equal(back, balanced(coefficients, q))


def polynomial(basis: Basis, integers: list[int], limbs: int) -> Any:
    out = np.empty((1, limbs, basis.n))
    for limb in range(limbs):
        basis.forward(balanced(integers, basis.primes[limb]), limb, out[0, limb])
    return out


@pytest.mark.parametrize("shift", [0, 1, 7, 20, 49, 62])
def test_lifting_keeps_the_integers(shift: int) -> None:
    basis = Basis(Parameters(13, (25, 25, 27, 27), 48, 20))
    half = basis.primes[0] * basis.primes[1] // 2
    random = np.random.default_rng(1)
    integers = [int(value) for value in random.integers(-half, half, basis.n - 2)] + [half, -half]
    shifted = [value >> shift for value in integers]
    assert np.array_equal(lift(polynomial(basis, integers, 2), 4, basis, shift), polynomial(basis, shifted, 4))


def test_residues_that_are_not_below_their_prime_are_refused(basis: Basis) -> None:
    words = np.zeros((2, basis.n), dtype=np.uint64)
    words[1, 5] = basis.primes[1]
    with pytest.raises(VeilfedError, match="not below its prime") as caught:
        basis.load(words)
    assert caught.value.code is Code.INPUT_INVALID
    with pytest.raises(VeilfedError, match="expected"):
        basis.load(words[:, :-1])


def test_loading_and_storing_are_inverse(basis: Basis) -> None:
    random = np.random.default_rng(2)
    words = np.stack([random.integers(0, q, basis.n, dtype=np.uint64) for q in basis.primes])
    assert np.array_equal(basis.store(basis.load(words)), words)
