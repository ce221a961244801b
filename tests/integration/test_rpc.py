"""Errors, roles and identities on real connections: all four kinds of RPC."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.coordinator_stub import Stub, serving
from tests.support.identities import Federation, make_federation
from veilfed.errors import Code, VeilfedError
from veilfed.identity.authority import CertificateAuthority
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.rpc.channel import open_channel, translated
from veilfed.rpc.server import create_server, run_server
from veilfed.v1.aggregator_pb2 import FetchRequest, JoinRequest, PushRequest, WorkRequest
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub, add_CoordinatorServicer_to_server

SECONDS = 20.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


@asynccontextmanager
async def connected(files: TlsFiles, address: str, server: Identity, roots: bytes | None = None) -> AsyncIterator[Any]:
    """A stub of the coordinator; what goes wrong is translated."""
    credentials = load_credentials(files)
    with translated(credentials, address):
        async with open_channel(credentials, address, server, roots=roots) as channel:
            yield CoordinatorStub(channel)


@asynccontextmanager
async def dialling(
    federation: Federation, stub: Stub, files: TlsFiles | None = None, served: TlsFiles | None = None
) -> AsyncIterator[Any]:
    """A client of the stub behind the aggregator's certificate; north's agent, if no other is given."""
    async with (
        serving(load_credentials(served or federation.aggregator), stub) as address,
        connected(files or federation.agents["north"], address, federation.aggregator_id) as client,
    ):
        yield client


async def join(stub: Any) -> None:
    await stub.Join(JoinRequest(), timeout=SECONDS)


async def work(stub: Any) -> None:
    async for _ in stub.Work(iter([WorkRequest()]), timeout=SECONDS):
        pass


async def push(stub: Any) -> None:
    await stub.Push(iter([PushRequest(chunk=b"1")]), timeout=SECONDS)


async def fetch(stub: Any) -> None:
    async for _ in stub.Fetch(FetchRequest(), timeout=SECONDS):
        pass


KINDS = pytest.mark.parametrize("call", [join, work, push, fetch])
Call = Callable[[Any], Coroutine[Any, Any, None]]


def failing(federation: Federation, error: Exception, call: Call) -> tuple[VeilfedError, Stub]:
    """What a client sees of an error that a handler raises."""
    stub = Stub(error)

    async def run() -> None:
        async with dialling(federation, stub) as client:
            await call(client)

    with pytest.raises(VeilfedError) as caught:
        asyncio.run(run())
    return caught.value, stub


@KINDS
def test_an_error_of_the_catalogue_crosses_whole(federation: Federation, call: Call) -> None:
    raised = VeilfedError(Code.ROUND_CLOSED, "round 3 is closed: 2 % late, né à Köln", "Take round 4.")
    seen, _ = failing(federation, raised, call)
    assert (seen.code, seen.message, seen.hint) == (raised.code, raised.message, raised.hint)


@KINDS
def test_any_other_error_is_internal_without_its_detail(federation: Federation, call: Call) -> None:
    seen, stub = failing(federation, RuntimeError("private detail"), call)
    assert seen.code is Code.INTERNAL
    assert "private" not in str(seen)
    assert len(stub.peers) == 1


@pytest.mark.parametrize("code", [Code.FILE_UNUSABLE, Code.STATE_CORRUPT], ids=lambda code: code.name)
def test_what_is_wrong_with_a_services_own_files_stays_there(federation: Federation, code: Code) -> None:
    for call in (join, work, push, fetch):
        seen, _ = failing(federation, VeilfedError(code, "/srv/private: No space left on device"), call)
        assert seen.code is Code.INTERNAL
        assert "/srv" not in str(seen)


def test_an_error_longer_than_metadata_may_be_arrives_shortened(federation: Federation) -> None:
    seen, _ = failing(federation, VeilfedError(Code.JOB_INVALID, "é" * 100_000, "h" * 100_000), join)
    assert seen.code is Code.JOB_INVALID
    assert seen.message.startswith("éééé")
    assert seen.message.endswith(" ...")
    assert seen.hint.endswith(" ...")


@KINDS
def test_a_wrong_role_is_denied_in_every_kind_of_rpc(federation: Federation, call: Call) -> None:
    stub = Stub()
    stranger = federation.make(
        replace(federation.aggregator_id, role=Role.ADMIN), federation.folder / f"admin-{call.__name__}"
    )

    async def run() -> None:
        async with dialling(federation, stub, stranger) as client:
            await call(client)

    if call is fetch:  # administrators may download models
        asyncio.run(run())
        assert len(stub.peers) == 1
        return
    with pytest.raises(VeilfedError) as caught:
        asyncio.run(run())
    assert caught.value.code is Code.ROLE_DENIED
    assert stub.peers == []


def test_each_of_many_calls_at_once_knows_its_own_peer(federation: Federation) -> None:
    async def run() -> None:
        async with serving(load_credentials(federation.aggregator), Stub()) as address:

            async def sessions(institution: str) -> set[str]:
                async with connected(federation.agents[institution], address, federation.aggregator_id) as client:
                    answers = [client.Join(JoinRequest(), timeout=SECONDS) for _ in range(20)]
                    return {answer.session for answer in await asyncio.gather(*answers)}

            north, south = await asyncio.gather(sessions("north"), sessions("south"))
            assert north == {str(federation.agent_id("north"))}
            assert south == {str(federation.agent_id("south"))}

    asyncio.run(run())


def outcome(federation: Federation, files: TlsFiles) -> VeilfedError:
    """What a client sees that cannot Join; no handler may have run."""
    stub = Stub()

    async def run() -> None:
        async with dialling(federation, stub, files) as client:
            await join(client)

    with pytest.raises(VeilfedError) as caught:
        asyncio.run(run())
    assert stub.peers == []
    return caught.value


def test_a_method_that_the_table_of_roles_lacks_is_denied_to_all(federation: Federation) -> None:
    async def forgotten(request: bytes, context: Any) -> bytes:
        raise AssertionError("reached")

    async def run() -> None:
        credentials = load_credentials(federation.aggregator)
        server, port = create_server(credentials, "127.0.0.1:0")
        handlers = {"Method": grpc.unary_unary_rpc_method_handler(forgotten)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Forgotten", handlers)])
        await server.start()
        agent, address = load_credentials(federation.agents["north"]), f"127.0.0.1:{port}"
        try:
            with translated(agent, address):
                async with open_channel(agent, address, federation.aggregator_id) as channel:
                    await channel.unary_unary("/test.Forgotten/Method", None, None)(b"", timeout=SECONDS)
        finally:
            await server.stop(0)

    with pytest.raises(VeilfedError) as caught:
        asyncio.run(run())
    assert caught.value.code is Code.ROLE_DENIED


def test_a_servers_certificate_does_not_pass_as_a_client(federation: Federation) -> None:
    error = outcome(federation, federation.make(federation.oracle_id("north"), federation.folder / "dialling-oracle"))
    assert error.code is Code.TLS_REFUSED


def test_a_zones_root_admits_nobody_to_the_federation(federation: Federation, tmp_path: Path) -> None:
    """Whoever holds it may sign what he likes: it is in nobody's bundle."""
    zone = CertificateAuthority.open(federation.zone_roots["north"].parent)
    files = federation.make(federation.agent_id("south"), tmp_path / "agent", replace(zone, zone=None))
    assert outcome(federation, files).code is Code.TLS_REFUSED


