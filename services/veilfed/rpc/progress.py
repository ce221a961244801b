"""Bounds on calls in which nothing moves. Keepalive ends dead connections, not calls of a peer that stands still."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from veilfed.errors import Code, VeilfedError

__all__ = ["STALL_SECONDS", "moving", "progressing"]

# A chunk of 1 MiB takes as long on a link of 28 kbit/s.
STALL_SECONDS = 300.0

Message = TypeVar("Message")


def _stalled(what: str, seconds: float) -> VeilfedError:
    return VeilfedError(Code.TIMEOUT, f"{what}: nothing moved for {seconds:g} seconds")


async def moving(messages: AsyncIterable[Message], what: str, seconds: float = STALL_SECONDS) -> AsyncIterator[Message]:
    """The messages of a stream. Raises VeilfedError(TIMEOUT) when the next one is not there after `seconds`."""
    received = aiter(messages)
    while True:
        try:
            async with asyncio.timeout(seconds):
                message = await anext(received)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _stalled(what, seconds) from None
        yield message


@asynccontextmanager
async def progressing(what: str, seconds: float = STALL_SECONDS) -> AsyncIterator[Callable[[], None]]:
    """A block that calls what it is given whenever something has moved.

    Raises VeilfedError(TIMEOUT) when it does not for `seconds`.
    """
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(seconds) as bound:
            yield lambda: None if bound.expired() else bound.reschedule(now() + seconds)
    except TimeoutError:
        raise _stalled(what, seconds) from None
