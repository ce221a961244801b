"""Large models and updates in chunks: Stat, Push, Fetch."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from sqlalchemy import Connection

from aggregator.artifacts import Ref, Upload
from aggregator.engine import Engine
from aggregator.rounds import queries, sessions
from aggregator.rounds.book import Job
from aggregator.words import no_such_job
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity, Role
from veilfed.protocol import CHUNK_BYTES
from veilfed.v1.aggregator_pb2 import (
    FetchRequest,
    FetchResponse,
    PushRequest,
    PushResponse,
    StatRequest,
    StatResponse,
)

__all__ = ["Transfers"]


def _member(connection: Connection, job: Job, identity: Identity) -> None:
    """Institutions that a job does not name or ask learn nothing of it, not even that it exists."""
    if identity.role is not Role.AGENT or identity.institution in job.spec.cohort.train + job.spec.cohort.evaluate:
        return
    if not queries.takes_part(connection, job.id, identity.institution):
        raise no_such_job(job.id)


class Transfers:
    """Uploads of agents and downloads of agents and administrators."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def _job(self, identity: Identity, job_id: str, session: str) -> Job:
        def find(connection: Connection) -> Job:
            sessions.check(connection, sessions.session_digest(session), identity)
            job = self._engine.machine.job(connection, job_id)
            _member(connection, job, identity)
            if not queries.is_running(connection, job_id):
                raise VeilfedError(Code.JOB_ENDED, f"job {job_id} has ended")
            return job

        return await self._engine.run(find)

    async def stat(self, identity: Identity, request: StatRequest) -> StatResponse:
        await self._job(identity, request.job_id, request.session)
        received, complete = await asyncio.to_thread(
            self._engine.artifacts.arrived, request.job_id, identity.institution, request.sha256
        )
        return StatResponse(received=received, complete=complete)

    async def push(self, identity: Identity, requests: AsyncIterator[PushRequest]) -> PushResponse:
        """Takes one upload. What has arrived when the stream breaks stays, for the next one to go on from."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("body") != "header":
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "Push: the first message must be the header")
        header = first.header
        job = await self._job(identity, header.job_id, header.session)
        ref = Ref(header.artifact.sha256, header.artifact.size)
        if identity.institution in job.spec.cohort.evaluate:
            raise VeilfedError(Code.ARTIFACT_INVALID, "Push: this institution only evaluates in this job")
        if not 0 < ref.size <= job.strategy.model_bytes:
            raise VeilfedError(
                Code.ARTIFACT_INVALID, f"Push: {ref.size} bytes are not the size of an update of the job"
            )
        upload = await self._begun(job.id, identity.institution, ref, header.offset)
        if upload is None:
            return PushResponse(received=ref.size, complete=True)
        return await self._take(upload, requests)

    async def _begun(self, job_id: str, institution: str, ref: Ref, offset: int) -> Upload | None:
        """As `_begin`. What a call has begun that is cancelled meanwhile is let go."""
        beginning = asyncio.ensure_future(asyncio.to_thread(self._begin, job_id, institution, ref, offset))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._let_go)
            raise

    def _let_go(self, beginning: "asyncio.Future[Upload | None]") -> None:
        if not beginning.cancelled() and beginning.exception() is None and (upload := beginning.result()) is not None:
            self._engine.spawn(asyncio.to_thread(self._engine.artifacts.release, upload))

    def _begin(self, job_id: str, institution: str, ref: Ref, offset: int) -> Upload | None:
        """An upload to go on with; None if it is whole already."""
        artifacts = self._engine.artifacts
        _, complete = artifacts.arrived(job_id, institution, ref.sha256)
        return None if complete else artifacts.upload(job_id, institution, ref, offset)

    async def _take(self, upload: Upload, requests: AsyncIterator[PushRequest]) -> PushResponse:
        try:
            async for request in requests:
                chunk = request.chunk  # once: each time makes a copy
                if request.WhichOneof("body") != "chunk" or len(chunk) > CHUNK_BYTES:
                    raise VeilfedError(
                        Code.PROTOCOL_VIOLATION, f"Push: expected a chunk of at most {CHUNK_BYTES} bytes"
                    )
                await asyncio.to_thread(upload.write, chunk)
            complete = await asyncio.to_thread(upload.finish)
            return PushResponse(received=upload.received, complete=complete)
        finally:
            await asyncio.to_thread(self._engine.artifacts.release, upload)

    def _find_model(self, connection: Connection, identity: Identity, request: FetchRequest) -> None:
        _member(connection, self._engine.machine.job(connection, request.job_id), identity)
        if not queries.is_model(connection, request.job_id, request.sha256):
            raise VeilfedError(Code.NOT_FOUND, "the job has no such model")

    async def fetch(self, identity: Identity, request: FetchRequest) -> AsyncIterator[FetchResponse]:
        """The bytes of a model of a job; never of an update."""
        await self._engine.run(partial(self._find_model, identity=identity, request=request))
        chunks = self._engine.artifacts.chunks(request.sha256, request.offset)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield FetchResponse(chunk=chunk)
