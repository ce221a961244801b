"""Uploads that are broken off or refused, over real TLS to a real aggregator."""

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import ScriptedAgent
from veilfed.errors import Code, VeilfedError
from veilfed.protocol import CHUNK_BYTES
from veilfed.v1.aggregator_pb2 import PushRequest
from veilfed.v1.tensor_pb2 import Artifact

# 16 MiB of parameters and their frame.
CLASSES, DIMENSION = 64, 65_536
SIZE = CLASSES * DIMENSION * 4


@pytest.fixture(scope="module")
def aggregator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregator]:
    folder = tmp_path_factory.mktemp("aggregator")
    with running_aggregator(make_federation(folder / "federation", ["north"]), folder / "service") as made:
        yield made


def agent(aggregator: Aggregator) -> ScriptedAgent:
    return ScriptedAgent(aggregator.federation.agents["north"], aggregator.address, aggregator.federation.aggregator_id)


def refused(code: Code) -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is code)


def spec() -> dict[str, Any]:
    strategy = {"classes": [f"class {number}" for number in range(CLASSES)], "dimension": DIMENSION}
    return job_spec(["north"], strategy=strategy, rounds=1)


def named(data: bytes) -> Artifact:
    return Artifact(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


@asynchronous
async def test_an_agent_that_breaks_off_leaves_a_part_that_another_upload_goes_on_from(aggregator: Aggregator) -> None:
    data = bytes(range(256)) * (3 * CHUNK_BYTES // 256)
    artifact = named(data)
    async with aggregator.admin() as admin, agent(aggregator) as north:
        job_id = await admin.submit(spec())
        await north.task()
        uploads = aggregator.folder / "artifacts" / "uploads" / job_id / "north"
        async with north.pushing(job_id, artifact) as upload:
            await upload.write(PushRequest(chunk=data[:CHUNK_BYTES]))
            async with asyncio.timeout(20):
                while (await north.stat(job_id, artifact.sha256)).received < CHUNK_BYTES:  # noqa: ASYNC110  polled
                    await asyncio.sleep(0.01)
        assert [path.name for path in uploads.iterdir()] == [f"{artifact.sha256}.part"]
        assert not (await north.stat(job_id, artifact.sha256)).complete
        assert (await north.push(job_id, artifact, data[CHUNK_BYTES:], offset=CHUNK_BYTES)).complete
        assert [path.name for path in uploads.iterdir()] == [artifact.sha256]
        assert (uploads / artifact.sha256).read_bytes() == data
        await admin.cancel(job_id)


@asynchronous
async def test_a_large_upload_is_refused_by_name(aggregator: Aggregator) -> None:
    """Refused at its header, in the middle of 16 MiB of chunks or after them: the agent gets to know why."""
    data = bytes(SIZE)
    artifact = named(data)
    shorter, other = Artifact(sha256=artifact.sha256, size=SIZE // 2), Artifact(sha256="ab" * 32, size=SIZE)
    async with aggregator.admin() as admin, agent(aggregator) as north:
        job_id = await admin.submit(spec())
        await north.task()
        for _ in range(10):
            with refused(Code.NOT_FOUND):
                await north.push("no-such-job", artifact, data)
            with refused(Code.ARTIFACT_INVALID):  # more than was announced
                await north.push(job_id, shorter, data)
        with refused(Code.ARTIFACT_INVALID):  # another digest
            await north.push(job_id, other, data)
        await admin.cancel(job_id)
        with refused(Code.JOB_ENDED):
            await north.push(job_id, artifact, data)


@asynchronous
async def test_a_transfer_during_a_fault_of_the_disk_can_be_tried_again(aggregator: Aggregator) -> None:
    """Not FILE_UNUSABLE, which the agent would take for its own and refuse the task; and no folder is named."""
    data = bytes(range(256)) * 1000
    artifact = named(data)
    async with aggregator.admin() as admin, agent(aggregator) as north:
        job_id = await admin.submit(spec())
        task = await north.task()
        folder = aggregator.folder / "artifacts" / "uploads" / job_id
        folder.write_bytes(b"in the way")
        for _ in range(2):
            with refused(Code.INTERNAL) as caught:
                await north.push(job_id, artifact, data)
            assert str(aggregator.folder) not in caught.value.message
        folder.unlink()
        assert (await north.push(job_id, artifact, data)).complete
        (aggregator.folder / "artifacts" / "models" / task.artifact.sha256[:2] / task.artifact.sha256).unlink()
        with refused(Code.INTERNAL):
            await north.fetch(job_id, task.artifact.sha256)
        await admin.cancel(job_id)
    assert aggregator.process is not None
    assert str(folder) in aggregator.process.err.read_text()
