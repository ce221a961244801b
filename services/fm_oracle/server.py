"""Puts the oracle together and runs it."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fm_oracle.config import OracleConfig
from fm_oracle.embed.batcher import Batcher
from fm_oracle.gate import ReleaseGate
from fm_oracle.models import registry
from fm_oracle.models.base import Model
from fm_oracle.servicer import OracleService, StreamLimits
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials, load_credentials
from veilfed.identity.names import Role
from veilfed.logs import get_logger
from veilfed.rpc.progress import STALL_SECONDS
from veilfed.rpc.server import create_server, run_server
from veilfed.v1.blocks_pb2_grpc import add_EncryptedBlocksServicer_to_server
from veilfed.v1.oracle_pb2_grpc import add_OracleServicer_to_server

if TYPE_CHECKING:
    from fm_oracle.blocks.service import BlocksService

__all__ = ["serve", "service"]

log = get_logger("oracle.server")

DRAIN_SECONDS = 5.0  # for streams that the server has cut off to write their refunds
PREPARERS = 2  # threads of tokenisers and image decoders, which work outside Python's lock


def _credentials(config: OracleConfig) -> Credentials:
    credentials = load_credentials(config.identity)
    if credentials.identity.role is not Role.ORACLE:
        raise VeilfedError(Code.IDENTITY_INVALID, f"{credentials.identity} is not the identity of an oracle")
    return credentials


@asynccontextmanager
async def service(
    model: Model[Any], config: OracleConfig, stall_seconds: float = STALL_SECONDS
) -> AsyncIterator[OracleService]:
    """The service and the threads and files that it needs, for as long as the block lasts; see StreamLimits."""
    # The number of threads is a property of the thread that calls torch, so the arithmetic's own thread sets it.
    arithmetic = ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(config.threads,))
    preparer = ThreadPoolExecutor(PREPARERS, "prepare")
    with ReleaseGate(config.state, config.limits) as gate, arithmetic, preparer:
        batcher = Batcher(
            model.forward, arithmetic, max_batch=config.max_batch, wait_seconds=config.batch_wait_ms / 1000
        )
        streams = StreamLimits(config.max_batch, config.read_ahead, config.max_streams, stall_seconds, config.prompts)
        oracle = OracleService(model, gate, batcher, preparer, arithmetic, streams)
        try:
            yield oracle
        finally:
            await batcher.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await oracle.drained()


@asynccontextmanager
async def _blocks(config: OracleConfig, credentials: Credentials) -> AsyncIterator["BlocksService | None"]:
    """The service on ciphertexts, where it is configured. Raises VeilfedError."""
    encrypted = config.encrypted
    if encrypted is None:
        yield None
        return
    try:
        from fm_oracle.blocks.compute import Served  # noqa: PLC0415  the extra `encrypted`
        from fm_oracle.blocks.service import BlocksService  # noqa: PLC0415
    except ImportError as error:
        raise VeilfedError(
            Code.PACKAGE_MISSING, f"encrypted: needs {error.name}", "pip install 'veilfed[oracle,encrypted]'"
        ) from None
    served = await asyncio.to_thread(Served.load, encrypted.student, encrypted.threads)
    limits = replace(config.limits, burst=max(config.burst, served.diagonals.samples))
    with ReleaseGate(config.state, limits) as gate:
        federation = credentials.identity.federation
        blocks = await asyncio.to_thread(BlocksService, served, encrypted, config.state, federation, gate)
        log.info("student loaded", version=served.version[:16], blocks=served.student.shape.blocks)
        yield blocks


async def serve(config: OracleConfig) -> None:
    """Serves until SIGTERM. Raises VeilfedError when the oracle cannot start."""
    credentials = _credentials(config)
    async with AsyncExitStack() as stack:
        server, port = create_server(credentials, config.listen)
        if config.model is not None:
            torch.set_num_threads(config.threads)
            model = await asyncio.to_thread(registry.load, config.model, config.packages)
            card = model.card
            log.info("model loaded", model=card.name, version=card.version, dimension=card.dimension)
            add_OracleServicer_to_server(await stack.enter_async_context(service(model, config)), server)
        blocks = await stack.enter_async_context(_blocks(config, credentials))
        if blocks is not None:
            add_EncryptedBlocksServicer_to_server(blocks, server)
        await run_server(server, port, name="oracle")
