"""Attention and the exponential on ciphertexts, against the same sums on plain arrays."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from client_agent.encrypted.vault import Real, Vault
from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.polynomials import exponential, quadratic_factors
from tests.support.encrypted_keys import evaluation_keys, public_key
from veilfed.ckks.basis import Basis
from veilfed.ckks.parameters import Parameters
from veilfed.errors import VeilfedError

pytestmark = pytest.mark.encrypted

PARAMETERS = Parameters(13, (40, 32, 32, 32, 32), 44, 32)
DIAGONALS = Diagonals(tokens=8, samples=512, baby=4)
CHANNELS = 4


class Bench:
    def __init__(self) -> None:
        self.basis = Basis(PARAMETERS, threads=2)
        self.vault = Vault(self.basis, DIAGONALS.steps)
        self.evaluator = Evaluator(self.basis, evaluation_keys(self.vault), public_key(self.vault), self.vault.refresh)
        self.random = np.random.default_rng(5)

    def slots(self, count: int, largest: float = 1.0) -> Real:
        return self.random.uniform(-largest, largest, (count, PARAMETERS.slots))

    def encrypted(self, slots: Real) -> Ciphertexts:
        made = [self.vault.encrypt_by_seal(row) for row in slots]
        return Ciphertexts(np.stack([values for values, _ in made]), made[0][1])

    def opened(self, x: Ciphertexts) -> Real:
        return np.stack([self.vault.decrypt_by_seal(values, x.scale) for values in x.values])


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.basis.close()


def by_token(slots: Real) -> Real:
    """[channels, tokens, samples]."""
    return slots.reshape(len(slots), DIAGONALS.tokens, DIAGONALS.samples)


def test_scores_and_weighted_sums_by_diagonals(bench: Bench) -> None:
    queries, keys, values = (bench.slots(CHANNELS) for _ in range(3))
    found = DIAGONALS.scores(bench.encrypted(queries), bench.encrypted(keys), bench.evaluator)
    scores = np.einsum("ctb,csb->tsb", by_token(queries), by_token(keys))
    tokens = np.arange(DIAGONALS.tokens)
    for r, slots in enumerate(bench.opened(found)):
        diagonal = scores[tokens, (tokens + r) % DIAGONALS.tokens]
        back = -(r // DIAGONALS.baby) * DIAGONALS.baby
        assert np.abs(np.roll(diagonal, -back, axis=0).ravel() - slots).max() < 1e-3

    x = bench.encrypted(values).at(found.limbs)
    applied = bench.opened(DIAGONALS.apply(found, x, bench.evaluator))
    expected = np.einsum("tsb,csb->ctb", scores, by_token(values))
    assert np.abs(applied - expected.reshape(CHANNELS, -1)).max() < 1e-2

    sums = bench.opened(DIAGONALS.row_sums(found, bench.evaluator))
    assert np.abs(sums[0] - scores.sum(axis=1).ravel()).max() < 1e-2


def test_the_exponential_is_taylors(bench: Bench) -> None:
    x = bench.slots(2, largest=3.0)
    found = exponential(bench.encrypted(x), bench.evaluator)
    assert found.limbs == PARAMETERS.limbs - 3
    taylor = sum(x**k / math.factorial(k) for k in range(7))
    assert np.abs(bench.opened(found) / 720 - taylor).max() < 1e-3


def test_its_factors_have_no_real_root() -> None:
    factors = quadratic_factors()
    assert all(a * a < 4 * b for a, b in factors)
    x = np.linspace(-4, 4, 100)
    product = np.prod([x * x + a * x + b for a, b in factors], axis=0)
    assert np.allclose(product / 720, sum(x**k / math.factorial(k) for k in range(7)), rtol=1e-12)


@pytest.mark.parametrize("wrong", [(6, 512, 2), (8, 500, 4), (8, 512, 16), (8, 512, 0)])
def test_layouts_that_do_not_wrap_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(VeilfedError, match="powers of two"):
        Diagonals(*wrong)
