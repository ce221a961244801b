"""The JobService: the administrators' side."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeAlias

import grpc
from sqlalchemy import Connection

from aggregator.engine import Engine
from aggregator.rounds import queries
from aggregator.rounds.records import Effects, Live
from veilfed.errors import Code, VeilfedError
from veilfed.rpc.server import peer
from veilfed.v1.aggregator_pb2 import (
    AddClientRequest,
    AddClientResponse,
    CancelJobRequest,
    CancelJobResponse,
    ForgetClientRequest,
    ForgetClientResponse,
    GetJobRequest,
    GetJobResponse,
    GetReportRequest,
    GetReportResponse,
    ListJobsRequest,
    ListJobsResponse,
    ResolveJobRequest,
    ResolveJobResponse,
    SubmitJobRequest,
    SubmitJobResponse,
    WatchJobRequest,
    WatchJobResponse,
)
from veilfed.v1.aggregator_pb2_grpc import JobServiceServicer
from veilfed.wire.tensors import from_tensor

__all__ = ["Jobs"]

# Events that come so soon after each other are read together.
GATHER_SECONDS = 0.05

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Jobs(JobServiceServicer):
    """Submit, list, get, watch, cancel, change, report."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def SubmitJob(self, request: SubmitJobRequest, context: Context) -> SubmitJobResponse:  # noqa: N802
        vectors = from_tensor(request.class_vectors) if request.HasField("class_vectors") else None
        return SubmitJobResponse(job_id=await self._engine.submit(request.spec, vectors))

    async def ListJobs(self, request: ListJobsRequest, context: Context) -> ListJobsResponse:  # noqa: N802
        return ListJobsResponse(jobs=await self._engine.run(lambda c: queries.summaries(c, request.limit)))

    async def GetJob(self, request: GetJobRequest, context: Context) -> GetJobResponse:  # noqa: N802
        connected = set(self._engine.hub.live())
        return await self._engine.run(lambda c: queries.details(c, request.job_id, connected))

    async def WatchJob(  # noqa: N802
        self, request: WatchJobRequest, context: Context
    ) -> AsyncIterator[WatchJobResponse]:
        after = request.after
        with self._engine.hub.watching(request.job_id) as changed:
            while not self._engine.stopping:
                changed.clear()
                events, ended = await self._engine.run(partial(queries.events, job_id=request.job_id, after=after))
                for event in events:
                    yield event
                    after = event.number
                if ended:
                    return
                if len(events) < queries.MAX_EVENTS:
                    await changed.wait()
                    await asyncio.sleep(GATHER_SECONDS)
        # An end in order would say that the job has ended.
        raise VeilfedError(Code.UNREACHABLE, "the aggregator is stopping", "Watch again later.")

    async def CancelJob(self, request: CancelJobRequest, context: Context) -> CancelJobResponse:  # noqa: N802
        await self._engine.cancel(request.job_id, peer())
        return CancelJobResponse()

    async def GetReport(self, request: GetReportRequest, context: Context) -> GetReportResponse:  # noqa: N802
        number = request.round if request.HasField("round") else None
        return await self._engine.run(partial(queries.report, job_id=request.job_id, number=number))

    async def AddClient(self, request: AddClientRequest, context: Context) -> AddClientResponse:  # noqa: N802
        def change(connection: Connection, live: Live) -> tuple[int, Effects]:
            return machine.add_client(connection, request.job_id, request.institution, by, live)

        machine, by = self._engine.machine, peer()
        return AddClientResponse(round=await self._engine.change_job(request.job_id, change))

    async def ForgetClient(self, request: ForgetClientRequest, context: Context) -> ForgetClientResponse:  # noqa: N802
        number = await self._engine.forget_client(request.job_id, request.institution, peer())
        return ForgetClientResponse(round=number)

    async def ResolveJob(self, request: ResolveJobRequest, context: Context) -> ResolveJobResponse:  # noqa: N802
        def change(connection: Connection, live: Live) -> tuple[int, Effects]:
            return machine.resolve(connection, request.job_id, request.ridge, by)

        machine, by = self._engine.machine, peer()
        return ResolveJobResponse(round=await self._engine.change_job(request.job_id, change))
