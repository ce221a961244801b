"""What an agent can learn from the ciphertexts that it gets: attacks, with controls that succeed."""

import math
from typing import Any

import numpy as np
import pytest

from client_agent.encrypted.vault import Vault
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.masks import hide, rerandomise
from fm_oracle.encrypted.operations import Layer
from tests.support.encrypted_keys import evaluation_keys, public_key
from veilfed.ckks.basis import Basis
from veilfed.ckks.parameters import Parameters

pytestmark = pytest.mark.encrypted

FEATURES, BINS, LEAST = 8, 64, 1e-6


class Bench:
    def __init__(self) -> None:
        self.basis = Basis(Parameters(13, (48, 48, 36), 48, 36))
        self.vault = Vault(self.basis, ())
        self.public_key = public_key(self.vault)
        keys = evaluation_keys(self.vault)
        self.evaluator = Evaluator(self.basis, keys, self.public_key, self.vault.refresh)
        self.random = np.random.default_rng(7)

    def encrypted(self, largest: float, count: int) -> Ciphertexts:
        slots = self.random.uniform(-largest, largest, (count, self.basis.parameters.slots))
        made = [self.vault.encrypt_by_seal(row) for row in slots]
        return Ciphertexts(np.stack([values for values, _ in made]), made[0][1])


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def solved(matrix: list[list[int]], right: list[list[int]], q: int) -> list[list[int]]:
    """X of matrix X = right modulo a prime, by Gauss and Jordan."""
    rows = [a + b for a, b in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = next(r for r in range(column, size) if rows[r][column] % q)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        inverse = pow(rows[column][column], -1, q)
        rows[column] = [value * inverse % q for value in rows[column]]
        for r in range(size):
            if r != column and rows[r][column]:
                factor = rows[r][column]
                rows[r] = [(a - factor * b) % q for a, b in zip(rows[r], rows[column], strict=True)]
    return [row[size:] for row in rows]


def recovered(x: Ciphertexts, y: Ciphertexts, q: int) -> Any:
    """The weights of y = W x, from the second components alone, if y's are the layer's combinations of x's."""
    at_places = [[int(value) % q for value in x.values[:, 1, 0, place]] for place in range(FEATURES)]
    outputs = [[int(value) % q for value in y.values[:, 1, 0, place]] for place in range(FEATURES)]
    found = np.array(solved(at_places, outputs, q), dtype=object).T
    return np.where(found > q // 2, found - q, found)


def test_linear_algebra_finds_the_weights_unless_randomness_is_fresh(bench: Bench) -> None:
    layer = Layer.rounded(bench.random.standard_normal((FEATURES, FEATURES)), 2.0**12)
    x = bench.encrypted(1.0, FEATURES)
    y = bench.evaluator.linear(layer, x)
    q = bench.basis.primes[0]
    assert (recovered(x, y, q) == layer.integers.astype(int)).all()
    fresh = rerandomise(y, bench.public_key, bench.basis)
    assert not (recovered(x, fresh, q) == layer.integers.astype(int)).any()
    masked, _ = hide(y, bench.public_key, bench.basis)
    assert not (recovered(x, masked, q) == layer.integers.astype(int)).any()


def test_without_a_mask_the_agent_would_see_the_plaintext(bench: Bench) -> None:
    """The control of the next test."""
    opened = bench.vault.open(rerandomise(bench.encrypted(1.0, 1), bench.public_key, bench.basis).values)
    assert uniformity(bench, opened) < LEAST


@pytest.mark.parametrize("largest", [0.0, 1.0, 2.0**40], ids=["zero", "in range", "far out of range"])
def test_what_is_opened_for_a_refresh_is_uniform_for_any_plaintext(bench: Bench, largest: float) -> None:
    x = bench.encrypted(min(largest, 1.0), 2)
    x = Ciphertexts(x.values, x.scale) if largest <= 1 else bench.evaluator.times(x, [largest] * 2, 2 * x.scale)
    masked, _ = hide(x, bench.public_key, bench.basis)
    assert uniformity(bench, bench.vault.open(masked.values)) > LEAST


def uniformity(bench: Bench, polynomials: Any) -> float:
    """The smallest p of chi-square tests of the coefficients' residues, for each limb and polynomial."""
    found = []
    for values in polynomials:
        for limb in range(len(values)):
            coefficients = np.empty(bench.basis.n)
            bench.basis.inverse(values[limb].copy(), limb, coefficients)
            share = coefficients / bench.basis.q[limb] + 0.5
            counts = np.bincount(np.minimum((share * BINS).astype(int), BINS - 1), minlength=BINS)
            found.append(chance(counts))
    return min(found)


def chance(counts: Any) -> float:
    """The p of a chi-square test that these are uniform (Wilson and Hilferty, 1931)."""
    expected, freedom = counts.mean(), len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    width = 2 / (9 * freedom)
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - width)) / math.sqrt(width)
    return math.erfc(deviation / math.sqrt(2)) / 2
