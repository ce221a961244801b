"""Many clients in one process: each has its own identity, connection and stream, and answers every task at once.

python -m benchmarks.light_clients FOLDER INSTITUTION[,INSTITUTION...] ADDRESS
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np

from veilfed import protocol
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.rpc.channel import open_channel
from veilfed.v1.aggregator_pb2 import (
    TASK_KIND_TRAIN,
    Heartbeat,
    JoinRequest,
    LedgerHead,
    Task,
    Update,
    WorkRequest,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub
from veilfed.wire.tensors import to_map, unpack_map

HEARTBEAT_SECONDS = 5.0


def answer(task: Task) -> Update:
    """The model as it came: what is computed does not matter here."""
    head = LedgerHead(records=1, sha256="ab" * 32)
    update = Update(job_id=task.job_id, round=task.round, token=task.token, ledger_head=head)
    if task.kind == TASK_KIND_TRAIN:
        update.weight = 1.0
        update.tensors.CopyFrom(to_map({name: np.array(v) for name, v in unpack_map(task.tensors).items()}))
    return update


async def client(folder: Path, institution: str, address: str) -> None:
    credentials = load_credentials(TlsFiles.in_folder(folder / institution))
    aggregator = Identity(credentials.identity.federation, Role.AGGREGATOR, "coordinator", "aggregator")
    async with open_channel(credentials, address, aggregator) as channel:
        stub: Any = CoordinatorStub(channel)  # the stubs of grpc know no stream that is written to
        request = JoinRequest(protocol_version=protocol.VERSION, identity=str(credentials.identity))
        session = (await stub.Join(request)).session
        stream = stub.Work()

        async def beat() -> None:
            while True:
                await stream.write(WorkRequest(session=session, heartbeat=Heartbeat(activity="idle")))
                await asyncio.sleep(HEARTBEAT_SECONDS)

        beating = asyncio.create_task(beat())
        try:
            async for response in stream:
                if response.WhichOneof("body") == "task":
                    await stream.write(WorkRequest(session=session, update=answer(response.task)))
        finally:
            beating.cancel()


async def main(folder: Path, institutions: list[str], address: str) -> None:
    await asyncio.gather(*(client(folder, institution, address) for institution in institutions))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]))
