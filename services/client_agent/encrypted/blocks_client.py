"""The model owner's blocks on this institution's ciphertexts: opens a session, answers refreshes, decrypts outputs.

A pass can be broken off at any instant. What is needed to go on is in a folder:

    FOLDER/keys.bin      the secret and the public key, for the parameters and rotations that stand before them
    FOLDER/sent.json     the name of the evaluation keys that the oracle was given last
    FOLDER/pass/         a pass that has not ended: its name and what it is of, and the outputs that came
"""

import asyncio
import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from client_agent.config import EncryptedConfig
from client_agent.egress import EgressGate
from client_agent.encrypted.conversation import Conversation, conversing
from client_agent.encrypted.running import RunningPass
from client_agent.encrypted.vault import Vault
from veilfed.ckks.basis import Basis
from veilfed.ckks.messages import Expected, ciphertext_messages, key_messages, public_seed, read_ciphertexts
from veilfed.ckks.parameters import MAX_SHIFT, Parameters
from veilfed.ckks.samples import Arranged, arrange, token_features, with_places
from veilfed.ckks.sampling import SEED_BYTES
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.identity.material import Credentials
from veilfed.logs import get_logger
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.blocks_pb2 import (
    DescribeStudentRequest,
    DescribeStudentResponse,
    ForwardRequest,
    ForwardResponse,
    ForwardStart,
    OpenSessionRequest,
    Refresh,
    SessionStart,
)
from veilfed.v1.blocks_pb2_grpc import EncryptedBlocksStub
from veilfed.v1.encrypted_pb2 import CiphertextBatch

if TYPE_CHECKING:
    from veilfed.v1.blocks_pb2_grpc import EncryptedBlocksAsyncStub

__all__ = ["BlocksClient", "check_card", "connect_blocks"]

log = get_logger("agent.blocks")

Real = NDArray[np.float64]
Talk = Conversation[ForwardRequest, ForwardResponse]

DESCRIBE_SECONDS = 30.0
# A phase on all cores of the oracle may take minutes, and other passes come first.
SILENT_SECONDS = 1800.0
SESSION_SECONDS = 900.0
TELL_SECONDS = 5.0
# Ciphertexts that are encrypted, or refreshed, at a time: what bounds this side's memory.
TOGETHER = 64
MAX_REFRESHED = 256
# Of a description that is believed.
MAX_DIMENSION, MAX_BLOCKS, MAX_ROTATIONS = 8192, 256, 256
# Of a student that this software computes.
MAX_HEADS = 64
# Outputs are rounded to this, so that less can be planted in them: a quarter of the noise that they come with.
OUTPUT_STEP = 2.0**-12
# Noise, and what polynomials leave, take outputs a little beyond their range.
ROOM = 1.1


