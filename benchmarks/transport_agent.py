"""An agent of benchmarks.transport: the real agent's transport, gate and ledger; the training is one addition.

python -m benchmarks.transport_agent FOLDER INSTITUTION ADDRESS
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from client_agent.clerk import Clerk
from client_agent.config import AggregatorEndpoint
from client_agent.coordinator_client import Session, join
from client_agent.egress import EgressGate, EgressPolicy
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.jobs import parse_job
from veilfed.v1.aggregator_pb2 import TASK_KIND_TRAIN, Task, Update
from veilfed.wire.tensors import map_bytes, parse_map, unpack_map

CLASSIFIER = "classifier"


class Agent:
    """Answers every task at once."""

    def __init__(self, session: Session, gate: EgressGate, seed: int) -> None:
        self._session, self._gate = session, gate
        self._random = np.random.default_rng(seed)
        self._step: np.ndarray | None = None
        self._consented = ""

    async def answer(self, task: Task) -> None:
        if task.job_id != self._consented:
            strategy = parse_job(task.spec_json).strategy
            self._gate.expect(task.job_id, {CLASSIFIER: ((len(strategy.classes), strategy.dimension), np.float32)})
            self._consented = task.job_id
        if task.WhichOneof("model") == "artifact":
            arrays = parse_map(await self._session.download(task.job_id, task.artifact, bytearray()))
        else:
            arrays = unpack_map(task.tensors)
        update = Update(job_id=task.job_id, round=task.round, token=task.token)
        if task.kind == TASK_KIND_TRAIN:
            await self._train(np.asarray(arrays[CLASSIFIER]), update)
        self._session.send(update)

    async def _train(self, classifier: np.ndarray, update: Update) -> None:
        if self._step is None:
            self._step = self._random.standard_normal(classifier.shape).astype(np.float32) * np.float32(0.01)
        data = map_bytes({CLASSIFIER: classifier + self._step})
        update.weight = 1.0
        if len(data) > self._session.inline_limit:
            update.artifact.CopyFrom(await self._session.upload(update.job_id, data))
        else:
            update.tensors.ParseFromString(data)


async def main(folder: Path, institution: str, address: str) -> None:
    credentials = load_credentials(TlsFiles.in_folder(folder / institution))
    aggregator = Identity(credentials.identity.federation, Role.AGGREGATOR, "coordinator", "aggregator")
    ledger = folder / f"{institution}.jsonl"
    with EgressGate(EgressPolicy(), credentials.identity, ledger, aggregator, credentials.bundle_pem) as gate:
        endpoint = AggregatorEndpoint(address=address, identity=aggregator)
        async with join(credentials, endpoint, gate) as session:
            agent = Agent(session, gate, int(institution.removeprefix("site")))
            clerk = Clerk(gate)
            session.heartbeat("idle")
            async for response in session.responses():
                for receipt in response.receipts:
                    clerk.take(receipt)
                if response.HasField("task"):
                    await agent.answer(response.task)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
