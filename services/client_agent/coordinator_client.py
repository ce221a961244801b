"""One session with the aggregator, through the egress gate: the stream of work, and long models in chunks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import grpc

from client_agent.config import AggregatorEndpoint
from client_agent.egress import EgressGate
from client_agent.egress.rules import COORDINATOR
from veilfed import __version__, protocol
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.rpc.progress import STALL_SECONDS, moving, progressing
from veilfed.v1.aggregator_pb2 import (
    FetchRequest,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    PushHeader,
    PushRequest,
    StatRequest,
    TaskRefusal,
    Update,
    WorkRequest,
    WorkResponse,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub
from veilfed.v1.secagg_pb2 import MaskAnswer
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire.tensors import digest

if TYPE_CHECKING:
    from veilfed.v1.aggregator_pb2_grpc import CoordinatorAsyncStub

__all__ = ["JoinRefused", "Session", "join"]

CALL_SECONDS = 30.0

# Leases that an aggregator may ask for. Each heartbeat is a record of the ledger: shorter ones would fill the disk.
LEASE_SECONDS = (0.1, 3600.0)

# Joining again cannot help: somebody has to change something.
FATAL = frozenset(
    {Code.PROTOCOL_VERSION, Code.ROLE_DENIED, Code.IDENTITY_MISMATCH, Code.IDENTITY_INVALID, Code.POLICY_DENIED}
)


class JoinRefused(VeilfedError):  # noqa: N818  an error of the catalogue that ends the agent
    """The aggregator, or the institution's own policy, does not let this agent join."""


