"""A whole block on ciphertexts, against the same arithmetic on plain slots."""

import numpy as np
import pytest

from client_agent.encrypted.vault import Vault
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from tests.support.blocks import (
    DIAGONALS,
    PADDING_SCALE,
    PARAMETERS,
    SCALE,
    Real,
    flat,
    make_case,
    on_plain_slots,
    padding,
)
from tests.support.encrypted_keys import evaluation_keys, public_key
from veilfed.ckks.basis import Basis

pytestmark = pytest.mark.encrypted


def encrypted(vault: Vault, slots: Real, scale: float) -> Ciphertexts:
    """At a scale below that of the parameters: the slots are made smaller, and the ciphertexts read larger."""
    smaller = scale / 2.0**PARAMETERS.scale_bits
    return Ciphertexts(np.stack([vault.encrypt_by_seal(row * smaller)[0] for row in slots]), scale)


@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
def test_ciphertexts_agree_with_plain_slots(post: bool) -> None:
    case = make_case(post)
    basis = Basis(PARAMETERS, threads=2)
    vault = Vault(basis, DIAGONALS.steps)
    evaluator = Evaluator(basis, evaluation_keys(vault), public_key(vault), vault.refresh)
    found = case.block(
        encrypted(vault, flat(case.x), SCALE),
        encrypted(vault, flat(case.mask[None]), SCALE),
        encrypted(vault, flat(padding(case)[None]), PADDING_SCALE),
        evaluator,
    )
    opened = np.stack([vault.decrypt_by_seal(values, found.scale) for values in found.values])
    plain = on_plain_slots(case)
    assert (found.scale, found.limbs) == (plain.scale, plain.limbs)
    assert np.abs(opened - plain.values).max() < 1e-3 * np.abs(plain.values).max()
    basis.close()
