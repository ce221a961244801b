"""Both directions of one call: what is sent waits for as long as the call lives, and no longer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from veilfed.errors import Code, VeilfedError
from veilfed.rpc.progress import moving

__all__ = ["Conversation", "conversing"]

Request = TypeVar("Request")
Response = TypeVar("Response")

# Messages of either direction that are in memory.
WAITING = 4


class Conversation(Generic[Request, Response]):
    """To be gone through for the responses; raises what the call ends with, also where something is sent."""

    def __init__(self) -> None:
        self._sending: asyncio.Queue[Request] = asyncio.Queue(WAITING)
        self._received: asyncio.Queue[Response] = asyncio.Queue(WAITING)
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    async def requests(self) -> AsyncIterator[Request]:
        """For the call."""
        while True:
            yield await self._sending.get()

    async def read(self, responses: AsyncIterator[Response]) -> None:
        """Takes what comes until the call ends: grpc says nothing of its end to who only sends."""
        try:
            async for response in responses:
                await self._received.put(response)
        except Exception as error:  # told to who sends or receives next
            self._error = error
        finally:
            self._ended.set()

    async def send(self, request: Request) -> None:
        """Raises what the call has ended with, or VeilfedError(UNREACHABLE)."""
        if not await self._before_end(self._sending.put(request)):
            raise self._error or VeilfedError(Code.UNREACHABLE, "the call has ended while something was to be sent")

    def __aiter__(self) -> "Conversation[Request, Response]":
        return self

    async def __anext__(self) -> Response:
        found: list[Response] = []

        async def receive() -> None:
            found.append(await self._received.get())

        # What came before the end, or with it, comes first.
        if not self._received.empty() or await self._before_end(receive()) or not self._received.empty():
            return found[0] if found else self._received.get_nowait()
        raise self._error or StopAsyncIteration

    async def _before_end(self, waiting: Coroutine[Any, Any, None]) -> bool:
        """Whether something could be done before the call has ended."""
        wanted, ended = asyncio.create_task(waiting), asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({wanted, ended}, return_when=asyncio.FIRST_COMPLETED)
            return wanted.done()
        finally:
            wanted.cancel()
            ended.cancel()


@asynccontextmanager
async def conversing(
    call_of: Callable[[AsyncIterator[Request]], Any], what: str, silent_seconds: float
) -> AsyncIterator[Conversation[Request, Any]]:
    """A call; it is cancelled when the block ends. TIMEOUT where nothing comes for `silent_seconds`."""
    conversation: Conversation[Request, Any] = Conversation()
    call = call_of(conversation.requests())
    reading = asyncio.create_task(conversation.read(moving(call, what, silent_seconds)))
    try:
        yield conversation
    finally:
        call.cancel()
        reading.cancel()
        await asyncio.wait({reading})
