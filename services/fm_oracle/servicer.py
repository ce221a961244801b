"""What the oracle answers: its model card, and embeddings within the release gate."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from fm_oracle.embed.batcher import Batcher
from fm_oracle.gate import Charge, ReleaseGate
from fm_oracle.models.base import Model
from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger
from veilfed.rpc.progress import STALL_SECONDS
from veilfed.rpc.server import peer
from veilfed.v1.oracle_pb2 import (
    MODALITY_IMAGE,
    MODALITY_TEXT,
    DescribeRequest,
    DescribeResponse,
    EmbedRequest,
    EmbedResponse,
)
from veilfed.v1.oracle_pb2_grpc import OracleServicer
from veilfed.wire.tensors import to_tensor

__all__ = ["OracleService", "StreamLimits"]

log = get_logger("oracle.service")

MODALITIES = {"text": MODALITY_TEXT, "image": MODALITY_IMAGE}
FIELDS = {"text": "texts", "image": "images"}  # of EmbedRequest.inputs


# Work under way, in the order of the requests; None when there are no more.
_Answers = asyncio.Queue["asyncio.Future[EmbedResponse] | None"]


@dataclass(frozen=True)
class StreamLimits:
    """See OracleConfig. A stream whose client sends nothing for `stall_seconds` ends."""

    max_batch: int = 64
    read_ahead: int = 4
    max_streams: int = 16
    stall_seconds: float = STALL_SECONDS


class OracleService(OracleServicer):
    """The black box. `preparer` runs the tokeniser and the image decoder off the event loop, `arithmetic` the model."""

    def __init__(
        self,
        model: Model[Any],
        gate: ReleaseGate,
        batcher: Batcher,
        preparer: Executor,
        arithmetic: Executor,
        limits: StreamLimits,
    ) -> None:
        self._model = model
        self._gate = gate
        self._batcher = batcher
        self._preparer = preparer
        self._arithmetic = arithmetic
        self._limits = limits
        self._streams: Counter[str] = Counter()
        self._settling: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()
        self._drained.set()

    async def drained(self) -> None:
        """Waits until no stream is open any more and all refunds are written."""
        await self._drained.wait()
        while self._settling:
            await asyncio.wait(self._settling)

    def _shielded(self, settle: Coroutine[Any, Any, None]) -> Awaitable[None]:
        """Refunds go on when their stream is cancelled once more meanwhile, as in a server that stops."""
        task = asyncio.create_task(settle)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return asyncio.shield(task)

    async def Describe(  # noqa: N802
        self, request: DescribeRequest, context: "grpc.aio.ServicerContext[DescribeRequest, DescribeResponse]"
    ) -> DescribeResponse:
        card = self._model.card
        return DescribeResponse(
            model=card.name,
            version=card.version,
            modality=MODALITIES[card.modality],
            dimension=card.dimension,
            blocks=card.blocks,
            max_tokens=card.max_tokens,
            image_size=card.image_size,
            max_batch=self._limits.max_batch,
            max_request_bytes=protocol.MAX_MESSAGE_BYTES,
            quota_left=await asyncio.to_thread(self._gate.left, peer().institution),
            text_tower=card.text_tower,
        )

    async def Embed(  # noqa: N802
        self,
        request_iterator: AsyncIterator[EmbedRequest],
        context: "grpc.aio.ServicerContext[EmbedRequest, EmbedResponse]",
    ) -> AsyncIterator[EmbedResponse]:
        institution = peer().institution
        with self._stream(institution):
            slots = asyncio.Semaphore(self._limits.read_ahead)
            answers: _Answers = asyncio.Queue()  # bounded by `slots`
            reader = asyncio.create_task(self._read(institution, request_iterator, slots, answers))
            current: asyncio.Future[EmbedResponse] | None = None
            try:
                while (current := await self._next(answers)) is not None:
                    response = await current
                    current = None  # given out from here on: no refund
                    yield response
                    slots.release()
            finally:
                reader.cancel()
                await self._shielded(self._abandon(institution, current, answers))

    async def _next(self, answers: _Answers) -> "asyncio.Future[EmbedResponse] | None":
        """The next answer, None after the last. There is none only while the client owes the next request.

        Raises VeilfedError(TIMEOUT) when that does not come.
        """
        seconds = self._limits.stall_seconds
        try:
            async with asyncio.timeout(seconds):
                return await answers.get()
        except TimeoutError:
            raise VeilfedError(Code.TIMEOUT, f"Embed: no request for {seconds:g} seconds") from None

    @contextmanager
    def _stream(self, institution: str) -> Iterator[None]:
        """Counts the open streams of an institution. Raises VeilfedError(RATE_LIMITED) when there are too many."""
        if self._streams[institution] >= self._limits.max_streams:
            raise VeilfedError(
                Code.RATE_LIMITED,
                f"{institution} has {self._limits.max_streams} streams open; no more are allowed at a time",
            )
        self._streams[institution] += 1
        self._drained.clear()
        try:
            yield
        finally:
            self._streams[institution] -= 1
            if not self._streams.total():
                self._drained.set()

    async def _read(
        self, institution: str, requests: AsyncIterator[EmbedRequest], slots: asyncio.Semaphore, answers: _Answers
    ) -> None:
        """Takes in as many requests as there are slots and starts the work on each; the answers keep their order."""
        turn = asyncio.Lock()
        received = aiter(requests)
        try:
            while True:
                await slots.acquire()
                request = await anext(received, None)
                if request is None:
                    break
                answers.put_nowait(asyncio.create_task(self._answer(institution, request, turn)))
            answers.put_nowait(None)
        except Exception as error:
            failed: asyncio.Future[EmbedResponse] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            answers.put_nowait(failed)

    async def _answer(self, institution: str, request: EmbedRequest, turn: asyncio.Lock) -> EmbedResponse:
        """Charges and computes one request; what was charged is given back when it fails or is cancelled."""
        kind, inputs = self._inputs(request)
        async with turn:  # a stream's requests are charged in their order, each when the rate allows it
            charging = asyncio.create_task(asyncio.to_thread(self._gate.charge, institution, len(inputs)))
            try:
                charge = await asyncio.shield(charging)
                await asyncio.sleep(charge.wait_seconds)
            except BaseException:
                await self._shielded(self._undo(institution, charging, len(inputs)))
                raise
        try:
            embeddings = await self._compute(institution, kind, inputs)
        except BaseException:
            await self._shielded(self._undo(institution, charging, len(inputs)))
            raise
        return EmbedResponse(batch=request.batch, embeddings=to_tensor(embeddings), quota_left=charge.quota_left)

    def _inputs(self, request: EmbedRequest) -> tuple[str, Sequence[Any]]:
        """The inputs of a request and their field. Raises VeilfedError(INPUT_INVALID) for the wrong kind or number."""
        where = f"batch {request.batch}"
        card, given = self._model.card, request.WhichOneof("inputs")
        if given is None:
            raise VeilfedError(Code.INPUT_INVALID, f"{where} has no inputs")
        if given != FIELDS[card.modality] and not (given == FIELDS["text"] and card.text_tower):
            raise VeilfedError(Code.INPUT_INVALID, f"{where} holds {given}; this oracle embeds {FIELDS[card.modality]}")
        values: Sequence[Any] = getattr(request, given).values
        if not 1 <= len(values) <= self._limits.max_batch:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"{where} holds {len(values)} inputs; from 1 to {self._limits.max_batch} are allowed",
            )
        return given, values

    async def _compute(self, institution: str, kind: str, inputs: Sequence[Any]) -> NDArray[np.float32]:
        """Embeddings float32 [n, d], all finite."""
        loop = asyncio.get_running_loop()
        if kind == FIELDS[self._model.card.modality]:
            prepared = await loop.run_in_executor(self._preparer, self._model.prepare, inputs)
            embeddings = await self._batcher.embed(institution, prepared)
        else:  # a text tower: prompts for classes, so few that they need no batches over clients
            embeddings = await loop.run_in_executor(self._arithmetic, self._model.embed_texts, list(inputs))
        if not np.isfinite(embeddings).all():
            raise VeilfedError(Code.INTERNAL, "the model gave an embedding that is not finite")
        return embeddings

    async def _undo(self, institution: str, charging: "asyncio.Task[Charge]", count: int) -> None:
        """Refunds a charge, also one that is still being written while its request was cancelled."""
        try:
            await charging
        except VeilfedError as error:  # nothing was charged
            log.warning("refused", institution=institution, inputs=count, code=error.code.name)
            return
        await asyncio.to_thread(self._gate.refund, institution, count)

    async def _abandon(
        self, institution: str, current: "asyncio.Future[EmbedResponse] | None", answers: _Answers
    ) -> None:
        """Ends the work on a stream that is over and refunds what was computed but not given out."""
        rest = [] if current is None else [current]
        while not answers.empty():
            if (answer := answers.get_nowait()) is not None:
                rest.append(answer)
        for answer in rest:
            answer.cancel()
        done = await asyncio.gather(*rest, return_exceptions=True)
        count = sum(answer.embeddings.shape[0] for answer in done if isinstance(answer, EmbedResponse))
        if count:
            await asyncio.to_thread(self._gate.refund, institution, count)
