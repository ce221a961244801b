"""Ciphertexts and keys on the wire: they come back, and what was tampered with is refused by name."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from client_agent.encrypted.vault import Vault
from veilfed import protocol
from veilfed.ckks.basis import Basis
from veilfed.ckks.messages import Expected, ciphertext_messages, key_messages, read_ciphertexts, read_keys
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.sampling import SEED_BYTES
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError
from veilfed.v1.encrypted_pb2 import CiphertextBatch, EvaluationKeyDigit

pytestmark = pytest.mark.encrypted

PARAMETERS = Parameters(13, (45, 40, 40), 48, 40)
STEPS = (1, 8)
SEED = bytes(range(SEED_BYTES))
COUNT = 40


@pytest.fixture(scope="module")
def basis() -> Basis:
    return Basis(PARAMETERS, threads=2)


@pytest.fixture(scope="module")
def vault(basis: Basis) -> Vault:
    return Vault(basis, STEPS)


@pytest.fixture(scope="module")
def slots() -> Float:
    return np.random.default_rng(0).uniform(-1, 1, (COUNT, PARAMETERS.slots))


@pytest.fixture(scope="module")
def values(vault: Vault, slots: Float) -> Float:
    return vault.encrypt(np.stack([vault.encode(row) for row in slots]), SEED)


@pytest.mark.parametrize("seed", [None, SEED], ids=["whole", "seeded"])
def test_ciphertexts_come_back(seed: bytes | None, values: Float, basis: Basis) -> None:
    data = [message.SerializeToString() for message in ciphertext_messages(values, 2.0**40, basis, seed)]
    assert len(data) > 1
    assert max(map(len, data)) <= protocol.MAX_MESSAGE_BYTES
    messages = [CiphertextBatch.FromString(item) for item in data]
    back, scale = read_ciphertexts(messages, Expected(COUNT, 3), basis)
    assert scale == 2.0**40
    assert np.array_equal(back, values)
    # A residue takes as many bits as its prime has; from a seed, half of the polynomials.
    residues = COUNT * (1 if seed else 2) * sum(PARAMETERS.data_bits) * PARAMETERS.n // 8
    assert sum(map(len, data)) < residues + len(data) * 256


def test_keys_come_back_in_any_order(vault: Vault, basis: Basis) -> None:
    digits = list(vault.key_digits(SEED))
    data = [m.SerializeToString() for m in key_messages(digits, SEED, basis)]
    assert max(map(len, data)) <= protocol.MAX_MESSAGE_BYTES
    back = read_keys(map(EvaluationKeyDigit.FromString, reversed(data)), STEPS, basis)
    assert back.steps == STEPS
    for made in digits:
        number = back.rotation(made.rotation) if made.rotation else back.relinearisation
        assert np.array_equal(back.values[number, 0, made.digit], made.first)
    # Of the two components of a digit one is sent.
    residues = len(digits) * (sum(PARAMETERS.data_bits) + PARAMETERS.special_bits) * PARAMETERS.n // 8
    assert sum(map(len, data)) < residues + len(data) * 256


def other_parameters(message: CiphertextBatch) -> None:
    message.parameters = Parameters(13, (45, 40, 41), 48, 40).digest


def tampered(message: CiphertextBatch) -> None:
    message.residues = bytes([message.residues[0] ^ 1]) + message.residues[1:]


def out_of_range(message: CiphertextBatch) -> None:
    message.residues = b"\xff" * len(message.residues)
    message.sha256 = hashlib.sha256(message.residues).digest()


def cut(message: CiphertextBatch) -> None:
    message.residues = message.residues[:-8]
    message.sha256 = hashlib.sha256(message.residues).digest()


def wrong_level(message: CiphertextBatch) -> None:
    message.limbs = 2


def three_components(message: CiphertextBatch) -> None:
    message.components = 3


def short_seed(message: CiphertextBatch) -> None:
    message.seed = b"short"


def endless_scale(message: CiphertextBatch) -> None:
    message.scale = float("inf")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (other_parameters, Code.INPUT_INVALID, "made for other parameters than Parameters"),
        (tampered, Code.PROTOCOL_VIOLATION, "ciphertexts from number 0: the bytes do not have the digest"),
        (out_of_range, Code.PROTOCOL_VIOLATION, "a residue is not below its prime"),
        (cut, Code.PROTOCOL_VIOLATION, "need .* bytes, there are"),
        (wrong_level, Code.INPUT_INVALID, "ciphertexts of the wrong level: 2 limbs, expected 3"),
        (three_components, Code.INPUT_INVALID, "ciphertexts of 3 components, expected 2"),
        (short_seed, Code.INPUT_INVALID, "a seed of 5 bytes"),
        (endless_scale, Code.PROTOCOL_VIOLATION, "a scale of inf"),
    ],
)
def test_ciphertexts_that_are_refused(
    change: Callable[[CiphertextBatch], None], code: Code, words: str, values: Float, basis: Basis
) -> None:
    messages = list(ciphertext_messages(values, 2.0**40, basis, SEED))
    change(messages[0])
    with pytest.raises(VeilfedError, match=words) as caught:
        read_ciphertexts(messages, Expected(COUNT, 3), basis)
    assert caught.value.code is code


def test_other_numbers_of_ciphertexts_are_refused(values: Float, basis: Basis) -> None:
    messages = list(ciphertext_messages(values, 2.0**40, basis, SEED))
    with pytest.raises(VeilfedError, match=f"{COUNT} ciphertexts, expected {COUNT + 1}"):
        read_ciphertexts(messages, Expected(COUNT + 1, 3), basis)
    with pytest.raises(VeilfedError, match=f"more than the {COUNT - 1} ciphertexts"):
        read_ciphertexts(messages, Expected(COUNT - 1, 3), basis)


def test_keys_that_are_missing_or_were_changed_are_refused(vault: Vault, basis: Basis) -> None:
    messages = list(key_messages(vault.key_digits(SEED), SEED, basis))
    with pytest.raises(VeilfedError, match="there are no keys for rotation 16") as caught:
        read_keys(messages, (*STEPS, 16), basis)
    assert caught.value.code is Code.INPUT_INVALID
    with pytest.raises(VeilfedError, match="there are no keys for relinearisation, rotation 8"):
        read_keys([m for m in messages if (m.rotation, m.digit) not in {(8, 1), (0, 2)}], STEPS, basis)
    messages[4].residues = messages[4].residues[:-1] + b"\x00"
    with pytest.raises(VeilfedError, match="the key for rotation 8, digit 1: the bytes"):
        read_keys(messages, STEPS, basis)
    messages[4].parameters = "0" * 64
    with pytest.raises(VeilfedError, match="made for other parameters"):
        read_keys(messages, STEPS, basis)
