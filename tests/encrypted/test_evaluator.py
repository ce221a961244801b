"""The evaluator against SEAL: the same keys, the same ciphertexts, the same slots."""

from collections.abc import Iterator

import numpy as np
import pytest

from client_agent.encrypted.vault import Real, Vault
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.masks import rerandomise
from fm_oracle.encrypted.operations import Layer
from tests.support.encrypted_keys import evaluation_keys, public_key
from tests.support.seal_keys import seal_keys
from veilfed.ckks.basis import Basis
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.sampling import uniform
from veilfed.errors import Code, VeilfedError

pytestmark = pytest.mark.encrypted

STEPS = (1, -1, 5, 64, -300)
PARAMETERS = [
    Parameters(13, (48, 48, 36), 48, 36),
    Parameters(14, (48, 48, 36, 36, 36), 48, 36),
]


class Bench:
    """Both parties in one process."""

    def __init__(self, parameters: Parameters, made_by_seal: bool) -> None:
        self.basis = Basis(parameters, threads=2)
        self.vault = Vault(self.basis, STEPS)
        self.public_key = public_key(self.vault)
        keys = seal_keys(self.vault) if made_by_seal else evaluation_keys(self.vault)
        self.evaluator = Evaluator(self.basis, keys, self.public_key, self.vault.refresh)
        self.random = np.random.default_rng(3)

    def slots(self, count: int) -> Real:
        return self.random.uniform(-1, 1, (count, self.basis.parameters.slots))

    def encrypted(self, slots: Real) -> Ciphertexts:
        made = [self.vault.encrypt_by_seal(row) for row in slots]
        return Ciphertexts(np.stack([values for values, _ in made]), made[0][1])

    def opened(self, x: Ciphertexts) -> Real:
        return np.stack([self.vault.decrypt_by_seal(values, x.scale) for values in x.values])


@pytest.fixture(
    scope="module",
    params=[(PARAMETERS[0], True), (PARAMETERS[0], False), (PARAMETERS[1], False)],
    ids=["SEAL's keys", "2^13", "2^14"],
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(*request.param)
    yield made
    made.basis.close()


def close(found: Real, expected: Real, bound: float) -> None:
    assert np.abs(found - expected).max() < bound


def test_ciphertexts_come_back_as_they_were(bench: Bench) -> None:
    slots = bench.slots(2)
    close(bench.opened(bench.encrypted(slots)), slots, 1e-5)


@pytest.mark.parametrize("lower", [0, 1])
def test_rotations_of_several_ciphertexts_at_once(bench: Bench, lower: int) -> None:
    slots = bench.slots(3)
    x = bench.encrypted(slots)
    rotated = bench.evaluator.rotate(x.at(x.limbs - lower), STEPS)
    for number, step in enumerate(STEPS):
        found = rotated[slice(number * len(x), (number + 1) * len(x))]
        close(bench.opened(found), np.roll(slots, -step, axis=1), 1e-4)


def test_a_sum_of_products_is_relinearised_and_rescaled_once(bench: Bench) -> None:
    a, b = bench.slots(5), bench.slots(4)
    left, right = bench.random.integers(0, 5, (2, 70)), bench.random.integers(0, 4, (3, 70))
    x, y = bench.encrypted(a), bench.encrypted(b)
    product = bench.evaluator.sum_products(x, left.tolist(), y, right.tolist())
    expected = np.stack([(a[one] * b[other]).sum(axis=0) for other in right for one in left])
    close(bench.opened(product), expected, 1e-2)
    found = bench.evaluator.rescale(bench.evaluator.relinearise(product))
    assert found.limbs == x.limbs - 1
    close(bench.opened(found), expected, 1e-2)


def test_sums_and_constants(bench: Bench) -> None:
    a, b = bench.slots(2), bench.slots(2)
    x, y = bench.encrypted(a), bench.encrypted(b)
    close(bench.opened(bench.evaluator.add(x, y)), a + b, 1e-4)
    close(bench.opened(bench.evaluator.plus(x, -2.5)), a - 2.5, 1e-4)
    close(bench.opened(bench.evaluator.total(x)), a.sum(axis=0), 1e-4)
    close(bench.opened(bench.evaluator.times(x, [1.5, -0.3], 2**10 * x.scale)), a * [[1.5], [-0.3]], 1e-3)


def test_products_channel_by_channel_and_by_one(bench: Bench) -> None:
    a, b = bench.slots(3), bench.slots(3)
    x, y = bench.encrypted(a), bench.encrypted(b)
    close(bench.opened(bench.evaluator.multiplied(x, y)), a * b, 1e-3)
    close(bench.opened(bench.evaluator.multiplied(x, y[:1])), a * b[:1], 1e-3)


@pytest.mark.parametrize("bits", [10, 16])
def test_a_linear_layer(bench: Bench, bits: int) -> None:
    weights = bench.random.standard_normal((7, 40)) / np.sqrt(40)
    slots = bench.slots(40)
    layer = Layer.rounded(weights, 2.0**bits)
    found = bench.evaluator.linear(layer, bench.encrypted(slots))
    close(bench.opened(found), layer.integers / layer.scale @ slots, 1e-4)


def test_fresh_randomness_changes_both_components_and_no_slot(bench: Bench) -> None:
    slots = bench.slots(2)
    x = bench.encrypted(slots)
    fresh = rerandomise(x, bench.public_key, bench.basis)
    assert not np.isclose(fresh.values, x.values).any(axis=(2, 3)).all()
    assert (fresh.values == x.values).mean() < 1e-3
    close(bench.opened(fresh), slots, 1e-4)


@pytest.mark.parametrize("shift", [0, 10])
def test_a_masked_refresh(bench: Bench, shift: int) -> None:
    slots = bench.slots(2)
    x = bench.encrypted(slots).at(3)
    found = bench.evaluator.refresh(x, 1.0, shift)
    assert found.limbs == bench.basis.parameters.limbs
    assert found.scale == x.scale / 2**shift
    close(bench.opened(found), slots, 1e-4 * 2**shift)


def test_a_refresh_that_would_show_something_is_refused(bench: Bench) -> None:
    with pytest.raises(VeilfedError, match="does not hide") as caught:
        bench.evaluator.refresh(bench.encrypted(bench.slots(1)).at(2), 1.0, 0)
    assert caught.value.code is Code.INPUT_INVALID


def test_uniform_polynomials_repeat_for_a_seed_alone(bench: Bench) -> None:
    seed = bytes(32)
    assert np.array_equal(uniform(bench.basis, 2, seed, 1), uniform(bench.basis, 2, seed, 1))
    others = [uniform(bench.basis, 2, seed, 2), uniform(bench.basis, 2), uniform(bench.basis, 2)]
    assert all((uniform(bench.basis, 2, seed, 1) != other).mean() > 0.999 for other in others)
