"""What a client says of a connection that cannot be made, or ends: which side is to look where."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.support.coordinator_stub import Stub, serving
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.proxy import Proxy, proxied
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import JoinRequest, WorkRequest
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub

SECONDS = 20.0
Writer = asyncio.StreamWriter


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


@asynccontextmanager
async def dialling(federation: Federation, address: str) -> AsyncIterator[Any]:
    agent = load_credentials(federation.agents["north"])
    with translated(agent, address):
        async with open_channel(agent, address, federation.aggregator_id) as channel:
            yield CoordinatorStub(channel)


async def refusal(federation: Federation, address: str) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        async with dialling(federation, address) as client:
            await client.Join(JoinRequest(), timeout=SECONDS)
    return caught.value


async def worked(federation: Federation, link: Proxy) -> None:
    """A stream of work, until the link is cut."""
    async with dialling(federation, link.address) as client:
        stream = client.Work(timeout=SECONDS)
        await stream.write(WorkRequest())
        await stream.read()
        link.cut()
        await stream.read()


@asynchronous
async def test_a_link_that_is_cut_is_unreachable_and_no_refused_handshake(federation: Federation) -> None:
    """The server lives, and so does the proxy that has reset the connection."""
    async with serving(load_credentials(federation.aggregator), Stub()) as address:
        with proxied(address) as link:
            with pytest.raises(VeilfedError) as caught:
                await worked(federation, link)
            assert caught.value.code is Code.UNREACHABLE
            assert "was cut" in caught.value.message
            async with dialling(federation, link.address) as client:
                assert (await client.Join(JoinRequest(), timeout=SECONDS)).session


@asynchronous
async def test_a_proxy_without_a_server_behind_it_is_unreachable(federation: Federation) -> None:
    with proxied("127.0.0.1:1") as link:
        error = await refusal(federation, link.address)
    assert error.code is Code.UNREACHABLE
    assert "before TLS begins" in error.message
    assert "proxy" in error.hint


async def hang_up(writer: Writer) -> None:
    writer.close()


async def reset(writer: Writer) -> None:
    writer.transport.abort()


async def speak_http(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("behave", "code"),
    [(hang_up, Code.UNREACHABLE), (reset, Code.UNREACHABLE), (speak_http, Code.TLS_REFUSED)],
    ids=lambda item: item.__name__ if callable(item) else "",
)
@asynchronous
async def test_somebody_else_listens_there(
    federation: Federation, behave: Callable[[Writer], Awaitable[None]], code: Code
) -> None:
    async def answer(_: asyncio.StreamReader, writer: Writer) -> None:
        await behave(writer)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        error = await refusal(federation, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert error.code is code


@asynchronous
async def test_a_server_without_tls_is_refused(federation: Federation) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        error = await refusal(federation, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
    assert error.code is Code.TLS_REFUSED
    assert "not TLS 1.3" in error.message


@pytest.mark.slow  # gRPC waits 20 s for a handshake
@asynchronous
async def test_somebody_is_there_and_says_nothing(federation: Federation) -> None:
    """As a service that is paused: the system takes the connection, and nobody answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with pytest.raises(VeilfedError, match="says nothing") as caught:
            async with dialling(federation, f"127.0.0.1:{listening.getsockname()[1]}") as client:
                await client.Join(JoinRequest(), timeout=60)
    assert caught.value.code is Code.TIMEOUT
