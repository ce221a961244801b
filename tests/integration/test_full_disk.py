"""A disk that is full for a while under running services: a limit on the size of their files, set from outside."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.test_agent_standin import bench, offer
from tests.support.agents import running
from tests.support.aggregators import job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import Process, until
from tests.support.scripted_agent import ScriptedAgent
from veilfed.errors import Code, VeilfedError
from veilfed.ledger import verify
from veilfed.rpc.channel import translated

if not hasattr(resource, "prlimit"):
    pytest.skip("limits of another process can be set on Linux alone", allow_module_level=True)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


@contextmanager
def full_disk(process: Process, size: int = 0) -> Iterator[None]:
    """No file of the process can grow beyond `size` bytes, its log neither."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def refused(code: Code) -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is code)


@asynchronous
async def test_an_aggregator_refuses_by_name_keeps_its_rounds_and_goes_on(
    federation: Federation, tmp_path: Path
) -> None:
    with running_aggregator(federation, tmp_path / "aggregator", 30.0) as aggregator:
        assert aggregator.process is not None
        north = ScriptedAgent(federation.agents["north"], aggregator.address, federation.aggregator_id)
        async with aggregator.admin() as admin, north:
            job_id = await admin.submit(job_spec(["north"], rounds=1))
            task = await north.task()
            with full_disk(aggregator.process):
                with refused(Code.INTERNAL), translated(None, ""):
                    await admin.submit(job_spec(["north"]))
                with refused(Code.INTERNAL), translated(None, ""):  # the agent's cue to come back
                    await north.send(update=await north.answer(task))
                    await north.next()
                with refused(Code.INTERNAL):
                    await north.join()
                assert await admin.jobs() == [job_id]
            await north.join()
            await north.open()
            again = await north.task()
            assert again.token == task.token
            await north.send(update=await north.answer(again))
            working = asyncio.create_task(north.work())
            assert (await admin.ended(job_id)).summary.state == "done"
            assert await admin.jobs() == [job_id]
            working.cancel()


@asynchronous
async def test_a_database_that_may_not_grow_is_named_in_the_log(federation: Federation, tmp_path: Path) -> None:
    """Its log may: they lie on two disks, or its file has reached the limit first."""
    with running_aggregator(federation, tmp_path / "aggregator", 30.0) as aggregator:
        assert aggregator.process is not None
        async with aggregator.admin() as admin:
            with full_disk(aggregator.process, 24 * 1024), refused(Code.INTERNAL), translated(None, ""):
                for _ in range(20):
                    await admin.submit(job_spec(["north"]))
            kept = await admin.jobs()
            assert await admin.submit(job_spec(["north"])) not in kept
        assert "the disk cannot be read or written" in aggregator.process.err.read_text()
        assert "aggregator.sqlite" in aggregator.process.err.read_text()


@asynchronous
async def test_an_agent_sends_nothing_that_its_ledger_cannot_keep_and_goes_on(
    federation: Federation, tmp_path: Path
) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.open = [offer(0)]
        with running(b.config()) as agent:
            await asyncio.to_thread(agent.ready)
            await b.update()
            with full_disk(agent, b.ledger.stat().st_size):  # more than its log has
                size = b.ledger.stat().st_size  # a heartbeat may just have been recorded
                b.coordinator.send(offer(1))
                words = "ledger.jsonl: File too large"
                await asyncio.to_thread(until, lambda: words in agent.err.read_text(), 30, "what is wrong")
                assert b.coordinator.updates.empty()
                assert b.ledger.stat().st_size == size
                b.coordinator.open = [offer(1)]
            assert (await b.update()).round == 1
            assert await asyncio.to_thread(agent.terminate) == 0
        verify(b.ledger)
