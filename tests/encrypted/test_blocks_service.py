"""Passes of samples through the vendor's blocks over real services: what comes out, what does not, what is refused."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.config import EncryptedConfig
from client_agent.egress import EgressGate, EgressPolicy
from client_agent.encrypted import blocks_client
from client_agent.encrypted.blocks_client import BlocksClient, check_card, connect_blocks
from client_agent.encrypted.conversation import conversing
from client_agent.encrypted.inputs import load_inputs
from client_agent.encrypted.outputs import block_features
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Party
from tests.support.processes import free_port
from tests.support.tiny_student import BLOCKS, TINY, TOKENS, expected_outputs, seen_texts, tiny_config, tiny_oracle
from veilfed.ckks.messages import Expected, ciphertext_messages, key_messages, public_seed, read_ciphertexts
from veilfed.ckks.sampling import SEED_BYTES
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.jobs import BlindfedStrategy
from veilfed.ledger import read
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.blocks_pb2 import (
    DescribeStudentResponse,
    ForwardRequest,
    ForwardResponse,
    ForwardStart,
    OpenSessionRequest,
    SessionStart,
)
from veilfed.v1.blocks_pb2_grpc import EncryptedBlocksStub

pytestmark = pytest.mark.encrypted

TEXTS = ["hello", "a text that is too long", "x", "veil fed", "zebra", "ab"]
# Noise that floods outputs, rounding, and what the arithmetic leaves.
CLOSE = 4e-3


class Vendor:
    """The oracle's process, and how institutions reach it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.federation: Federation = make_federation(folder / "federation", ["north", "south"])
        self.folder, self.address = folder / "vendor", f"127.0.0.1:{free_port()}"
        self.folder.mkdir()
        self.oracle: Party = tiny_oracle(tiny_config(self.federation, self.folder, self.address, **settings))

    def start(self) -> None:
        self.oracle.start()
        self.oracle.process.ready(240)

    @property
    def config(self) -> EncryptedConfig:
        identity = str(self.federation.oracle_id("vendor"))
        return EncryptedConfig.model_validate(
            {"address": self.address, "identity": identity, "inputs": self.folder / "inputs.safetensors"}
        )

    def gate(self, folder: Path, institution: str = "north") -> EgressGate:
        folder.mkdir(parents=True, exist_ok=True)
        return EgressGate(
            EgressPolicy(consent="allow"),
            self.federation.agent_id(institution),
            folder / "ledger.jsonl",
            self.federation.aggregator_id,
            self.federation.authority.root_pem,
        )

    @asynccontextmanager
    async def client(self, folder: Path, institution: str = "north") -> AsyncIterator[BlocksClient]:
        credentials = load_credentials(self.federation.agents[institution])
        with self.gate(folder, institution) as gate:
            async with connect_blocks(credentials, self.config, gate, folder / "encrypted") as client:
                yield client

    @asynccontextmanager
    async def stub(self, institution: str) -> AsyncIterator[Any]:
        """Without a gate, for what an honest agent does not send."""
        credentials = load_credentials(self.federation.agents[institution])
        async with open_channel(credentials, self.address, self.federation.oracle_id("vendor")) as channel:
            yield EncryptedBlocksStub(channel)


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vendor]:
    made = Vendor(tmp_path_factory.mktemp("blocks"))
    try:
        made.start()
        yield made
    finally:
        made.oracle.kill()


def strategy(released: list[int]) -> BlindfedStrategy:
    return BlindfedStrategy(
        name="blindfed",
        classes=["a", "b"],
        dimension=TINY.dimension,
        blocks=BLOCKS,
        tokens=TOKENS,
        released=released,
    )


async def features(vendor: Vendor, folder: Path, released: list[int]) -> Any:
    credentials = load_credentials(vendor.federation.agents["north"])
    with vendor.gate(folder) as gate:
        return await block_features(
            credentials, vendor.config, gate, folder / "encrypted", "text", TEXTS, strategy(released)
        )


async def released_by(vendor: Vendor, folder: Path) -> list[int]:
    async with vendor.client(folder) as client:
        return list(client.card.released)