class Session:
    """A session that the aggregator has opened. Ends with its stream."""

    def __init__(
        self,
        stub: "CoordinatorAsyncStub",
        joined: JoinResponse,
        credentials: Credentials,
        address: str,
        gate: EgressGate,
        stall_seconds: float,
    ) -> None:
        self._stub = stub
        self._stall_seconds = stall_seconds
        self._credentials = credentials
        self._address = address
        self._gate = gate
        self._name = joined.session
        # None ends the stream.
        self._outgoing: asyncio.Queue[WorkRequest | None] = asyncio.Queue()
        self._closed = False
        self.lease_seconds = joined.lease_seconds
        self.inline_limit = min(joined.inline_limit or protocol.INLINE_LIMIT, protocol.INLINE_LIMIT)

    async def responses(self) -> AsyncIterator[WorkResponse]:
        """What the aggregator sends, until either side ends the stream. Raises VeilfedError."""

        async def requests() -> AsyncIterator[WorkRequest]:
            while (request := await self._outgoing.get()) is not None:
                yield request

        with translated(self._credentials, self._address):
            async for response in self._stub.Work(requests()):
                yield response

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Errors of the catalogue, also where a transfer ends because its session has ended."""
        try:
            with translated(self._credentials, self._address):
                yield
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # grpc cancels whoever waits on a channel that is closed, and refuses new calls on it.
            if not self._closed:
                raise
            raise VeilfedError(Code.UNREACHABLE, f"{self._address}: the session has ended") from None

    def close(self) -> None:
        """The connection is about to be closed."""
        self._closed = True
        while not self._outgoing.empty():
            if (request := self._outgoing.get_nowait()) is not None:
                self._gate.withdraw(request)

    @property
    def idle(self) -> bool:
        """Whether everything that was queued has passed the gate."""
        return self._outgoing.empty()

    def heartbeat(self, activity: str) -> None:
        # A stream that does not move needs no second heartbeat in its queue.
        if self._outgoing.empty():
            self._outgoing.put_nowait(WorkRequest(session=self._name, heartbeat=Heartbeat(activity=activity)))

    def refuse(self, refusal: TaskRefusal) -> None:
        """Queues a refusal. Raises VeilfedError(POLICY_DENIED) as `send`."""
        self._send(WorkRequest(session=self._name, refusal=refusal))

    def send(self, update: Update) -> None:
        """Queues an update. Raises VeilfedError(POLICY_DENIED) when the gate would not let it pass."""
        self._send(WorkRequest(session=self._name, update=update))

    def send_mask(self, answer: MaskAnswer) -> None:
        """Queues a message of secure aggregation. Raises VeilfedError(POLICY_DENIED) as `send`."""
        self._send(WorkRequest(session=self._name, mask=answer))

    def _send(self, request: WorkRequest) -> None:
        if self._closed:
            raise VeilfedError(Code.UNREACHABLE, f"{self._address}: the session has ended")
        # A message that the gate refuses later would end the whole stream.
        self._outgoing.put_nowait(self._gate.admit_ahead(self._gate.aggregator, COORDINATOR + "Work", request))

    def finish(self) -> None:
        """Ends the stream after what is queued."""
        self._outgoing.put_nowait(None)

    async def upload(self, job_id: str, data: bytes) -> Artifact:
        """Sends an update that is too long for a message; goes on where an earlier attempt stopped.

        `data` is a serialised TensorMap in canonical form. Raises VeilfedError.
        """
        artifact = await asyncio.to_thread(self._gate.approve_artifact, job_id, data)
        with self._calling():
            stat = await self._stub.Stat(
                StatRequest(session=self._name, job_id=job_id, sha256=artifact.sha256), timeout=CALL_SECONDS
            )
            if stat.complete:
                return artifact
            if stat.received > len(data):
                raise VeilfedError(Code.PROTOCOL_VIOLATION, "the aggregator has more of the artifact than there is")
            header = PushHeader(session=self._name, job_id=job_id, artifact=artifact, offset=stat.received)
            async with progressing("the upload", self._stall_seconds) as moved:
                pushed = await self._stub.Push(_noted(_pieces(header, data), moved))
        if not pushed.complete:
            raise VeilfedError(Code.UNREACHABLE, f"{self._address}: the upload ended early")
        return artifact

    async def download(self, job_id: str, artifact: Artifact, kept: bytearray) -> bytes:
        """A model that is too long for a message. `kept` is what earlier attempts have got, and grows.

        Raises VeilfedError; PROTOCOL_VIOLATION when it is not the artifact that was named.
        """
        if artifact.size > protocol.MAX_ARTIFACT_BYTES:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"a model of {artifact.size} bytes is longer than is allowed")
        request = FetchRequest(job_id=job_id, sha256=artifact.sha256, offset=len(kept))
        with self._calling():
            if len(kept) < artifact.size:
                async for response in moving(self._stub.Fetch(request), "the download", self._stall_seconds):
                    kept += response.chunk
                    if len(kept) > artifact.size:
                        break
        if len(kept) < artifact.size:
            raise VeilfedError(Code.UNREACHABLE, f"{self._address}: the download ended early")
        data = bytes(kept)
        if len(data) != artifact.size or await asyncio.to_thread(digest, data) != artifact.sha256:
            kept.clear()
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "the aggregator sent another model than it named")
        return data


async def _noted(requests: AsyncIterator[PushRequest], moved: Callable[[], None]) -> AsyncIterator[PushRequest]:
    """The requests. grpc asks for the next one when it has sent the one before."""
    async for request in requests:
        moved()
        yield request


async def _pieces(header: PushHeader, data: bytes) -> AsyncIterator[PushRequest]:
    yield PushRequest(header=header)
    for start in range(header.offset, len(data), protocol.CHUNK_BYTES):
        yield PushRequest(chunk=data[start : start + protocol.CHUNK_BYTES])


@asynccontextmanager
async def join(
    credentials: Credentials, endpoint: AggregatorEndpoint, gate: EgressGate, stall_seconds: float = STALL_SECONDS
) -> AsyncIterator[Session]:
    """Opens a session; the block's end closes the connection.

    Transfers in which nothing moves for `stall_seconds` end with TIMEOUT. Raises VeilfedError.
    """
    channel = open_channel(
        credentials,
        endpoint.address,
        endpoint.identity,
        interceptors=gate.interceptors(endpoint.identity),
        keepalive_seconds=endpoint.keepalive_seconds,
    )
    async with channel:
        stub = CoordinatorStub(channel)
        request = JoinRequest(
            protocol_version=protocol.VERSION, identity=str(credentials.identity), software_version=__version__
        )
        try:
            with translated(credentials, endpoint.address):
                joined = await stub.Join(request, timeout=CALL_SECONDS)
            if joined.protocol_version != protocol.VERSION:
                raise VeilfedError(
                    Code.PROTOCOL_VERSION,
                    f"the aggregator speaks protocol {joined.protocol_version}, this agent {protocol.VERSION}",
                )
            shortest, longest = LEASE_SECONDS
            if not shortest <= joined.lease_seconds <= longest:
                raise VeilfedError(
                    Code.PROTOCOL_VIOLATION,
                    f"the aggregator asks for a lease of {joined.lease_seconds:g} seconds",
                )
        except VeilfedError as error:
            if error.code in FATAL:
                raise JoinRefused(error.code, error.message, error.hint) from None
            raise
        session = Session(stub, joined, credentials, endpoint.address, gate, stall_seconds)
        try:
            yield session
        finally:
            session.close()
