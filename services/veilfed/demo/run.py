"""Runs the study over the real services and collects what it showed."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from veilfed.demo.federation import Federation
from veilfed.demo.processes import command
from veilfed.demo.study import Cell, job_spec
from veilfed.demo.workspace import Institution
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.jobs import JobSpec
from veilfed.ledger import Summary, verify
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import GetJobRequest, GetJobResponse, SubmitJobRequest, WatchJobRequest
from veilfed.v1.aggregator_pb2_grpc import JobServiceStub

if TYPE_CHECKING:
    from veilfed.v1.aggregator_pb2_grpc import JobServiceAsyncStub  # exists in the stubs alone

__all__ = ["Progress", "Stopwatch", "audit", "fetch", "run_job", "run_jobs"]

RPC_SECONDS = 30.0
CHECK_SECONDS = 1.0

Result = TypeVar("Result")


@dataclass
class Stopwatch:
    """Seconds by stage; a stage inside another is not counted twice in the total."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started, inner = time.monotonic(), sum(self.seconds.values())
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - started - (sum(self.seconds.values()) - inner)

    def document(self) -> dict[str, float]:
        rounded = {name: round(value, 2) for name, value in self.seconds.items()}
        return {**rounded, "total": round(sum(self.seconds.values()), 2)}


def fetch(model: str, data: str, packages: Path) -> None:
    """Downloads a model and data, each by its party's own command; quick when they are there."""
    for arguments in (
        ("oracle", "fetch", model, "--folder", packages),
        ("data", "fetch", data, "--folder", packages),
    ):
        done = subprocess.run(command(*arguments), stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            what = " ".join(str(argument) for argument in arguments[:3])
            raise VeilfedError(Code.DOWNLOAD_FAILED, f"`veilfed {what}` failed; its error is above")


class Progress:
    """What `run_jobs` tells its caller; does nothing by itself."""

    def job_started(self, cell: Cell) -> None: ...

    def round_published(self, cell: Cell) -> None: ...

    def job_ended(self, cell: Cell, job: GetJobResponse) -> None: ...


async def _run_job(jobs: "JobServiceAsyncStub", spec: JobSpec, on_round: Callable[[], None]) -> GetJobResponse:
    """Submits one job and waits for its end. Raises VeilfedError(JOB_FAILED) if it fails."""
    submitted = await jobs.SubmitJob(SubmitJobRequest(spec=spec.model_dump_json()), timeout=RPC_SECONDS)
    async for event in jobs.WatchJob(WatchJobRequest(job_id=submitted.job_id)):
        if event.kind == "round_published":
            on_round()
    job = await jobs.GetJob(GetJobRequest(job_id=submitted.job_id), timeout=RPC_SECONDS)
    if job.summary.state != "done":
        raise VeilfedError(Code.JOB_FAILED, f"{job.summary.name} {job.summary.state}: {job.summary.error}")
    return job


@asynccontextmanager
async def _job_service(federation: Federation) -> AsyncIterator["JobServiceAsyncStub"]:
    """As the administrator."""
    workspace = federation.workspace
    credentials = load_credentials(TlsFiles.in_folder(workspace.admin_folder / "identity"))
    address = federation.addresses["aggregator"]
    with translated(credentials, address):
        async with open_channel(credentials, address, workspace.aggregator) as channel:
            yield JobServiceStub(channel)


async def _run_all(
    federation: Federation, chosen: Sequence[Cell], rounds: int, progress: Progress
) -> dict[Cell, GetJobResponse]:
    done = {}
    async with _job_service(federation) as jobs:
        for cell in chosen:
            progress.job_started(cell)
            spec = job_spec(federation.workspace.task, cell, rounds)
            done[cell] = await _run_job(jobs, spec, partial(progress.round_published, cell))
            progress.job_ended(cell, done[cell])
    return done


async def _while_all_live(federation: Federation, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; raises VeilfedError(UNREACHABLE) as soon as a party's process has ended."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            federation.check()
            await asyncio.wait({task}, timeout=CHECK_SECONDS)
        return task.result()
    finally:
        task.cancel()


def run_jobs(
    federation: Federation, chosen: Sequence[Cell], rounds: int, progress: Progress | None = None
) -> dict[Cell, GetJobResponse]:
    """Runs jobs of the study, one after the other, and returns them finished."""
    return asyncio.run(_while_all_live(federation, _run_all(federation, chosen, rounds, progress or Progress())))


def run_job(federation: Federation, spec: JobSpec, on_round: Callable[[], None]) -> GetJobResponse:
    """Runs one job to its end; `on_round` is called for each round that is published. Raises VeilfedError."""

    async def run() -> GetJobResponse:
        async with _job_service(federation) as jobs:
            return await _run_job(jobs, spec, on_round)

    return asyncio.run(_while_all_live(federation, run()))


def audit(institution: Institution) -> Summary:
    """Verifies the institution's ledger offline, as its auditor would. Raises VeilfedError(LEDGER_BROKEN)."""
    bundle = institution.agent_folder / "identity" / "bundle.pem"
    return verify(institution.ledger, bundle_pem=bundle.read_bytes())
