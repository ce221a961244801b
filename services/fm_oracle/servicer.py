"""What the oracle answers: its model card, and embeddings within the release gate."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from fm_oracle.embed.batcher import Batcher
from fm_oracle.gate import Charge, ReleaseGate
from fm_oracle.models.base import Model
from fm_oracle.requests import FIELDS, check_labels, read_head, read_inputs, read_prompts
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
    PromptGradientRequest,
    PromptGradientResponse,
)
from veilfed.v1.oracle_pb2_grpc import OracleServicer
from veilfed.wire.tensors import to_tensor

__all__ = ["OracleService", "StreamLimits"]

log = get_logger("oracle.service")

MODALITIES = {"text": MODALITY_TEXT, "image": MODALITY_IMAGE}
Float = NDArray[np.float32]

Result = TypeVar("Result")

# Work under way, in the order of the requests; None when there are no more.
_Answers = asyncio.Queue["asyncio.Future[EmbedResponse] | None"]


@dataclass(frozen=True)
class StreamLimits:
    """See OracleConfig. A stream whose client sends nothing for `stall_seconds` ends."""

    max_batch: int = 64
    read_ahead: int = 4
    max_streams: int = 16
    stall_seconds: float = STALL_SECONDS
    prompts: Literal["off", "forward", "gradients"] = "forward"


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
            prompt_width=self._prompt_width,
            prompt_gradients=bool(self._prompt_width) and self._limits.prompts == "gradients",
        )

    @property
    def _prompt_width(self) -> int:
        """Width of the prompt tokens that are taken, 0 for none."""
        return 0 if self._limits.prompts == "off" else self._model.card.prompt_width

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
        """Charges and computes one request."""
        where = f"batch {request.batch}"
        kind, inputs = read_inputs(request, where, self._model.card, self._limits.max_batch)
        prompts = read_prompts(request.prompts, where, self._prompt_width) if request.HasField("prompts") else None
        work = partial(self._compute, institution, kind, inputs, prompts)
        embeddings, charge = await self._charged(institution, len(inputs), turn, work)
        return EmbedResponse(batch=request.batch, embeddings=to_tensor(embeddings), quota_left=charge.quota_left)

    async def PromptGradient(  # noqa: N802
        self,
        request: PromptGradientRequest,
        context: "grpc.aio.ServicerContext[PromptGradientRequest, PromptGradientResponse]",
    ) -> PromptGradientResponse:
        institution, card, where = peer().institution, self._model.card, "the request"
        if self._limits.prompts != "gradients":
            raise VeilfedError(
                Code.POLICY_DENIED,
                "the model's owner does not let out gradients with respect to prompts",
                "Tune prompts forward-only, or ask the model's owner for `prompts: gradients`.",
            )
        _, inputs = read_inputs(request, where, card, self._limits.max_batch)
        prompts = read_prompts(request.prompts, where, self._prompt_width)
        head = read_head(request.head, where, card.dimension)
        labels = check_labels(request.labels, where, len(inputs), len(head))
        with self._stream(institution):
            work = partial(self._slope, institution, inputs, prompts, head, labels)
            (gradient, embeddings), charge = await self._charged(institution, len(inputs), asyncio.Lock(), work)
        return PromptGradientResponse(
            gradient=to_tensor(gradient), embeddings=to_tensor(embeddings), quota_left=charge.quota_left
        )

    async def _charged(
        self, institution: str, count: int, turn: asyncio.Lock, work: Callable[[], Awaitable[Result]]
    ) -> tuple[Result, Charge]:
        """Charges for `count` inputs, then does the work; what was charged is given back when it fails."""
        async with turn:  # a stream's requests are charged in their order, each when the rate allows it
            charging = asyncio.create_task(asyncio.to_thread(self._gate.charge, institution, count))
            try:
                charge = await asyncio.shield(charging)
                await asyncio.sleep(charge.wait_seconds)
            except BaseException:
                await self._shielded(self._undo(institution, charging, count))
                raise
        try:
            return await work(), charge
        except BaseException:
            await self._shielded(self._undo(institution, charging, count))
            raise

    async def _compute(self, institution: str, kind: str, inputs: Sequence[Any], prompts: Float | None) -> Float:
        """Embeddings float32 [n, d], all finite."""
        loop = asyncio.get_running_loop()
        if prompts is not None:
            # Never together with inputs of anybody else: prompts belong to these inputs alone.
            prepared = await loop.run_in_executor(self._preparer, self._model.prepare, inputs)
            forward = partial(self._model.forward_prompted, prepared, prompts)
            return _finite(await self._batcher.alone(institution, forward), prompted=True)
        if kind == FIELDS[self._model.card.modality]:
            prepared = await loop.run_in_executor(self._preparer, self._model.prepare, inputs)
            embeddings = await self._batcher.embed(institution, prepared)
        else:  # a text tower: prompts for classes, so few that they need no batches over clients
            embeddings = await loop.run_in_executor(self._arithmetic, self._model.embed_texts, list(inputs))
        return _finite(embeddings)

    async def _slope(
        self, institution: str, inputs: Sequence[Any], prompts: Float, head: Float, labels: NDArray[np.int64]
    ) -> tuple[Float, Float]:
        """(gradient [M, D], embeddings [n, d]), all finite."""
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._preparer, self._model.prepare, inputs)
        gradient, embeddings = await self._batcher.alone(
            institution, partial(self._model.prompt_gradient, prepared, prompts, head, labels)
        )
        return _finite(gradient, prompted=True), _finite(embeddings, prompted=True)

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


def _finite(array: Float, *, prompted: bool = False) -> Float:
    """The array. Raises VeilfedError: with prompts of a client's own choice it is the client's INPUT_INVALID."""
    if np.isfinite(array).all():
        return array
    if prompted:
        raise VeilfedError(Code.INPUT_INVALID, "with these prompts or this head the result is not finite")
    raise VeilfedError(Code.INTERNAL, "the model gave an embedding that is not finite")