class BlocksClient:
    """One oracle, connected. One pass at a time."""

    def __init__(
        self,
        stub: "EncryptedBlocksAsyncStub",
        card: DescribeStudentResponse,
        credentials: Credentials,
        config: EncryptedConfig,
        folder: Path,
    ) -> None:
        self._stub, self.card = stub, card
        self._credentials, self._config, self._folder = credentials, config, folder
        self._vault: Vault | None = None

    async def outputs(self, samples: Sequence[Real], indicators: int) -> list[NDArray[np.float32]]:
        """The released outputs float32 [t_i, R, d] of samples [t_i, f], at most `card.samples`.

        `indicators`: see client_agent.encrypted.inputs. Goes on where an earlier call for the same samples was broken
        off. Raises VeilfedError: what the oracle or the gate say, PROTOCOL_VIOLATION for what no oracle may ask or
        answer.
        """
        card = self.card
        arranged = await asyncio.to_thread(_arranged, samples, card, indicators)
        vault = await asyncio.to_thread(self._open_vault)
        running = await asyncio.to_thread(RunningPass.of, self._folder / "pass", card.version, arranged)
        if not all(running.has(block) for block in card.released):
            await self._forward(vault, await self._session(vault), running, arranged)
        channels = await asyncio.to_thread(running.outputs, card.released, card.tokens * card.samples)
        lengths = [len(sample) for sample in samples]
        apart = [token_features(block, lengths, card.samples) for block in channels]
        return [np.stack(one, axis=1).astype(np.float32) for one in zip(*apart, strict=True)]

    async def ended(self) -> None:
        """The outputs of the last pass are kept elsewhere."""
        await asyncio.to_thread(shutil.rmtree, self._folder / "pass", ignore_errors=True)

    def _open_vault(self) -> Vault:
        """The institution's keys, those that are kept where they fit."""
        if self._vault is None:
            parameters = _parameters(self.card)
            place = self._folder / "keys.bin"
            about = f"{parameters.digest} {list(self.card.rotations)}".encode()
            head, _, kept = place.read_bytes().partition(b"\n") if place.exists() else (b"", b"", b"")
            basis = Basis(parameters, self._config.threads)
            self._vault = Vault(basis, self.card.rotations, kept if head == about else None)
            if head != about:
                # What the oracle has is under the keys before these.
                (self._folder / "sent.json").unlink(missing_ok=True)
                shutil.rmtree(self._folder / "pass", ignore_errors=True)
                write_atomic(place, about + b"\n" + self._vault.to_bytes())
        return self._vault

    async def _session(self, vault: Vault) -> str:
        """A session, on keys that the oracle has or on new ones."""
        place = self._folder / "sent.json"
        if place.exists():
            name = json.loads(await asyncio.to_thread(place.read_bytes))["keys"]
            try:
                return await self._opened(name, None, vault)
            except VeilfedError as error:
                if error.code is not Code.NOT_FOUND:
                    raise
        # A seed of their own for each set: the same one with other noise would give the secret key away.
        name, seed = secrets.token_hex(32), secrets.token_bytes(SEED_BYTES)
        log.info("sending evaluation keys")
        session = await self._opened(name, seed, vault)
        await asyncio.to_thread(write_atomic, place, json.dumps({"keys": name}).encode())
        return session

    async def _opened(self, name: str, seed: bytes | None, vault: Vault) -> str:
        async def requests() -> AsyncIterator[OpenSessionRequest]:
            yield OpenSessionRequest(start=SessionStart(version=self.card.version, keys=name))
            if seed is not None:
                made = _key_requests(vault, name, seed)
                while (request := await asyncio.to_thread(next, made, None)) is not None:
                    yield request

        with translated(self._credentials, self._config.address):
            answer = await self._stub.OpenSession(requests(), timeout=SESSION_SECONDS)
        return answer.session

    async def _forward(self, vault: Vault, session: str, running: RunningPass, arranged: Arranged) -> None:
        have = [block for block in self.card.released if running.has(block)]
        start = ForwardStart(session=session, pass_id=running.name, have=have)
        with translated(self._credentials, self._config.address):
            async with conversing(self._stub.Forward, "the oracle's pass", SILENT_SECONDS) as talk:
                await talk.send(ForwardRequest(start=start))
                await self._answer(vault, arranged, running, talk)
        if missing := [block for block in self.card.released if not running.has(block)]:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle ended the pass without the blocks {missing}")

    async def _answer(self, vault: Vault, arranged: Arranged, running: RunningPass, talk: Talk) -> None:
        """Does what the oracle asks for until it says that the pass is done."""
        told, pace, left = 0.0, _Pace(), _most_refreshed(self.card)
        async for response in talk:
            kind = response.WhichOneof("body")
            if kind == "inputs":
                await self._send_inputs(vault, arranged, talk)
            elif kind == "refresh":
                left -= response.refresh.count
                if left < 0:
                    raise VeilfedError(Code.PROTOCOL_VIOLATION, "more refreshes than a pass can have")
                await self._refresh(vault, response.refresh, talk)
            elif kind == "output":
                await self._take(vault, response, talk, running)
            elif kind == "progress":
                if time.monotonic() - told > TELL_SECONDS:
                    told = time.monotonic()
                    _tell(response, pace)
            elif kind == "done":
                return
            else:
                raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle sent {kind} without its header")

    async def _send_inputs(self, vault: Vault, arranged: Arranged, talk: Talk) -> None:
        scale, padding_scale = vault.parameters.scale, 2.0**self.card.padding_scale_bits
        log.info("encrypting", channels=len(arranged.channels))
        for name, rows, at in (
            ("features", arranged.channels, scale),
            ("mask", arranged.mask, scale),
            ("padding", arranged.padding, padding_scale),
        ):
            for first in range(0, len(rows), TOGETHER):
                batches = await asyncio.to_thread(_encrypted, vault, rows[first : first + TOGETHER], at)
                for batch in batches:
                    await talk.send(_request(name, batch))

    async def _refresh(self, vault: Vault, asked: Refresh, talk: Talk) -> None:
        """Opens what is masked, and encrypts it again. What is sent depends on no plaintext that can be told."""
        limbs = vault.parameters.limbs
        if not (1 <= asked.count <= MAX_REFRESHED and 1 <= asked.masked_limbs <= asked.limbs <= limbs):
            raise VeilfedError(
                Code.PROTOCOL_VIOLATION,
                f"a refresh of {asked.count} ciphertexts from {asked.masked_limbs} to {asked.limbs} of {limbs} limbs",
            )
        if asked.shift > MAX_SHIFT:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"a refresh that shifts by {asked.shift} bits")
        batches = await _collected(talk, "masked", asked.count)
        for answer in await asyncio.to_thread(_refreshed, vault, batches, asked):
            await talk.send(_request("refreshed", answer))

    async def _take(self, vault: Vault, response: ForwardResponse, talk: Talk, running: RunningPass) -> None:
        """Decrypts a released output, and keeps it."""
        output = response.output
        if output.block not in self.card.released or output.count != self.card.dimension:
            raise VeilfedError(
                Code.PROTOCOL_VIOLATION, f"an output of block {output.block} with {output.count} channels"
            )
        batches = await _collected(talk, "values", output.count)
        limbs = output.limbs
        if not 1 <= limbs <= vault.parameters.limbs:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"an output with {limbs} limbs")
        opened = await asyncio.to_thread(_opened_output, vault, batches, Expected(output.count, limbs), self.card.range)
        await asyncio.to_thread(running.keep, output.block, opened)
        log.info("output", block=output.block)