def test_an_identity_of_another_federation_is_nobody(federation: Federation) -> None:
    """Even signed by the same root, as when two federations share one."""
    shared = replace(federation.authority, federation="other.veilfed")
    files = federation.make(
        Identity("other.veilfed", Role.AGENT, "north", "agent"), federation.folder / "foreign", shared
    )
    assert outcome(federation, files).code is Code.UNAUTHENTICATED


async def oracle_call(federation: Federation, served: TlsFiles) -> None:
    """North's agent dials what says to be north's oracle, and trusts its own zone's root alone."""
    async with serving(load_credentials(served), Stub()) as address:
        roots = federation.zone_roots["north"].read_bytes()
        async with connected(federation.agents["north"], address, federation.oracle_id("north"), roots=roots) as client:
            await join(client)


def test_the_zones_own_oracle_is_trusted(federation: Federation) -> None:
    asyncio.run(oracle_call(federation, federation.oracles["north"]))


def test_an_oracle_that_the_federations_authority_made_up_is_refused(federation: Federation, tmp_path: Path) -> None:
    false = federation.make(federation.oracle_id("north"), tmp_path / "false")
    with pytest.raises(VeilfedError) as caught:
        asyncio.run(oracle_call(federation, false))
    assert caught.value.code is Code.TLS_REFUSED


@pytest.mark.parametrize("roots", [b"", b"no certificate"])
def test_roots_without_a_certificate_are_not_replaced_by_others(federation: Federation, roots: bytes) -> None:
    async def go() -> None:
        async with connected(federation.agents["north"], "127.0.0.1:1", federation.oracle_id("north"), roots=roots):
            raise AssertionError("a channel was made")

    with pytest.raises(VeilfedError) as caught:
        asyncio.run(go())
    assert caught.value.code is Code.IDENTITY_INVALID


