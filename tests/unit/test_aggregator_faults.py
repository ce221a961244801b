"""Faults and rare orders of events at the engine: agents that flap, jobs that end early, disks that fail."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection, update
from sqlalchemy.exc import OperationalError

from aggregator.artifacts import Ref
from aggregator.engine import Engine
from aggregator.hub import MAX_QUEUE, Stream
from aggregator.intake import Intake
from aggregator.rounds import queries, sessions
from aggregator.rounds.records import Offer
from aggregator.store.schema import JobRow, RoundRow
from tests.support.aggregators import job_spec
from tests.support.databases import failing_commit
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import answer
from tests.unit.test_aggregator_engine import LONG, ONES, identity, job_when, join, running, send, spec
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials, load_credentials
from veilfed.protocol import MAX_MESSAGE_BYTES
from veilfed.v1.aggregator_pb2 import (
    GetJobResponse,
    ListJobsResponse,
    TaskEnded,
    WorkResponse,
)
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire.tensors import digest, map_bytes


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return load_credentials(make_federation(tmp_path_factory.mktemp("federation"), []).aggregator)


def refused(code: Code) -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is code)


@asynchronous
async def test_a_pending_round_opens_when_silent_agents_are_heard_again(tmp_path: Path) -> None:
    """The quorum is there by heartbeats alone: nobody connects anew."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        north.last_seen_ms = 0  # silent
        south = await join(engine, "south")
        job_id = await engine.submit(spec("north", "south"))
        assert (await job_when(engine, job_id, "pending")).summary.state == "running"
        await engine.heartbeat(north, "idle")
        await job_when(engine, job_id, "open")
        assert isinstance(await asyncio.wait_for(south.next(), 10), Offer)


@asynchronous
async def test_a_job_that_is_cancelled_while_it_folds_blames_nobody(tmp_path: Path, credentials: Credentials) -> None:
    """The files of a cancelled job go at once, also from under a fold; that is no institution's fault."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north"))
        folded = engine._folded

        def cancelled(*args: Any) -> Any:
            asyncio.run_coroutine_threadsafe(engine.cancel(job_id, identity("north")), loop).result(10)
            engine.artifacts.drop_job(job_id)
            return folded(*args)

        loop = asyncio.get_running_loop()
        engine._folded = cancelled  # type: ignore[assignment,method-assign]  # delayed, not replaced
        await send(engine, credentials, north, ONES)
        await job_when(engine, job_id, "cancelled")
        await asyncio.gather(*engine._folds.values())
        job = await engine.run(lambda c: queries.details(c, job_id, ()))
        assert [(client.state, client.code) for client in job.rounds[0].clients] == [("done", "")]
        events, _ = await engine.run(lambda c: queries.events(c, job_id, 0))
        assert events[-1].kind == "job_cancelled"


@asynchronous
async def test_a_heartbeat_of_an_ended_session_gets_no_work(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        await engine.run(lambda c: sessions.join(c, identity("north"), "1", engine.clock()))
        with refused(Code.SESSION_INVALID):
            await engine.heartbeat(north, "idle")


@asynchronous
async def test_a_join_whose_caller_has_gone_ends_the_older_session_all_the_same(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        joining = asyncio.create_task(engine.join(identity("north"), "2"))
        await asyncio.sleep(0)
        joining.cancel()
        with refused(Code.SESSION_REPLACED):
            await asyncio.wait_for(north.next(), 10)


def _spoil(connection: Connection, job_id: str) -> None:
    """Nobody can read its specification any more, and its round is over."""
    connection.execute(update(JobRow).where(JobRow.id == job_id).values(spec_json="{}"))
    connection.execute(update(RoundRow).where(RoundRow.job_id == job_id).values(deadline_ms=1, due_ms=1))


@asynchronous
async def test_a_job_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    """Such as one of another version: it fails by name, the service starts and its other jobs go on."""
    async with running(tmp_path) as engine:
        await join(engine, "north")
        bad = await engine.submit(spec("north"))
        good = await engine.submit(spec("north", "south", quorum=2))
        await engine.run(lambda c: _spoil(c, bad))
    async with running(tmp_path) as engine:
        await join(engine, "north")
        await join(engine, "south")
        await job_when(engine, good, "open")
        jobs = {job.job_id: job for job in await engine.run(lambda c: queries.summaries(c, 0))}
        assert jobs[bad].state == "failed"
        assert "specification" in jobs[bad].error
        with refused(Code.STATE_CORRUPT):
            await engine.run(lambda c: queries.details(c, bad, ()))


@asynchronous
async def test_a_fault_of_the_aggregator_costs_no_institution_its_update(
    tmp_path: Path, credentials: Credentials
) -> None:
    """The update could not be kept: the stream ends, so that the agent comes back and sends it again."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north", strategy={"dimension": LONG.shape[1]}))
        offer = await north.next()
        assert isinstance(offer, Offer)
        task = (await engine.task(offer)).task
        folder = tmp_path / "artifacts" / "updates"
        folder.rmdir()
        folder.write_bytes(b"in the way")
        with refused(Code.INTERNAL) as caught:
            await Intake(engine, credentials).update(north, answer(task, {"classifier": LONG}))
        assert str(tmp_path) not in caught.value.message
        folder.unlink()
        folder.mkdir()
        again = await engine.connect(north.session, identity("north"))
        offered = await again.next()
        assert isinstance(offered, Offer)
        assert offered.token == task.token
        await Intake(engine, credentials).update(again, answer(task, {"classifier": LONG}))
        await job_when(engine, job_id, "published")


