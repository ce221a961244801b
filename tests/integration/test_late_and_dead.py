"""Agents that come late, answer for a session that is over, or say nothing: over TLS to an aggregator's process."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import ScriptedAgent
from veilfed.errors import Code, VeilfedError
from veilfed.v1.aggregator_pb2 import ClientDetail


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


def agent(aggregator: Aggregator, institution: str) -> ScriptedAgent:
    federation = aggregator.federation
    return ScriptedAgent(federation.agents[institution], aggregator.address, federation.aggregator_id)


@asynchronous
async def test_who_joins_late_gets_the_current_model_and_takes_part(federation: Federation, tmp_path: Path) -> None:
    with running_aggregator(federation, tmp_path / "aggregator") as aggregator:
        async with aggregator.admin() as admin, agent(aggregator, "north") as north:
            job_id = await admin.submit(job_spec(["north", "south"], rounds=2, quorum=1, grace_seconds=0))
            await north.send(update=await north.answer(await north.task()))
            assert (await north.next()).receipts
            current = await north.task()
            async with agent(aggregator, "south") as south:
                task = await south.task()
                assert (task.job_id, task.round) == (job_id, 1)
                assert np.array_equal(await south.model(task), await north.model(current))
                await south.send(update=await south.answer(task))
                assert (await south.next()).receipts
                final = await south.task()
                assert final.round == 2
                job = await admin.get(job_id)
                await admin.cancel(job_id)
    clients = [{client.institution: (client.state, client.reason) for client in item.clients} for item in job.rounds]
    assert clients[0] == {"north": ("done", ""), "south": ("missing", "never joined")}
    assert clients[1]["south"] == ("done", "")


@asynchronous
async def test_a_result_of_a_session_that_is_over_does_not_count(federation: Federation, tmp_path: Path) -> None:
    with running_aggregator(federation, tmp_path / "aggregator") as aggregator:
        async with aggregator.admin() as admin, agent(aggregator, "north") as old:
            job_id = await admin.submit(job_spec(["north"], rounds=1))
            task = await old.task()
            async with agent(aggregator, "north") as new:
                assert await new.task() == task
                with pytest.raises(VeilfedError) as replaced:
                    await old.next()
                # On an open stream, too: the one of the session that came after it.
                current, new.session = new.session, old.session
                await new.send(update=await new.answer(task))
                with pytest.raises(VeilfedError) as invalid:
                    await new.next()
                new.session = current
                await new.open()
                assert await new.task() == task
                await new.send(update=await new.answer(task))
                assert (await new.next()).receipts
                job = await admin.get(job_id)
                await admin.cancel(job_id)
            kinds = [event.kind async for event in admin.watch(job_id)]
    assert (replaced.value.code, invalid.value.code) == (Code.SESSION_REPLACED, Code.SESSION_INVALID)
    assert kinds.count("update_taken") == 1
    assert job.rounds[0].clients[0].state == "done"


@asynchronous
async def test_a_silent_agent_is_not_shown_as_connected(federation: Federation, tmp_path: Path) -> None:
    """Its stream is open, as that of a machine that hangs."""
    with running_aggregator(federation, tmp_path / "aggregator", lease_seconds=1.0) as aggregator:
        async with aggregator.admin() as admin, agent(aggregator, "north") as north:
            job_id = await admin.submit(job_spec(["north", "south"]))

            async def client() -> ClientDetail:
                return (await admin.get(job_id)).clients[0]

            async with asyncio.timeout(20):
                while (shown := await client()).connected:  # noqa: ASYNC110  polled
                    await asyncio.sleep(0.05)
            seen = shown.last_seen_unix_ms
            assert (await client()).last_seen_unix_ms == seen
            async with asyncio.timeout(20):
                while not (shown := await client()).connected:
                    await north.heartbeat()
            assert shown.last_seen_unix_ms > seen
            await admin.cancel(job_id)