def test_another_zones_oracle_is_refused(federation: Federation) -> None:
    with pytest.raises(VeilfedError) as caught:
        asyncio.run(oracle_call(federation, federation.oracles["south"]))
    assert caught.value.code is Code.TLS_REFUSED


def test_a_proxy_in_the_environment_is_not_asked(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def run() -> None:
        async with dialling(federation, Stub()) as client:
            await join(client)

    asyncio.run(run())


@pytest.mark.parametrize("smaller", ["server", "client"])
def test_a_message_over_the_limit_is_too_large_and_the_next_one_passes(federation: Federation, smaller: str) -> None:
    limit: dict[str, Any] = {"max_message_bytes": 1024}
    served, dialled = (limit, {}) if smaller == "server" else ({}, limit)
    agent = load_credentials(federation.agents["north"])

    async def run() -> None:
        async with (
            serving(load_credentials(federation.aggregator), Stub(), **served) as address,
            open_channel(agent, address, federation.aggregator_id, **dialled) as channel,
        ):
            client = CoordinatorStub(channel)
            with pytest.raises(VeilfedError) as caught, translated(agent, address):
                await client.Join(JoinRequest(software_version="x" * 5000), timeout=SECONDS)
            assert caught.value.code is Code.MESSAGE_TOO_LARGE
            await join(client)

    asyncio.run(run())


def test_no_answer_in_time_is_a_timeout(federation: Federation) -> None:
    async def run() -> None:
        never = asyncio.Event()

        async def silence() -> AsyncIterator[PushRequest]:
            await never.wait()
            yield PushRequest()

        async with dialling(federation, Stub()) as client:
            await client.Push(silence(), timeout=0.3)

    with pytest.raises(VeilfedError) as caught:
        asyncio.run(run())
    assert caught.value.code is Code.TIMEOUT


def test_a_server_that_dies_is_unreachable_and_not_taken_for_one_that_refuses(federation: Federation) -> None:
    async def run() -> None:
        dies = asyncio.Event()

        async def serve(started: "asyncio.Future[str]") -> None:
            async with serving(load_credentials(federation.aggregator), Stub()) as address:
                started.set_result(address)
                await dies.wait()

        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(started))
        async with connected(federation.agents["north"], await started, federation.aggregator_id) as client:
            stream = client.Work(timeout=SECONDS)
            await stream.write(WorkRequest())
            await stream.read()
            dies.set()
            await server
            await stream.read()
            await join(client)

    with pytest.raises(VeilfedError) as caught:
        asyncio.run(run())
    assert caught.value.code is Code.UNREACHABLE


def test_an_expired_servers_certificate_is_the_clients_tls_refused(federation: Federation, tmp_path: Path) -> None:
    lapsed = datetime.now(UTC) - timedelta(days=9)
    files = federation.make(federation.aggregator_id, tmp_path / "a", not_before=lapsed, lifetime=timedelta(days=1))

    async def run() -> None:
        async with dialling(federation, Stub(), served=files) as client:
            await join(client)

    with pytest.raises(VeilfedError, match="did not prove") as caught:
        asyncio.run(run())
    assert caught.value.code is Code.TLS_REFUSED


def test_sigterm_ends_a_service_in_order(federation: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    """The ready line first; after the signal NOT_SERVING, then `on_stop`; a call in flight still gets its answer."""
    seen: list[str] = []

    async def run() -> None:
        server, port = create_server(load_credentials(federation.aggregator), "127.0.0.1:0")
        add_CoordinatorServicer_to_server(Stub(), server)

        told = asyncio.Event()

        async def on_stop() -> None:
            await asyncio.wait_for(told.wait(), SECONDS)
            seen.append("on_stop")

        service = asyncio.create_task(run_server(server, port, name="stub", on_stop=on_stop))
        agent, address = load_credentials(federation.agents["north"]), f"127.0.0.1:{port}"
        async with open_channel(agent, address, federation.aggregator_id) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            client: Any = CoordinatorStub(channel)
            push = client.Push(timeout=SECONDS)
            await push.write(PushRequest(chunk=b"12"))
            async for answer in watch:
                seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    ready = capsys.readouterr().out.splitlines()[-1]
                    assert json.loads(ready) == {"ready": True, "service": "stub", "port": port}
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    told.set()
                    break
            await push.write(PushRequest(chunk=b"345"))
            await push.done_writing()
            assert (await push).received == 5
            watch.cancel()
        await asyncio.wait_for(service, SECONDS)

    asyncio.run(run())
    assert seen == ["SERVING", "NOT_SERVING", "on_stop"]
