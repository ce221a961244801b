"""Arbitrary bytes at the real services over real TLS: every answer is an answer or a typed error, and they go on."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given
from hypothesis import strategies as st

from aggregator.config import AggregatorConfig
from aggregator.coordinator import Coordinator
from aggregator.intake import Intake
from aggregator.job_service import Jobs
from aggregator.server import engine
from fm_oracle.config import OracleConfig
from fm_oracle.server import service
from tests.support.aggregators import job_spec
from tests.support.fuzz import bounded_memory, encoded, profile  # noqa: F401  used by being there
from tests.support.identities import Federation, make_federation
from tests.support.models import PromptedModel
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import key_pem, make_key
from veilfed.identity.enrollment import EnrollmentService
from veilfed.identity.material import Credentials, TlsFiles, load_credentials
from veilfed.identity.names import Identity
from veilfed.rpc.channel import open_channel, translate
from veilfed.rpc.server import create_server
from veilfed.v1 import aggregator_pb2, enrollment_pb2, oracle_pb2
from veilfed.v1.aggregator_pb2 import JoinRequest, JoinResponse, SubmitJobRequest, SubmitJobResponse
from veilfed.v1.aggregator_pb2_grpc import (
    CoordinatorStub,
    JobServiceStub,
    add_CoordinatorServicer_to_server,
    add_JobServiceServicer_to_server,
)
from veilfed.v1.enrollment_pb2_grpc import add_EnrollmentServicer_to_server
from veilfed.v1.oracle_pb2_grpc import OracleStub, add_OracleServicer_to_server

SECONDS = 40.0  # a hang; far beyond what a busy machine needs
WATCH_SECONDS = 0.2
# What a caller must never be able to cause: a fault, a hang, the end of the service.
FAULTS = {Code.INTERNAL, Code.TIMEOUT, Code.UNREACHABLE, Code.TLS_REFUSED}
LONGEST = 20  # answers of one stream that are read
SESSION = "session-of-this-example"
WORDS = [SESSION, "job-of-this-test", "ab" * 32, "classifier", "global", "name: x", yaml.safe_dump(job_spec(["north"]))]


@dataclass
class Target:
    """A started service, the credentials that may call it, and the descriptor of its methods."""

    address: str
    server: Identity
    client: Credentials
    roots: bytes | None = None

    def channel(self) -> grpc.aio.Channel:
        return open_channel(self.client, self.address, self.server, roots=self.roots)


class Services:
    """All services in an event loop in a thread of its own, so that a test may call them from anywhere."""

    def __init__(self, folder: Path) -> None:
        self.federation = make_federation(folder / "federation", ["north"])
        self.targets: dict[str, Target] = {}
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.job = ""
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self._thread.start()
        self.run(self._start())

    def run(self, coroutine: "Coroutine[Any, Any, Any]") -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _start(self) -> None:
        federation = self.federation
        coordinator = await self._stack.enter_async_context(_aggregator(federation, self._folder))
        agent, admin = load_credentials(federation.agents["north"]), load_credentials(federation.admin)
        self.targets["Coordinator"] = Target(coordinator, federation.aggregator_id, agent)
        self.targets["JobService"] = Target(coordinator, federation.aggregator_id, admin)
        oracle = await self._stack.enter_async_context(_oracle(federation, self._folder))
        roots = federation.zone_roots["north"].read_bytes()
        self.targets["Oracle"] = Target(oracle, federation.oracle_id("north"), agent, roots)
        enrollment = await self._stack.enter_async_context(_enrollment(federation))
        self.targets["Enrollment"] = Target(enrollment, federation.authority.enrollment, agent)
        for name, target in self.targets.items():
            self.channels[name] = await self._stack.enter_async_context(target.channel())
        response: SubmitJobResponse = await JobServiceStub(self.channels["JobService"]).SubmitJob(
            SubmitJobRequest(spec=yaml.safe_dump(job_spec(["north"]))), timeout=SECONDS
        )
        self.job = response.job_id

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def session(self) -> str:
        """A fresh session; that the service gives one shows that it serves."""
        request = JoinRequest(protocol_version=1, identity=str(self.federation.agent_id("north")))
        response: JoinResponse = await CoordinatorStub(self.channels["Coordinator"]).Join(request, timeout=SECONDS)
        return response.session

    async def call(self, method: MethodDescriptor, requests: list[bytes]) -> VeilfedError | None:
        """Sends raw requests with this example's session and job put in; the error that was answered, if any."""
        name = method.containing_service.name
        if name == "Coordinator":
            session = await self.session()
            requests = [_with(data, SESSION, session) for data in requests]
        requests = [_with(data, "job-of-this-test", self.job) for data in requests]
        channel = self.channels[name]
        kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        make = getattr(channel, "_".join(kind))
        rpc = make(f"/{method.containing_service.full_name}/{method.name}")
        seconds = WATCH_SECONDS if method.name == "WatchJob" else SECONDS
        try:
            await _answer(rpc(iter(requests) if method.client_streaming else requests[0], timeout=seconds), method)
        except grpc.aio.AioRpcError as error:
            if method.name == "WatchJob" and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None  # it waits for events of a job that runs
            return translate(error, self.targets[name].client, self.targets[name].address)
        return None


