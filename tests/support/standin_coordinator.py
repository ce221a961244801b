"""A stand-in for the aggregator: offers what the test says and keeps what the agents send.

It is served by tests.support.coordinator_stub.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.v1.aggregator_pb2 import (
    FetchRequest,
    FetchResponse,
    JoinRequest,
    JoinResponse,
    PushHeader,
    PushRequest,
    PushResponse,
    StatRequest,
    StatResponse,
    TaskRefusal,
    Update,
    WorkRequest,
    WorkResponse,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorServicer

__all__ = ["StandInCoordinator"]

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class StandInCoordinator(CoordinatorServicer):
    """For one agent. `open` is offered on each new stream, as the aggregator does with open tasks."""

    protocol_version: int = protocol.VERSION
    lease_seconds: float = 3.0
    inline_limit: int = protocol.INLINE_LIMIT
    open: list[WorkResponse] = field(default_factory=list)
    joins: int = 0
    activities: "asyncio.Queue[str]" = field(default_factory=asyncio.Queue)
    updates: "asyncio.Queue[Update]" = field(default_factory=asyncio.Queue)
    refusals: "asyncio.Queue[TaskRefusal]" = field(default_factory=asyncio.Queue)
    # What Fetch gives out and Push has got; the first transfer of those in `cuts` breaks off after one chunk.
    model: bytes = b""
    pushed: bytearray = field(default_factory=bytearray)
    cuts: set[str] = field(default_factory=set)
    # Those in `stalls` say nothing more after one chunk, and `stalled` tells.
    stalls: set[str] = field(default_factory=set)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    fetches: list[FetchRequest] = field(default_factory=list)
    headers: list[PushHeader] = field(default_factory=list)
    _down: "asyncio.Queue[WorkResponse | None]" = field(default_factory=asyncio.Queue)

    def send(self, response: WorkResponse) -> None:
        """Sends something on the open stream."""
        self._down.put_nowait(response)

    def hang_up(self) -> None:
        """Ends the open stream."""
        self._down.put_nowait(None)

    async def activity(self, wanted: str, seconds: float = 120.0) -> None:
        """Waits for a heartbeat of this activity."""
        async with asyncio.timeout(seconds):
            while await self.activities.get() != wanted:
                pass

    async def Join(self, request: JoinRequest, context: Context) -> JoinResponse:  # noqa: N802
        self.joins += 1
        return JoinResponse(
            session=f"session-{self.joins}",
            protocol_version=self.protocol_version,
            lease_seconds=self.lease_seconds,
            inline_limit=self.inline_limit,
        )

    async def Work(  # noqa: N802
        self, request_iterator: AsyncIterator[WorkRequest], context: Context
    ) -> AsyncIterator[WorkResponse]:
        down: asyncio.Queue[WorkResponse | None] = asyncio.Queue()
        self._down = down
        for response in self.open:
            yield response
        reader = asyncio.create_task(self._read(request_iterator, down))
        try:
            while (item := await down.get()) is not None:
                yield item
        finally:
            reader.cancel()

    async def Stat(self, request: StatRequest, context: Context) -> StatResponse:  # noqa: N802
        return StatResponse(received=len(self.pushed))

    async def Push(  # noqa: N802
        self, request_iterator: AsyncIterator[PushRequest], context: Context
    ) -> PushResponse:
        async for request in request_iterator:
            if request.HasField("header"):
                self.headers.append(request.header)
                continue
            self.pushed += request.chunk
            await self._disturb("Push")
        return PushResponse(received=len(self.pushed), complete=len(self.pushed) == self.headers[-1].artifact.size)

    async def Fetch(self, request: FetchRequest, context: Context) -> AsyncIterator[FetchResponse]:  # noqa: N802
        self.fetches.append(request)
        for start in range(request.offset, len(self.model), protocol.CHUNK_BYTES):
            yield FetchResponse(chunk=self.model[start : start + protocol.CHUNK_BYTES])
            await self._disturb("Fetch")

    async def _disturb(self, method: str) -> None:
        if method in self.stalls:
            self.stalls.remove(method)
            self.stalled.set()
            await asyncio.Event().wait()
        if method in self.cuts:
            self.cuts.remove(method)
            raise VeilfedError(Code.UNREACHABLE, "the stand-in breaks off")

    async def _read(self, requests: AsyncIterator[WorkRequest], down: "asyncio.Queue[WorkResponse | None]") -> None:
        async for request in requests:
            if request.HasField("update"):
                self.updates.put_nowait(request.update)
            elif request.HasField("refusal"):
                self.refusals.put_nowait(request.refusal)
            else:
                self.activities.put_nowait(request.heartbeat.activity)
        down.put_nowait(None)
