"""Who is let in: real handshakes against a real server."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support import http2
from tests.support.http2 import secured
from tests.support.identities import Federation, make_federation
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials, TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.rpc.channel import open_channel, translated
from veilfed.rpc.roles import ROLES
from veilfed.rpc.server import create_server, peer
from veilfed.v1 import aggregator_pb2, blocks_pb2, enrollment_pb2, oracle_pb2
from veilfed.v1.aggregator_pb2 import ListJobsRequest, ListJobsResponse
from veilfed.v1.aggregator_pb2_grpc import JobServiceServicer, JobServiceStub, add_JobServiceServicer_to_server

ROOT = Path(__file__).parents[2]


class Jobs(JobServiceServicer):
    """Counts the calls that reach it."""

    def __init__(self) -> None:
        self.callers: list[Identity] = []

    async def ListJobs(self, request: ListJobsRequest, context: Any) -> ListJobsResponse:  # noqa: N802
        self.callers.append(peer())
        if request.limit == 13:
            raise RuntimeError("secret detail")
        return ListJobsResponse()


def make_jobs() -> Jobs:
    return Jobs()  # type: ignore[abstract]  # one method is enough to count calls


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["one"])


@asynccontextmanager
async def serving(federation: Federation) -> AsyncIterator[tuple[Jobs, str]]:
    jobs = make_jobs()
    server, port = create_server(load_credentials(federation.aggregator), "127.0.0.1:0")
    add_JobServiceServicer_to_server(jobs, server)
    await server.start()
    try:
        yield jobs, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def call(credentials: Credentials, address: str, server: Identity, limit: int = 0) -> ListJobsResponse:
    with translated(credentials, address):
        async with open_channel(credentials, address, server) as channel:
            response: ListJobsResponse = await JobServiceStub(channel).ListJobs(
                ListJobsRequest(limit=limit), timeout=20
            )
            return response


async def refusal(
    federation: Federation, credentials: Credentials, server: Identity | None = None, limit: int = 0
) -> tuple[VeilfedError, Jobs]:
    async with serving(federation) as (jobs, address):
        with pytest.raises(VeilfedError) as refused:
            await call(credentials, address, server or federation.aggregator_id, limit)
        return refused.value, jobs


def test_the_right_certificate_is_let_in_and_known_by_name(federation: Federation) -> None:
    async def run() -> list[Identity]:
        async with serving(federation) as (jobs, address):
            await call(load_credentials(federation.admin), address, federation.aggregator_id)
            return jobs.callers

    assert asyncio.run(run()) == [Identity("test.veilfed", Role.ADMIN, "coordinator", "admin")]


def test_a_wrong_role_is_denied_before_the_handler(federation: Federation) -> None:
    error, jobs = asyncio.run(refusal(federation, load_credentials(federation.agents["one"])))
    assert error.code is Code.ROLE_DENIED
    assert "agent/one/agent" in error.message
    assert jobs.callers == []


def bad_credentials(federation: Federation, folder: Path, kind: str) -> Credentials:
    admin = Identity("test.veilfed", Role.ADMIN, "coordinator", "admin")
    now = datetime.now(UTC)
    if kind == "other authority":
        other = make_federation(folder, [])
        return replace(load_credentials(other.admin), bundle_pem=federation.root.read_bytes())
    start = now - timedelta(days=9) if kind == "expired" else now + timedelta(days=9)
    return load_credentials(federation.make(admin, folder, not_before=start, lifetime=timedelta(days=1)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("other authority", "signed by no root in its own bundle"),
        ("expired", "expired at"),
        ("not yet valid", "is not valid before"),
    ],
)
def test_a_refused_handshake_never_reaches_the_handler_and_the_client_says_why(
    federation: Federation, tmp_path: Path, kind: str, words: str
) -> None:
    error, jobs = asyncio.run(refusal(federation, bad_credentials(federation, tmp_path / "bad", kind)))
    assert error.code is Code.TLS_REFUSED
    assert words in error.message
    assert jobs.callers == []


@pytest.mark.parametrize("role", ["oracle", "aggregator"])
def test_a_server_that_is_not_the_one_expected_is_refused_by_the_client(federation: Federation, role: str) -> None:
    expected = replace(federation.aggregator_id, role=Role(role), institution="elsewhere")
    error, jobs = asyncio.run(refusal(federation, load_credentials(federation.admin), expected))
    assert error.code is Code.TLS_REFUSED
    assert jobs.callers == []


def test_an_agents_certificate_does_not_pass_as_a_server(federation: Federation) -> None:
    """Clients demand the server usage and the role's DNS name; an agent's certificate has neither."""

    async def run() -> None:
        server, port = create_server(load_credentials(federation.agents["one"]), "127.0.0.1:0")
        add_JobServiceServicer_to_server(make_jobs(), server)
        await server.start()
        try:
            await call(load_credentials(federation.admin), f"127.0.0.1:{port}", federation.aggregator_id)
        finally:
            await server.stop(0)

    with pytest.raises(VeilfedError) as refused:
        asyncio.run(run())
    assert refused.value.code is Code.TLS_REFUSED


def test_without_certificate_or_without_tls_nothing_is_reached(federation: Federation) -> None:
    async def run() -> tuple[list[grpc.StatusCode], Jobs]:
        codes = []
        async with serving(federation) as (jobs, address):
            anonymous = grpc.ssl_channel_credentials(root_certificates=federation.root.read_bytes())
            options = [("grpc.ssl_target_name_override", federation.aggregator_id.server_name)]
            for channel in (
                grpc.aio.secure_channel(address, anonymous, options=options),
                grpc.aio.insecure_channel(address),
            ):
                async with channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await JobServiceStub(channel).ListJobs(ListJobsRequest(), timeout=20)
                    codes.append(refused.value.code())
            return codes, jobs

    codes, jobs = asyncio.run(run())
    assert codes == [grpc.StatusCode.UNAVAILABLE] * 2
    assert jobs.callers == []


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_tls_12_fails_and_13_works_with_the_same_certificate(federation: Federation, version: ssl.TLSVersion) -> None:
    def handshake(address: str, files: TlsFiles) -> str:
        with secured(address, federation.aggregator_id.server_name, files, version) as connection:
            return str(connection.version())

    async def run() -> str:
        async with serving(federation) as (_, address):
            return await asyncio.to_thread(handshake, address, federation.admin)

    if version is ssl.TLSVersion.TLSv1_3:
        assert asyncio.run(run()) == "TLSv1.3"
    else:
        with pytest.raises(ssl.SSLError):
            asyncio.run(run())


def test_an_unexpected_error_is_internal_without_its_detail(federation: Federation) -> None:
    error, _ = asyncio.run(refusal(federation, load_credentials(federation.admin), limit=13))
    assert error.code is Code.INTERNAL
    assert "secret" not in str(error)


def test_nobody_there_is_unreachable(federation: Federation) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(VeilfedError) as refused:
            asyncio.run(call(load_credentials(federation.admin), address, federation.aggregator_id))
    assert refused.value.code is Code.UNREACHABLE


def test_a_taken_port_is_a_typed_error(federation: Federation) -> None:
    async def run() -> None:
        async with serving(federation) as (_, address):
            create_server(load_credentials(federation.aggregator), address)

    with pytest.raises(VeilfedError) as refused:
        asyncio.run(run())
    assert refused.value.code is Code.UNREACHABLE


def test_every_rpc_of_the_protos_has_its_roles() -> None:
    rpcs = {
        f"/{service.full_name}/{method.name}"
        for file in (aggregator_pb2, blocks_pb2, oracle_pb2, enrollment_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {name for name in ROLES if not name.startswith("/grpc.health")} == rpcs - {"/veilfed.v1.Enrollment/Enroll"}


def fresh() -> dict[str, str]:
    """An environment in which veilfed was not imported yet."""
    return {name: value for name, value in os.environ.items() if name != "GRPC_SSL_CIPHER_SUITES"}


GRPC_FIRST = """
import asyncio, sys
import grpc  # before veilfed: too late for it to switch TLS 1.2 off
from pathlib import Path
from tests.support.coordinator_stub import Stub, serving
from veilfed.identity.material import TlsFiles, load_credentials

