"""Prompt tokens and their gradients over the oracle's real service: what is refused, what it costs, who gets what."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from client_agent.config import OracleEndpoint
from client_agent.egress import EgressGate, EgressPolicy
from client_agent.oracle_client import OracleClient, connect_oracle
from fm_oracle.models.minilm import MiniLM
from tests.integration.test_oracle_stream import Client, Running, oracle, texts, until_left
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.models import PromptedModel, TinyModel, TowersModel, png, published
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.v1.oracle_pb2 import (
    EmbedRequest,
    EmbedResponse,
    Images,
    PromptGradientRequest,
    PromptGradientResponse,
    Texts,
)
from veilfed.wire.tensors import from_tensor, to_tensor

Float = NDArray[np.float32]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


def tokens(*shape: int, seed: int = 0) -> Float:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def prompted(batch: int, prompts: NDArray[Any], *values: str) -> EmbedRequest:
    return EmbedRequest(batch=batch, texts=Texts(values=values), prompts=to_tensor(prompts))


def slope(prompts: NDArray[Any], head: NDArray[Any], labels: list[int], *values: str) -> PromptGradientRequest:
    return PromptGradientRequest(
        texts=Texts(values=values), prompts=to_tensor(prompts), head=to_tensor(head), labels=labels
    )


async def gradient(client: Client, request: PromptGradientRequest) -> PromptGradientResponse:
    with client.translated():
        return await client.stub.PromptGradient(request, timeout=20)


async def denied(client: Client, request: PromptGradientRequest) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        await gradient(client, request)
    return caught.value


def rows(answers: list[EmbedResponse]) -> Float:
    return np.concatenate([from_tensor(answer.embeddings).astype(np.float32) for answer in answers])


@asynchronous
async def test_the_card_says_what_may_be_done_with_prompts(federation: Federation, tmp_path: Path) -> None:
    expected = {"off": (0, False), "forward": (3, False), "gradients": (3, True)}
    for use, found in expected.items():
        async with oracle(federation, tmp_path / use, PromptedModel(), prompts=use) as running:
            card = await (await running.client()).describe()
            assert (card.prompt_width, card.prompt_gradients) == found
    async with oracle(federation, tmp_path / "without", TinyModel(), prompts="gradients") as running:
        card = await (await running.client()).describe()
        assert (card.prompt_width, card.prompt_gradients) == (0, False)


@asynchronous
async def test_concurrent_streams_get_what_each_alone_would_get(federation: Federation, tmp_path: Path) -> None:
    """Bit for bit, with the real model, two institutions, several prompts in each stream, and one without any."""
    model = MiniLM.load(published("minilm"))
    words = ["short", "a somewhat longer text about nothing", "no", "three words here", "the end of the list"]
    asked = {
        "north": [prompted(n, tokens(4, 384, seed=n), *words) for n in range(6)],
        "south": [prompted(n, tokens(7, 384, seed=100 + n), *reversed(words)) for n in range(6)],
    }
    async with oracle(federation, tmp_path, model, max_batch=16) as running:
        clients = {name: await running.client(name) for name in asked}
        alone = {name: rows(await clients[name].embed(asked[name])) for name in asked}
        together = await asyncio.gather(
            *(clients[name].embed(asked[name]) for name in asked),
            (await running.client()).embed([texts(n, *words) for n in range(6)]),
        )
    for name, answers in zip(asked, together, strict=False):
        assert np.array_equal(rows(answers), alone[name])
    plain = model.forward(model.prepare(words))
    assert np.abs(rows(together[2]) - np.tile(plain, (6, 1))).max() < 1e-4
    direct = model.forward_prompted(model.prepare(words), tokens(4, 384, seed=0))
    assert np.abs(alone["north"][: len(words)] - direct).max() < 1e-4


@asynchronous
async def test_a_pass_has_the_inputs_of_one_request_with_prompts_alone(federation: Federation, tmp_path: Path) -> None:
    model = PromptedModel()
    model.gate.clear()
    async with oracle(federation, tmp_path, model, max_batch=8, batch_wait_ms=200) as running:
        north, south = await running.client("north"), await running.client("south")
        calls = [
            asyncio.create_task(north.embed([prompted(0, tokens(2, 3), "a", "aa"), texts(1, "aaa")])),
            asyncio.create_task(south.embed([prompted(0, tokens(2, 3), "b", "bb"), texts(1, "bbb")])),
        ]
        model.gate.set()
        await asyncio.gather(*calls)
    with_prompts = [found for found in model.passes if {"a", "b"} & set(found)]
    assert sorted(map(sorted, with_prompts)) == [["a", "aa"], ["b", "bb"]]  # the same prompts, and yet apart


@asynchronous
async def test_inputs_with_prompts_cost_as_much_as_others(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, PromptedModel(), prompts="gradients", quota=6) as running:
        client = await running.client()
        (answer,) = await client.embed([prompted(0, tokens(1, 3), "a", "b")])
        assert answer.quota_left == 4
        found = await gradient(client, slope(tokens(1, 3), tokens(2, 2), [0, 1, 0], "a", "b", "ab"))
        assert found.quota_left == 1
        assert (await denied(client, slope(tokens(1, 3), tokens(2, 2), [0, 1], "a", "b"))).code is Code.QUOTA_EXCEEDED
        await until_left(client, 1)


@asynchronous
async def test_a_gradient_that_fails_is_not_charged(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, PromptedModel(), prompts="gradients", quota=6) as running:
        client = await running.client()
        assert (await denied(client, slope(tokens(1, 3), tokens(2, 2), [0, 1], "poison", "b"))).code is Code.INTERNAL
        await until_left(client, 6)
        running.model.gate.set()


@asynchronous
async def test_prompts_that_lead_nowhere_are_the_clients_fault(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, PromptedModel(), prompts="gradients", quota=6) as running:
        client, huge = await running.client(), np.full((1, 3), 3e38, np.float32)
        for error in (
            await client.refused([prompted(0, huge, "a")]),
            await denied(client, slope(huge, tokens(2, 2), [0], "a")),
        ):
            assert (error.code, "not finite" in error.message) == (Code.INPUT_INVALID, True)
        await until_left(client, 6)


@asynchronous
async def test_a_gradient_of_the_service_is_the_models(federation: Federation, tmp_path: Path) -> None:
    model = PromptedModel()
    prompts, head = tokens(2, 3), tokens(4, 2, seed=1)
    async with oracle(federation, tmp_path, model, prompts="gradients") as running:
        found = await gradient(await running.client(), slope(prompts, head, [3, 0], "banana", "kiwi"))
    expected, embeddings = model.prompt_gradient(model.prepare(["banana", "kiwi"]), prompts, head, np.array([3, 0]))
    assert np.array_equal(from_tensor(found.gradient), expected)
    assert np.array_equal(from_tensor(found.embeddings), embeddings)


@pytest.mark.parametrize("use", ["off", "forward"])
@asynchronous
async def test_gradients_are_refused_unless_the_owner_allows_them(
    federation: Federation, tmp_path: Path, use: str
) -> None:
    settings = {} if use == "forward" else {"prompts": use}  # it is the default
    async with oracle(federation, tmp_path, PromptedModel(), quota=5, **settings) as running:
        client = await running.client()
        error = await denied(client, slope(tokens(1, 3), tokens(2, 2), [0], "a"))
        assert error.code is Code.POLICY_DENIED
        assert "the model's owner does not let out gradients" in error.message
        await until_left(client, 5)


@asynchronous
async def test_prompts_are_refused_where_they_are_off(federation: Federation, tmp_path: Path) -> None:
    async with oracle(federation, tmp_path, PromptedModel(), prompts="off") as running:
        client = await running.client()
        error = await client.refused([prompted(3, tokens(1, 3), "a")])
        assert (error.code, error.message) == (
            Code.INPUT_INVALID,
            "batch 3 has prompt tokens; this oracle takes none",
        )


BAD: dict[str, tuple[NDArray[Any], str]] = {
    "another width": (tokens(2, 4), r"prompts of the shape \[2, 4\]"),
    "none": (tokens(0, 3), r"prompts of the shape \[0, 3\]"),
    "too many": (tokens(65, 3), r"\[1 to 64, 3\] is needed"),
    "one axis": (tokens(3), r"prompts of the shape \[3\]"),
    "float64": (np.zeros((1, 3)), "prompts of float64"),
    "not finite": (np.array([[0, np.nan, 0]], np.float32), "not finite"),
}


@pytest.mark.parametrize("case", BAD)
@asynchronous
async def test_bad_prompts_are_refused_before_they_are_charged(
    federation: Federation, tmp_path: Path, case: str
) -> None:
    prompts, message = BAD[case]
    async with oracle(federation, tmp_path, PromptedModel(), prompts="gradients", quota=5) as running:
        client = await running.client()
        for error in (
            await client.refused([prompted(7, prompts, "a")]),
            await denied(client, slope(prompts, tokens(2, 2), [0], "a")),
        ):
            assert error.code is Code.INPUT_INVALID
            assert error.message.startswith(("batch 7", "the request"))
            assert re.search(message, error.message)
        await until_left(client, 5)


WRONG = {
    "a head of one class": (tokens(1, 2), [0], "head of the shape"),
    "a head of another dimension": (tokens(2, 3), [0], "head of the shape"),
    "a label beyond the head": (tokens(2, 2), [2], "label below 2"),
    "a label too few": (tokens(2, 2), [], "label below 2"),
    "a label too many": (tokens(2, 2), [0, 1], "label below 2"),
}


@pytest.mark.parametrize("case", WRONG)
@asynchronous
async def test_heads_and_labels_that_do_not_fit(federation: Federation, tmp_path: Path, case: str) -> None:
    head, labels, message = WRONG[case]
    async with oracle(federation, tmp_path, PromptedModel(), prompts="gradients") as running:
        error = await denied(await running.client(), slope(tokens(1, 3), head, labels, "a"))
        assert error.code is Code.INPUT_INVALID
        assert message in error.message


@asynccontextmanager
async def agent(running: Running, folder: Path, **policy: Any) -> AsyncIterator[OracleClient]:
    """The agent of `north`, through its egress gate, at the oracle that runs."""
    federation = running.federation
    credentials = load_credentials(federation.agents["north"])
    endpoint = OracleEndpoint(
        address=f"127.0.0.1:{running.port}",
        identity=federation.oracle_id("north"),
        root=federation.zone_roots["north"],
    )
    rules = EgressPolicy(**policy)
    aggregator = federation.aggregator_id
    with EgressGate(rules, credentials.identity, folder / "ledger", aggregator, credentials.bundle_pem) as gate:
        async with connect_oracle(credentials, endpoint, gate) as client:
            yield client


@asynchronous
async def test_the_agent_gets_embeddings_and_gradients_over_many_requests(
    federation: Federation, tmp_path: Path
) -> None:
    model = PromptedModel()
    words = [f"{'a' * (n % 5)}{'word' * (1 + n % 7)}" for n in range(23)]
    prompts, head, labels = tokens(2, 3), tokens(3, 2, seed=1), np.arange(23) % 3
    async with (
        oracle(federation, tmp_path / "oracle", model, prompts="gradients", max_batch=4) as running,
        agent(running, tmp_path) as client,
    ):
        client.check_prompts(3, gradients=True)
        found = np.empty((23, 2), np.float32)
        async for rows, embeddings in client.embed("text", words, prompts):
            found[rows] = embeddings
        gradient, beside = await client.prompt_gradient("text", words, prompts, head, labels)
        with pytest.raises(VeilfedError, match="width 3, not 4") as caught:
            client.check_prompts(4, gradients=False)
        assert caught.value.code is Code.INPUT_INVALID
    prepared = model.prepare(words)
    expected, embeddings = model.prompt_gradient(prepared, prompts, head, labels)
    assert np.abs(gradient - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.array_equal(beside, embeddings)
    assert np.array_equal(found, embeddings)


@asynchronous
async def test_the_agent_is_told_what_the_oracle_does_not_do(federation: Federation, tmp_path: Path) -> None:
    for use, message in {"off": "takes no prompt tokens", "forward": "gives no gradients"}.items():
        async with (
            oracle(federation, tmp_path / use, PromptedModel(), prompts=use) as running,
            agent(running, tmp_path / use) as client,
        ):
            with pytest.raises(VeilfedError, match=message) as caught:
                client.check_prompts(3, gradients=True)
            assert caught.value.code is Code.INPUT_INVALID


@asynchronous
async def test_prompts_go_with_the_models_own_modality_alone(federation: Federation, tmp_path: Path) -> None:
    model = TowersModel()
    async with oracle(federation, tmp_path, model) as running:
        client = await running.client()
        error = await client.refused([prompted(0, tokens(1, 3), "a photo of a cat")])
        assert (error.code, "holds texts" in error.message) == (Code.INPUT_INVALID, True)
        picture = png(np.zeros((4, 4), np.uint8))
        image = EmbedRequest(batch=0, images=Images(values=[picture]), prompts=to_tensor(tokens(1, 3)))
        assert "takes none" in (await client.refused([image])).message
