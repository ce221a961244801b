"""The agent's side of the encrypted benchmark, in a process of its own; the two sides exchange messages of the wire."""

import multiprocessing
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
from google.protobuf.message import Message

from client_agent.encrypted.vault import Vault
from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import EvaluationKeys
from veilfed.ckks.messages import Expected, ciphertext_messages, key_messages, read_ciphertexts, read_keys
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.sampling import SEED_BYTES
from veilfed.ckks.transform import Float
from veilfed.memory import keep_all_memory
from veilfed.v1.encrypted_pb2 import CiphertextBatch, EvaluationKeyDigit

__all__ = ["RemoteAgent", "Setting", "peak_mb"]

# Inputs that are encrypted at a time.
TOGETHER = 64


@dataclass(frozen=True)
class Setting:
    """What an agent is started with: `steps` are those of rotations."""

    parameters: Parameters
    steps: tuple[int, ...]
    threads: int


def peak_mb() -> float:
    """The largest resident memory of this process so far, in MB of 1e6 bytes.

    Not getrusage's: that of a new process begins with what the one that has started it had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(found) * 1024 / 1e6


def _serve(connection: Connection, setting: Setting) -> None:
    """The agent's process: answers until the other side hangs up."""
    keep_all_memory()
    basis = Basis(setting.parameters, setting.threads)
    agent = _Agent(connection, Vault(basis, setting.steps), basis)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        getattr(agent, name)(*arguments)


class _Agent:
    def __init__(self, connection: Connection, vault: Vault, basis: Basis) -> None:
        self._connection, self._vault, self._basis = connection, vault, basis

    def keys(self) -> None:
        seed = secrets.token_bytes(SEED_BYTES)
        _send(self._connection, key_messages(self._vault.key_digits(seed), seed, self._basis))
        public = self._vault.public_key(seed := secrets.token_bytes(SEED_BYTES))
        _send(self._connection, ciphertext_messages(public[None], 1.0, self._basis, seed))

    def encrypt(self, slots: Float, scale: float) -> None:
        """Slots at any scale: they are made smaller, and the ciphertexts are read larger."""
        smaller = scale / self._basis.parameters.scale
        seed = secrets.token_bytes(SEED_BYTES)
        values = self._vault.encrypt(np.stack([self._vault.encode(row * smaller) for row in slots]), seed)
        _send(self._connection, ciphertext_messages(values, scale, self._basis, seed))

    def refresh(self, count: int, low: int, shift: int, limbs: int) -> None:
        masked, scale = read_ciphertexts(
            _received(self._connection, CiphertextBatch), Expected(count, low), self._basis
        )
        seed = secrets.token_bytes(SEED_BYTES)
        fresh = self._vault.refresh(masked, shift, limbs, seed)
        _send(self._connection, ciphertext_messages(fresh, scale, self._basis, seed))

    def decrypt(self, count: int, limbs: int) -> None:
        values, scale = read_ciphertexts(
            _received(self._connection, CiphertextBatch), Expected(count, limbs), self._basis
        )
        self._connection.send(np.stack([self._vault.decrypt_by_seal(row, scale) for row in values]))

    def peak(self) -> None:
        self._connection.send(peak_mb())


def _send(connection: Connection, messages: Iterator[Any]) -> int:
    """Sends messages and an empty one; how many bytes they have."""
    total = 0
    for message in messages:
        data = message.SerializeToString()
        connection.send_bytes(data)
        total += len(data)
    connection.send_bytes(b"")
    return total


def _received(connection: Connection, kind: type[Message]) -> Iterator[Any]:
    while data := connection.recv_bytes():
        message = kind()
        message.ParseFromString(data)
        yield message


class RemoteAgent:
    """What the oracle's process sees of the agent's; `seconds` it has waited for it, `bytes` that went between them."""

    def __init__(self, setting: Setting, basis: Basis) -> None:
        self._basis = basis
        self._setting = setting
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, setting))
        self._process.start()
        theirs.close()
        self.seconds = 0.0
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def keys(self) -> tuple[EvaluationKeys, Float]:
        """Evaluation keys, and the public key [2, limbs, n]."""
        self._connection.send(("keys", ()))
        keys = read_keys(self._received(EvaluationKeyDigit), self._setting.steps, self._basis)
        public, _ = self._ciphertexts(Expected(1, self._basis.parameters.limbs))
        return keys, public[0]

    def encrypt(self, slots: Float, scale: float) -> Float:
        """Some at a time: the agent needs no room for all."""
        parts = (slots[start : start + TOGETHER] for start in range(0, len(slots), TOGETHER))
        return np.concatenate([self._encrypted(part, scale) for part in parts])

    def _encrypted(self, slots: Float, scale: float) -> Float:
        self._connection.send(("encrypt", (slots, scale)))
        return self._ciphertexts(Expected(len(slots), self._basis.parameters.limbs))[0]

    def refresh(self, masked: Float, shift: int, limbs: int) -> Float:
        """The evaluator's agent."""
        started = time.perf_counter()
        self._connection.send(("refresh", (len(masked), masked.shape[2], shift, limbs)))
        self.bytes += _send(self._connection, ciphertext_messages(masked, 1.0, self._basis))
        fresh, _ = self._ciphertexts(Expected(len(masked), limbs))
        self.seconds += time.perf_counter() - started
        return fresh

    def decrypt(self, values: Float, scale: float) -> Float:
        self._connection.send(("decrypt", (len(values), values.shape[2])))
        _send(self._connection, ciphertext_messages(values, scale, self._basis))
        slots: Float = self._connection.recv()
        return slots

    def peak_mb(self) -> float:
        self._connection.send(("peak", ()))
        peak: float = self._connection.recv()
        return peak

    def _ciphertexts(self, expected: Expected) -> tuple[Float, float]:
        return read_ciphertexts(self._received(CiphertextBatch), expected, self._basis)

    def _received(self, kind: type[Message]) -> Iterator[Any]:
        for message in _received(self._connection, kind):
            self.bytes += message.ByteSize()
            yield message
