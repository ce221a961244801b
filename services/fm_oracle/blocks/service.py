"""What the oracle answers about its student: a description, sessions, passes. One pass is computed at a time."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from fm_oracle.blocks.compute import Served, run_pass
from fm_oracle.blocks.exchange import Exchange
from fm_oracle.blocks.passes import Passes, PassFolder
from fm_oracle.blocks.release import fixed, secret_of
from fm_oracle.blocks.sessions import Keys, Session, Sessions
from fm_oracle.config import EncryptedConfig
from fm_oracle.distill.export import PADDING_SCALE, PARAMETERS
from fm_oracle.gate import ReleaseGate
from veilfed.ckks.packing import packed_bytes
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger
from veilfed.rpc.progress import STALL_SECONDS, moving
from veilfed.rpc.server import peer
from veilfed.v1.blocks_pb2 import (
    CkksParameters,
    DescribeStudentRequest,
    DescribeStudentResponse,
    ForwardRequest,
    ForwardResponse,
    OpenSessionRequest,
    OpenSessionResponse,
    PassProgress,
)
from veilfed.v1.blocks_pb2_grpc import EncryptedBlocksServicer
from veilfed.wire.frames import joined
from veilfed.wire.tensors import digest

__all__ = ["BlocksService"]

log = get_logger("oracle.blocks")

# How often a pass that waits for others says so.
TELL_SECONDS = 10.0


@dataclass(frozen=True)
class _Turn:
    """The only one to compute; `waiting` are those that want to."""

    lock: asyncio.Lock
    waiting: list[str]


class BlocksService(EncryptedBlocksServicer):
    """Of one student for one federation. `state` is the folder for what must survive a restart."""

    def __init__(
        self,
        served: Served,
        config: EncryptedConfig,
        state: Path,
        federation: str,
        gate: ReleaseGate,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Reads files. Raises VeilfedError: FILE_UNUSABLE, STATE_CORRUPT."""
        self._served, self._gate, self._stall_seconds = served, gate, stall_seconds
        folder = state / "encrypted"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._inputs_sha256 = digest(config.inputs.read_bytes())
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{error.filename}: {error.strerror}") from None
        steps = served.diagonals.steps
        self._rotations = sorted({step % PARAMETERS.slots for step in steps} - {0})
        self._sessions = Sessions(folder / "sessions", served.basis, steps, served.version, config.session_hours * 3600)
        self._seconds = round(config.session_hours * 3600)
        self._passes = Passes(folder / "passes", served.version, served.basis)
        self._released = fixed(secret_of(state), served.version, federation, served.student.shape.blocks)
        self._turn = _Turn(asyncio.Lock(), [])
        # Institutions whose keys are on their way, and who may read such: it takes hundreds of megabytes.
        self._uploading: set[str] = set()
        self._reading = asyncio.Lock()

    async def DescribeStudent(  # noqa: N802
        self,
        request: DescribeStudentRequest,
        context: "grpc.aio.ServicerContext[DescribeStudentRequest, DescribeStudentResponse]",
    ) -> DescribeStudentResponse:
        shape, diagonals = self._served.student.shape, self._served.diagonals
        return DescribeStudentResponse(
            version=self._served.version,
            dimension=shape.dimension,
            blocks=shape.blocks,
            tokens=diagonals.tokens,
            samples=diagonals.samples,
            released=self._released,
            inputs_sha256=self._inputs_sha256,
            parameters=CkksParameters(
                log_n=PARAMETERS.log_n,
                data_bits=PARAMETERS.data_bits,
                special_bits=PARAMETERS.special_bits,
                scale_bits=PARAMETERS.scale_bits,
            ),
            rotations=self._rotations,
            padding_scale_bits=PADDING_SCALE.as_integer_ratio()[0].bit_length() - 1,
            range=self._served.range,
            quota_left=await asyncio.to_thread(self._gate.left, peer().institution),
        )

    async def OpenSession(  # noqa: N802
        self,
        request_iterator: AsyncIterator[OpenSessionRequest],
        context: "grpc.aio.ServicerContext[OpenSessionRequest, OpenSessionResponse]",
    ) -> OpenSessionResponse:
        institution = peer().institution
        requests = aiter(moving(request_iterator, "OpenSession", self._stall_seconds))
        first = await anext(requests, OpenSessionRequest())
        if not first.HasField("start"):
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "OpenSession begins with its start")
        start = first.start
        self._sessions.check_version(start.version)
        session = await asyncio.to_thread(self._sessions.reopen, institution, start.keys)
        if session is None:
            session = await self._received(institution, start.keys, requests)
        log.info("session", institution=institution, keys=start.keys[:8])
        return OpenSessionResponse(session=session.name, seconds=self._seconds)

    async def _received(self, institution: str, keys: str, requests: AsyncIterator[OpenSessionRequest]) -> Session:
        """A session on keys that are yet to come: onto the disk, as they are hundreds of megabytes.

        Raises VeilfedError(RATE_LIMITED) while the institution sends others.
        """
        if institution in self._uploading:
            raise VeilfedError(Code.RATE_LIMITED, f"{institution} is sending keys already")
        self._uploading.add(institution)
        try:
            place = self._sessions.place(institution, keys)
            descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=".tmp")
            received, count = Path(name), 0
            try:
                with os.fdopen(descriptor, "wb") as file:
                    async for request in requests:
                        count += 1
                        self._check_part(request, count)
                        await asyncio.to_thread(_append, file, request)
                if not count:
                    raise VeilfedError(
                        Code.NOT_FOUND, "there are no keys of this name", "Send all keys, under a new name."
                    )
                async with self._reading:
                    return await asyncio.to_thread(self._sessions.keep, institution, keys, received)
            finally:
                await asyncio.to_thread(received.unlink, missing_ok=True)
        finally:
            self._uploading.remove(institution)

    def _check_part(self, request: OpenSessionRequest, count: int) -> None:
        """Raises VeilfedError(PROTOCOL_VIOLATION) for more, or longer ones, than keys have."""
        basis = self._served.basis
        most = 1 + (len(self._rotations) + 1) * basis.special
        longest = packed_bytes(1, len(basis.primes), basis)
        size = max(len(request.digit.residues), len(request.public_key.residues))
        if count > most or request.HasField("start") or size > longest:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"more than the {most} messages of all keys, or longer ones")

    async def Forward(  # noqa: N802
        self,
        request_iterator: AsyncIterator[ForwardRequest],
        context: "grpc.aio.ServicerContext[ForwardRequest, ForwardResponse]",
    ) -> AsyncIterator[ForwardResponse]:
        institution = peer().institution
        requests = aiter(request_iterator)
        first = await anext(aiter(moving(requests, "Forward", self._stall_seconds)), ForwardRequest())
        if not first.HasField("start"):
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "Forward begins with its start")
        start = first.start
        session = await asyncio.to_thread(self._sessions.find, institution, start.session)
        async with self._my_turn(institution) as turns:
            folder = await self._pass(institution, start.pass_id, session)
            async for progress in turns:
                yield progress
            keys = await self._keys(institution, session)
            exchange = Exchange(requests, self._served.basis, self._stall_seconds)
            log.info("pass", institution=institution, folder=folder.path.name[:8], halves=folder.halves)
            work = partial(run_pass, self._served, keys, folder, frozenset(start.have), exchange)
            # Closed before the turn is given away: its thread goes on until it notices.
            async with aclosing(exchange.responses(work)) as responses:
                async for response in responses:
                    yield response

    async def _keys(self, institution: str, session: Session) -> Keys:
        """Those of a session. Waits for the thread that reads them, also when nobody wants them any more."""
        async with self._reading:
            reading = asyncio.create_task(asyncio.to_thread(self._sessions.keys, institution, session))
            try:
                return await asyncio.shield(reading)
            finally:
                await asyncio.wait({reading})

    async def _pass(self, institution: str, name: str, session: Session) -> PassFolder:
        """The pass that goes on, or a new one, which is charged.

        All samples that there is room for are charged: how many there are is encrypted. Raises
        VeilfedError(INPUT_INVALID) for a pass under other keys.
        """
        found = await asyncio.to_thread(self._passes.find, institution, name)
        if found is not None:
            if await asyncio.to_thread(lambda: found.keys) != session.keys:
                raise VeilfedError(Code.INPUT_INVALID, "the pass is under other keys", "Begin a new one.")
            return found
        charge = await asyncio.to_thread(self._gate.charge, institution, self._served.diagonals.samples)
        await asyncio.sleep(charge.wait_seconds)
        return await asyncio.to_thread(self._passes.begin, institution, name, session.keys, self._released)

    @asynccontextmanager
    async def _my_turn(self, institution: str) -> AsyncIterator[AsyncIterator[ForwardResponse]]:
        """The turn to compute, from when what it gives is gone through: what is to be said while waiting.

        Raises VeilfedError(RATE_LIMITED) where a pass of the institution is under way or waiting.
        """
        turn = self._turn
        if institution in turn.waiting:
            raise VeilfedError(Code.RATE_LIMITED, f"{institution} has a pass under way; one at a time is computed")
        turn.waiting.append(institution)
        acquiring: list[asyncio.Task[Any]] = []

        async def waiting() -> AsyncIterator[ForwardResponse]:
            acquiring.append(asyncio.create_task(turn.lock.acquire()))
            while not (await asyncio.wait(acquiring, timeout=TELL_SECONDS))[0]:
                yield ForwardResponse(progress=PassProgress(waiting=turn.waiting.index(institution)))

        try:
            yield waiting()
        finally:
            turn.waiting.remove(institution)
            for task in acquiring:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    if await task:
                        turn.lock.release()


def _append(file: BinaryIO, request: OpenSessionRequest) -> None:
    try:
        file.write(joined([request]))
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"keys: {error.strerror}") from None
