"""The institution's samples with their embeddings: each input is sent to the oracle once, and never again."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from client_agent.cache import EmbeddingCache, key_of
from client_agent.config import AgentConfig
from client_agent.data.source import Samples, load
from client_agent.egress import EgressGate
from client_agent.oracle_client import Batch, Inputs, OracleClient, connect_oracle
from client_agent.startup import load_agent_credentials, open_gate
from client_agent.state import StateFolder
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import BlindfedStrategy
from veilfed.logs import get_logger

__all__ = ["Features", "embed_apart"]

log = get_logger("agent.features")

Float = NDArray[np.float32]

PROGRESS_SECONDS = 2.0


class Features:
    """Embeddings of all samples of the configuration's data source, float32 [n, d], as the oracle gave them."""

    def __init__(self, config: AgentConfig, folder: Path, gate: EgressGate) -> None:
        self._config = config
        self._folder = folder
        self._gate = gate
        # Two jobs at a time must not ask for the same embeddings twice.
        self._lock = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._samples: Samples | None = None
        self._version = ""
        self._features: Float | None = None

    async def embedded(self, dimension: int) -> tuple[Samples, Float]:
        """The samples and their embeddings, of length `dimension`.

        Raises VeilfedError: INPUT_INVALID when the oracle's embeddings have another length or its model is for other
        inputs; what the data source, the oracle or the gate say.
        """
        async with self._lock, self.oracle(dimension) as (samples, oracle):
            version = oracle.card.version
            if self._features is None or self._version != version:
                self._features = await self._kept(oracle, samples.modality, samples.inputs)
                self._version = version
            return samples, self._features

    async def prompted(self, dimension: int, prompts: Float, rows: NDArray[np.intp]) -> Float:
        """Embeddings float32 [len(rows), d] of some samples with prompt tokens [M, D]. Errors as `embedded`."""
        async with self._lock, self.oracle(dimension) as (samples, oracle):
            oracle.check_prompts(prompts.shape[1], gradients=False)
            inputs: Any = [samples.inputs[row] for row in rows]
            return await self._kept(oracle, samples.modality, inputs, prompts)

    async def blocks(self, strategy: BlindfedStrategy) -> tuple[Samples, Float]:
        """The samples and the released outputs of the owner's blocks on their ciphertexts.

        float32 [n, t, 1 + R d], see client_agent.encrypted.outputs. Raises VeilfedError: POLICY_DENIED where no such
        oracle is configured, PACKAGE_MISSING, and what that oracle, the data source or the gate say.
        """
        config = self._config.encrypted
        if config is None:
            raise VeilfedError(Code.POLICY_DENIED, "jobs on encrypted blocks need `encrypted` in the configuration")
        try:
            from client_agent.encrypted.outputs import block_features  # noqa: PLC0415  the extra `encrypted`
        except ImportError as error:
            raise VeilfedError(
                Code.PACKAGE_MISSING, f"encrypted: needs {error.name}", "pip install 'veilfed[agent,encrypted]'"
            ) from None
        samples = await self.samples()
        credentials = await asyncio.to_thread(load_agent_credentials, self._config)
        folder = self._config.state / "encrypted"
        async with self._lock:
            return samples, await block_features(
                credentials, config, self._gate, folder, samples.modality, samples.inputs, strategy
            )

    @asynccontextmanager
    async def oracle(self, dimension: int) -> AsyncIterator[tuple[Samples, OracleClient]]:
        """The samples, and the oracle whose embeddings have length `dimension`. Errors as `embedded`."""
        samples = await self.samples()
        credentials = await asyncio.to_thread(load_agent_credentials, self._config)
        async with connect_oracle(credentials, self._config.own_oracle, self._gate) as oracle:
            card = oracle.card
            if card.dimension != dimension:
                raise VeilfedError(
                    Code.INPUT_INVALID, f"the oracle's embeddings have length {card.dimension}, not {dimension}"
                )
            oracle.check_modality(samples.modality)
            yield samples, oracle

    async def samples(self) -> Samples:
        """All samples of the data source. Raises VeilfedError: what the data source says."""
        async with self._loading:
            if self._samples is None:
                self._samples = await asyncio.to_thread(load, self._config.data, self._config.packages_folder)
                log.info("data loaded", samples=len(self._samples), modality=self._samples.modality)
            return self._samples

    async def _kept(
        self, oracle: OracleClient, modality: Literal["text", "image"], inputs: Any, prompts: Float | None = None
    ) -> Float:
        """Embeddings of the inputs: from the cache, the rest from the oracle and into the cache."""
        card = oracle.card
        with EmbeddingCache(self._folder, card.version, modality, card.dimension, prompts) as cache:
            features, absent = await asyncio.to_thread(cache.get, inputs)
            wanted = await asyncio.to_thread(_distinct, [inputs[index] for index in absent])
            if not wanted:
                return features
            log.info("embedding", samples=len(inputs), to_ask=len(wanted))
            async for rows, embeddings in _progress(oracle.embed(modality, wanted, prompts), len(wanted)):
                await asyncio.to_thread(cache.add, [wanted[row] for row in rows], embeddings)
            features, absent = await asyncio.to_thread(cache.get, inputs)
        if len(absent):
            raise VeilfedError(Code.STATE_CORRUPT, f"{cache.path}: what was just written cannot be read")
        return features


def _distinct(inputs: Any) -> Any:
    """Each content once: samples may repeat."""
    return list({key_of(value): value for value in inputs}.values())


async def embed(
    oracle: OracleClient, modality: Literal["text", "image"], inputs: Inputs, prompts: Float | None = None
) -> Float:
    """Embeddings float32 [n, d] of inputs, with prompt tokens [M, D], past the cache. Raises VeilfedError."""
    features = np.empty((len(inputs), oracle.card.dimension), np.float32)
    async for rows, embeddings in oracle.embed(modality, inputs, prompts):
        features[rows] = embeddings
    return features


async def embed_apart(
    config: AgentConfig, inputs: Inputs, dimension: int | None = None, prompts: Float | None = None
) -> Float:
    """Embeddings float32 [n, d], with prompt tokens [M, D], of inputs that are not the agent's samples.

    They are not cached, and in a ledger of their own.

    The agent may run beside it. Raises VeilfedError: INPUT_INVALID where the oracle's embeddings have not the length
    `dimension`; what the oracle or the gate say.
    """
    credentials = load_agent_credentials(config)
    with open_gate(config, credentials, StateFolder(config.state).predictions_ledger) as gate:
        async with connect_oracle(credentials, config.own_oracle, gate) as oracle:
            if dimension not in {None, oracle.card.dimension}:
                raise VeilfedError(Code.INPUT_INVALID, "the oracle is not the one that the job was trained with")
            if prompts is not None:
                oracle.check_prompts(prompts.shape[1], gradients=False)
            return await embed(oracle, "text" if isinstance(inputs[0], str) else "image", inputs, prompts)


async def _progress(batches: AsyncGenerator[Batch, None], total: int) -> AsyncGenerator[Batch, None]:
    """The batches, with a line of the log now and then."""
    done, told = 0, time.monotonic()
    async with aclosing(batches):
        async for rows, embeddings in batches:
            yield rows, embeddings
            done += len(rows)
            if time.monotonic() - told > PROGRESS_SECONDS or done == total:
                told = time.monotonic()
                log.info("embedding", done=done, total=total)
