"""A whole block: its plan, its arithmetic on plain slots against the formulas, and on ciphertexts against both."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from client_agent.encrypted.vault import Vault
from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.block import Block, Ranges, Weights
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.plain import PlainEvaluator, Slots
from fm_oracle.encrypted.plan import Planner, Shape
from veilfed.ckks.basis import Basis
from veilfed.ckks.parameters import Parameters

Real = NDArray[np.float64]

PARAMETERS = Parameters(14, (48, *[36] * 9), 48, 36)
CHANNELS, HIDDEN, HEADS = 8, 16, 2
DIAGONALS = Diagonals(tokens=8, samples=1024, baby=4)
EPSILON = 1e-6
SCALE, PADDING_SCALE = 2.0**36, 2.0**24


@dataclass
class Case:
    """A block with random weights, and inputs [channels, tokens, samples] of different lengths."""

    block: Block
    x: Real
    mask: Real
    expected: Real


def centred(matrix: Real) -> Real:
    return matrix - matrix.mean(axis=0, keepdims=True)


def taylor(x: Real) -> Real:
    return np.asarray(sum(x**k / math.factorial(k) for k in range(7)))


def make_case() -> Case:
    random = np.random.default_rng(11)

    def layer(out: int, fan_in: int, size: float = 1.0) -> Real:
        return random.standard_normal((out, fan_in + 1)) * size / np.sqrt(fan_in)

    qkv = layer(3 * CHANNELS, CHANNELS, 0.3)
    output, hidden, back = layer(CHANNELS, CHANNELS), layer(HIDDEN, CHANNELS), layer(CHANNELS, HIDDEN)
    lengths = random.integers(2, DIAGONALS.tokens + 1, DIAGONALS.samples)
    mask = (np.arange(DIAGONALS.tokens)[:, None] < lengths).astype(np.float64)
    x = centred(random.standard_normal((CHANNELS, DIAGONALS.tokens, DIAGONALS.samples))) * mask
    found: dict[str, list[Real]] = {"variance": [], "sum": []}
    expected = plain_block(x, mask, qkv, centred(output), hidden, centred(back), found)
    folded_hidden = hidden.copy()
    folded_hidden[:, -1] += 1
    folded_back = centred(back)
    folded_back[:, -1] += 3 / 8 * folded_back[:, :-1].sum(axis=1)
    folded_back[:, :-1] /= 8
    variances = [(float(v.min()) * 0.9, float(v.max()) * 1.1) for v in found["variance"]]
    sums = (float(min(s.min() for s in found["sum"])), float(max(s.max() for s in found["sum"])))
    ranges = Ranges(32.0, 16.0, 8.0, sums, variances[0], variances[1])
    weights = Weights(qkv, centred(output), folded_hidden, folded_back)
    return Case(Block(weights, ranges, HEADS, DIAGONALS, EPSILON), x, mask, expected)


def plain_block(
    x: Real, mask: Real, qkv: Real, output: Real, hidden: Real, back: Real, found: dict[str, list[Real]]
) -> Real:
    """The formulas, sample by sample of [channels, tokens, samples]; notes the ranges that occur."""
    real = mask > 0

    def apply(layer: Real, values: Real) -> Real:
        return np.einsum("oc,ctb->otb", layer[:, :-1], values) + layer[:, -1, None, None]

    def norm(values: Real) -> Real:
        variance = (values**2).mean(axis=0)
        found["variance"].append(variance[real] + EPSILON)
        return values / np.sqrt(variance + EPSILON)

    q, k, v = np.split(apply(qkv, norm(x)) * mask, 3)
    size = CHANNELS // HEADS
    attended = np.empty_like(x)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        weights = taylor(np.einsum("ctb,csb->tsb", q[part], k[part])) * mask[None]
        sums = weights.sum(axis=1)
        found["sum"].append(sums[real])
        attended[part] = np.einsum("tsb,csb->ctb", weights, v[part]) / sums
    h = x + apply(output, attended) * mask
    z = apply(hidden, norm(h))
    return (h + apply(back, 0.125 * z**2 + 0.25 * z + 0.5)) * mask


def flat(values: Real) -> Real:
    return values.reshape(-1, PARAMETERS.slots)


def padding(case: Case) -> Real:
    """Padded tokens of each sample, in all of its slots."""
    missing = DIAGONALS.tokens - case.mask.sum(axis=0)
    return np.broadcast_to(missing, case.mask.shape)


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case()


def on_plain_slots(case: Case) -> Real:
    limbs = PARAMETERS.limbs
    found = case.block(
        Slots(flat(case.x), SCALE, limbs),
        Slots(flat(case.mask[None]), SCALE, limbs),
        Slots(flat(padding(case)[None]), PADDING_SCALE, limbs),
        PlainEvaluator(PARAMETERS),
    )
    assert (found.scale, found.limbs) == (SCALE, limbs)
    return found.values.reshape(case.x.shape)


def test_the_arithmetic_is_that_of_the_formulas(case: Case) -> None:
    found = on_plain_slots(case)
    assert np.abs(found).max() < 32
    assert np.abs(found - case.expected).max() < 2e-2 * np.abs(case.expected).max()


def test_a_plan_has_every_phase_and_ends_at_the_top(case: Case) -> None:
    planner = Planner(PARAMETERS)
    limbs = PARAMETERS.limbs
    made = case.block(Shape(CHANNELS, SCALE, limbs), Shape(1, SCALE, limbs), Shape(1, PADDING_SCALE, limbs), planner)
    assert (len(made), made.scale, made.limbs) == (CHANNELS, SCALE, limbs)
    phases = [row.phase for row in planner.rows if row.work]
    assert phases[0] == "first norm"
    assert phases[-1] == "back"
    assert sum(row.work["multiply_adds"] for row in planner.rows) > 0


@pytest.mark.encrypted
def test_ciphertexts_agree_with_plain_slots(case: Case) -> None:
    basis = Basis(PARAMETERS, threads=2)
    vault = Vault(basis, DIAGONALS.steps)
    evaluator = Evaluator(basis, vault.evaluation_keys(), vault.public_key(), vault.refresh)
    found = case.block(
        encrypted(vault, flat(case.x), SCALE),
        encrypted(vault, flat(case.mask[None]), SCALE),
        encrypted(vault, flat(padding(case)[None]), PADDING_SCALE),
        evaluator,
    )
    opened = np.stack([vault.decrypt_by_seal(values, found.scale) for values in found.values])
    plain = on_plain_slots(case)
    assert np.abs(opened.reshape(case.x.shape) - plain).max() < 1e-3 * np.abs(plain).max()
    basis.close()


def encrypted(vault: Vault, slots: Real, scale: float) -> Ciphertexts:
    """A scale below that of the parameters: the slots are made smaller, and the ciphertexts read larger."""
    smaller = scale / 2.0**PARAMETERS.scale_bits
    return Ciphertexts(np.stack([vault.encrypt_by_seal(row * smaller)[0] for row in slots]), scale)
