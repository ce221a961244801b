"""A model with an embedding and two blocks on ciphertexts, against the same arithmetic on plain slots."""

import numpy as np
import pytest

from client_agent.encrypted.vault import Vault
from fm_oracle.encrypted.block import Ranges
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.model import EncryptedModel, make_block
from fm_oracle.encrypted.plain import PlainEvaluator, Slots
from tests.support.blocks import (
    CHANNELS,
    DIAGONALS,
    EPSILON,
    HEADS,
    PADDING_SCALE,
    PARAMETERS,
    SCALE,
    Real,
    centred,
    make_case,
)
from tests.support.encrypted_keys import evaluation_keys, public_key
from veilfed.ckks.basis import Basis
from veilfed.ckks.samples import arrange

pytestmark = pytest.mark.encrypted

FEATURES = 5


def test_streams_after_each_block_agree_with_plain_slots() -> None:
    block, random = make_case().block, np.random.default_rng(5)
    # Of blocks one after the other: the second one meets other variances than the first one's data had.
    wide = Ranges(64.0, 32.0, 16.0, (0.3, 300.0), (0.02, 20.0), (0.02, 20.0))
    made = make_block(block.weights, wide, HEADS, DIAGONALS, EPSILON)
    assert (made.newton, made.goldschmidt) > (block.newton, block.goldschmidt)
    embedding = centred(random.standard_normal((CHANNELS, FEATURES + DIAGONALS.tokens)) / 2)
    model = EncryptedModel(embedding, [made, made])
    lengths = random.integers(2, DIAGONALS.tokens + 1, 40)
    batch = arrange(
        [random.standard_normal((length, FEATURES)) for length in lengths], DIAGONALS.tokens, DIAGONALS.samples
    )
    places = np.kron(np.eye(DIAGONALS.tokens), np.ones(DIAGONALS.samples)) * batch.mask
    inputs = [
        (np.concatenate([batch.channels, places]), SCALE),
        (batch.mask, SCALE),
        (batch.padding, PADDING_SCALE),
    ]
    basis = Basis(PARAMETERS, threads=2)
    vault = Vault(basis, DIAGONALS.steps)
    evaluator = Evaluator(basis, evaluation_keys(vault), public_key(vault), vault.refresh)

    def encrypted(slots: Real, scale: float) -> Ciphertexts:
        smaller = scale / PARAMETERS.scale
        return Ciphertexts(np.stack([vault.encrypt_by_seal(row * smaller)[0] for row in slots]), scale)

    features, mask, padding = (encrypted(*item) for item in inputs)
    found = list(model(features, mask, padding, evaluator))
    on_slots = [Slots(*item, PARAMETERS.limbs) for item in inputs]
    plain = list(model(on_slots[0], on_slots[1], on_slots[2], PlainEvaluator(PARAMETERS)))
    assert len(found) == len(plain) == 2
    real = batch.mask[0] > 0
    for ours, expected in zip(found, plain, strict=True):
        opened = np.stack([vault.decrypt_by_seal(values, ours.scale) for values in ours.values])
        assert np.abs(opened - expected.values)[:, real].max() < 1e-3 * np.abs(expected.values).max()
    basis.close()
