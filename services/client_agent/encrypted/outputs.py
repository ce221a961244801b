"""Block outputs of an institution's samples: computed once on their ciphertexts, and kept by content."""

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.cache import key_of
from client_agent.config import EncryptedConfig
from client_agent.egress import EgressGate
from client_agent.encrypted.blocks_client import BlocksClient, connect_blocks
from client_agent.encrypted.inputs import Inputs, load_inputs
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.identity.material import Credentials
from veilfed.jobs import BlindfedStrategy
from veilfed.logs import get_logger

__all__ = ["OutputStore", "block_features"]

log = get_logger("agent.blocks")

Float = NDArray[np.float32]


async def block_features(
    credentials: Credentials,
    config: EncryptedConfig,
    gate: EgressGate,
    folder: Path,
    modality: str,
    inputs: Sequence[Any],
    strategy: BlindfedStrategy,
) -> Float:
    """What `blindfed` trains on: float32 [n, t, 1 + R d], the mask of tokens and then the released outputs.

    Asks the oracle for what is not kept yet, a batch at a time. Raises VeilfedError: INPUT_INVALID where the oracle's
    student is not the one of the job; what the oracle, the gate or the file of inputs say.
    """
    prepared = await asyncio.to_thread(load_inputs, config.inputs)
    if prepared.modality != modality:
        raise VeilfedError(Code.INPUT_INVALID, f"the oracle's student is for inputs of {prepared.modality}")
    async with connect_blocks(credentials, config, gate, folder) as client:
        _check_student(client, strategy)
        store = OutputStore(folder / "outputs", client.card.version, client.card.inputs_sha256, strategy)
        keys = await asyncio.to_thread(lambda: [key_of(value).hex() for value in inputs])
        wanted = [key for key in dict.fromkeys(keys) if not store.has(key)]
        if wanted:
            log.info("samples for ciphertexts", samples=len(keys), to_ask=len(wanted))
        by_key = dict(zip(keys, inputs, strict=True))
        for first in range(0, len(wanted), client.card.samples):
            batch = wanted[first : first + client.card.samples]
            await _computed(client, prepared, store, batch, [by_key[key] for key in batch])
    return await asyncio.to_thread(store.features, keys)


def _check_student(client: BlocksClient, strategy: BlindfedStrategy) -> None:
    card = client.card
    found = (card.dimension, card.blocks, list(card.released), card.tokens)
    wanted = (strategy.dimension, strategy.blocks, list(strategy.released), strategy.tokens)
    if found != wanted:
        names = ("dimension", "blocks", "released", "tokens")
        other = [f"{n} {f} and not {w}" for n, f, w in zip(names, found, wanted, strict=True) if f != w]
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"the oracle's student has {'; '.join(other)}",
            "Ask the model's owner what `veilfed oracle student` says, and submit a job for that.",
        )


async def _computed(
    client: BlocksClient, prepared: Inputs, store: "OutputStore", keys: Sequence[str], inputs: Sequence[Any]
) -> None:
    """One batch on ciphertexts, and into the store."""
    samples = await asyncio.to_thread(prepared.features, inputs)
    found = await client.outputs(samples, prepared.indicators)
    await asyncio.to_thread(store.keep, keys, found)
    await client.ended()


class OutputStore:
    """A file for each sample: float32 [t, R, d]. Of one student with its inputs and releases; others are removed."""

    def __init__(self, folder: Path, version: str, inputs_sha256: str, strategy: BlindfedStrategy) -> None:
        about = f"{version} {inputs_sha256} {strategy.released}"
        self._folder, self._strategy = folder / hashlib.sha256(about.encode()).hexdigest(), strategy
        if not self._folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, parents=True)

    def has(self, key: str) -> bool:
        return self._place(key).exists()

    def keep(self, keys: Sequence[str], found: Sequence[Float]) -> None:
        for key, sample in zip(keys, found, strict=True):
            write_atomic(self._place(key), np.ascontiguousarray(sample, np.float32).tobytes())

    def features(self, keys: Sequence[str]) -> Float:
        """Of all samples, as `block_features`. Raises VeilfedError(STATE_CORRUPT)."""
        width = self._strategy.width - 1
        out = np.zeros((len(keys), self._strategy.tokens, 1 + width), np.float32)
        for row, key in enumerate(keys):
            data = np.frombuffer(self._place(key).read_bytes(), np.float32)
            if not len(data) or len(data) % width:
                raise VeilfedError(Code.STATE_CORRUPT, f"{self._place(key)}: not a sample's outputs")
            sample = data.reshape(-1, width)
            out[row, : len(sample), 0] = 1
            out[row, : len(sample), 1:] = sample
        return out

    def _place(self, key: str) -> Path:
        return self._folder / f"{key}.bin"
