"""A model of 64 MiB where no message may be longer than 1 MiB: it travels in chunks, both ways."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.config import AggregatorConfig
from aggregator.coordinator import Coordinator
from aggregator.intake import Intake
from aggregator.job_service import Jobs
from aggregator.server import engine
from tests.support.aggregators import Admin, job_spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import ScriptedAgent, answer
from veilfed.identity.material import load_credentials
from veilfed.rpc.channel import open_channel
from veilfed.rpc.server import create_server
from veilfed.v1.aggregator_pb2_grpc import add_CoordinatorServicer_to_server, add_JobServiceServicer_to_server
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire.tensors import map_bytes, parse_map

CAP = 1024 * 1024
SHAPE = (256, 65_536)
MIB = 1024 * 1024


def _spec() -> dict[str, Any]:
    classes = [f"class-{number}" for number in range(SHAPE[0])]
    return job_spec(["north"], rounds=1, strategy={"classes": classes, "dimension": SHAPE[1]})


@asynchronous
async def test_64_mib_with_messages_of_1_mib(tmp_path: Path) -> None:
    federation = make_federation(tmp_path / "federation", ["north"])
    credentials = load_credentials(federation.aggregator)
    config = AggregatorConfig(
        identity=federation.aggregator,
        listen="127.0.0.1:0",
        database=f"sqlite:///{tmp_path / 'aggregator.sqlite'}",
        artifacts=tmp_path / "artifacts",
    )
    async with engine(config) as made:
        server, port = create_server(credentials, config.listen, max_message_bytes=CAP)
        add_CoordinatorServicer_to_server(Coordinator(made, Intake(made, credentials)), server)
        add_JobServiceServicer_to_server(Jobs(made), server)
        await server.start()
        address, server_id = f"127.0.0.1:{port}", federation.aggregator_id
        north = ScriptedAgent(federation.agents["north"], address, server_id, max_message_bytes=CAP)
        admin_files = load_credentials(federation.admin)
        async with open_channel(admin_files, address, server_id, max_message_bytes=CAP) as channel, north:
            admin = Admin(channel)
            job_id = await admin.submit(_spec())
            task = await north.task()
            assert task.artifact.size > 64 * MIB
            model = await north.model(task)
            assert model.shape == SHAPE
            trained = map_bytes({"classifier": model + np.float32(0.5)})
            artifact = Artifact(sha256=hashlib.sha256(trained).hexdigest(), size=len(trained))
            assert (await north.push(job_id, artifact, trained)).complete
            update = answer(task)
            update.artifact.CopyFrom(artifact)
            await north.send(update=update)
            assert (await north.next()).receipts
            final = await north.task()
            published = parse_map(await north.fetch(job_id, final.artifact.sha256))["classifier"]
            assert np.allclose(published, model + np.float32(0.5), atol=2.0**-30)
            await north.send(update=answer(final))
            assert (await admin.ended(job_id)).summary.state == "done"
        await server.stop(0)
