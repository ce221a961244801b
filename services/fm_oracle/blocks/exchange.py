"""Between a stream of the event loop and the thread that computes: messages both ways, a bounded number at a time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from veilfed.ckks.basis import Basis
from veilfed.ckks.messages import Expected, ciphertext_messages, read_ciphertexts
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError
from veilfed.v1.blocks_pb2 import BlockOutput, ForwardRequest, ForwardResponse, PassProgress, Refresh
from veilfed.v1.encrypted_pb2 import CiphertextBatch

__all__ = ["Exchange"]

# Responses that wait for the client to read: it sets the pace.
WAITING = 4
# Of all answers of one pass: others wait for it.
PATIENCE_SECONDS = 3600.0

Result = TypeVar("Result")


class Exchange:
    """One pass's stream. What the thread calls raises VeilfedError(CANCELLED) once the stream is over."""

    def __init__(self, requests: AsyncIterator[ForwardRequest], basis: Basis, stall_seconds: float) -> None:
        self._requests, self._basis, self._stall_seconds = requests, basis, stall_seconds
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[ForwardResponse | None] = asyncio.Queue(WAITING)
        self._over = False
        # What the thread waits for.
        self._current: Future[Any] | None = None
        self._patience = PATIENCE_SECONDS

    async def responses(self, work: Callable[[], None]) -> AsyncGenerator[ForwardResponse, None]:
        """What `work`, which runs in a thread, sends. Raises what it raises; ends after it has ended."""

        async def run() -> None:
            try:
                await asyncio.to_thread(work)
            finally:
                if not self._over:
                    await self._responses.put(None)

        working = asyncio.create_task(run())
        try:
            while (response := await self._responses.get()) is not None:
                yield response
            await working
        finally:
            self._over = True
            while not working.done():  # until it notices, at its next message or phase
                if self._current is not None:
                    self._current.cancel()
                while not self._responses.empty():
                    self._responses.get_nowait()
                await asyncio.wait({working}, timeout=0.1)
            if not working.cancelled():
                working.exception()  # told already, or nobody is there to be told

    # For the thread.

    def send(self, response: ForwardResponse) -> None:
        self._call(self._responses.put(response))

    def tell(self, phase: str, done: int, total: int) -> None:
        self.send(ForwardResponse(progress=PassProgress(phase=phase, done=done, total=total)))

    def received(self, field: str, expected: Expected) -> tuple[Float, float]:
        """The next ciphertexts, which must come in this field, and their scale.

        Raises VeilfedError: PROTOCOL_VIOLATION for another message, TIMEOUT, and as veilfed.ckks.messages does.
        """
        return read_ciphertexts(self._batches(field, expected.count), expected, self._basis)

    def refresh(self, masked: Float, shift: int, limbs: int) -> Float:
        """The evaluator's agent."""
        count, _, masked_limbs, _ = masked.shape
        header = Refresh(count=count, masked_limbs=masked_limbs, limbs=limbs, shift=shift)
        self.send(ForwardResponse(refresh=header))
        for batch in ciphertext_messages(masked, 1.0, self._basis):
            self.send(ForwardResponse(masked=batch))
        return self.received("refreshed", Expected(count, limbs, seeded=True))[0]

    def output(self, block: int, batches: list[CiphertextBatch]) -> None:
        """A released output."""
        count = sum(batch.count for batch in batches)
        self.send(ForwardResponse(output=BlockOutput(block=block, count=count, limbs=batches[0].limbs)))
        for batch in batches:
            self.send(ForwardResponse(values=batch))

    def _batches(self, field: str, count: int) -> Iterator[CiphertextBatch]:
        done = 0
        while done < count:
            request = self._call(self._next())
            if request.WhichOneof("body") != field:
                raise VeilfedError(Code.PROTOCOL_VIOLATION, f"expected {field} of {count} ciphertexts")
            batch: CiphertextBatch = getattr(request, field)
            if not batch.count:
                raise VeilfedError(Code.PROTOCOL_VIOLATION, f"{field} without ciphertexts")
            yield batch
            done += batch.count

    async def _next(self) -> ForwardRequest:
        started = self._loop.time()
        try:
            async with asyncio.timeout(min(self._stall_seconds, self._patience)):
                return await anext(self._requests)
        except StopAsyncIteration:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "the stream ended in the middle of a pass") from None
        except TimeoutError:
            raise VeilfedError(Code.TIMEOUT, "Forward: the client's answers take too long") from None
        finally:
            self._patience -= self._loop.time() - started

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine in the event loop."""
        if self._over:
            coroutine.close()
            raise _cancelled()
        self._current = current = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return current.result()
        except CancelledError:
            raise _cancelled() from None


def _cancelled() -> VeilfedError:
    return VeilfedError(Code.CANCELLED, "the stream is over")
