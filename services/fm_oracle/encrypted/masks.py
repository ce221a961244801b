"""What a ciphertext goes through before an agent opens it: fresh randomness, and for a refresh a mask.

Without the first, the second component of a result is a known combination of the agent's own, and linear algebra
modulo q finds the weights. Without the second, a refresh would show the agent what is computed. The mask is uniform
modulo the whole remaining modulus Q: for any plaintext, what the agent opens is uniform too. The agent's reply is right
if no coefficient of signal + mask leaves (-Q/2, Q/2), which fails with probability at most 2 B n / Q for a signal of
at most B: fm_oracle.encrypted.operations.MARGIN_BITS demands that this is negligible.
"""

import numpy as np

from fm_oracle.encrypted.ciphertexts import Ciphertexts
from veilfed.ckks import kernels
from veilfed.ckks.basis import Basis
from veilfed.ckks.lifting import lift
from veilfed.ckks.sampling import Stream, uniform
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["Masked", "hide", "rerandomise", "reveal"]


def rerandomise(x: Ciphertexts, public_key: Float, basis: Basis) -> Ciphertexts:
    """The same plaintexts under fresh randomness in both components: each gets an encryption of zero of its own."""
    out = np.empty_like(x.values)
    stream = Stream()
    for number in range(len(x)):
        limbs = x.limbs
        small = basis.from_integers(stream.ternary(basis.n), limbs)
        for component in range(2):
            error = basis.from_integers(stream.noise(basis.n), limbs)
            for limb in range(limbs):
                kernels.add_product(
                    x.values[number, component, limb],
                    error[limb],
                    public_key[component, limb],
                    small[limb],
                    out[number, component, limb],
                    basis.q[limb],
                    basis.p[limb],
                )
    return Ciphertexts(out, x.scale)


class Masked:
    """Masks [C, limbs, n] of a batch that is out for a refresh. They are used once, and never leave the oracle."""

    def __init__(self, masks: Float, scale: float, shift: int) -> None:
        self.masks = masks
        # Of what comes back.
        self.scale = scale
        self.shift = shift


def hide(x: Ciphertexts, public_key: Float, basis: Basis, shift: int) -> tuple[Ciphertexts, Masked]:
    """What the agent gets for a refresh, and what the oracle keeps meanwhile.

    The agent divides what it opens by 2^shift. That the modulus is large enough for the signal is for the caller to see
    (Operations.hidden).
    """
    fresh = rerandomise(x, public_key, basis)
    masks = np.stack([uniform(basis, x.limbs) for _ in range(len(x))])
    for number in range(len(x)):
        for limb in range(x.limbs):
            values = fresh.values[number, 0, limb]
            kernels.add(values, masks[number, limb], values, basis.q[limb], basis.p[limb])
    return fresh, Masked(masks, x.scale / 2**shift, shift)


def reveal(fresh: Float, masked: Masked, basis: Basis) -> Ciphertexts:
    """The hidden plaintexts at the level of the agent's fresh ciphertexts [C, 2, limbs, n]."""
    if len(fresh) != len(masked.masks):
        raise VeilfedError(Code.INPUT_INVALID, f"{len(fresh)} ciphertexts came back, expected {len(masked.masks)}")
    out = fresh.copy()
    lifted = lift(masked.masks, fresh.shape[2], basis, masked.shift)
    for number in range(len(out)):
        for limb in range(out.shape[2]):
            values = out[number, 0, limb]
            kernels.subtract(values, lifted[number, limb], values, basis.q[limb], basis.p[limb])
    return Ciphertexts(out, masked.scale)
