"""A peer that stands still on a living connection: its call ends after a time, on either side."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.config import AggregatorEndpoint, OracleEndpoint
from client_agent.coordinator_client import Session, join
from client_agent.egress import EgressGate, EgressPolicy
from client_agent.oracle_client import connect_oracle
from fm_oracle.config import OracleConfig
from fm_oracle.server import service
from tests.support.coordinator_stub import Stub, serving
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.models import TinyModel
from tests.support.standin_coordinator import StandInCoordinator
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.ledger import read, verify
from veilfed.protocol import CHUNK_BYTES
from veilfed.rpc.channel import open_channel, translated
from veilfed.rpc.server import create_server
from veilfed.v1.aggregator_pb2 import FetchRequest, FetchResponse, PushRequest, TaskRefusal
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub
from veilfed.v1.oracle_pb2 import EmbedRequest, Texts
from veilfed.v1.oracle_pb2_grpc import OracleStub, add_OracleServicer_to_server
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire.tensors import digest, map_bytes

# What has to go on must do so within this, on a busy machine too.
STALL = 2.0
SECONDS = 20.0
JOB = "job-1"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


def timed_out() -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is Code.TIMEOUT)


def gate(federation: Federation, folder: Path) -> EgressGate:
    agent = load_credentials(federation.agents["north"])
    return EgressGate(
        EgressPolicy(consent="allow"), agent.identity, folder / "ledger", federation.aggregator_id, agent.bundle_pem
    )


class Endless(Stub):
    """Gives out chunks for ever; `given` counts them, and `ended` tells when nobody wants more."""

    given = 0

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[FetchResponse]:  # noqa: N802
        try:
            while True:
                self.given += 1
                yield FetchResponse(chunk=bytes(CHUNK_BYTES))
        finally:
            self.ended.set()


@asynccontextmanager
async def stub_of(federation: Federation, server: Stub) -> AsyncIterator[Any]:
    agent = load_credentials(federation.agents["north"])
    async with (
        serving(load_credentials(federation.aggregator), server, stall_seconds=STALL) as address,
        open_channel(agent, address, federation.aggregator_id) as channel,
    ):
        with translated(agent, address):
            yield CoordinatorStub(channel)


@asynchronous
async def test_a_client_that_stops_sending_an_upload(federation: Federation) -> None:
    with timed_out():
        async with stub_of(federation, Stub()) as client:
            call = client.Push(timeout=SECONDS)
            await call.write(PushRequest(chunk=b"1"))
            await call


@asynchronous
async def test_a_client_that_does_not_read_a_download(federation: Federation) -> None:
    server = Endless()
    async with stub_of(federation, server) as client:
        call = client.Fetch(FetchRequest(), timeout=SECONDS)
        responses = aiter(call)
        await anext(responses)
        await asyncio.wait_for(server.ended.wait(), SECONDS)
        given = server.given
        assert given < 64  # what buffers hold
        with timed_out(), translated(None, ""):
            async for _ in responses:
                pass
        assert server.given == given


@asynchronous
async def test_a_client_that_sends_the_oracle_nothing(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path) as (_, address):
        agent = load_credentials(federation.agents["north"])
        roots = federation.zone_roots["north"].read_bytes()
        async with open_channel(agent, address, federation.oracle_id("north"), roots=roots) as channel:
            with timed_out(), translated(agent, address):
                oracle_stub: Any = OracleStub(channel)
                call = oracle_stub.Embed(timeout=SECONDS)
                await call.write(EmbedRequest(texts=Texts(values=["a"])))
                assert (await call.read()).batch == 0
                await call.read()


@asynccontextmanager
async def oracle(federation: Federation, folder: Path) -> AsyncIterator[tuple[TinyModel, str]]:
    files = federation.oracles["north"]
    config = OracleConfig(identity=files, listen="127.0.0.1:0", model="minilm", state=folder / "oracle")
    model = TinyModel()
    server, port = create_server(load_credentials(files), config.listen)
    async with service(model, config, stall_seconds=STALL) as made:
        add_OracleServicer_to_server(made, server)
        await server.start()
        try:
            yield model, f"127.0.0.1:{port}"
        finally:
            model.gate.set()
            await server.stop(0)


@asynchronous
async def test_an_oracle_that_does_not_answer(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path) as (model, address):
        endpoint = OracleEndpoint(
            address=address, identity=federation.oracle_id("north"), root=federation.zone_roots["north"]
        )
        with gate(federation, tmp_path) as door:
            connecting = connect_oracle(load_credentials(federation.agents["north"]), endpoint, door, STALL)
            async with connecting as client:
                assert [len(rows) async for rows, _ in client.embed("text", ["a", "b"])] == [2]
                model.gate.clear()
                with timed_out():
                    async for _ in client.embed("text", ["c"]):
                        pass


@asynccontextmanager
async def session(federation: Federation, folder: Path, server: StandInCoordinator) -> AsyncIterator[Session]:
    async with serving(load_credentials(federation.aggregator), server) as address:
        endpoint = AggregatorEndpoint(address=address, identity=federation.aggregator_id)
        with gate(federation, folder) as door:
            door.expect(JOB, {"classifier": ((3, 262_144), np.float32)})
            async with join(load_credentials(federation.agents["north"]), endpoint, door, STALL) as made:
                yield made


@asynchronous
async def test_an_aggregator_that_stops_in_a_transfer_and_one_that_goes_on(
    federation: Federation, tmp_path: Path
) -> None:
    data = map_bytes({"classifier": np.ones((3, 262_144), np.float32)})
    server = StandInCoordinator(model=data, stalls={"Push", "Fetch"})
    async with session(federation, tmp_path, server) as made:
        with timed_out():
            await made.upload(JOB, data)
        assert len(server.pushed) == CHUNK_BYTES
        await made.upload(JOB, data)
        assert [header.offset for header in server.headers] == [0, CHUNK_BYTES]
        kept = bytearray()
        artifact = Artifact(sha256=digest(data), size=len(data))
        with timed_out():
            await made.download(JOB, artifact, kept)
        assert len(kept) == CHUNK_BYTES
        assert await made.download(JOB, artifact, kept) == data


@asynchronous
async def test_what_is_queued_when_a_session_ends_is_said_not_to_have_left(
    federation: Federation, tmp_path: Path
) -> None:
    async with session(federation, tmp_path, StandInCoordinator()) as made:
        made.refuse(TaskRefusal(job_id=JOB, token="t", code="POLICY_DENIED", reason="not today"))  # nothing reads it
    *_, passed, note = read(tmp_path / "ledger")
    assert (passed["purpose"], passed["decision"]) == ("refusal", "passed")
    assert (note["note"], passed["digest"] in note["text"]) == ("withdrawn", True)
    verify(tmp_path / "ledger")