def _arranged(samples: Sequence[Real], card: DescribeStudentResponse, indicators: int) -> Arranged:
    arranged = arrange(samples, card.tokens, card.samples)
    return with_places(arranged, indicators, card.samples) if indicators else arranged


def check_card(card: DescribeStudentResponse) -> None:
    """What an oracle says of its student becomes sizes and names of files here. Raises VeilfedError."""
    parameters = _parameters(card)
    released, rotations = list(card.released), list(card.rotations)
    good = (
        re.fullmatch(r"[0-9a-f]{64}", card.version) is not None
        and 1 <= card.dimension <= MAX_DIMENSION
        and 1 <= card.blocks <= MAX_BLOCKS
        and released == sorted(set(released))
        and released
        and released[0] >= 1
        and released[-1] <= card.blocks
        and rotations == sorted(set(rotations))
        and all(0 < step < parameters.slots for step in rotations)
        and len(rotations) <= MAX_ROTATIONS
        and 0 < card.range < parameters.scale
        and card.padding_scale_bits <= parameters.scale_bits
    )
    if not good:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "the oracle's description of its student is none")


def _parameters(card: DescribeStudentResponse) -> Parameters:
    """Raises VeilfedError(INPUT_INVALID) for a set that is not secure: the institution's keys would not be, either."""
    told = card.parameters
    parameters = Parameters(told.log_n, tuple(told.data_bits), told.special_bits, told.scale_bits)
    if card.tokens * card.samples != parameters.slots:
        raise VeilfedError(
            Code.PROTOCOL_VIOLATION, f"{card.tokens} tokens of {card.samples} samples in {parameters.slots} slots"
        )
    return parameters


def _key_requests(vault: Vault, name: str, seed: bytes) -> Iterator[OpenSessionRequest]:
    public = vault.public_key(public_seed(name))
    for batch in ciphertext_messages(public[None], 1.0, vault.basis, public_seed(name)):
        yield OpenSessionRequest(public_key=batch)
    for digit in key_messages(vault.key_digits(seed), seed, vault.basis):
        yield OpenSessionRequest(digit=digit)


def _encrypted(vault: Vault, rows: Real, scale: float) -> list[CiphertextBatch]:
    """Slots at any scale: they are made smaller, and the ciphertexts are read larger."""
    seed, smaller = secrets.token_bytes(SEED_BYTES), scale / vault.parameters.scale
    values = vault.encrypt(np.stack([vault.encode(row * smaller) for row in rows]), seed)
    return list(ciphertext_messages(values, scale, vault.basis, seed))