@asynchronous
async def test_released_outputs_are_those_of_the_student(vendor: Vendor, tmp_path: Path) -> None:
    released = await released_by(vendor, tmp_path / "card")
    assert released
    assert all(other > one + 1 for one, other in pairwise(released))
    found = await features(vendor, tmp_path / "north", released)
    plain = expected_outputs(vendor.folder, TEXTS)
    assert found.shape == (len(TEXTS), TOKENS, 1 + len(released) * TINY.dimension)
    assert found[..., 0].sum(axis=1).tolist() == [min(len(text), TOKENS) for text in TEXTS]
    for number, block in enumerate(released):
        part = found[..., 1 + number * TINY.dimension :][..., : TINY.dimension]
        assert np.abs(part - plain[block - 1]).max() < CLOSE
    # What has left, by the ledger: keys and ciphertexts, and nothing that carries inputs.
    records = [one for one in read(tmp_path / "north" / "ledger.jsonl") if one["kind"] == "message"]
    assert {one["purpose"] for one in records} == {"describe", "evaluation_keys", "ciphertexts"}
    assert not any("inputs" in one for one in records)

    # Asked again, nothing is computed again.
    again = await features(vendor, tmp_path / "north", released)
    assert np.array_equal(again, found)
    more = [one for one in read(tmp_path / "north" / "ledger.jsonl") if one["kind"] == "message"][len(records) :]
    assert [one["purpose"] for one in more] == ["describe"]

    # From nothing: other keys, another session, other ciphertexts, and the same blocks.
    anew = await features(vendor, tmp_path / "anew", released)
    assert np.abs(anew - found).max() < 2 * CLOSE


class Tapped:
    """A stub that keeps all responses of passes."""

    def __init__(self, stub: Any, kept: list[ForwardResponse], until_values: bool = False) -> None:
        self._stub, self._kept, self._until_values = stub, kept, until_values
        self.OpenSession = stub.OpenSession

    def Forward(self, requests: Any) -> "TappedCall":  # noqa: N802
        return TappedCall(self._stub.Forward(requests), self._kept, self._until_values)


class TappedCall:
    """With `until_values` the link is cut when an output begins to come."""

    def __init__(self, call: Any, kept: list[ForwardResponse], until_values: bool) -> None:
        self._call, self._kept, self._until_values = call, kept, until_values
        self.cancel = call.cancel

    async def __aiter__(self) -> AsyncIterator[ForwardResponse]:
        async for response in self._call:
            self._kept.append(response)
            if self._until_values and response.HasField("values"):
                self._call.cancel()
                raise VeilfedError(Code.UNREACHABLE, "cut")
            yield response


@asynchronous
async def test_no_message_has_the_output_of_a_block_that_is_not_released(vendor: Vendor, tmp_path: Path) -> None:
    """All that came in a pass, opened with the institution's own secret key."""
    kept: list[ForwardResponse] = []
    texts = seen_texts()[:200]
    async with vendor.client(tmp_path) as client:
        client._stub = Tapped(client._stub, kept)  # type: ignore[assignment]
        prepared = load_inputs(vendor.config.inputs)
        await client.outputs(prepared.features(texts), 0)
        vault, released = client._open_vault(), list(client.card.released)
    plain = expected_outputs(vendor.folder, texts)
    real = plain[0].any(axis=2)
    streams = np.stack([stream[real] for stream in plain])  # [block, token, channel]
    streams = (streams - streams.mean(axis=1, keepdims=True)) / streams.std(axis=1, keepdims=True)
    masked, outputs, block = 0, dict.fromkeys(released, 0), 0
    for response in kept:
        kind = response.WhichOneof("body")
        if kind == "output":
            block = response.output.block
        if kind not in {"masked", "values"}:
            continue
        batch = getattr(response, kind)
        values, scale = read_ciphertexts([batch], Expected(batch.count, batch.limbs), vault.basis)
        for row in values:
            opened = vault.decrypt_by_seal(row, scale).reshape(TOKENS, -1)[:, : len(texts)].T[real]
            if kind == "values":
                channel = outputs[block]
                assert np.abs(opened - plain[block - 1][real][:, channel]).max() < CLOSE
                outputs[block] += 1
                continue
            masked += 1
            told = np.abs(np.einsum("btc,t->bc", streams, (opened - opened.mean()) / opened.std())) / len(opened)
            # As large as by chance, among tens of thousands of tries on a thousand tokens.
            assert told.max() < 6 / np.sqrt(len(opened))
    assert masked > 400
    assert outputs == dict.fromkeys(released, TINY.dimension)


async def opened(stub: Any, version: str, keys: str, *more: OpenSessionRequest) -> str:
    async def requests() -> AsyncIterator[OpenSessionRequest]:
        yield OpenSessionRequest(start=SessionStart(version=version, keys=keys))
        for request in more:
            yield request

    with translated(None, "the vendor"):
        return str((await stub.OpenSession(requests(), timeout=60)).session)


