"""The aggregator as a process, over mutual TLS, with scripted agents."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.aggregators import Admin, Aggregator, job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import until
from tests.support.scripted_agent import HEAD, ScriptedAgent, trained
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.ledger import Head, SignedHead
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import (
    Evaluation,
    JoinRequest,
    ListJobsRequest,
    Rejection,
    Task,
    Update,
)
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub, JobServiceStub
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire.tensors import map_bytes, parse_map, to_map

INSTITUTIONS = ["north", "south", "east"]
CHUNK = 1024 * 1024


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)


@pytest.fixture(scope="module")
def aggregator(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregator]:
    with running_aggregator(federation, tmp_path_factory.mktemp("aggregator")) as started:
        yield started


def agent(aggregator: Aggregator, institution: str) -> ScriptedAgent:
    federation = aggregator.federation
    return ScriptedAgent(federation.agents[institution], aggregator.address, federation.aggregator_id)


@asynccontextmanager
async def working(
    aggregator: Aggregator, institutions: list[str], change: Callable[[Task, Update], Update] | None = None
) -> AsyncIterator[None]:
    """Agents that answer every task rightly, or as `change` says."""
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent(aggregator, name)) for name in institutions]
        tasks = [asyncio.create_task(one.work(change)) for one in agents]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def refused(code: Code) -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is code)


async def rejection(one: ScriptedAgent, update: Update) -> Rejection:
    await one.send(update=update)
    response = await one.next()
    assert response.WhichOneof("body") == "rejection", response
    return response.rejection


@asynchronous
async def test_a_whole_job(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, working(aggregator, INSTITUTIONS):
        job_id = await admin.submit(job_spec(["north", "south"], ["east"]))
        job = await admin.ended(job_id)
        kinds = [event.kind async for event in admin.watch(job_id)]
    assert (job.summary.state, job.summary.rounds_published) == ("done", 2)
    assert [item.state for item in job.rounds] == ["published"] * 3
    assert job.rounds[1].model_sha256 == job.rounds[0].published_sha256
    assert job.rounds[2].model_sha256 == job.rounds[1].published_sha256
    assert job.rounds[2].published_sha256 == ""
    assert {client.state for item in job.rounds for client in item.clients} == {"done"}
    assert [client.connected for client in job.clients] == [True] * 3
    assert all(client.last_seen_unix_ms > 0 for client in job.clients)
    assert (kinds[0], kinds[-1], kinds.count("round_published")) == ("job_submitted", "job_done", 3)
    # Nothing of the updates is left.
    until(lambda: not list((aggregator.folder / "artifacts" / "updates").iterdir()), 20, "updates removed")


@asynchronous
async def test_the_published_model_is_the_mean_of_the_updates(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, agent(aggregator, "north") as north, agent(aggregator, "south") as south:
        job_id = await admin.submit(job_spec(["north", "south"], rounds=1))
        sent = []
        for one in (north, south):
            task = await one.task()
            model = await one.model(task)
            sent.append(trained(task, model, one.identity.institution))
            await one.send(update=await one.answer(task))
            assert (await one.next()).receipts
        final = await north.task()
        assert (final.round, final.job_id) == (1, job_id)
        assert np.allclose(await north.model(final), (sent[0].astype(float) + sent[1]) / 2, atol=1e-6)
        assert np.array_equal(await north.model(final), await south.model(await south.task()))
        await admin.cancel(job_id)


@asynchronous
async def test_a_receipt_is_signed_by_the_aggregator(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, agent(aggregator, "north") as north:
        job_id = await admin.submit(job_spec(["north"], rounds=1))
        await north.send(update=await north.answer(await north.task()))
        (receipt,) = (await north.next()).receipts
        await admin.cancel(job_id)
    assert receipt.ledger_head == HEAD
    signed = SignedHead(
        str(north.identity),
        job_id,
        0,
        Head(HEAD.records, HEAD.sha256),
        receipt.signature,
        receipt.certificate_pem,
    )
    assert signed.check(aggregator.federation.root.read_bytes()) == aggregator.federation.aggregator_id


@asynchronous
async def test_roles(aggregator: Aggregator) -> None:
    federation = aggregator.federation
    agents = load_credentials(federation.agents["north"])
    async with open_channel(agents, aggregator.address, federation.aggregator_id) as channel:
        with refused(Code.ROLE_DENIED), translated(agents, aggregator.address):
            await JobServiceStub(channel).ListJobs(ListJobsRequest())
    async with aggregator.admin() as admin:
        with refused(Code.ROLE_DENIED), translated(None, aggregator.address):
            await CoordinatorStub(admin.channel).Join(JoinRequest())


@asynchronous
async def test_joining(aggregator: Aggregator) -> None:
    async with agent(aggregator, "north") as north:
        with refused(Code.IDENTITY_MISMATCH):
            await north.join(identity=str(aggregator.federation.agent_id("south")))
        with refused(Code.PROTOCOL_VERSION):
            await north.join(protocol_version=999)
        for session in ("", "x", north.session + "x"):
            async with agent(aggregator, "south") as south:
                south.session = session
                await south.open()
                with refused(Code.SESSION_INVALID):
                    await south.next()
        # The session of another is no better.
        async with agent(aggregator, "south") as south:
            south.session = north.session
            await south.open()
            with refused(Code.SESSION_INVALID):
                await south.next()


@asynchronous
async def test_rejoining_gets_work_every_time(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin:
        job_id = ""
        tokens = set()
        async with agent(aggregator, "north") as old:
            job_id = await admin.submit(job_spec(["north"], rounds=1))
            tokens.add((await old.task()).token)
            for _ in range(5):
                async with agent(aggregator, "north") as new:
                    tokens.add((await new.task()).token)
            with refused(Code.SESSION_REPLACED):
                await old.next()
        assert len(tokens) == 1
        await admin.cancel(job_id)


SPOILED: dict[str, Callable[[Update], Any]] = {
    "no parameters": lambda update: update.ClearField("tensors"),
    "not a number": lambda update: update.tensors.CopyFrom(_model(math.nan)),
    "infinite": lambda update: update.tensors.CopyFrom(_model(math.inf)),
    "too large": lambda update: update.tensors.CopyFrom(_model(1e6)),
    "one row": lambda update: update.tensors.CopyFrom(to_map({"classifier": np.ones((1, 4), np.float32)})),
    "float64": lambda update: update.tensors.CopyFrom(to_map({"classifier": np.ones((2, 4))})),
    "another name": lambda update: update.tensors.CopyFrom(to_map({"other": np.ones((2, 4), np.float32)})),
    "one more tensor": lambda update: update.tensors.CopyFrom(
        to_map({"classifier": np.ones((2, 4), np.float32), "transform": np.ones((4, 4), np.float32)})
    ),
    "bytes missing": lambda update: setattr(update.tensors.tensors[0].tensor, "data", b"123"),
    "an empty model": lambda update: update.tensors.CopyFrom(to_map({})),
    "no weight": lambda update: setattr(update, "weight", 0.0),
    "negative weight": lambda update: setattr(update, "weight", -1.0),
    "weight not a number": lambda update: setattr(update, "weight", math.nan),
    "large weight": lambda update: setattr(update, "weight", 2.0),
    "more right than all": lambda update: setattr(update.evaluations[0], "correct", 9),
    "unknown counts": lambda update: update.evaluations.append(Evaluation(name="x", correct=1, total=2)),
}


def _model(value: float) -> Any:
    array = np.ones((2, 4), dtype=np.float32)
    array[1, 1] = value
    return to_map({"classifier": array})


@asynchronous
async def test_spoiled_updates_are_refused_by_name_and_the_rounds_go_on(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, agent(aggregator, "south") as south, working(aggregator, ["north"]):
        job_id = await admin.submit(job_spec(["north", "south"], rounds=len(SPOILED), quorum=1))
        for spoil in SPOILED.values():
            task = await south.task()
            update = await south.answer(task)
            spoil(update)
            answer = await rejection(south, update)
            assert (answer.code, answer.token) == ("UPDATE_INVALID", task.token)
            assert answer.message
        await south.send(update=await south.answer(await south.task()))
        job = await admin.ended(job_id)
        events = [event async for event in admin.watch(job_id) if event.kind == "client_excluded"]
    assert job.summary.state == "done"
    assert [event.institution for event in events] == ["south"] * len(SPOILED)
    for item in job.rounds[:-1]:
        states = {client.institution: (client.state, client.code) for client in item.clients}
        assert states == {"north": ("done", ""), "south": ("excluded", "UPDATE_INVALID")}


@asynchronous
async def test_wrong_claims_are_refused_and_exclude_nobody(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, agent(aggregator, "north") as north, agent(aggregator, "south") as south:
        job_id = await admin.submit(job_spec(["north", "south"], rounds=1))
        mine, other = await north.task(), await south.task()
        right = await north.answer(mine)

        async def code(**changes: Any) -> str:
            wrong = Update()
            wrong.CopyFrom(right)
            for name, value in changes.items():
                setattr(wrong, name, value)
            return (await rejection(north, wrong)).code

        assert await code(token=other.token) == "TASK_INVALID"
        assert await code(token="") == "TASK_INVALID"
        assert await code(round=1) == "TASK_INVALID"
        assert await code(job_id="other") == "TASK_INVALID"
        headless = Update()
        headless.CopyFrom(right)
        headless.ClearField("ledger_head")
        assert (await rejection(north, headless)).code == "PROTOCOL_VIOLATION"
        absent = Update()
        absent.CopyFrom(right)
        absent.artifact.CopyFrom(Artifact(sha256="ab" * 32, size=10))
        assert (await rejection(north, absent)).code == "ARTIFACT_INVALID"
        await north.send(update=right)
        assert (await north.next()).receipts
        assert await code() == "UPDATE_DUPLICATE"
        await south.send(update=await south.answer(other))
        assert (await south.next()).receipts
        assert (await north.task()).round == 1
        assert {client.state for client in (await admin.get(job_id)).rounds[0].clients} == {"done"}
        await admin.cancel(job_id)
        assert (await north.next()).ended.job_id == job_id


@asynchronous
async def test_a_refusal_by_policy_is_named(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, agent(aggregator, "north") as north:
        job_id = await admin.submit(job_spec(["north"], rounds=1))
        await north.refuse(await north.task(), "POLICY_DENIED", "this strategy is not\nallowed")
        job = await admin.ended(job_id)
        assert (job.summary.state, job.rounds[0].state) == ("failed", "failed")
        assert "north (POLICY_DENIED: this strategy is not allowed)" in job.summary.error


@asynchronous
async def test_a_silent_agent_loses_its_task_to_the_spare_one(federation: Federation, tmp_path: Path) -> None:
    files = federation.make(federation.agent_id("north", "spare"), tmp_path / "spare")
    with running_aggregator(federation, tmp_path / "aggregator", lease_seconds=2.0) as aggregator:
        spare = ScriptedAgent(files, aggregator.address, federation.aggregator_id)
        async with aggregator.admin() as admin:
            job_id = await admin.submit(job_spec(["north"], rounds=1))
            async with agent(aggregator, "north") as north, spare:
                task = await north.task()  # it connected first

                async def beat() -> None:
                    while True:
                        await spare.heartbeat()
                        await asyncio.sleep(0.3)

                beating = asyncio.create_task(beat())
                again = await spare.task()
                beating.cancel()
                assert again.token == task.token
                # The silent one is too late.
                assert (await rejection(north, await north.answer(task))).code == "TASK_INVALID"
                await spare.send(update=await spare.answer(again))
                assert (await spare.next()).receipts
                await admin.cancel(job_id)


def large_spec(**changes: Any) -> dict[str, Any]:
    """A model of 2.5 MiB."""
    strategy = {"classes": [f"class {number}" for number in range(10)], "dimension": 65_536}
    return job_spec(["north"], strategy=strategy, rounds=1, **changes)


@asynchronous
async def test_a_large_model_travels_as_an_artifact_and_resumes(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin, agent(aggregator, "north") as north, agent(aggregator, "south") as south:
        job_id = await admin.submit(large_spec())
        task = await north.task()
        assert task.WhichOneof("model") == "artifact"
        whole = await north.fetch(job_id, task.artifact.sha256)
        assert hashlib.sha256(whole).hexdigest() == task.artifact.sha256
        assert await north.fetch(job_id, task.artifact.sha256, offset=CHUNK + 5) == whole[CHUNK + 5 :]

        arrays = {"classifier": trained(task, await north.model(task), "north")}
        data = map_bytes(arrays)
        artifact = Artifact(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        assert (await north.push(job_id, artifact, data[: CHUNK + 100])).received == CHUNK + 100
        stat = await north.stat(job_id, artifact.sha256)
        assert (stat.received, stat.complete) == (CHUNK + 100, False)
        update = await north.answer(task)  # pushes from the start again, which is right too
        half = Artifact(sha256="cd" * 32, size=len(data))
        await north.push(job_id, half, data[:CHUNK])
        with refused(Code.ARTIFACT_INVALID):
            await north.push(job_id, half, data[CHUNK + 1 :], offset=CHUNK + 1)
        with refused(Code.ARTIFACT_INVALID):  # whole, but not with this digest
            await north.push(job_id, half, data[CHUNK:], offset=CHUNK)
        assert (await north.push(job_id, artifact, b"")).complete
        await north.send(update=update)
        assert (await north.next()).receipts

        final = await north.task()
        published = parse_map(await north.fetch(job_id, final.artifact.sha256))["classifier"]
        assert np.allclose(published, arrays["classifier"], atol=2.0**-32)
        # Updates are never given out, and models only within the cohort.
        with refused(Code.NOT_FOUND):
            await north.fetch(job_id, artifact.sha256)
        with refused(Code.NOT_FOUND):
            await south.fetch(job_id, final.artifact.sha256)
        with refused(Code.NOT_FOUND):
            await south.stat(job_id, artifact.sha256)
        huge = Artifact(sha256="ef" * 32, size=10 * len(data))
        with refused(Code.ARTIFACT_INVALID):
            await north.push(job_id, huge, b"x")
        await admin.cancel(job_id)
        with refused(Code.JOB_ENDED):
            await north.push(job_id, artifact, data)


@asynchronous
async def test_invalid_jobs_and_unknown_ones(aggregator: Aggregator) -> None:
    async with aggregator.admin() as admin:
        classes = [f"class {number}" for number in range(20_000)]
        too_large = job_spec(["north"], strategy={"classes": classes, "dimension": 65_536})
        for spec in (job_spec(["north"], quorum=2), job_spec([]), {"name": "x"}, too_large):
            with refused(Code.JOB_INVALID), translated(None, aggregator.address):
                await admin.submit(spec)
        with refused(Code.NOT_FOUND), translated(None, aggregator.address):
            await admin.get("none")
        with refused(Code.NOT_FOUND), translated(None, aggregator.address):
            async for _ in admin.watch("none"):
                pass


async def published(aggregator: Aggregator, admin: Admin, spec: dict[str, Any]) -> list[str]:
    job = await admin.ended(await admin.submit(spec))
    assert job.summary.state == "done", job.summary.error
    return [item.published_sha256 for item in job.rounds]


@asynchronous
async def test_killed_in_the_middle_of_rounds_it_publishes_the_same_bytes(
    federation: Federation, tmp_path: Path
) -> None:
    spec = job_spec(["north", "south"], ["east"], rounds=3)
    with running_aggregator(federation, tmp_path / "aggregator") as aggregator:
        async with aggregator.admin() as admin, working(aggregator, INSTITUTIONS):
            expected = await published(aggregator, admin, spec)
        async with aggregator.admin() as admin:
            job_id = await admin.submit(spec)
        north, south, east = (agent(aggregator, name) for name in INSTITUTIONS)
        # Killed with a job that is pending; with tasks out; with one update taken; with all but one.
        await _restart(aggregator)
        async with north, south, east:
            agents = [north, south, east]
            tasks = [await one.task() for one in agents]
            answered = 0
            for answers in (0, 1, 1):
                for _ in range(answers):
                    await agents[answered].send(update=await agents[answered].answer(tasks[answered]))
                    assert (await agents[answered].next()).receipts
                    answered += 1
                await _restart(aggregator)
                for one in agents:
                    with pytest.raises(VeilfedError):
                        await one.next()
                    await one.open()
                for one, task in list(zip(agents, tasks, strict=True))[answered:]:
                    assert await one.task() == task  # with the same token, and without a new Join
            # What was taken before the kills is in; the rest goes on.
            assert (await rejection(north, await north.answer(tasks[0]))).code == "UPDATE_DUPLICATE"
            await east.send(update=await east.answer(tasks[2]))
            works = [asyncio.create_task(one.work()) for one in agents]
            async with aggregator.admin() as admin:
                job = await admin.ended(job_id)
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
    assert job.summary.state == "done", job.summary.error
    assert [item.published_sha256 for item in job.rounds] == expected


async def _restart(aggregator: Aggregator) -> None:
    aggregator.kill9()
    await asyncio.to_thread(aggregator.start)


@asynchronous
async def test_it_stops_in_order_with_streams_open(federation: Federation, tmp_path: Path) -> None:
    with running_aggregator(federation, tmp_path / "aggregator") as aggregator:
        assert aggregator.process is not None
        async with aggregator.admin() as admin, agent(aggregator, "north") as north:
            job_id = await admin.submit(job_spec(["north", "south"]))
            begun = asyncio.Event()
            watching = asyncio.create_task(_watched(aggregator, job_id, begun))
            await asyncio.wait_for(begun.wait(), 20)
            aggregator.process.ask_to_stop()
            with refused(Code.UNREACHABLE):
                await north.next()
            with refused(Code.UNREACHABLE):  # an end in order would say that the job has ended
                await watching
        assert await asyncio.to_thread(aggregator.process.wait, 30) == 0
        assert "error" not in aggregator.process.tail()


async def _watched(aggregator: Aggregator, job_id: str, begun: asyncio.Event) -> None:
    async with aggregator.admin() as admin:
        async for _ in admin.watch(job_id):
            begun.set()
