"""The egress gate on mutual TLS, with an aggregator that countersigns with its real certificate."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from client_agent.egress import EgressGate, EgressPolicy
from tests.support.identities import Federation, make_federation
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import load_key
from veilfed.identity.material import Credentials, load_credentials
from veilfed.ledger import Head, head_statement, verify
from veilfed.rpc.channel import open_channel
from veilfed.rpc.server import create_server, peer
from veilfed.v1.aggregator_pb2 import Evaluation, Heartbeat, Receipt, Update, WorkRequest, WorkResponse
from veilfed.v1.aggregator_pb2_grpc import CoordinatorServicer, CoordinatorStub, add_CoordinatorServicer_to_server
from veilfed.wire import tensors

CLASSIFIER = np.ones((2, 3), np.float32)


class Countersigning(CoordinatorServicer):
    """Answers each update with a receipt."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._key = load_key(credentials.key_pem, "the key")
        self.updates = 0

    async def Work(  # noqa: N802  gRPC's name
        self,
        request_iterator: AsyncIterator[WorkRequest],
        context: grpc.aio.ServicerContext[WorkRequest, WorkResponse],
    ) -> AsyncIterator[WorkResponse]:
        async for request in request_iterator:
            if not request.HasField("update"):
                continue
            self.updates += 1
            update = request.update
            head = Head(update.ledger_head.records, update.ledger_head.sha256)
            statement = head_statement(peer(), update.job_id, update.round, head)
            receipt = Receipt(
                job_id=update.job_id,
                round=update.round,
                token=update.token,
                ledger_head=update.ledger_head,
                signature=self._key.sign(statement, ec.ECDSA(SHA256())),
                certificate_pem=self._credentials.certificate_pem,
            )
            yield WorkResponse(receipts=[receipt])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


def work(number: int, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> WorkRequest:
    counts = [Evaluation(name="personal", correct=30, total=40)]
    update = Update(job_id="job-1", round=number, token="t", weight=1.0, evaluations=counts)
    update.tensors.CopyFrom(tensors.to_map({"classifier": array}))
    return WorkRequest(session="s", update=update)


def test_updates_leave_and_are_countersigned(federation: Federation, tmp_path: Path) -> None:
    agent = load_credentials(federation.agents["north"])
    aggregator = load_credentials(federation.aggregator)
    ledger = tmp_path / "ledger"

    async def go() -> None:
        server, port = create_server(aggregator, "127.0.0.1:0")
        servicer = Countersigning(aggregator)  # type: ignore[abstract]  # no other RPC is called
        add_CoordinatorServicer_to_server(servicer, server)
        await server.start()
        gate = EgressGate(EgressPolicy(), agent.identity, ledger, aggregator.identity, agent.bundle_pem)
        interceptors = gate.interceptors(aggregator.identity)
        channel = open_channel(agent, f"127.0.0.1:{port}", aggregator.identity, interceptors=interceptors)
        try:
            gate.expect("job-1", {"classifier": ((2, 3), "float32")})
            heartbeat = WorkRequest(session="s", heartbeat=Heartbeat(activity="training"))
            stub = CoordinatorStub(channel)
            async for response in stub.Work(iter([work(0, CLASSIFIER), heartbeat, work(1, CLASSIFIER)])):
                assert await asyncio.to_thread(gate.record_receipts, response.receipts) == [None]
            assert servicer.updates == 2
            with pytest.raises(VeilfedError, match="the job says") as caught:
                async for _ in stub.Work(iter([work(2, np.ones((2, 4), np.float32))])):
                    pass
            assert caught.value.code is Code.POLICY_DENIED
            assert servicer.updates == 2
        finally:
            await channel.close(None)
            await server.stop(None)
            gate.close()

    asyncio.run(go())
    summary = verify(ledger, bundle_pem=federation.root.read_bytes())
    assert (summary.passed, summary.refused, summary.receipts) == (3, 1, 2)
    assert summary.countersigned >= 2
    assert summary.signers == [str(aggregator.identity)]
    assert summary.identity == str(agent.identity)
    with pytest.raises(VeilfedError, match="was not issued under the bundle's roots"):
        verify(ledger, bundle_pem=federation.zone_roots["north"].read_bytes())
