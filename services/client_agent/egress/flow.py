"""One call's outgoing messages: what each is, whether it may leave, and the interceptors that see to it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

if TYPE_CHECKING:
    from client_agent.egress.gate import Destination, EgressGate

__all__ = ["Flow", "interceptors"]


class Flow:
    """The outgoing side of one call: where it goes, and how far an upload has come."""

    def __init__(self, destination: "Destination", method: str, metadata: bool = False) -> None:
        self.destination = destination
        self.method = method
        # Metadata would go past the check of messages: none is allowed.
        self.metadata = metadata
        # Of an upload: the artifact's job and bytes, and where the next chunk starts.
        self.job = ""
        self.artifact: memoryview | None = None
        self.position = 0
        # Why the requests ended early: grpc cancels the call then, and this is what its caller gets to see.
        self.failure: Exception | None = None


def interceptors(gate: "EgressGate", destination: "Destination") -> list[grpc.aio.ClientInterceptor]:
    """One interceptor for each shape of a call. They belong at the end of a channel's list, next to the wire.

    After them come those of veilfed.rpc.endings alone, which pass messages on as they are.
    """
    kinds: list[type[_Interceptor]] = [_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream]
    return [kind(gate, destination) for kind in kinds]  # type: ignore[misc]  # each also is a ClientInterceptor


class _Interceptor:
    def __init__(self, gate: "EgressGate", destination: "Destination") -> None:
        self._gate = gate
        self._destination = destination

    def _opened(self, details: Any) -> Flow:
        """The flow of a call whose messages come later, which may be started."""
        flow = self._flow(details)
        self._gate.open(flow)
        return flow

    def _flow(self, details: Any) -> Flow:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        return Flow(self._destination, method, metadata=bool(list(details.metadata or ())))

    async def _admitted(
        self, flow: Flow, messages: AsyncIterable[Message] | Iterable[Message]
    ) -> AsyncIterator[Message]:
        """The messages that may leave, up to the first that may not: grpc then cancels the call."""
        try:
            if isinstance(messages, AsyncIterable):
                async for message in messages:
                    yield self._gate.admit(flow, message)
            else:
                for message in messages:
                    yield self._gate.admit(flow, message)
        except Exception as error:
            flow.failure = error
            raise


class _UnaryUnary(_Interceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        admitted = self._gate.admit(self._flow(client_call_details), request)
        return await continuation(client_call_details, admitted)


class _UnaryStream(_Interceptor, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        admitted = self._gate.admit(self._flow(client_call_details), request)
        return await continuation(client_call_details, admitted)


class _StreamUnary(_Interceptor, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        flow = self._opened(client_call_details)
        call = await continuation(client_call_details, self._admitted(flow, request_iterator))
        return _Explained(call, flow)


class _StreamStream(_Interceptor, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        flow = self._opened(client_call_details)
        call = await continuation(client_call_details, self._admitted(flow, request_iterator))
        return _responses(call, flow)


class _Explained:
    """A call that raises what ended its requests where grpc would only say that it was cancelled."""

    def __init__(self, call: Any, flow: Flow) -> None:
        self._call = call
        self._flow = flow

    def __await__(self) -> Any:
        try:
            return (yield from self._call.__await__())
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            if self._flow.failure is not None:
                raise self._flow.failure from None
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


async def _responses(call: Any, flow: Flow) -> AsyncIterator[Any]:
    """The responses of a call; ends with what ended its requests where grpc would only say that it was cancelled."""
    try:
        async for response in call:
            yield response
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        if flow.failure is not None:
            raise flow.failure from None
        raise
