"""Evaluation keys that SEAL has made, read in our form: what our evaluator does with them must be what SEAL does."""

import struct
from collections.abc import Iterator

import numpy as np

from client_agent.encrypted.seal import HEADER, WORD, residues
from client_agent.encrypted.vault import Vault
from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import EvaluationKeys, galois_element, galois_order
from veilfed.ckks.transform import Float

PARMS_ID = 32


def seal_keys(vault: Vault) -> EvaluationKeys:
    """Of SEAL's own making, for the secret key of an agent and its rotations."""
    vault.seal.relinKeyGen()
    if vault.steps:
        vault.seal.rotateKeyGen(list(vault.steps))
    rotations = vault.seal.to_bytes_rotate_key("none") if vault.steps else b""
    return read_evaluation_keys(rotations, vault.seal.to_bytes_relin_key("none"), vault.steps, vault.basis)


def _length(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at + WORD)[0])


def read_evaluation_keys(
    rotations: bytes, relinearisation: bytes, steps: tuple[int, ...], basis: Basis
) -> EvaluationKeys:
    """The keys for rotations by `steps` to the left, distinct modulo the number of slots, and for relinearisation."""
    n, data_primes = basis.n, basis.special
    values = np.empty((len(steps) + 1, 2, data_primes, data_primes + 1, n))
    orders = np.empty((len(steps) + 1, n), dtype=np.int32)
    orders[-1] = np.arange(n)
    # A key of the automorphism by an odd element e is in slot (e - 1) / 2.
    wanted = {(galois_element(step, n) - 1) // 2: number for number, step in enumerate(steps)}
    for slot, digits in _switching_keys(memoryview(rotations)) if steps else ():
        if slot in wanted:
            number = wanted.pop(slot)
            orders[number] = order = galois_order(steps[number], n)
            _read_key(digits, basis, values[number])
            values[number][..., order] = values[number].copy()
    assert not wanted
    for _, digits in _switching_keys(memoryview(relinearisation)):
        _read_key(digits, basis, values[-1])
    return EvaluationKeys(values, orders, steps)


def _switching_keys(data: memoryview) -> Iterator[tuple[int, list[memoryview]]]:
    """The slots that have a key, each with the serialised ciphertexts of its digits."""
    at = HEADER + PARMS_ID
    slots = int(struct.unpack_from("<Q", data, at)[0])
    at += WORD
    for slot in range(slots):
        count = int(struct.unpack_from("<Q", data, at)[0])
        at += WORD
        digits = []
        for _ in range(count):
            length = _length(data, at)
            digits.append(data[at : at + length])
            at += length
        if digits:
            yield slot, digits


def _read_key(digits: list[memoryview], basis: Basis, out: Float) -> None:
    """out [2, K, K + 1, n] of the ciphertexts of K digits."""
    for number, digit in enumerate(digits):
        out[:, number] = basis.load(residues(digit, (2, basis.special + 1, basis.n)))