async def main():
    stub = Stub()
    async with serving(load_credentials(TlsFiles.in_folder(Path(sys.argv[1]))), stub) as address:
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    print(*stub.peers)

asyncio.run(main())
"""


def test_where_grpc_was_imported_first_a_call_over_tls_12_is_refused_before_its_handler(federation: Federation) -> None:
    command = [sys.executable, "-c", GRPC_FIRST, str(federation.aggregator.key.parent)]
    agent, name = federation.agents["one"], federation.aggregator_id.server_name
    answers = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=fresh()
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            with secured(address, name, agent, version) as connection:
                answers[version] = http2.call(connection, "/veilfed.v1.Coordinator/Join")
        reached, _ = server.communicate("end\n", timeout=30)
    assert b"UNAUTHENTICATED" in answers[ssl.TLSVersion.TLSv1_2]
    assert b"veilfed-code" not in answers[ssl.TLSVersion.TLSv1_3]
    assert reached.splitlines()[-1:] == [str(federation.agent_id("one"))]


def test_grpc_offers_tls_13_alone_whoever_imports_first() -> None:
    code = "import veilfed, os; assert os.environ['GRPC_SSL_CIPHER_SUITES'] == 'ECDHE-RSA-AES256-GCM-SHA384'"
    subprocess.run([sys.executable, "-c", code], check=True, env=fresh())
