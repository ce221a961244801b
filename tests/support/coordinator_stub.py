"""A coordinator for tests of the transport: it answers each kind of RPC, or fails as it is told, and counts callers.

For tests of agents there is tests.support.standin_coordinator.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from veilfed.identity.material import Credentials
from veilfed.identity.names import Identity
from veilfed.rpc.server import create_server, peer
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
from veilfed.v1.aggregator_pb2_grpc import (
    CoordinatorServicer,
    add_CoordinatorServicer_to_server,
)

__all__ = ["Stub", "serving"]

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Stub(CoordinatorServicer):
    """Every method notes the peer, then raises `error` if there is one."""

    error: Exception | None = None
    peers: list[Identity] = field(default_factory=list)

    def _enter(self) -> None:
        self.peers.append(peer())
        if self.error is not None:
            raise self.error

    async def Join(self, request: JoinRequest, context: Context) -> JoinResponse:  # noqa: N802
        self._enter()
        return JoinResponse(session=str(peer()))

    async def Stat(self, request: StatRequest, context: Context) -> StatResponse:  # noqa: N802
        self._enter()
        return StatResponse()

    async def Work(  # noqa: N802
        self, request_iterator: AsyncIterator[WorkRequest], context: Context
    ) -> AsyncIterator[WorkResponse]:
        async for _ in request_iterator:
            yield WorkResponse()
            self._enter()

    async def Push(  # noqa: N802
        self, request_iterator: AsyncIterator[PushRequest], context: Context
    ) -> PushResponse:
        self._enter()
        return PushResponse(received=sum([len(request.chunk) async for request in request_iterator]))

    async def Fetch(self, request: FetchRequest, context: Context) -> AsyncIterator[FetchResponse]:  # noqa: N802
        self._enter()
        yield FetchResponse(chunk=b"chunk")


@asynccontextmanager
async def serving(credentials: Credentials, coordinator: CoordinatorServicer, **options: Any) -> AsyncIterator[str]:
    """A coordinator behind the real server; the address."""
    server, port = create_server(credentials, "127.0.0.1:0", **options)
    add_CoordinatorServicer_to_server(coordinator, server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
