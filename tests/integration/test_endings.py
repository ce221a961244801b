"""What a client sees of a call that the server ends while the client is still sending."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.coordinator_stub import Stub, serving
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.protocol import CHUNK_BYTES
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import PushRequest, PushResponse, WorkRequest, WorkResponse
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub

SECONDS = 20.0
# Without veilfed.rpc.endings about a third of the refusals come as INTERNAL: so many would not all be lucky.
TRIES = 40
CHUNK = PushRequest(chunk=bytes(CHUNK_BYTES))
REFUSAL = VeilfedError(Code.JOB_ENDED, "job 7 has ended", "Submit another.")


class Brief(Stub):
    """Answers in order before the client has sent everything."""

    async def Work(self, request_iterator: AsyncIterator[WorkRequest], context: Any) -> AsyncIterator[WorkResponse]:  # noqa: N802
        async for _ in request_iterator:
            yield WorkResponse()
            return

    async def Push(self, request_iterator: AsyncIterator[PushRequest], context: Any) -> PushResponse:  # noqa: N802
        return PushResponse(received=7)


class Halfway(Stub):
    """Refuses after some chunks."""

    async def Push(self, request_iterator: AsyncIterator[PushRequest], context: Any) -> PushResponse:  # noqa: N802
        for _ in range(3):
            await anext(request_iterator)
        raise REFUSAL


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


@asynccontextmanager
async def client_of(federation: Federation, stub: Stub) -> AsyncIterator[Any]:
    agent = load_credentials(federation.agents["north"])
    async with (
        serving(load_credentials(federation.aggregator), stub) as address,
        open_channel(agent, address, federation.aggregator_id) as channel,
    ):
        with translated(agent, address):
            yield CoordinatorStub(channel)


async def worked(client: Any) -> int:
    """The responses of a stream whose client sends on and on."""

    async def requests() -> AsyncIterator[WorkRequest]:
        while True:
            yield WorkRequest()
            await asyncio.sleep(0)

    return len([response async for response in client.Work(requests(), timeout=SECONDS)])


@pytest.mark.parametrize("stub", [Stub(REFUSAL), Halfway()], ids=["at once", "after some chunks"])
@asynchronous
async def test_a_refusal_of_an_upload_arrives_whole(federation: Federation, stub: Stub) -> None:
    for _ in range(TRIES):
        with pytest.raises(VeilfedError) as caught:
            async with client_of(federation, stub) as client:
                await client.Push(iter([CHUNK] * 16), timeout=SECONDS)
        seen = caught.value
        assert (seen.code, seen.message, seen.hint) == (REFUSAL.code, REFUSAL.message, REFUSAL.hint)


@asynchronous
async def test_a_refusal_on_a_stream_in_both_directions_arrives_whole(federation: Federation) -> None:
    for _ in range(TRIES):
        with pytest.raises(VeilfedError) as caught:
            async with client_of(federation, Stub(REFUSAL)) as client:
                await worked(client)
        assert (caught.value.code, caught.value.message) == (REFUSAL.code, REFUSAL.message)


@asynchronous
async def test_an_orderly_end_while_the_client_sends_is_no_error(federation: Federation) -> None:
    async with client_of(federation, Brief()) as client:
        for _ in range(TRIES):
            assert (await client.Push(iter([CHUNK] * 16), timeout=SECONDS)).received == 7
            assert await worked(client) == 1
