"""The oracle's streams over real TLS, with a tiny model that makes every case quick."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from fm_oracle.config import OracleConfig
from fm_oracle.models.base import Model
from fm_oracle.server import serve, service
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.models import TinyModel, TowersModel, png
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.rpc.server import create_server
from veilfed.v1.oracle_pb2 import (
    MODALITY_IMAGE,
    MODALITY_TEXT,
    DescribeRequest,
    DescribeResponse,
    EmbedRequest,
    EmbedResponse,
    Images,
    Texts,
)
from veilfed.v1.oracle_pb2_grpc import OracleStub, add_OracleServicer_to_server
from veilfed.wire.tensors import from_tensor

if TYPE_CHECKING:
    from veilfed.v1.oracle_pb2_grpc import OracleAsyncStub


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


@dataclass
class Running:
    """An oracle of `north` that serves in this process, and channels to it."""

    federation: Federation
    model: TinyModel
    server: grpc.aio.Server
    port: int
    stack: AsyncExitStack

    async def client(self, institution: str = "north") -> "Client":
        credentials = load_credentials(self.federation.agents[institution])
        oracle = load_credentials(self.federation.oracles["north"]).identity
        roots = self.federation.zone_roots["north"].read_bytes()
        address = f"127.0.0.1:{self.port}"
        channel = await self.stack.enter_async_context(open_channel(credentials, address, oracle, roots=roots))
        return Client(OracleStub(channel), lambda: translated(credentials, address))


@dataclass
class Client:
    stub: "OracleAsyncStub"
    translated: Callable[[], Any]

    async def describe(self) -> DescribeResponse:
        with self.translated():
            return await self.stub.Describe(DescribeRequest(), timeout=20)

    async def embed(self, requests: Iterable[EmbedRequest]) -> list[EmbedResponse]:
        with self.translated():
            return [response async for response in self.stub.Embed(iter(requests), timeout=20)]

    async def refused(self, requests: Iterable[EmbedRequest]) -> VeilfedError:
        with pytest.raises(VeilfedError) as caught:
            await self.embed(requests)
        return caught.value


@asynccontextmanager
async def oracle(
    federation: Federation, state: Path, model: Model[Any] | None = None, **settings: Any
) -> AsyncIterator[Running]:
    identity = federation.oracles["north"]
    config = OracleConfig(identity=identity, listen="127.0.0.1:0", model="minilm", state=state, **settings)
    tiny = TinyModel()
    async with AsyncExitStack() as stack:
        server, port = create_server(load_credentials(identity), config.listen)
        add_OracleServicer_to_server(await stack.enter_async_context(service(model or tiny, config)), server)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(tiny.gate.set)
        yield Running(federation, tiny, server, port, stack)


def texts(batch: int, *values: str) -> EmbedRequest:
    return EmbedRequest(batch=batch, texts=Texts(values=values))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  polled from outside, as a client would
            await asyncio.sleep(0.01)


async def until_left(client: Client, expected: int) -> None:
    async with asyncio.timeout(20):
        while (await client.describe()).quota_left != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynchronous
async def test_describe(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, quota=10, quotas={"south": 3}) as running:
        card = await (await running.client()).describe()
        assert (card.model, card.version, card.modality) == ("tiny", "0" * 64, MODALITY_TEXT)
        assert (card.dimension, card.blocks, card.max_tokens, card.image_size) == (2, 1, 8, 0)
        assert (card.max_batch, card.quota_left) == (64, 10)
        assert (await (await running.client("south")).describe()).quota_left == 3


@asynchronous
async def test_answers_come_in_order(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path) as running:
        client = await running.client()
        answers = await client.embed(texts(100 - n, *["a" * n] * (1 + n % 7)) for n in range(1, 60))
        assert [answer.batch for answer in answers] == [100 - n for n in range(1, 60)]
        for n, answer in enumerate(answers, start=1):
            assert np.array_equal(from_tensor(answer.embeddings), np.full((1 + n % 7, 2), n, dtype=np.float32))
            assert not answer.HasField("quota_left")


@asynchronous
async def test_a_bad_request_ends_its_own_stream_only(federation: Federation, tmp_path: Path) -> None:
    bad: list[tuple[EmbedRequest, str]] = [
        (EmbedRequest(batch=7), "batch 7 has no inputs"),
        (EmbedRequest(batch=7, texts=Texts()), "batch 7 holds 0 inputs"),
        (texts(7, *["a"] * 65), "batch 7 holds 65 inputs"),
        (EmbedRequest(batch=7, images=Images(values=[b"x"])), "batch 7 holds images"),
        (texts(7, "a", ""), "text 1"),
    ]
    async with oracle(federation, tmp_path, quota=10_000) as running:
        north, south = await running.client("north"), await running.client("south")
        running.model.gate.clear()
        steady = asyncio.create_task(south.embed(texts(n, "a") for n in range(20)))
        await until(lambda: running.model.started > 0)
        for request, message in bad:
            refusal = asyncio.create_task(north.refused([request]))
            error = await refusal
            assert error.code is Code.INPUT_INVALID
            assert message in error.message
        running.model.gate.set()
        assert len(await steady) == 20
        await until_left(north, 10_000)  # nothing was given out, nothing is charged
        await until_left(south, 10_000 - 20)


@asynchronous
async def test_what_was_answered_before_a_bad_request_arrives(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path) as running:
        client = await running.client()
        call = client.stub.Embed(
            iter([texts(1, "a"), texts(2, "aa"), EmbedRequest(batch=3), texts(4, "a")]), timeout=20
        )
        answers = aiter(call)
        assert [(await anext(answers)).batch, (await anext(answers)).batch] == [1, 2]
        with pytest.raises(VeilfedError, match="no inputs"), client.translated():
            await anext(answers)


@asynchronous
async def test_a_failed_pass_is_refunded_and_says_nothing_private(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, quota=100) as running:
        client = await running.client()
        error = await client.refused([texts(1, "a", "poison")])
        assert error.code is Code.INTERNAL
        assert "poison" not in str(error)
        assert "a pass that fails" not in str(error)
        await until_left(client, 100)
        assert len(await client.embed([texts(1, "a")])) == 1


@asynchronous
async def test_a_text_tower_embeds_prompts_for_classes(federation: Federation, tmp_path: Path) -> None:
    pictures = Images(values=[png(np.full((4, 4, 3), value, np.uint8)) for value in (10, 20)])
    async with oracle(federation, tmp_path, TowersModel(), quota=10) as running:
        client = await running.client()
        card = await client.describe()
        assert (card.modality, card.text_tower) == (MODALITY_IMAGE, True)
        requests = [texts(1, "a dog", "an elephant"), EmbedRequest(batch=2, images=pictures), texts(3, "a cat")]
        answers = [from_tensor(answer.embeddings).tolist() for answer in await client.embed(requests)]
        assert answers == [[[5, 1], [11, 2]], [[10, 1], [20, 1]], [[5, 2]]]
        assert (await client.describe()).quota_left == 5
        error = await client.refused([texts(4, "fine", "x" * 10_001)])
        assert (error.code, "text 1 of the batch" in error.message) == (Code.INPUT_INVALID, True)
        assert (await client.describe()).quota_left == 5  # what was refused was refunded


@asynchronous
async def test_the_quota_is_kept_over_streams_and_restarts(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, quota=10) as running:
        client = await running.client()
        answers = await client.embed([texts(1, *["a"] * 4), texts(2, *["a"] * 3)])
        assert [answer.quota_left for answer in answers] == [6, 3]
        error = await client.refused([texts(1, *["a"] * 4)])
        assert error.code is Code.QUOTA_EXCEEDED
    async with oracle(federation, tmp_path, quota=10) as running:
        client = await running.client()
        assert (await client.refused([texts(1, *["a"] * 4)])).code is Code.QUOTA_EXCEEDED
        assert len(await client.embed([texts(1, *["a"] * 3)])) == 1
        assert len(await (await running.client("south")).embed([texts(1, *["a"] * 10)])) == 1


@asynchronous
async def test_a_stream_that_is_left_is_refunded(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, quota=1000, read_ahead=3) as running:
        client = await running.client()
        running.model.gate.clear()
        call = client.stub.Embed((texts(n, "a", "a") for n in range(50)), timeout=20)
        waiting = asyncio.create_task(call.read())
        await until_left(client, 1000 - 6)
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until_left(client, 1000)
        running.model.gate.set()
        assert len(await client.embed([texts(1, "a")])) == 1


@asynchronous
async def test_an_oracle_that_stops_refunds_what_it_did_not_give_out(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, quota=100, read_ahead=3) as running:
        client = await running.client()
        running.model.gate.clear()
        stream = asyncio.create_task(client.embed(texts(n, "a") for n in range(10)))
        await until_left(client, 97)
        await running.server.stop(0)
        with pytest.raises(VeilfedError):
            await stream
    async with oracle(federation, tmp_path, quota=100) as running:
        assert (await (await running.client()).describe()).quota_left == 100


@asynchronous
async def test_no_more_is_read_ahead_than_allowed(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, quota=1000, read_ahead=2) as running:
        client = await running.client()
        running.model.gate.clear()
        task = asyncio.create_task(client.embed(texts(n, "a") for n in range(30)))
        await until_left(client, 998)
        for _ in range(20):  # a third request would be charged well within this time
            assert (await client.describe()).quota_left == 998
        running.model.gate.set()
        assert len(await task) == 30


@asynchronous
async def test_too_many_streams_are_refused(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, max_streams=2) as running:
        north, south = await running.client("north"), await running.client("south")
        running.model.gate.clear()
        open_streams = [asyncio.create_task(north.embed([texts(n, "a")])) for n in range(2)]
        south_stream = asyncio.create_task(south.embed([texts(1, "a")]))
        await until(lambda: running.model.prepared == 3)
        assert (await north.refused([texts(3, "a")])).code is Code.RATE_LIMITED
        running.model.gate.set()
        await asyncio.gather(*open_streams, south_stream)
        assert len(await north.embed([texts(4, "a")])) == 1


@asynchronous
async def test_the_rate_holds_a_stream_back(federation: Federation, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rate": 40.0, "burst": 10, "max_batch": 10}
    async with oracle(federation, tmp_path, **settings) as running:
        client = await running.client()
        clock = asyncio.get_running_loop()
        start = clock.time()
        assert len(await client.embed(texts(n, *["a"] * 10) for n in range(4))) == 4
        assert clock.time() - start >= 30 / 40.0
    settings["rate"] = 0.1  # nothing comes back while the test runs
    async with oracle(federation, tmp_path / "strict", rate_wait_seconds=0, **settings) as running:
        client = await running.client()
        assert (await client.refused(texts(n, *["a"] * 10) for n in range(4))).code is Code.RATE_LIMITED


@asynchronous
async def test_clients_share_passes(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, batch_wait_ms=100) as running:
        clients = [await running.client(name) for name in ("north", "south")]
        running.model.gate.clear()
        first = asyncio.create_task(clients[0].embed([texts(0, "a")]))
        await until(lambda: running.model.started > 0)
        tasks = [asyncio.create_task(client.embed([texts(n, *["a"] * 5)])) for n, client in enumerate(clients)]
        await until(lambda: running.model.prepared == 3)
        running.model.gate.set()
        await asyncio.gather(first, *tasks)
        assert running.model.sizes == [1, 10]


def _roles(federation: Federation) -> Iterator[Any]:
    yield federation.admin
    yield federation.aggregator
    yield federation.oracles["south"]


@asynchronous
async def test_only_agents_are_answered(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path) as running:
        for files in _roles(federation):
            credentials = load_credentials(files)
            address = f"127.0.0.1:{running.port}"
            server = load_credentials(federation.oracles["north"]).identity
            roots = federation.zone_roots["north"].read_bytes()
            async with open_channel(credentials, address, server, roots=roots) as channel:
                with pytest.raises(VeilfedError) as caught, translated(credentials, address):
                    await OracleStub(channel).Describe(DescribeRequest(), timeout=20)
            assert caught.value.code in {Code.ROLE_DENIED, Code.TLS_REFUSED}
        assert running.model.prepared == 0


@asynchronous
async def test_another_role_cannot_serve(federation: Federation, tmp_path: Path) -> None:
    config = OracleConfig(identity=federation.agents["north"], listen="127.0.0.1:0", model="minilm", state=tmp_path)
    with pytest.raises(VeilfedError, match="not the identity of an oracle") as caught:
        await serve(config)
    assert caught.value.code is Code.IDENTITY_INVALID
