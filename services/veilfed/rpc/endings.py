"""The server's last word on a call whose client was still sending.

When a write fails because the server has ended the call, grpc.aio puts INTERNAL in the place of the status that the
server sent (grpc/grpc issue 36066, seen in 1.85). In four of ten refused uploads, and at times in a stream of work or
of embeddings, the reason was lost that way. The interceptors below keep it.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any, TypeVar

import grpc

__all__ = ["interceptors"]

Result = TypeVar("Result")

# What grpc.aio makes of a failed write. An error of a handler has other words.
FAILED_WRITE = "Internal error from Core"
# How long the server's status may take to come after the write has failed: both are of the same end of the call.
LATE_SECONDS = 2.0


def interceptors() -> list[grpc.aio.ClientInterceptor]:
    """For calls whose client sends a stream. They leave messages alone, and must be the last: they need grpc's call."""
    return [_StreamUnary(), _StreamStream()]  # type: ignore[list-item]  # each also is a ClientInterceptor


def _now(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    coroutine.close()
    raise RuntimeError("the call has no status yet")


class _Ending:
    """The status of a call, kept at the moment when it is set: what a failed write sets does not count."""

    def __init__(self, call: Any) -> None:
        self._status: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._ended)
        if call.done():
            self._ended(call)

    def _ended(self, call: Any) -> None:
        """grpc calls this each time that it sets the status."""
        status = grpc.aio.AioRpcError(
            _now(call.code()),
            _now(call.initial_metadata()),
            _now(call.trailing_metadata()),
            _now(call.details()),
            _now(call.debug_error_string()),
        )
        if self._status is None and not _of_failed_write(status):
            self._status = status
            self._known.set()

    async def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """What the server said, if `error` stands in its place. Its code may be OK."""
        if not _of_failed_write(error):
            return error
        try:
            async with asyncio.timeout(LATE_SECONDS):
                await self._known.wait()
        except TimeoutError:
            return error
        return self._status or error


def _of_failed_write(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == FAILED_WRITE


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return _Answer(await continuation(client_call_details, request_iterator))


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        call = await continuation(client_call_details, request_iterator)
        return _responses(call, _Ending(call))


class _Answer:
    """A call with one response that raises what the server said."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ending = _Ending(call)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self._call
        except grpc.aio.AioRpcError as error:
            raise await self._ending.instead_of(error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


async def _responses(call: Any, ending: _Ending) -> AsyncIterator[Any]:
    """The responses of a call, to the end that the server gave it."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        said = await ending.instead_of(error)
        if said.code() is not grpc.StatusCode.OK:
            raise said from None
    finally:
        call.cancel()  # nobody reads any more; nothing happens to a call that has ended
