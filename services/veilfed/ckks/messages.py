"""Ciphertexts and keys as messages, and back, with everything checked that a stranger could have made.

All `read_` functions raise VeilfedError(PROTOCOL_VIOLATION) for bytes that were changed or cut and residues out of
range, and VeilfedError(INPUT_INVALID) for other parameters, numbers or levels than are expected.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from veilfed import protocol
from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import EvaluationKeys, KeyDigit, digit_nonce, galois_order
from veilfed.ckks.packing import pack, packed_bytes, unpack
from veilfed.ckks.sampling import uniform
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError
from veilfed.v1.encrypted_pb2 import CiphertextBatch, EvaluationKeyDigit

__all__ = ["Expected", "ciphertext_messages", "key_messages", "public_seed", "read_ciphertexts", "read_keys"]

# What a message has besides its residues.
FRAME_BYTES = 4096
# A scale is a number of bits between these: what a sender says decides how a receiver reads the slots.
MAX_SCALE_BITS = 400


@dataclass(frozen=True)
class Expected:
    """What a receiver is ready for. `seeded`: second components must follow from a seed, from `seed` if it is given."""

    count: int
    limbs: int
    components: int = 2
    seeded: bool = False
    seed: bytes | None = None


def ciphertext_messages(
    values: Float, scale: float, basis: Basis, seed: bytes | None = None
) -> Iterator[CiphertextBatch]:
    """Ciphertexts [C, components, limbs, n], in messages that gRPC takes; with `seed`, without second components."""
    count, components, limbs, _ = values.shape
    sent = values if seed is None else values[:, :1]
    each = packed_bytes(sent.shape[1], limbs, basis)
    together = max(1, (protocol.MAX_MESSAGE_BYTES - FRAME_BYTES) // each)
    for first in range(0, count, together):
        part = sent[first : first + together]
        residues = pack(part, basis)
        yield CiphertextBatch(
            parameters=basis.parameters.digest,
            count=len(part),
            components=components,
            limbs=limbs,
            scale=scale,
            seed=seed or b"",
            first=first,
            residues=residues,
            sha256=hashlib.sha256(residues).digest(),
        )


def read_ciphertexts(messages: Iterable[CiphertextBatch], expected: Expected, basis: Basis) -> tuple[Float, float]:
    """The values [C, components, limbs, n] and their scale."""
    out = np.empty((expected.count, expected.components, expected.limbs, basis.n))
    done, scale = 0, 0.0
    for message in messages:
        _same_parameters(message.parameters, basis)
        _as_expected(message, expected)
        if done + message.count > expected.count:
            raise VeilfedError(Code.INPUT_INVALID, f"more than the {expected.count} ciphertexts that are expected")
        scale = message.scale if done == 0 else scale
        if message.scale != scale or not 1 <= scale < 2.0**MAX_SCALE_BITS:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"a scale of {message.scale:g}")
        _intact(message.residues, message.sha256, f"ciphertexts from number {done}")
        part = out[done : done + message.count]
        if message.seed:
            part[:, 0] = unpack(message.residues, (message.count, expected.limbs, basis.n), basis)
            _from_seed(part, message, basis)
        else:
            part[:] = unpack(message.residues, part.shape, basis)
        done += message.count
    if done < expected.count:
        raise VeilfedError(Code.INPUT_INVALID, f"{done} ciphertexts, expected {expected.count}")
    return out, scale


def key_messages(digits: Iterable[KeyDigit], seed: bytes, basis: Basis) -> Iterator[EvaluationKeyDigit]:
    """One message for each digit of each key; second components are not sent, as they follow from the seed."""
    for digit in digits:
        residues = pack(digit.first, basis)
        yield EvaluationKeyDigit(
            parameters=basis.parameters.digest,
            rotation=digit.rotation,
            digit=digit.digit,
            residues=residues,
            sha256=hashlib.sha256(residues).digest(),
            seed=seed,
        )


def read_keys(messages: Iterable[EvaluationKeyDigit], steps: Iterable[int], basis: Basis) -> EvaluationKeys:
    """The keys for relinearisation and for rotations by `steps` to the left, in any order of messages; others are left.

    Raises VeilfedError(INPUT_INVALID) also for keys that are missing.
    """
    wanted = sorted({step % basis.parameters.slots for step in steps} - {0})
    numbers = {rotation: number for number, rotation in enumerate((*wanted, 0))}
    digits, n = basis.special, basis.n
    values = np.empty((len(numbers), 2, digits, digits + 1, n))
    missing = {(rotation, digit) for rotation in numbers for digit in range(digits)}
    for message in messages:
        _same_parameters(message.parameters, basis)
        place = message.rotation, message.digit
        if place not in missing:
            continue
        _intact(message.residues, message.sha256, f"the key for rotation {message.rotation}, digit {message.digit}")
        key = values[numbers[message.rotation], :, message.digit]
        key[0] = unpack(message.residues, (digits + 1, n), basis)
        key[1] = uniform(basis, digits + 1, message.seed, digit_nonce(message.rotation, message.digit, basis))
        missing.remove(place)
    if missing:
        names = sorted({"relinearisation" if rotation == 0 else f"rotation {rotation}" for rotation, _ in missing})
        raise VeilfedError(Code.INPUT_INVALID, f"there are no keys for {', '.join(names)}", "Send all keys again.")
    orders = np.empty((len(numbers), n), dtype=np.int32)
    for rotation, number in numbers.items():
        orders[number] = galois_order(rotation, n)
    return EvaluationKeys(values, orders, tuple(wanted))


def _same_parameters(digest: str, basis: Basis) -> None:
    if digest != basis.parameters.digest:
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"made for other parameters than {basis.parameters}",
            "Both parties must use the same parameter set.",
        )


def public_seed(keys: str) -> bytes:
    """What the second component of the public key with this name follows from: nobody's choice."""
    return hashlib.sha256(b"veilfed public key\0" + keys.encode()).digest()


def _as_expected(message: CiphertextBatch, expected: Expected) -> None:
    if expected.seeded and not message.seed:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "ciphertexts whose second components do not follow from a seed")
    if expected.seed is not None and message.seed != expected.seed:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "a public key that was not made from the name of its keys")
    if message.limbs != expected.limbs:
        raise VeilfedError(
            Code.INPUT_INVALID, f"ciphertexts of the wrong level: {message.limbs} limbs, expected {expected.limbs}"
        )
    if message.components != expected.components:
        raise VeilfedError(
            Code.INPUT_INVALID, f"ciphertexts of {message.components} components, expected {expected.components}"
        )


def _intact(residues: bytes, sha256: bytes, what: str) -> None:
    if hashlib.sha256(residues).digest() != sha256:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"{what}: the bytes do not have the digest that came with them")


def _from_seed(part: Float, message: CiphertextBatch, basis: Basis) -> None:
    """Fills in second components."""
    if part.shape[1] != 2:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"a seed for ciphertexts of {part.shape[1]} components")

    def fill(number: int) -> None:
        part[number, 1] = uniform(basis, part.shape[2], message.seed, message.first + number)

    basis.each(fill, ((number,) for number in range(len(part))))
