"""An agent that does what a test says: joins, takes tasks, sends given updates. It trains nothing."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray

from veilfed import protocol
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity
from veilfed.rpc.channel import open_channel, translate
from veilfed.v1.aggregator_pb2 import (
    TASK_KIND_TRAIN,
    Evaluation,
    FetchRequest,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    LedgerHead,
    PushHeader,
    PushRequest,
    PushResponse,
    StatRequest,
    StatResponse,
    Task,
    TaskRefusal,
    Update,
    WorkRequest,
    WorkResponse,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire.tensors import map_bytes, parse_map, to_map, unpack_map

__all__ = ["HEAD", "ScriptedAgent", "answer", "trained"]

HEAD = LedgerHead(records=3, sha256="ab" * 32)
CLASSIFIER = "classifier"


def trained(task: Task, model: NDArray[np.float32], institution: str) -> NDArray[np.float32]:
    """What a scripted institution "trains": a fixed function of model, round and institution."""
    seed = int.from_bytes(hashlib.sha256(f"{institution}:{task.round}".encode()).digest()[:4], "big")
    noise = np.random.default_rng(seed).standard_normal(model.shape)
    return np.asarray(model * 0.5 + noise, dtype=np.float32)


def answer(task: Task, arrays: dict[str, NDArray[Any]] | None = None, weight: float | None = None) -> Update:
    """A right update, with the given parameters for a training task."""
    trains = task.kind == TASK_KIND_TRAIN
    update = Update(
        job_id=task.job_id,
        round=task.round,
        token=task.token,
        weight=(1.0 if trains else 0.0) if weight is None else weight,
        evaluations=[Evaluation(name="global", correct=3, total=4)],
        ledger_head=HEAD,
    )
    if trains and arrays is not None:
        update.tensors.CopyFrom(to_map(arrays))
    return update


class ScriptedAgent:
    """Use as `async with`; the stream is open inside."""

    def __init__(self, files: TlsFiles, address: str, server: Identity, **options: Any) -> None:
        self._credentials = load_credentials(files)
        self.identity = self._credentials.identity
        self._address = address
        self._channel = open_channel(self._credentials, address, server, **options)
        self.stub: Any = CoordinatorStub(self._channel)
        self.session = ""
        self._stream: Any = None
        # grpc takes one message of a stream at a time.
        self._writing = asyncio.Lock()
        self._lease_seconds = 0.0
        self._rest: WorkResponse | None = None

    async def __aenter__(self) -> Self:
        await self.join()
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._credentials, self._address) from None

    async def join(self, **changes: Any) -> JoinResponse:
        values = {"protocol_version": protocol.VERSION, "identity": str(self.identity), **changes}
        response: JoinResponse = await self._call("Join", JoinRequest(**values))
        self.session, self._lease_seconds = response.session, response.lease_seconds
        return response

    async def open(self) -> None:
        """Opens the work stream with the session, once the server answers; a heartbeat is its first message."""
        self._stream, self._rest = self.stub.Work(wait_for_ready=True), None
        await self.heartbeat()

    async def send(self, **body: Any) -> None:
        """To a stream that has ended nothing is sent: `next` raises what ended it."""
        async with self._writing:
            with suppress(asyncio.InvalidStateError):
                await self._stream.write(WorkRequest(session=self.session, **body))

    async def heartbeat(self, activity: str = "idle") -> None:
        await self.send(heartbeat=Heartbeat(activity=activity))

    async def refuse(self, task: Task, code: str, reason: str) -> None:
        refusal = TaskRefusal(job_id=task.job_id, round=task.round, token=task.token, code=code, reason=reason)
        await self.send(refusal=refusal)

    async def next(self, timeout: float = 20.0) -> WorkResponse:  # noqa: ASYNC109  a test's patience
        """The next message; receipts that came with it come first, alone. Raises VeilfedError when it was ended."""
        if self._rest is not None:
            response, self._rest = self._rest, None
            return response
        try:
            # wait_for of Python 3.11 loses a cancellation that comes together with its result.
            async with asyncio.timeout(timeout):
                response = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._credentials, self._address) from None
        assert isinstance(response, WorkResponse), "the stream ended"
        if response.receipts and response.WhichOneof("body"):
            receipts = WorkResponse(receipts=response.receipts)
            response.ClearField("receipts")
            self._rest = response
            return receipts
        return response

    async def task(self) -> Task:
        """The next message, which must be a task."""
        response = await self.next()
        assert response.WhichOneof("body") == "task", response
        return response.task

    async def model(self, task: Task) -> NDArray[np.float32]:
        """The model of a task, downloaded if need be."""
        if task.WhichOneof("model") == "tensors":
            return np.asarray(unpack_map(task.tensors)[CLASSIFIER], dtype=np.float32)
        data = await self.fetch(task.job_id, task.artifact.sha256)
        assert len(data) == task.artifact.size
        return np.asarray(parse_map(data)[CLASSIFIER], dtype=np.float32)

    async def fetch(self, job_id: str, sha256: str, offset: int = 0) -> bytes:
        data = bytearray()
        try:
            async for response in self.stub.Fetch(FetchRequest(job_id=job_id, sha256=sha256, offset=offset)):
                assert len(response.chunk) <= protocol.CHUNK_BYTES
                data += response.chunk
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._credentials, self._address) from None
        return bytes(data)

    async def stat(self, job_id: str, sha256: str) -> StatResponse:
        response: StatResponse = await self._call(
            "Stat", StatRequest(session=self.session, job_id=job_id, sha256=sha256)
        )
        return response

    async def push(self, job_id: str, artifact: Artifact, data: bytes, offset: int = 0) -> PushResponse:
        """Uploads `data` as the bytes of the artifact from `offset` on."""
        header = PushHeader(session=self.session, job_id=job_id, artifact=artifact, offset=offset)
        chunks: Iterable[PushRequest] = (
            PushRequest(chunk=data[start : start + protocol.CHUNK_BYTES])
            for start in range(0, len(data), protocol.CHUNK_BYTES)
        )
        response: PushResponse = await self._call("Push", itertools.chain([PushRequest(header=header)], chunks))
        return response

    @asynccontextmanager
    async def pushing(self, job_id: str, artifact: Artifact) -> AsyncIterator[Any]:
        """An upload whose chunks the test writes; broken off when the block ends."""
        call = self.stub.Push()
        header = PushHeader(session=self.session, job_id=job_id, artifact=artifact, offset=0)
        await call.write(PushRequest(header=header))
        try:
            yield call
        finally:
            call.cancel()

    async def work(self, change: Callable[[Task, Update], Update] | None = None) -> None:
        """Answers every task, with right updates that `change` may spoil, and shows that it lives, until cancelled."""
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                response = await self.next(60)
                if response.WhichOneof("body") != "task":
                    continue
                task = response.task
                update = await self.answer(task)
                await self.send(update=change(task, update) if change else update)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Heartbeats until the stream ends: who is silent for longer than a lease gets no work."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await asyncio.sleep(self._lease_seconds / 3)
                await self.heartbeat()

    async def answer(self, task: Task) -> Update:
        """A right update."""
        if task.kind != TASK_KIND_TRAIN:
            return answer(task)
        arrays = {CLASSIFIER: trained(task, await self.model(task), self.identity.institution)}
        data = map_bytes(arrays)
        if len(data) <= protocol.INLINE_LIMIT:
            return answer(task, arrays)
        artifact = Artifact(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        assert (await self.push(task.job_id, artifact, data)).complete
        update = answer(task)
        update.artifact.CopyFrom(artifact)
        return update
