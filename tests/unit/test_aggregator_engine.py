"""The engine and its streams, in process, on real files and a real database."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from sqlalchemy import Connection, update

from aggregator.artifacts import Artifacts
from aggregator.engine import Engine
from aggregator.hub import MAX_QUEUE, Hub, Stream
from aggregator.intake import Intake
from aggregator.rounds import queries, sessions
from aggregator.rounds.masked import KeptAnswer
from aggregator.rounds.records import MaskOffer, Offer
from aggregator.store.database import Database
from aggregator.store.schema import TaskRow
from tests.support.aggregators import job_spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import answer
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.v1.aggregator_pb2 import GetJobResponse, WorkResponse
from veilfed.wire.tensors import parse_map


def identity(institution: str, name: str = "agent") -> Identity:
    return Identity("test.veilfed", Role.AGENT, institution, name)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return load_credentials(make_federation(tmp_path_factory.mktemp("federation"), []).aggregator)


@asynccontextmanager
async def running(folder: Path, clock: Callable[[], int] | None = None) -> AsyncIterator[Engine]:
    artifacts = Artifacts.open(folder / "artifacts")
    database = Database(f"sqlite:///{folder / 'aggregator.sqlite'}")
    engine = Engine(database, artifacts, lease_seconds=30, clock=clock)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        database.close()
        artifacts.close()


async def join(engine: Engine, institution: str) -> Stream:
    secret = await engine.join(identity(institution), "1")
    return await engine.connect(sessions.session_digest(secret), identity(institution))


async def send(engine: Engine, credentials: Credentials, stream: Stream, array: NDArray[np.float32]) -> WorkResponse:
    """Answers the stream's next task with an update and returns the reply."""
    offer = await stream.next()
    assert isinstance(offer, Offer)
    task = (await engine.task(offer)).task
    await Intake(engine, credentials).update(stream, answer(task, {"classifier": array}))
    if receipts := stream.receipts():
        return WorkResponse(receipts=receipts)
    reply = await stream.next()
    assert isinstance(reply, WorkResponse)
    return reply


async def job_when(engine: Engine, job_id: str, state: str, number: int = 0) -> GetJobResponse:
    """The job as soon as a round of it has a state."""
    with engine.hub.watching(job_id) as changed:
        while True:
            job = await engine.run(lambda c: queries.details(c, job_id, ()))
            if len(job.rounds) > number and job.rounds[number].state == state:
                return job
            await asyncio.wait_for(changed.wait(), 10)
            changed.clear()


def spec(*train: str, **changes: Any) -> str:
    return str(yaml.safe_dump(job_spec(list(train), **changes)))


ONES = np.ones((2, 4), dtype=np.float32)
# Too long to be kept in a row of the database.
LONG = np.ones((2, 10_000), dtype=np.float32)


async def damage(engine: Engine, folder: Path, institution: str) -> None:
    """Changes what is kept of an institution's update."""
    files = list((folder / "artifacts" / "updates").rglob(f"{institution}.*"))
    for kept in files:
        kept.write_bytes(b"damaged")

    def rows(connection: Connection) -> int:
        with_parameters = (TaskRow.institution == institution, TaskRow.parameters.is_not(None))
        return connection.execute(update(TaskRow).where(*with_parameters).values(parameters=b"damaged")).rowcount

    assert len(files) + await engine.run(rows) == 1


@pytest.mark.parametrize("model", [ONES, LONG], ids=["row", "file"])
@asynchronous
async def test_a_damaged_update_excludes_its_institution_not_the_round(
    tmp_path: Path, credentials: Credentials, model: NDArray[np.float32]
) -> None:
    async with running(tmp_path) as engine:
        north, south = await join(engine, "north"), await join(engine, "south")
        job_id = await engine.submit(spec("north", "south", quorum=1, strategy={"dimension": model.shape[1]}))
        assert (await send(engine, credentials, south, 3 * model)).receipts
        await damage(engine, tmp_path, "south")
        assert (await send(engine, credentials, north, model)).receipts
        job = await job_when(engine, job_id, "published")
        clients = {client.institution: (client.state, client.code) for client in job.rounds[0].clients}
        assert clients == {"north": ("done", ""), "south": ("excluded", "STATE_CORRUPT")}
        published = parse_map(engine.artifacts.model(job.rounds[0].published_sha256))["classifier"]
        assert np.array_equal(published, model)