async def first_answer(stub: Any, session: str, name: str | None = None) -> ForwardResponse:
    async def requests() -> AsyncIterator[ForwardRequest]:
        yield ForwardRequest(start=ForwardStart(session=session, pass_id=name or secrets.token_hex(16)))
        await asyncio.sleep(60)  # a stream that is still open

    while True:
        try:
            call = stub.Forward(requests(), timeout=60)
            with translated(None, "the vendor"):
                async for response in call:
                    if response.WhichOneof("body") != "progress":
                        call.cancel()
                        return response  # type: ignore[no-any-return]
            raise AssertionError("no answer")
        except VeilfedError as error:
            if error.code is not Code.RATE_LIMITED:
                raise
            await asyncio.sleep(0.05)  # the pass before this one has not noticed yet that its stream is over


def refused(code: Code, words: str) -> Any:
    return pytest.raises(VeilfedError, match=f"(?s){code.name}.*{words}")


@asynchronous
async def test_sessions_that_are_refused(vendor: Vendor, tmp_path: Path) -> None:
    async with vendor.client(tmp_path / "north") as client:
        version = client.card.version
        vault = client._open_vault()
        session = await client._session(vault)
        keys = client._folder / "sent.json"
        name = keys.read_text().split('"')[3]
    seed = secrets.token_bytes(SEED_BYTES)
    given = public_seed("2" * 64)
    public = vault.public_key(given)[None]
    key = [OpenSessionRequest(public_key=batch) for batch in ciphertext_messages(public, 1.0, vault.basis, given)]
    digits = [OpenSessionRequest(digit=digit) for digit in key_messages(vault.key_digits(seed), seed, vault.basis)]

    async with vendor.stub("north") as stub:
        with refused(Code.INPUT_INVALID, "another student"):
            await opened(stub, "0" * 64, name)
        with refused(Code.NOT_FOUND, "no keys of this name"):
            await opened(stub, version, "1" * 64)
        with refused(Code.INPUT_INVALID, "hexadecimal"):
            await opened(stub, version, "../../etc")
        with refused(Code.INPUT_INVALID, "there are no keys for"):
            await opened(stub, version, "2" * 64, *key, *digits[:-1])
        with refused(Code.NOT_FOUND, "no keys of this name"):  # nothing half of it is kept
            await opened(stub, version, "2" * 64)
        with refused(Code.PROTOCOL_VIOLATION, "a public key that was not made from the name"):
            await opened(stub, version, "3" * 64, *key, *digits)
        chosen = [OpenSessionRequest(public_key=one) for one in ciphertext_messages(0 * public, 1.0, vault.basis)]
        with refused(Code.PROTOCOL_VIOLATION, "or longer ones"):  # both components
            await opened(stub, version, "2" * 64, *chosen, *digits)
        digits[3].digit.residues = digits[3].digit.residues[:-1] + b"\x00"
        with refused(Code.PROTOCOL_VIOLATION, "do not have the digest"):
            await opened(stub, version, "2" * 64, *key, *digits)
        with refused(Code.SESSION_INVALID, "no such session"):
            await first_answer(stub, secrets.token_hex(16))
        with refused(Code.INPUT_INVALID, "the pass is not named"):
            await first_answer(stub, session, "../pass")
        # A session that was opened again ends the one before it.
        newer = await opened(stub, version, name)
        with refused(Code.SESSION_INVALID, "no such session"):
            await first_answer(stub, session)
        assert (await first_answer(stub, newer)).HasField("inputs")
    async with vendor.stub("south") as stub:
        with refused(Code.SESSION_INVALID, "no such session"):
            await first_answer(stub, newer)
        with refused(Code.NOT_FOUND, "no keys of this name"):
            await opened(stub, version, name)


@asynchronous
async def test_quota_and_expiry(tmp_path: Path) -> None:
    vendor = Vendor(tmp_path, quotas={"north": 2000}, encrypted={"session_hours": 3 / 3600})
    name, other = secrets.token_hex(16), secrets.token_hex(16)
    try:
        vendor.start()
        async with vendor.client(tmp_path / "north") as client, vendor.stub("north") as stub:
            assert client.card.quota_left == 2000
            session = await client._session(client._open_vault())
            with refused(Code.SESSION_INVALID, "expired"):
                while True:
                    await first_answer(stub, session, name)

            async def answered(name: str) -> None:
                """With a session that is open."""
                while True:
                    try:
                        await first_answer(stub, await client._session(client._open_vault()), name)
                        return
                    except VeilfedError as error:
                        if error.code is not Code.SESSION_INVALID:
                            raise

            # All samples of a pass are charged, however many there are; keys have expired with their session.
            with refused(Code.QUOTA_EXCEEDED, "of 2000 embeddings"):
                for _ in range(3):
                    await answered(other)
                    other = secrets.token_hex(16)
    finally:
        vendor.oracle.kill()


