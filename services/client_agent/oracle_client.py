"""Embeddings from the oracle of the institution's own zone, through the egress gate."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from client_agent.config import OracleEndpoint
from client_agent.egress import EgressGate
from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import load_certificates
from veilfed.identity.material import Credentials, read_file
from veilfed.rpc.channel import open_channel, translated
from veilfed.rpc.progress import STALL_SECONDS, moving
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
from veilfed.v1.oracle_pb2_grpc import OracleStub
from veilfed.wire.tensors import from_tensor

if TYPE_CHECKING:
    from veilfed.v1.oracle_pb2_grpc import OracleAsyncStub

__all__ = ["Batch", "Inputs", "OracleClient", "connect_oracle", "zone_roots"]

Inputs = Sequence[str] | Sequence[bytes]
Float = NDArray[np.float32]
# Indices of inputs, and their embeddings [n, d].
Batch = tuple[NDArray[np.intp], Float]

# Requests that are under way at a time: keeps the oracle busy and bounds memory.
IN_FLIGHT = 8

# Room for the frame around the inputs of a request, and for 10 bytes around each.
REQUEST_OVERHEAD = 1024
INPUT_OVERHEAD = 10

DESCRIBE_SECONDS = 30.0
# An oracle may hold a request back for an hour, to keep its rate.
ANSWER_SECONDS = 3600.0 + STALL_SECONDS

MODALITIES = {"text": MODALITY_TEXT, "image": MODALITY_IMAGE}


class OracleClient:
    """One oracle, connected."""

    def __init__(
        self,
        stub: "OracleAsyncStub",
        card: DescribeResponse,
        credentials: Credentials,
        address: str,
        answer_seconds: float,
    ) -> None:
        self._stub = stub
        self._answer_seconds = answer_seconds
        self._credentials = credentials
        self._address = address
        self.card = card

    def check_modality(self, modality: Literal["text", "image"]) -> None:
        """Raises VeilfedError(INPUT_INVALID) when the oracle does not embed such inputs."""
        if self.card.modality != MODALITIES[modality] and not (modality == "text" and self.card.text_tower):
            raise VeilfedError(Code.INPUT_INVALID, f"the oracle's model {self.card.model} does not embed {modality}s")

    async def embed(self, modality: Literal["text", "image"], inputs: Inputs) -> AsyncGenerator[Batch, None]:
        """(indices into `inputs`, embeddings float32 [n, d]) batch by batch, each input once, in any order.

        Raises VeilfedError: what the oracle or the gate said, DATA_INVALID for an input that no request can hold,
        PROTOCOL_VIOLATION for an answer that does not fit its request.
        """
        self.check_modality(modality)
        batches = list(_batches(inputs, self._most_inputs(), self._request_bytes()))
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def requests() -> AsyncIterator[EmbedRequest]:
            for number, batch in enumerate(batches):
                await slots.acquire()
                yield _request(number, modality, [inputs[index] for index in batch])

        with translated(self._credentials, self._address):
            answered = 0
            async for response in moving(self._stub.Embed(requests()), "the oracle's answers", self._answer_seconds):
                if answered == len(batches):
                    raise VeilfedError(Code.PROTOCOL_VIOLATION, "the oracle sent more answers than it was asked for")
                yield batches[answered], self._embeddings(response, answered, len(batches[answered]))
                answered += 1
                slots.release()
            if answered < len(batches):
                raise VeilfedError(Code.UNREACHABLE, f"{self._address}: the oracle ended the stream early")

    def _most_inputs(self) -> int:
        """Most inputs in one request: its answer must fit into a message, too."""
        fitting = (protocol.MAX_MESSAGE_BYTES - REQUEST_OVERHEAD) // (4 * self.card.dimension)
        return max(1, min(self.card.max_batch, fitting))

    def _request_bytes(self) -> int:
        """Most bytes of inputs in one request."""
        limit = min(self.card.max_request_bytes or protocol.MAX_MESSAGE_BYTES, protocol.MAX_MESSAGE_BYTES)
        return int(limit) - REQUEST_OVERHEAD

    def _embeddings(self, response: EmbedResponse, number: int, count: int) -> Float:
        embeddings = from_tensor(response.embeddings)
        shape = (count, self.card.dimension)
        if response.batch != number or embeddings.shape != shape or embeddings.dtype != np.float32:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle's answer does not fit batch {number}")
        found: Float = embeddings.astype(np.float32, copy=False)
        if not np.isfinite(found).all():
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle's answer to batch {number} is not finite")
        return found


def _request(number: int, modality: str, values: list[str | bytes]) -> EmbedRequest:
    if modality == "text":
        return EmbedRequest(batch=number, texts=Texts(values=values))  # type: ignore[arg-type]
    return EmbedRequest(batch=number, images=Images(values=values))  # type: ignore[arg-type]


def _batches(inputs: Inputs, most: int, most_bytes: int) -> Iterator[NDArray[np.intp]]:
    """Indices of inputs that travel together. Neighbours in length, because a batch costs as its longest input."""
    sizes = [len(value.encode()) if isinstance(value, str) else len(value) for value in inputs]
    batch: list[int] = []
    filled = 0
    for index in sorted(range(len(inputs)), key=sizes.__getitem__):
        size = sizes[index] + INPUT_OVERHEAD
        if size > most_bytes:
            raise VeilfedError(Code.DATA_INVALID, f"input {index} has {sizes[index]} bytes; at most {most_bytes} pass")
        if batch and (len(batch) == most or filled + size > most_bytes):
            yield np.array(batch, np.intp)
            batch, filled = [], 0
        batch.append(index)
        filled += size
    if batch:
        yield np.array(batch, np.intp)


def zone_roots(path: Path, credentials: Credentials) -> bytes:
    """The root certificates of the institution's own zone, PEM.

    Raises VeilfedError: FILE_UNUSABLE, or IDENTITY_INVALID where one of them is a root of the federation, whose
    authority could then make up an oracle and have raw data sent to it.
    """
    pem = read_file(path)
    federation = load_certificates(credentials.bundle_pem, "the bundle")
    if any(root in federation for root in load_certificates(pem, str(path))):
        raise VeilfedError(
            Code.IDENTITY_INVALID,
            f"{path}: a root of the federation, not of the institution's own zone alone",
            "Make a root of the own zone with `veilfed pki init --zone`, and name its root.pem.",
        )
    return pem


@asynccontextmanager
async def connect_oracle(
    credentials: Credentials, endpoint: OracleEndpoint, gate: EgressGate, answer_seconds: float = ANSWER_SECONDS
) -> AsyncIterator[OracleClient]:
    """The oracle, after it has shown its model card.

    A stream in which no answer comes for `answer_seconds` ends with TIMEOUT. Raises VeilfedError.
    """
    own_zone = endpoint.identity.institution == credentials.identity.institution
    channel = open_channel(
        credentials,
        endpoint.address,
        endpoint.identity,
        roots=zone_roots(endpoint.root, credentials),
        interceptors=gate.interceptors(endpoint.identity, own_zone=own_zone),
    )
    async with channel:
        stub = OracleStub(channel)
        with translated(credentials, endpoint.address):
            card = await stub.Describe(DescribeRequest(), timeout=DESCRIBE_SECONDS)
        yield OracleClient(stub, card, credentials, endpoint.address, answer_seconds)
