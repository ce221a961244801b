"""An egress gate on real channels to a real server that keeps every byte that it gets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from client_agent.egress import EgressGate, EgressPolicy
from client_agent.egress.rules import COORDINATOR, ORACLE
from tests.support.countersign import AGGREGATOR, Countersigner
from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.ledger import Record, read, verify
from veilfed.v1.aggregator_pb2 import (
    Heartbeat,
    JoinRequest,
    PushRequest,
    PushResponse,
    Update,
    WorkRequest,
    WorkResponse,
)
from veilfed.v1.oracle_pb2 import (
    EmbedRequest,
    EmbedResponse,
    Texts,
)
from veilfed.wire import tensors

AGENT = Identity.parse("spiffe://test.veilfed/agent/north/main")
ORACLE_ID = Identity.parse("spiffe://test.veilfed/oracle/north/main")
VENDOR = Identity.parse("spiffe://test.veilfed/oracle/vendor/main")
CLASSIFIER = np.arange(6, dtype=np.float32).reshape(2, 3)
SHAPES = {"classifier": ((2, 3), "float32")}
JOB = "job-1"
TEXT = "a private sentence"


class Server:
    """Answers every call, and keeps the bytes of every request."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.calls: list[str] = []
        self.address = ""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method
        self.calls.append(method)

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                self.got.append((method, request))
                if not method.endswith(("Push", "OpenSession")):
                    yield b""
            if method.endswith(("Push", "OpenSession")):
                yield b""

        return grpc.stream_stream_rpc_method_handler(answer)

    def service_name(self) -> str | None:
        return None

    def messages(self, method: str) -> list[bytes]:
        return [data for name, data in self.got if name == method]


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    made = Server()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((made,))  # type: ignore[arg-type]
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(None)


class Bench:
    """A gate with its server, and channels through the gate."""

    def __init__(self, gate: EgressGate, server: Server) -> None:
        self.gate = gate
        self.server = server
        self._channels: list[grpc.aio.Channel] = []

    def channel(self, to: Identity = AGGREGATOR, own_zone: bool = False) -> grpc.aio.Channel:
        interceptors = self.gate.interceptors(to, own_zone=own_zone)
        options = [("grpc.enable_http_proxy", 0)]
        self._channels.append(grpc.aio.insecure_channel(self.server.address, options, interceptors=interceptors))
        return self._channels[-1]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def work(self, *requests: Message, to: Identity = AGGREGATOR, own_zone: bool = False) -> list[Any]:
        """Sends messages by the Work stream (or Embed, for an oracle); returns the responses."""
        if to is AGGREGATOR:
            call = stream(self.channel(to), COORDINATOR + "Work", WorkResponse)
        else:
            call = stream(self.channel(to, own_zone), ORACLE + "Embed", EmbedResponse)
        return [response async for response in call(iter(requests))]

    async def push(self, *requests: PushRequest) -> None:
        await self.channel().stream_unary(COORDINATOR + "Push", serialize, PushResponse.FromString)(iter(requests))

    def records(self) -> list[Record]:
        return [record for record in read(self.gate._ledger.path) if record["kind"] == "message"]


def serialize(message: Message) -> bytes:
    return message.SerializeToString()


def stream(channel: grpc.aio.Channel, method: str, response: Any) -> Any:
    return channel.stream_stream(method, serialize, response.FromString)


def run(
    folder: Path, signer: Countersigner, scenario: Callable[[Bench], Awaitable[None]], **policy: Any
) -> list[Record]:
    """Runs a scenario with a gate in `folder`; returns the ledger's messages, after verifying the ledger."""

    async def go() -> list[Record]:
        with EgressGate(EgressPolicy(**policy), AGENT, folder / "ledger", AGGREGATOR, signer.bundle) as gate:
            async with serving() as server:
                bench = Bench(gate, server)
                try:
                    await scenario(bench)
                finally:
                    await bench.close()
            return bench.records()

    records = asyncio.run(go())
    verify(folder / "ledger", bundle_pem=signer.bundle)
    return records


@contextmanager
def denied(reason: str, code: Code = Code.POLICY_DENIED) -> Iterator[None]:
    with pytest.raises(VeilfedError, match=reason) as caught:
        yield
    assert caught.value.code is code
    assert TEXT not in str(caught.value)


def update(**fields: Any) -> WorkRequest:
    values: dict[str, Any] = {"tensors": tensors.to_map({"classifier": CLASSIFIER}), "weight": 1.0} | fields
    return WorkRequest(session="s", update=Update(job_id=JOB, round=2, token="t", **values))


def heartbeat(activity: str = "training") -> WorkRequest:
    return WorkRequest(session="s", heartbeat=Heartbeat(activity=activity))


def texts(count: int = 1) -> EmbedRequest:
    return EmbedRequest(batch=1, texts=Texts(values=[TEXT] * count))


JOIN = JoinRequest(protocol_version=protocol.VERSION, identity=str(AGENT), software_version="0.1.0")
