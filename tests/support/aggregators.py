"""An aggregator as a process of its own, and a connection of its administrator."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.identities import Federation
from tests.support.processes import Process, free_port, veilfed
from veilfed.identity.material import load_credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import (
    CancelJobRequest,
    GetJobRequest,
    GetJobResponse,
    ListJobsRequest,
    SubmitJobRequest,
    WatchJobRequest,
    WatchJobResponse,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub, JobServiceStub

__all__ = ["Admin", "Aggregator", "job_spec", "running_aggregator"]


def job_spec(train: list[str], evaluate: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    """A small job: 2 classes, d = 4, 2 rounds, everybody needed."""
    strategy = {"name": "fedot", "classes": ["no", "yes"], "dimension": 4, **changes.pop("strategy", {})}
    spec = {
        "name": "trial",
        "strategy": strategy,
        "cohort": {"train": train, "evaluate": evaluate or []},
        "rounds": 2,
        "quorum": len(train),
        "deadline_seconds": 60,
        "grace_seconds": 60,
    }
    return spec | changes


class Aggregator:
    """A process that can be killed and started again on the same files and port."""

    def __init__(
        self, federation: Federation, folder: Path, lease_seconds: float = 5.0, keepalive_seconds: float = 60.0
    ) -> None:
        self.federation, self.folder = federation, folder
        self._keepalive_seconds = keepalive_seconds
        self._lease_seconds = lease_seconds
        self.port = free_port()
        self.process: Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "aggregator.yaml"
        files = self.federation.aggregator
        document = {
            "identity": {"certificate": str(files.certificate), "key": str(files.key), "bundle": str(files.bundle)},
            "listen": self.address,
            "database": f"sqlite:///{self.folder / 'aggregator.sqlite'}",
            "artifacts": str(self.folder / "artifacts"),
            "lease_seconds": self._lease_seconds,
            "keepalive_seconds": self._keepalive_seconds,
        }
        config.write_text(yaml.safe_dump(document))
        self.process = Process(veilfed("aggregator", "serve", "--config", config), self.folder / "log")
        self.process.ready()

    def kill9(self) -> None:
        if self.process is not None:
            self.process.kill()

    @asynccontextmanager
    async def admin(self) -> AsyncIterator["Admin"]:
        credentials = load_credentials(self.federation.admin)
        async with open_channel(credentials, self.address, self.federation.aggregator_id) as channel:
            with translated(credentials, self.address):
                yield Admin(channel)


@contextmanager
def running_aggregator(
    federation: Federation, folder: Path, lease_seconds: float = 5.0, keepalive_seconds: float = 60.0
) -> Iterator[Aggregator]:
    """A started aggregator; killed when the block ends."""
    aggregator = Aggregator(federation, folder, lease_seconds, keepalive_seconds)
    try:
        aggregator.start()
        yield aggregator
    finally:
        aggregator.kill9()


@dataclass
class Admin:
    """The calls of an administrator."""

    channel: Any

    async def submit(self, spec: dict[str, Any]) -> str:
        response = await JobServiceStub(self.channel).SubmitJob(SubmitJobRequest(spec=yaml.safe_dump(spec)), timeout=20)
        return str(response.job_id)

    async def jobs(self) -> list[str]:
        response = await JobServiceStub(self.channel).ListJobs(ListJobsRequest(), timeout=20)
        return [job.job_id for job in response.jobs]

    async def get(self, job_id: str) -> GetJobResponse:
        found: GetJobResponse = await JobServiceStub(self.channel).GetJob(GetJobRequest(job_id=job_id), timeout=20)
        return found

    async def watch(self, job_id: str) -> AsyncIterator[WatchJobResponse]:
        async for event in JobServiceStub(self.channel).WatchJob(WatchJobRequest(job_id=job_id), timeout=60):
            yield event

    async def ended(self, job_id: str) -> GetJobResponse:
        """Waits for the end of a job."""
        async for _ in self.watch(job_id):
            pass
        return await self.get(job_id)

    async def happened(self, job_id: str, kind: str) -> WatchJobResponse:
        """Waits for an event of a kind."""
        async for event in self.watch(job_id):
            if event.kind == kind:
                return event
        raise AssertionError(f"the job ended without {kind}")

    async def cancel(self, job_id: str) -> None:
        await JobServiceStub(self.channel).CancelJob(CancelJobRequest(job_id=job_id), timeout=20)

    @property
    def coordinator(self) -> Any:
        return CoordinatorStub(self.channel)