@asynchronous
async def test_what_was_sent_before_an_orderly_end_arrives() -> None:
    """An agent that ends its side after an update gets the receipt."""
    stream = Stream("s1", identity("north"), 0)
    for number in range(3):
        stream.send(WorkResponse(ended=TaskEnded(round=number)))
    stream.close()
    items = [await stream.next() for _ in range(3)]
    assert [item.ended.round for item in items if isinstance(item, WorkResponse)] == [0, 1, 2]
    assert await stream.next() is None
    stream.send(WorkResponse())
    assert await stream.next() is None


@asynchronous
async def test_an_agent_may_take_part_in_many_jobs(tmp_path: Path) -> None:
    """All tasks are offered at once to whoever connects: that is no sign that the agent does not read."""
    async with running(tmp_path) as engine:
        first = await join(engine, "north")
        jobs = {await engine.submit(spec("north")) for _ in range(70)}
        engine.hub.disconnect(first)
        again = await engine.connect(first.session, identity("north"))
        offers = [await asyncio.wait_for(again.next(), 10) for _ in jobs]
        assert {offer.job_id for offer in offers if isinstance(offer, Offer)} == jobs


@asynchronous
async def test_a_stream_does_not_grow_without_bound() -> None:
    stream = Stream("s1", identity("north"), 0)
    for number in range(MAX_QUEUE + 1):
        stream.send(Offer("s1", "job", number, True, str(number), Ref("", 0), 0))
    with pytest.raises(VeilfedError, match="does not read"):
        await stream.next()


WORDS = "\N{SNOWMAN}" * 300


@asynchronous
async def test_answers_stay_below_the_limit_of_messages(tmp_path: Path, credentials: Credentials) -> None:
    """Whatever institutions give as reasons: the newest rounds of a job and the list of jobs can be told."""
    names = [f"institution-{number}" for number in range(400)]
    async with running(tmp_path) as engine:
        streams = [await join(engine, name) for name in names]
        jobs = [await engine.submit(spec(*names, quorum=1, rounds=20)) for _ in range(1)]

        def exclude(connection: Connection) -> None:
            for stream in streams:
                offers = sessions.offer(connection, stream.session, stream.identity.institution, 0, 1, again=True)
                assert offers
            connection.exec_driver_sql("UPDATE tasks SET state='excluded', code='POLICY_DENIED', reason=?", (WORDS,))
            for number in range(1, 20):
                connection.exec_driver_sql(
                    "INSERT INTO rounds SELECT job_id, ?, state, model_sha256, model_size, published_sha256, opened_ms,"
                    " deadline_ms, due_ms, quorum_ms, report, ridge, attempt, phase FROM rounds WHERE number = 0",
                    (number,),
                )
                connection.exec_driver_sql(
                    "INSERT INTO tasks SELECT job_id, ?, institution, trains, counts, state, token || ?, leased_to,"
                    " lease_ms, code, reason, identity, update_sha256, weight, evaluations, ledger_records,"
                    " ledger_sha256, finished_ms, parameters, spec_json FROM tasks WHERE round = 0",
                    (number, str(number)),
                )
            connection.execute(update(JobRow).values(error=WORDS * 100))

        await engine.run(exclude)
        job: GetJobResponse = await engine.run(lambda c: queries.details(c, jobs[0], ()))
        assert job.rounds[-1].round == 19
        assert len(job.rounds) < 20
        assert job.ByteSize() < MAX_MESSAGE_BYTES
        assert job.summary.error == WORDS * 100

        def multiply(connection: Connection) -> None:
            for number in range(200):
                connection.exec_driver_sql(
                    "INSERT INTO jobs SELECT id || ?, name, strategy, '{}', 'failed', rounds, rounds_published,"
                    " created_ms, ended_ms, error FROM jobs WHERE id = ?",
                    (str(number), jobs[0]),
                )

        await engine.run(multiply)
        listed = ListJobsResponse(jobs=await engine.run(lambda c: queries.summaries(c, 1000)))
        assert len(listed.jobs) == 201
        assert listed.ByteSize() < MAX_MESSAGE_BYTES


@asynchronous
async def test_numbers_beyond_what_a_database_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        job_id = await engine.submit(spec("north"))
        assert await engine.run(lambda c: queries.events(c, job_id, 2**64 - 1)) == ([], False)
        model = await engine.run(lambda c: queries.details(c, job_id, ()))
        assert model.summary.job_id == job_id
        ref = engine.artifacts.put_model(b"x")
        assert list(engine.artifacts.chunks(ref.sha256, 2**64 - 1)) == []


