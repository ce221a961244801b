"""Embeddings from the oracle of the institution's own zone, through the egress gate."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    Images,
    PromptGradientRequest,
    Texts,
)
from veilfed.v1.oracle_pb2_grpc import OracleStub
from veilfed.v1.tensor_pb2 import Tensor
from veilfed.wire.tensors import from_tensor, to_tensor

if TYPE_CHECKING:
    from veilfed.v1.oracle_pb2_grpc import OracleAsyncStub

__all__ = ["Batch", "Inputs", "OracleClient", "connect_oracle", "zone_roots"]

Inputs = Sequence[str] | Sequence[bytes]
Float = NDArray[np.float32]
Labels = NDArray[np.int64]
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

    def check_prompts(self, width: int, *, gradients: bool) -> None:
        """Raises VeilfedError(INPUT_INVALID) when the oracle takes no prompts of this width, or gives no gradients."""
        found = self.card.prompt_width
        if found != width:
            takes = f"takes prompt tokens of width {found}, not {width}" if found else "takes no prompt tokens"
            raise VeilfedError(Code.INPUT_INVALID, f"the oracle's model {self.card.model} {takes}")
        if gradients and not self.card.prompt_gradients:
            raise VeilfedError(
                Code.INPUT_INVALID,
                "the oracle gives no gradients with respect to prompts",
                "Submit a job that tunes forward-only, or ask the model's owner for `prompts: gradients`.",
            )

    async def embed(
        self, modality: Literal["text", "image"], inputs: Inputs, prompts: Float | None = None
    ) -> AsyncGenerator[Batch, None]:
        """(indices into `inputs`, embeddings float32 [n, d]) batch by batch, each input once, in any order.

        `prompts` are prompt tokens [M, D] for all inputs. Raises VeilfedError: what the oracle or the gate said,
        DATA_INVALID for an input that no request can hold, PROTOCOL_VIOLATION for an answer that does not fit its
        request.
        """
        self.check_modality(modality)
        given = None if prompts is None else to_tensor(prompts)
        batches = list(_batches(inputs, self._most_inputs(), self._request_bytes(given)))
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def requests() -> AsyncIterator[EmbedRequest]:
            for number, batch in enumerate(batches):
                await slots.acquire()
                yield EmbedRequest(batch=number, prompts=given, **_field(modality, inputs, batch))

        with translated(self._credentials, self._address):
            answered = 0
            async for response in moving(self._stub.Embed(requests()), "the oracle's answers", self._answer_seconds):
                if answered == len(batches):
                    raise VeilfedError(Code.PROTOCOL_VIOLATION, "the oracle sent more answers than it was asked for")
                count = len(batches[answered])
                if response.batch != answered:
                    raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle's answer does not fit batch {answered}")
                yield batches[answered], _floats(response.embeddings, (count, self.card.dimension))
                answered += 1
                slots.release()
            if answered < len(batches):
                raise VeilfedError(Code.UNREACHABLE, f"{self._address}: the oracle ended the stream early")

    async def prompt_gradient(
        self, modality: Literal["text", "image"], inputs: Inputs, prompts: Float, head: Float, labels: Labels
    ) -> tuple[NDArray[np.float64], Float]:
        """(gradient [M, D], embeddings [n, d]) as PromptGradientResponse says, over all inputs.

        The inputs travel in as many requests as they need, one after the other, as the oracle computes them; their
        order, and that of the sum, depends on the inputs alone. Raises VeilfedError: what the oracle or the gate said,
        DATA_INVALID for an input that no request can hold, PROTOCOL_VIOLATION.
        """
        self.check_modality(modality)
        given, classifier = to_tensor(prompts), to_tensor(head)
        total = np.zeros(prompts.shape)
        embeddings = np.empty((len(inputs), self.card.dimension), np.float32)
        for batch in _batches(inputs, self._most_inputs(), self._request_bytes(given, classifier)):
            request = PromptGradientRequest(
                prompts=given, head=classifier, labels=labels[batch].tolist(), **_field(modality, inputs, batch)
            )
            with translated(self._credentials, self._address):
                answer = await self._stub.PromptGradient(request, timeout=self._answer_seconds)
            total += _floats(answer.gradient, prompts.shape)
            embeddings[batch] = _floats(answer.embeddings, (len(batch), self.card.dimension))
        return total, embeddings

    def _most_inputs(self) -> int:
        """Most inputs in one request: its answer must fit into a message, too."""
        fitting = (protocol.MAX_MESSAGE_BYTES - REQUEST_OVERHEAD) // (4 * self.card.dimension)
        return max(1, min(self.card.max_batch, fitting))

    def _request_bytes(self, *beside: Tensor | None) -> int:
        """Most bytes of inputs in one request that has these tensors in it."""
        limit = min(self.card.max_request_bytes or protocol.MAX_MESSAGE_BYTES, protocol.MAX_MESSAGE_BYTES)
        return int(limit) - REQUEST_OVERHEAD - sum(len(tensor.data) for tensor in beside if tensor is not None)


def _floats(tensor: Tensor, shape: tuple[int, ...]) -> Float:
    """An answer's array, which must be float32 of this shape, and finite. Raises VeilfedError(PROTOCOL_VIOLATION)."""
    array = from_tensor(tensor)
    if array.shape != shape or array.dtype != np.float32:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the oracle's answer is not float32 {list(shape)}")
    found: Float = array.astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "the oracle's answer is not finite")
    return found


def _field(modality: str, inputs: Inputs, batch: NDArray[np.intp]) -> dict[str, Any]:
    """The inputs of one request, by the name of their field."""
    values: Any = [inputs[index] for index in batch]
    return {"texts": Texts(values=values)} if modality == "text" else {"images": Images(values=values)}


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