def _refreshed(vault: Vault, batches: Sequence[CiphertextBatch], asked: Refresh) -> list[CiphertextBatch]:
    masked, scale = read_ciphertexts(batches, Expected(asked.count, asked.masked_limbs), vault.basis)
    seed = secrets.token_bytes(SEED_BYTES)
    fresh = vault.refresh(masked, asked.shift, asked.limbs, seed)
    return list(ciphertext_messages(fresh, scale, vault.basis, seed))


def _opened_output(vault: Vault, batches: Sequence[CiphertextBatch], expected: Expected, largest: float) -> Float:
    """Slots [d, slots], within the range and rounded.

    What is beyond the range is cut to it, and nobody is told: an answer that depended on it would be one on what a
    hostile oracle has made of the institution's ciphertexts.
    """
    values, scale = read_ciphertexts(batches, expected, vault.basis)
    opened = np.nan_to_num(np.stack([vault.decrypt_by_seal(row, scale) for row in values]), nan=0.0)
    cut: Float = np.clip(opened, -largest, largest)
    beyond = int((np.abs(opened) > ROOM * largest).sum())
    if beyond:
        log.warning("the oracle's outputs were out of their range", values=beyond, of=opened.size)
    rounded: Float = np.rint(cut / OUTPUT_STEP) * OUTPUT_STEP
    return rounded


def _most_refreshed(card: DescribeStudentResponse) -> int:
    """Ciphertexts that are refreshed in a pass, at most: streams, queries, keys and values, scores of all heads."""
    return card.blocks * (8 * card.dimension + MAX_HEADS * card.tokens + MAX_REFRESHED) + card.dimension


async def _collected(talk: Talk, field: str, count: int) -> list[CiphertextBatch]:
    """The next messages, which must be of one field, up to so many ciphertexts."""
    batches: list[CiphertextBatch] = []
    done = 0
    while done < count:
        response = await anext(talk, ForwardResponse())
        batch: CiphertextBatch = getattr(response, field)
        if response.WhichOneof("body") != field or not batch.count:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle sent fewer than {count} ciphertexts")
        batches.append(batch)
        done += batch.count
    return batches


def _request(field: str, batch: CiphertextBatch) -> ForwardRequest:
    given: dict[str, Any] = {field: batch}
    return ForwardRequest(**given)


class _Pace:
    """How long what is left will take, once a half of a block was seen from its start to its end."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def seconds_left(self, done: int, total: int) -> int | None:
        self._seen.setdefault(done, time.monotonic())
        # The first half seen may have been under way already.
        first, last = sorted(self._seen)[:2][-1], done
        if first >= last:
            return None
        return round((self._seen[last] - self._seen[first]) / (last - first) * (total - last))


def _tell(response: ForwardResponse, pace: _Pace) -> None:
    progress = response.progress
    if progress.waiting:
        log.info("waiting for other passes", before=progress.waiting)
        return
    left = pace.seconds_left(progress.done, progress.total)
    about = {} if left is None else {"seconds_left": left}
    log.info("computing on ciphertexts", phase=progress.phase, done=progress.done, of=progress.total, **about)


@asynccontextmanager
async def connect_blocks(
    credentials: Credentials, config: EncryptedConfig, gate: EgressGate, folder: Path
) -> AsyncIterator[BlocksClient]:
    """The oracle, after it has described its student. Raises VeilfedError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: ASYNC240  once
    channel = open_channel(
        credentials, config.address, config.identity, interceptors=gate.interceptors(config.identity)
    )
    async with channel:
        stub = EncryptedBlocksStub(channel)
        with translated(credentials, config.address):
            card = await stub.DescribeStudent(DescribeStudentRequest(), timeout=DESCRIBE_SECONDS)
        digest = hashlib.sha256(await asyncio.to_thread(config.inputs.read_bytes)).hexdigest()
        if digest != card.inputs_sha256:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"{config.inputs}: not what the oracle prepares inputs with",
                "Ask the model's owner for the file again.",
            )
        check_card(card)
        yield BlocksClient(stub, card, credentials, config, folder)