def _with(data: bytes, placeholder: str, value: str) -> bytes:
    """Replaces a length-prefixed text; other places of the placeholder become a wrong length, which is as good."""
    old, new = placeholder.encode(), value.encode()
    return data.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)


async def _answer(call: Any, method: MethodDescriptor) -> None:
    if not method.server_streaming:
        await call
        return
    left = LONGEST
    async for _ in call:
        left -= 1
        if not left or method.name == "WatchJob":  # of a running job it would not end
            call.cancel()
            return


@asynccontextmanager
async def _serving(files: TlsFiles, add: Any) -> AsyncIterator[str]:
    server, port = create_server(load_credentials(files), "127.0.0.1:0")
    add(server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def _aggregator(federation: Federation, folder: Path) -> AsyncIterator[str]:
    config = AggregatorConfig(
        identity=federation.aggregator,
        listen="127.0.0.1:0",
        database=f"sqlite:///{folder / 'aggregator.sqlite'}",
        artifacts=folder / "artifacts",
    )
    async with engine(config) as made:

        def add(server: grpc.aio.Server) -> None:
            intake = Intake(made, load_credentials(federation.aggregator))
            add_CoordinatorServicer_to_server(Coordinator(made, intake), server)
            add_JobServiceServicer_to_server(Jobs(made), server)

        async with _serving(federation.aggregator, add) as address:
            yield address


@asynccontextmanager
async def _oracle(federation: Federation, folder: Path) -> AsyncIterator[str]:
    files = federation.oracles["north"]
    config = OracleConfig(
        identity=files, listen="127.0.0.1:0", model="minilm", state=folder / "oracle", prompts="gradients"
    )
    async with (
        service(PromptedModel(), config) as made,
        _serving(files, lambda server: add_OracleServicer_to_server(made, server)) as address,
    ):
        yield address


@asynccontextmanager
async def _enrollment(federation: Federation) -> AsyncIterator[str]:
    authority = federation.authority
    key = make_key()
    certificate = authority.sign(authority.enrollment, key.public_key())
    credentials = Credentials(authority.enrollment, certificate, key_pem(key), authority.root_pem)
    server, port = create_server(credentials, "127.0.0.1:0", require_client=False)
    add_EnrollmentServicer_to_server(EnrollmentService(authority), server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    made = Services(tmp_path_factory.mktemp("services"))
    yield made
    made.close()


METHODS = [
    method
    for file in (aggregator_pb2, oracle_pb2, enrollment_pb2)
    for declared in file.DESCRIPTOR.services_by_name.values()
    for method in declared.methods
]


def requests_of(method: MethodDescriptor) -> "st.SearchStrategy[list[bytes]]":
    one = st.one_of(encoded(method.input_type, WORDS), st.binary(max_size=40))
    return st.lists(one, min_size=1, max_size=3 if method.client_streaming else 1)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_any_bytes_are_answered_with_a_typed_error_and_the_service_goes_on(
    services: Services, method: MethodDescriptor
) -> None:
    @profile(25)
    @given(requests_of(method))
    def check(requests: list[bytes]) -> None:
        error = services.run(services.call(method, requests))
        assert error is None or (error.code not in FAULTS and error.hint)

    check()
    serves(services)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_many_more_bytes(services: Services, method: MethodDescriptor) -> None:
    @profile(25, slow=True)
    @given(requests_of(method))
    def check(requests: list[bytes]) -> None:
        error = services.run(services.call(method, requests))
        assert error is None or (error.code not in FAULTS and error.hint)

    check()
    serves(services)


def serves(services: Services) -> None:
    """Every service answers a right call."""

    async def ask() -> None:
        assert await services.session()
        jobs = JobServiceStub(services.channels["JobService"])
        assert (await jobs.ListJobs(aggregator_pb2.ListJobsRequest(), timeout=SECONDS)).jobs
        oracle = OracleStub(services.channels["Oracle"])
        assert (await oracle.Describe(oracle_pb2.DescribeRequest(), timeout=SECONDS)).dimension == 2

    services.run(ask())
