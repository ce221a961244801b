"""The Coordinator service: the agents' side. Logic only; the wiring is in server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from aggregator.engine import Engine
from aggregator.hub import Stream
from aggregator.intake import Intake
from aggregator.rounds import sessions
from aggregator.rounds.records import MaskOffer, Offer
from aggregator.transfers import Transfers
from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger
from veilfed.rpc.server import peer
from veilfed.v1.aggregator_pb2 import (
    FetchRequest,
    FetchResponse,
    JoinRequest,
    JoinResponse,
    PushRequest,
    PushResponse,
    StatRequest,
    StatResponse,
    WorkRequest,
    WorkResponse,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorServicer

__all__ = ["Coordinator"]

log = get_logger("aggregator.coordinator")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Coordinator(CoordinatorServicer):
    """Sessions, work, transfers."""

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._engine = engine
        self._intake = intake
        self._transfers = Transfers(engine)

    async def Join(self, request: JoinRequest, context: Context) -> JoinResponse:  # noqa: N802
        if request.protocol_version != protocol.VERSION:
            raise VeilfedError(
                Code.PROTOCOL_VERSION,
                f"the agent speaks version {request.protocol_version}, the aggregator {protocol.VERSION}",
            )
        identity = peer()
        if request.identity != str(identity):
            raise VeilfedError(Code.IDENTITY_MISMATCH, f"the connection is of {identity}")
        return JoinResponse(
            session=await self._engine.join(identity, request.software_version),
            protocol_version=protocol.VERSION,
            lease_seconds=self._engine.lease_seconds,
            inline_limit=protocol.INLINE_LIMIT,
        )

    async def Work(  # noqa: N802
        self, request_iterator: AsyncIterator[WorkRequest], context: Context
    ) -> AsyncIterator[WorkResponse]:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            return
        stream = await self._engine.connect(sessions.session_digest(first.session), peer())
        reader = asyncio.create_task(self._read(stream, first, requests))
        try:
            while (item := await stream.next()) is not None:
                if isinstance(item, Offer):
                    response = await self._engine.task(item)
                    response.receipts.extend(stream.receipts())
                    yield response
                elif isinstance(item, MaskOffer):
                    asked = await self._engine.masking.request(item, stream.identity.institution)
                    if asked is not None:
                        asked.receipts.extend(stream.receipts())
                        yield asked
                else:
                    yield item
        finally:
            reader.cancel()
            self._engine.hub.disconnect(stream)

    async def _read(self, stream: Stream, first: WorkRequest, requests: AsyncIterator[WorkRequest]) -> None:
        """Takes what the agent sends, one message after the other, until it ends its side."""
        error: VeilfedError | None = None
        try:
            await self._take(stream, first)
            async for request in requests:
                await self._take(stream, request)
        except VeilfedError as raised:
            error = raised
        except Exception as raised:  # the boundary of the service
            log.error("unexpected error on a work stream", identity=str(stream.identity), exc_info=raised)
            error = VeilfedError(Code.INTERNAL, "a fault of the service")
        finally:
            self._engine.hub.disconnect(stream)
            stream.close(error)

    async def _take(self, stream: Stream, request: WorkRequest) -> None:
        if sessions.session_digest(request.session) != stream.session:
            raise sessions.invalid()
        stream.last_seen_ms = self._engine.clock()
        body = request.WhichOneof("body")
        if body == "heartbeat":
            await self._engine.heartbeat(stream, request.heartbeat.activity)
        elif body == "update":
            await self._intake.update(stream, request.update)
        elif body == "mask":
            await self._engine.masking.answer(stream, request.mask)
        elif body == "refusal":
            await self._intake.refusal(stream, request.refusal)
        else:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "Work: a message without a known body")

    async def Stat(self, request: StatRequest, context: Context) -> StatResponse:  # noqa: N802
        return await self._transfers.stat(peer(), request)

    async def Push(  # noqa: N802
        self, request_iterator: AsyncIterator[PushRequest], context: Context
    ) -> PushResponse:
        return await self._transfers.push(peer(), aiter(request_iterator))

    async def Fetch(self, request: FetchRequest, context: Context) -> AsyncIterator[FetchResponse]:  # noqa: N802
        async for response in self._transfers.fetch(peer(), request):
            yield response