@asynchronous
async def test_an_output_is_computed_and_flooded_once(vendor: Vendor, tmp_path: Path) -> None:
    """Whoever goes away while it comes gets the same bytes again, and nothing is computed anew."""
    prepared = load_inputs(vendor.config.inputs)
    kept: list[ForwardResponse] = []
    async with vendor.client(tmp_path) as client:
        block = client.card.released[0]
        real = client._stub
        client._stub = Tapped(real, kept, until_values=True)  # type: ignore[assignment]
        with pytest.raises(VeilfedError):
            await client.outputs(prepared.features(TEXTS), 0)
        first = [response.values for response in kept if response.HasField("values")]
        kept.clear()
        client._stub = Tapped(real, kept)  # type: ignore[assignment]
        while True:
            try:
                await client.outputs(prepared.features(TEXTS), 0)
                break
            except VeilfedError as error:
                if error.code is not Code.RATE_LIMITED:  # else the pass has not noticed yet
                    raise
                kept.clear()
                await asyncio.sleep(0.05)
    header = next(response.output for response in kept if response.HasField("output"))
    again = [response.values for response in kept if response.HasField("values")]
    assert header.block == block
    assert again[0].SerializeToString() == first[0].SerializeToString()
    done = [response.progress.done for response in kept if response.HasField("progress") and response.progress.phase]
    assert min(done) >= 2 * block


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "../../outside"), ("blocks", 0), ("range", 0.0), ("released", [2, 1]), ("rotations", [2**20])],
)
@asynchronous
async def test_descriptions_that_are_not_believed(vendor: Vendor, tmp_path: Path, field: str, value: Any) -> None:
    """What an oracle says becomes names of files and sizes at the agent."""
    async with vendor.client(tmp_path) as client:
        card = DescribeStudentResponse()
        card.CopyFrom(client.card)
    check_card(card)
    card.ClearField(field)  # type: ignore[arg-type]
    card.MergeFrom(DescribeStudentResponse(**{field: value}))
    with pytest.raises(VeilfedError) as caught:
        check_card(card)
    assert caught.value.code is Code.PROTOCOL_VIOLATION


@asynchronous
async def test_a_call_that_ends_while_much_is_to_be_sent() -> None:
    """Whoever sends is told, however much waits before it."""

    class Ended:
        def __init__(self, requests: AsyncIterator[Any]) -> None:
            self.cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

        async def __aiter__(self) -> AsyncIterator[str]:
            yield "one"
            raise VeilfedError(Code.UNREACHABLE, "gone")

    async def all_sent(conversation: Any) -> None:
        for number in range(1000):
            await conversation.send(number)

    conversation: Any
    async with asyncio.timeout(30), conversing(Ended, "the test", 10) as conversation:
        assert await anext(conversation) == "one"
        with pytest.raises(VeilfedError, match="gone"):
            await all_sent(conversation)
        with pytest.raises(VeilfedError, match="gone"):
            await anext(conversation)


@asynchronous
async def test_an_oracle_that_is_killed_goes_on_where_it_was(
    vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the start: the halves that were done are not done again."""
    prepared = load_inputs(vendor.config.inputs)
    told: list[int] = []
    half = asyncio.Event()

    def tell(response: ForwardResponse, pace: object) -> None:
        # Before the first block is done: with all released outputs there would be nothing to go on for.
        told.append(response.progress.done)
        if told[-1] >= 1:
            half.set()

    monkeypatch.setattr(blocks_client, "_tell", tell)
    monkeypatch.setattr(blocks_client, "TELL_SECONDS", 0.0)
    async with vendor.client(tmp_path) as client:
        released = list(client.card.released)
        running = asyncio.create_task(client.outputs(prepared.features(TEXTS), 0))
        async with asyncio.timeout(120):
            await half.wait()
        vendor.oracle.kill()
        with pytest.raises(VeilfedError) as caught:
            await running
        assert caught.value.code in {Code.UNREACHABLE, Code.TIMEOUT}
    vendor.start()
    told.clear()
    async with vendor.client(tmp_path) as client:
        found = await client.outputs(prepared.features(TEXTS), 0)
    assert told[0] >= 1
    plain = expected_outputs(vendor.folder, TEXTS)
    for number, block in enumerate(released):
        for row, one in enumerate(found):
            assert np.abs(one[:, number] - plain[block - 1][row, : len(one)]).max() < CLOSE