@asynchronous
async def test_all_updates_damaged_fail_the_job(tmp_path: Path, credentials: Credentials) -> None:
    async with running(tmp_path) as engine:
        north, south = await join(engine, "north"), await join(engine, "south")
        job_id = await engine.submit(spec("north", "south", quorum=1))
        await send(engine, credentials, south, ONES)
        await damage(engine, tmp_path, "south")
        offer = await north.next()
        assert isinstance(offer, Offer)
        refusal = answer((await engine.task(offer)).task)  # no parameters: excluded, so that south alone is left
        await Intake(engine, credentials).update(north, refusal)
        job = await job_when(engine, job_id, "failed")
        assert "0 updates are left" in job.summary.error
        assert "south (STATE_CORRUPT" in job.summary.error


@asynchronous
async def test_an_update_counts_although_its_sender_has_gone(tmp_path: Path, credentials: Credentials) -> None:
    """The stream's task is cancelled while the update is being committed: the round closes nevertheless."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north"))
        offer = await north.next()
        assert isinstance(offer, Offer)
        update = answer((await engine.task(offer)).task, {"classifier": ONES})
        taking = asyncio.create_task(Intake(engine, credentials).update(north, update))
        accepted = asyncio.Event()
        accept = engine.machine.accept

        def accepting(*args: Any, **kwargs: Any) -> Any:
            loop.call_soon_threadsafe(accepted.set)
            return accept(*args, **kwargs)

        loop = asyncio.get_running_loop()
        engine.machine.accept = accepting  # type: ignore[method-assign]  # observed, not replaced
        await asyncio.wait_for(accepted.wait(), 10)
        taking.cancel()
        job = await job_when(engine, job_id, "published")
        assert job.rounds[0].clients[0].state == "done"


@asynchronous
async def test_leftovers_of_ended_jobs_are_removed_at_the_start(tmp_path: Path, credentials: Credentials) -> None:
    async with running(tmp_path) as engine:
        stream = await join(engine, "north")
        job_id = await engine.submit(spec("north", "south", quorum=1, strategy={"dimension": LONG.shape[1]}))
        await send(engine, credentials, stream, LONG)
    leftover = tmp_path / "artifacts" / "updates" / "ended-00000000" / "0"
    leftover.mkdir(parents=True)
    async with running(tmp_path) as engine:
        assert engine.artifacts.jobs() == {job_id}


def hub() -> Hub:
    return Hub(lambda: 100_000, 5_000)


def test_silent_agents_get_no_work() -> None:
    made = hub()
    silent, spare = Stream("s1", identity("north"), 94_999), Stream("s2", identity("north", "spare"), 95_000)
    made.connect(silent)
    assert made.live() == {}
    made.connect(spare)
    assert made.live() == {"north": "s2"}
    silent.last_seen_ms = 99_000
    assert made.live() == {"north": "s1"}


@asynchronous
async def test_one_stream_per_session() -> None:
    made = hub()
    old, new = Stream("s1", identity("north"), 100_000), Stream("s1", identity("north"), 100_000)
    made.connect(old)
    made.connect(new)
    with pytest.raises(VeilfedError) as caught:
        await old.next()
    assert caught.value.code is Code.SESSION_INVALID
    made.disconnect(old)
    made.send("s1", WorkResponse())
    assert await new.next() == WorkResponse()


@asynchronous
async def test_a_stream_that_is_not_read_is_closed() -> None:
    stream = Stream("s1", identity("north"), 0)
    for _ in range(MAX_QUEUE + 1):
        stream.send(WorkResponse())
    with pytest.raises(VeilfedError, match="does not read"):
        await stream.next()


@asynchronous
async def test_a_masked_round_that_cannot_be_made_again_from_the_database_begins_anew(
    tmp_path: Path, credentials: Credentials
) -> None:
    """Such as after a stop that lasted longer than a certificate: else it would stand still, and others with it."""
    document = job_spec(["north", "south", "west"], rounds=1, quorum=3, secure_aggregation={})
    async with running(tmp_path) as engine:
        job_id = await engine.submit(yaml.safe_dump(document))
        for stream in [await join(engine, name) for name in document["cohort"]["train"]]:
            offer = await stream.next()
            assert isinstance(offer, Offer)
            task = (await engine.task(offer)).task
            await Intake(engine, credentials).update(stream, answer(task, weight=0.0))
        [stands] = await engine.run(engine.machine.masking)
        kept = [KeptAnswer(stands.phase, "north", b"")]
        keep = partial(engine.machine.keep_answers, job_id=job_id, number=0, attempt=stands.attempt, kept=kept)
        assert await engine.run(keep)
    async with running(tmp_path) as engine:
        assert await engine.masking.request(MaskOffer(job_id, 0), "elsewhere") is None
        [stands] = await engine.run(engine.machine.masking)
        assert stands.attempt == 1
        again = await engine.masking.request(MaskOffer(job_id, 0), "north")
        assert again is not None
        assert again.mask.attempt == 1
