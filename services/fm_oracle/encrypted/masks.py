"""What a ciphertext goes through before an agent opens it: fresh randomness, and for a refresh a mask.

Without the first, the second component of a result is a known combination of the agent's own, and linear algebra
modulo q finds the weights. Without the second, a refresh would show the agent what is computed. The mask is uniform
modulo the whole remaining modulus Q: for any plaintext, what the agent opens is uniform too. The agent's reply is right
if no coefficient of signal + mask leaves (-Q/2, Q/2), which fails with probability at most 2 B n / Q for a signal of
at most B: fm_oracle.encrypted.operations.MARGIN_BITS demands that this is negligible.
"""

import math

import numpy as np

from fm_oracle.encrypted.ciphertexts import Ciphertexts
from veilfed.ckks import kernels
from veilfed.ckks.basis import Basis
from veilfed.ckks.lifting import lift
from veilfed.ckks.sampling import Stream, uniform
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["flood", "hide", "rerandomise", "reveal"]

# The noise on what is released, as bits below the scale: in a slot of a ring of degree 2^14 its standard deviation is
# sqrt(n / 3) / 2^18 = 2.8e-4, some seven bits above the noise of a block's own arithmetic.
FLOOD_BELOW_SCALE = 18


def rerandomise(x: Ciphertexts, public_key: Float, basis: Basis) -> Ciphertexts:
    """The same plaintexts under fresh randomness in both components: each gets an encryption of zero of its own."""
    out = np.empty_like(x.values)
    basis.each(_rerandomise, ((values, public_key, basis, into) for values, into in zip(x.values, out, strict=True)))
    return Ciphertexts(out, x.scale)


def _rerandomise(values: Float, public_key: Float, basis: Basis, out: Float) -> None:
    """One ciphertext [2, limbs, n]."""
    stream, limbs = Stream(), values.shape[1]
    small = basis.from_integers(stream.ternary(basis.n), limbs)
    for component in range(2):
        error = basis.from_integers(stream.noise(basis.n), limbs)
        for limb in range(limbs):
            x, key = values[component, limb], public_key[component, limb]
            q, p = basis.q[limb], basis.p[limb]
            kernels.add_product(x, error[limb], key, small[limb], out[component, limb], q, p)


def hide(x: Ciphertexts, public_key: Float, basis: Basis) -> tuple[Ciphertexts, Float]:
    """What the agent gets for a refresh; and the masks [C, limbs, n], which are used once and never leave the oracle.

    That the modulus is large enough for the signal is for the caller to see (Operations.refreshed_limbs).
    """
    fresh = rerandomise(x, public_key, basis)
    masks = np.empty((len(x), x.limbs, basis.n))
    basis.each(_mask, ((values[0], mask, basis) for values, mask in zip(fresh.values, masks, strict=True)))
    return fresh, masks


def flood(fresh: Ciphertexts, basis: Basis) -> Ciphertexts:
    """What the agent gets of a released output, which must come from a refresh: one limb, and noise in the plaintext.

    After a refresh both components are the agent's own but for the mask, so they hold the plaintext and nothing else.
    The noise of the arithmetic depends on what was computed; uniform noise of a hundred times its size hides it to that
    degree, and no further.
    """
    out = fresh.at(1)
    bound = 1 << (round(math.log2(out.scale)) - FLOOD_BELOW_SCALE)
    basis.each(_flood, ((values[0], bound, basis) for values in out.values))
    return out


def _flood(values: Float, bound: int, basis: Basis) -> None:
    """Adds uniform integers in [-bound, bound) to a first component [1, n]."""
    noise = Stream().below(2 * bound, basis.n).astype(np.int64) - bound
    kernels.add(values[0], basis.from_integers(noise, 1)[0], values[0], basis.q[0], basis.p[0])


def reveal(fresh: Float, masks: Float, shift: int, basis: Basis) -> Float:
    """Ciphertexts of the hidden plaintexts, from the agent's fresh ones [C, 2, limbs, n], divided by 2^shift."""
    if len(fresh) != len(masks):
        raise VeilfedError(Code.INPUT_INVALID, f"{len(fresh)} ciphertexts came back, expected {len(masks)}")
    out = fresh.copy()
    lifted = lift(masks, fresh.shape[2], basis, shift)
    basis.each(_unmask, ((values[0], mask, basis) for values, mask in zip(out, lifted, strict=True)))
    return out


def _mask(values: Float, mask: Float, basis: Basis) -> None:
    """Makes a mask [limbs, n], and adds it to a first component."""
    mask[:] = uniform(basis, len(mask))
    for limb, row in enumerate(values):
        kernels.add(row, mask[limb], row, basis.q[limb], basis.p[limb])


def _unmask(values: Float, mask: Float, basis: Basis) -> None:
    for limb, row in enumerate(values):
        kernels.subtract(row, mask[limb], row, basis.q[limb], basis.p[limb])
