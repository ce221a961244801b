"""An institution's keys: the secret one is made by SEAL, and never leaves this object."""

import secrets
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from Pyfhel import PyCtxt, Pyfhel

from client_agent.encrypted import seal
from veilfed.ckks import kernels
from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import KeyDigit, digit_nonce, galois_order
from veilfed.ckks.lifting import lift
from veilfed.ckks.parameters import balanced
from veilfed.ckks.sampling import SEED_BYTES, Stream, uniform
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["Vault"]

Real = NDArray[np.float64]


class Vault:
    """Keys for a parameter set, and for rotations by `steps` to the left, around the end.

    Fresh ones, or those of `to_bytes`. Raises VeilfedError(STATE_CORRUPT) for bytes that are no keys.
    """

    def __init__(self, basis: Basis, steps: Sequence[int], kept: bytes | None = None) -> None:
        self.basis = basis
        self.parameters = parameters = basis.parameters
        self.steps = tuple(sorted({step % basis.parameters.slots for step in steps} - {0}))
        self.seal = Pyfhel()
        bits = [*parameters.data_bits, parameters.special_bits]
        self.seal.contextGen(scheme="ckks", n=parameters.n, scale=parameters.scale, qi_sizes=bits)
        if tuple(int(q) for q in self.seal.get_qi()) != parameters.primes:
            raise VeilfedError(Code.INTERNAL, "SEAL has chosen other primes than this software")
        if kept is None:
            self.seal.keyGen()
        else:
            self._load(kept)
        primes = basis.special + 1
        self._secret = seal.read_polynomial(self.seal.to_bytes_secret_key("none"), primes, basis)
        # Serialised ciphertexts by (components, limbs), for their headers.
        self._headers: dict[tuple[int, int], bytes] = {}

    def to_bytes(self) -> bytes:
        """The secret and the public key: not to be seen by anybody else."""
        public = self.seal.to_bytes_public_key("none")
        return b"".join([len(public).to_bytes(8, "little"), public, self.seal.to_bytes_secret_key("none")])

    def _load(self, kept: bytes) -> None:
        end = 8 + int.from_bytes(kept[:8], "little")
        try:
            self.seal.from_bytes_public_key(kept[8:end])
            self.seal.from_bytes_secret_key(kept[end:])
        except Exception:  # noqa: BLE001, RUF100  whatever SEAL says of bytes that are no keys
            raise VeilfedError(Code.STATE_CORRUPT, "the institution's keys for ciphertexts cannot be read") from None

    def key_digits(self, seed: bytes) -> Iterator[KeyDigit]:
        """What the oracle computes with: the keys for rotations and for relinearisation, one digit after the other.

        Digit i of a switching key for the secret t from the secret s is an encryption under t, modulo all primes, of
        the polynomial that is P s modulo prime i and 0 modulo the others, where P is the special prime (SEAL's form).
        A `seed` is used once.
        """
        secret, n = self._secret, self.basis.n
        for step in self.steps:
            # Before the automorphism, as the evaluator applies it to results: what it makes of t is s.
            before = np.empty_like(secret)
            before[:, galois_order(step, n)] = secret
            yield from self._switching_key(step, secret, before, seed)
        squared, zero = np.empty_like(secret), np.zeros(n)
        for limb, (q, p) in enumerate(zip(self.basis.q, self.basis.p, strict=True)):
            kernels.add_product(zero, zero, secret[limb], secret[limb], squared[limb], q, p)
        yield from self._switching_key(0, squared, secret, seed)

    def _switching_key(self, rotation: int, source: Float, target: Float, seed: bytes) -> Iterator[KeyDigit]:
        basis = self.basis
        for digit in range(basis.special):
            first = np.empty_like(source)
            second = uniform(basis, len(first), seed, digit_nonce(rotation, digit, basis))
            error = basis.from_integers(Stream().noise(basis.n), len(first))
            message = np.zeros_like(source)
            factor = balanced(basis.primes[basis.special], basis.primes[digit])
            kernels.times_constant(source[digit], factor, message[digit], basis.q[digit], basis.p[digit])
            basis.each(
                kernels.encrypt,
                (
                    (message[k], error[k], second[k], target[k], first[k], basis.q[k], basis.p[k])
                    for k in range(len(first))
                ),
            )
            yield KeyDigit(rotation, digit, first)

    def public_key(self, seed: bytes) -> Float:
        """An encryption of zero [2, limbs, n] under the secret key, whose second component `seed` gives.

        The seed is public and may be anything: used once, as each key has a name of its own.
        """
        zero: Float = np.zeros((1, self.parameters.limbs, self.basis.n))
        made: Float = self.encrypt(zero, seed)[0]
        return made

    def encode(self, slots: Real) -> Float:
        """The polynomial [limbs, n] of real slots, at the parameters' scale."""
        data = self.seal.encode(np.asarray(slots, dtype=np.float64)).to_bytes("none")
        return seal.read_polynomial(data, self.parameters.limbs, self.basis)

    def encrypt(self, polynomials: Float, seed: bytes, first: int = 0) -> Float:
        """Fresh ciphertexts [C, 2, limbs, n] of polynomials [C, limbs, n], under the secret key.

        The second components are those that `seed` gives (`veilfed.ckks.sampling.uniform`), with nonces from `first`
        on: they need not be sent. A seed and a nonce are used once.
        """
        count, limbs, n = polynomials.shape
        out = np.empty((count, 2, limbs, n))
        self.basis.each(self._encrypt, ((polynomials[c], seed, first + c, out[c]) for c in range(count)))
        return out

    def _encrypt(self, polynomial: Float, seed: bytes, nonce: int, out: Float) -> None:
        limbs, n = polynomial.shape
        out[1] = uniform(self.basis, limbs, seed, nonce)
        error = self.basis.from_integers(Stream().noise(n), limbs)
        for limb in range(limbs):
            q, p = self.basis.q[limb], self.basis.p[limb]
            kernels.encrypt(polynomial[limb], error[limb], out[1, limb], self._secret[limb], out[0, limb], q, p)

    def open(self, values: Float) -> Float:
        """The polynomials [C, limbs, n] in ciphertexts [C, 2, limbs, n]."""
        out = np.empty((len(values), *values.shape[2:]))
        self.basis.each(
            kernels.decrypt,
            (
                (
                    values[c, 0, limb],
                    values[c, 1, limb],
                    self._secret[limb],
                    out[c, limb],
                    self.basis.q[limb],
                    self.basis.p[limb],
                )
                for c in range(len(values))
                for limb in range(values.shape[2])
            ),
        )
        return out

    def encrypt_by_seal(self, slots: Real) -> tuple[Float, float]:
        """Under the public key: values [2, limbs, n] and scale."""
        return seal.read_ciphertext(self.seal.encrypt(np.asarray(slots, dtype=np.float64)).to_bytes("none"), self.basis)

    def decrypt_by_seal(self, values: Float, scale: float) -> Real:
        """The slots of a ciphertext [components, limbs, n]."""
        form = len(values), values.shape[1]
        if form not in self._headers:
            self._headers[form] = self._header(*form)
        data = seal.ciphertext_bytes(values, scale, self._headers[form], self.basis)
        slots: Real = np.asarray(self.seal.decrypt(PyCtxt(pyfhel=self.seal, bytestring=data, scheme="ckks")))
        return slots

    def _header(self, components: int, limbs: int) -> bytes:
        """A serialised ciphertext with so many components and limbs."""
        like = self.seal.encrypt(np.zeros(1))
        for _ in range(self.parameters.limbs - limbs):
            self.seal.mod_switch_to_next_ctxt(like)
        if components == 3:
            self.seal.multiply(like, like)
        data: bytes = like.to_bytes("none")
        return data

    def refresh(self, masked: Float, shift: int, limbs: int, seed: bytes | None = None) -> Float:
        """Fresh ciphertexts [C, 2, limbs, n] of what is in masked ones of a lower level, divided by 2^shift.

        `seed` is a new one, given where it is sent in the place of the second components.
        """
        lifted = lift(self.open(masked), limbs, self.basis, shift)
        return self.encrypt(lifted, seed or secrets.token_bytes(SEED_BYTES))