@asynchronous
async def test_what_agents_say_is_printable(tmp_path: Path) -> None:
    """Words of agents are shown in administrators' terminals."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north"))
        await engine.heartbeat(north, "idle\x1b[2J\n" + "x" * 100)
        (client,) = (await engine.run(lambda c: queries.details(c, job_id, ()))).clients
        assert client.activity.startswith("idle [2J ")
        assert client.activity.isprintable()
        assert len(client.activity) == 64


@asynchronous
async def test_a_long_specification_does_not_hold_up_the_agents(tmp_path: Path) -> None:
    """YAML of the largest size takes seconds to read; the loop turns meanwhile, and would not turn once otherwise."""
    classes = [f"c{number}" for number in range(40_000)]
    text = yaml.safe_dump(job_spec(["north"], strategy={"classes": classes, "dimension": 2}))
    async with running(tmp_path) as engine:
        submitting = asyncio.create_task(engine.submit(text))
        turns = 0
        while not submitting.done():
            await asyncio.sleep(0.005)
            turns += 1
        await submitting
        assert turns > 10


@asynchronous
async def test_a_deadline_that_passes_while_the_service_is_down(tmp_path: Path, credentials: Credentials) -> None:
    """Who was at work has a lease's time to come back."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north", deadline_seconds=600))
        now = engine.clock()
    async with running(tmp_path, lambda: now + 601_000) as engine:
        again = await engine.connect(north.session, identity("north"))
        await send(engine, credentials, again, ONES)
        await job_when(engine, job_id, "published")


@pytest.mark.parametrize("kept", [False, True], ids=["undone", "kept"])
@asynchronous
async def test_a_commit_that_fails_ends_the_streams_and_holds_up_no_round(
    tmp_path: Path, credentials: Credentials, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have happened: a task that it gave out would never arrive, while heartbeats keep its lease."""
    monkeypatch.setattr("aggregator.engine.RETRY_SECONDS", 0.1)
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north"))
        publish = engine.machine.publish

        def failing(*args: Any) -> Any:
            stack.enter_context(failing_commit(engine._database, kept))
            return publish(*args)

        with ExitStack() as stack:
            engine.machine.publish = failing  # type: ignore[assignment,method-assign]  # its commit fails, it is not replaced
            assert (await send(engine, credentials, north, ONES)).receipts
            with refused(Code.INTERNAL):  # an agent's cue to come back
                await asyncio.wait_for(north.next(), 20)
        engine.machine.publish = publish  # type: ignore[method-assign]
        again = await engine.connect(north.session, identity("north"))
        offer = await asyncio.wait_for(again.next(), 20)
        assert isinstance(offer, Offer)
        assert offer.round == 1
        events, _ = await engine.run(lambda c: queries.events(c, job_id, 0))
        assert [event.kind for event in events].count("round_published") == 1


@asynchronous
async def test_the_end_of_a_job_whose_commit_fails_is_seen_and_its_files_go(
    tmp_path: Path, credentials: Credentials
) -> None:
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north", "south", quorum=1, strategy={"dimension": LONG.shape[1]}))
        assert (await send(engine, credentials, north, LONG)).receipts
        assert engine.artifacts.jobs() == {job_id}
        with failing_commit(engine._database, kept=True), pytest.raises(OperationalError):
            await engine.cancel(job_id, identity("north"))
        await job_when(engine, job_id, "cancelled")
        async with asyncio.timeout(20):
            while engine.artifacts.jobs():  # noqa: ASYNC110  removed by the timer
                await asyncio.sleep(0.02)


def _uploaded(engine: Engine, job_id: str, data: bytes) -> Artifact:
    """A whole upload of `north`."""
    ref = Ref(digest(data), len(data))
    upload = engine.artifacts.upload(job_id, "north", ref, 0)
    upload.write(data)
    assert upload.finish()
    engine.artifacts.release(upload)
    return Artifact(sha256=ref.sha256, size=ref.size)


@asynchronous
async def test_an_upload_that_the_gate_refuses_is_removed(tmp_path: Path, credentials: Credentials) -> None:
    """One that is named wrongly stays: it can be named again."""
    async with running(tmp_path) as engine:
        north = await join(engine, "north")
        job_id = await engine.submit(spec("north", "south", quorum=1, rounds=2, strategy={"dimension": LONG.shape[1]}))
        offer = await north.next()
        assert isinstance(offer, Offer)
        update = answer((await engine.task(offer)).task, weight=-1.0)
        update.artifact.CopyFrom(_uploaded(engine, job_id, map_bytes({"classifier": LONG})))
        for number, code, left in ((7, Code.TASK_INVALID, 1), (0, Code.UPDATE_INVALID, 0)):
            update.round = number
            await Intake(engine, credentials).update(north, update)
            reply = await north.next()
            assert isinstance(reply, WorkResponse)
            assert reply.rejection.code == code.name
            kept = [path for path in (tmp_path / "artifacts" / "uploads").rglob("*") if path.is_file()]
            assert len(kept) == left
