"""Links that are cut, slow or dead, two processes with one identity, and clocks that disagree. All parties are real."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.agents import CLASSES, spec
from tests.support.aggregators import job_spec, running_aggregator
from tests.support.coordinator_stub import Stub, serving
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, running_parties
from tests.support.scripted_agent import ScriptedAgent
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials

# 40 x 65,536 x 4 bytes: ten chunks.
DIMENSION = 65_536
JOB = spec(
    ["north"],
    rounds=1,
    dimension=DIMENSION,
    classes=[*CLASSES, *(f"class-{number}" for number in range(38))],
    transform="identity",
)
MODEL_BYTES = 40 * DIMENSION * 4
# Its models travel inline.
SHORT_JOB = spec(["north"], rounds=1, dimension=DIMENSION, transform="identity")
KEEPALIVE_SECONDS = 1.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


@pytest.fixture(scope="module")
def parties(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    with running_parties(federation, tmp_path_factory.mktemp("parties"), ["north"], DIMENSION) as made:
        yield made


async def done(parties: Parties, job_id: str) -> None:
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    kinds = [event.kind for event in await parties.events(job_id)]
    assert (kinds.count("update_taken"), kinds.count("evaluation_taken")) == (1, 1)


async def done_in_spite_of_the_cut(parties: Parties) -> None:
    mark = len(parties.agents["north"].log)
    await done(parties, await parties.submit(JOB))
    assert parties.link.cuts == 1
    assert Code.UNREACHABLE.name in parties.agents["north"].log[mark:]
    assert Code.TLS_REFUSED.name not in parties.agents["north"].log[mark:]


@asynchronous
async def test_an_upload_that_is_cut_goes_on_where_it_was(parties: Parties) -> None:
    parties.link.reset()
    parties.link.cut_up_at = MODEL_BYTES * 9 // 10
    await done_in_spite_of_the_cut(parties)
    # From the start again it would be 1.9 times the model. What was on its way at the cut is lost: what the sockets and
    # grpc's flow-control window hold, which is more the later the reader comes to run (0.2 to 5 MiB were seen).
    assert MODEL_BYTES < parties.link.up < MODEL_BYTES * 16 // 10


@asynchronous
async def test_a_download_that_is_cut_goes_on_where_it_was(parties: Parties) -> None:
    parties.link.reset()
    parties.link.cut_down_at = MODEL_BYTES * 9 // 10
    await done_in_spite_of_the_cut(parties)
    # Two models come down: that of the round, and the final one. From the start again it would be 2.9.
    assert 2 * MODEL_BYTES < parties.link.down < MODEL_BYTES * 26 // 10


@asynchronous
async def test_a_slow_link(parties: Parties) -> None:
    """A transfer takes longer than a lease; heartbeats travel next to it."""
    parties.link.reset()
    parties.link.rate = MODEL_BYTES / 2.5
    started = time.monotonic()
    await done(parties, await parties.submit(JOB))
    parties.link.reset()
    assert time.monotonic() - started > 5
    assert parties.link.cuts == 0


@asynchronous
async def test_a_dead_link_is_noticed_and_left(parties: Parties, tmp_path: Path) -> None:
    """Nothing passes and nobody is told, as behind a firewall that forgot the connection: keepalive finds out."""
    parties.link.reset()
    north = parties.agents["north"]
    north.kill()
    careful = parties.twin("north", tmp_path / "careful", KEEPALIVE_SECONDS)
    try:
        careful.start()
        await asyncio.to_thread(careful.process.ready)
        parties.link.black_hole = True
        job_id = await parties.submit(JOB)
        await asyncio.to_thread(careful.says, "no session", Code.UNREACHABLE.name, timeout=20)
        parties.link.cut()
        parties.link.reset()
        await done(parties, job_id)
    finally:
        parties.link.reset()
        careful.kill()
        north.start()
        await asyncio.to_thread(north.process.ready)


@asynchronous
async def test_two_processes_with_one_identity(parties: Parties, tmp_path: Path) -> None:
    """They do not end each other's sessions in turn: who came last works, the other one waits and says why."""
    parties.link.reset()
    north = parties.agents["north"]
    mark = len(north.log)
    twin = parties.twin("north", tmp_path / "twin")
    twin.start()
    try:
        await asyncio.to_thread(twin.process.ready)
        await asyncio.to_thread(north.says, "another process works with this agent's identity", after=mark)
        # Done long before the other one's wait is over.
        job = await parties.ended(await parties.submit(SHORT_JOB | {"rounds": 5}))
        assert job.summary.state == "done", job.summary.error
        assert north.log[mark:].count('"event": "joined"') == 0
        assert twin.log.count('"event": "joined"') == 1
        assert Code.SESSION_REPLACED.name in north.log[mark:]
    finally:
        twin.kill()
        north.kill()
        north.start()
        await asyncio.to_thread(north.process.ready)


@asynchronous
async def test_one_identity_started_five_times_gets_work_each_time(parties: Parties) -> None:
    parties.link.reset()
    north = parties.agents["north"]
    for number in range(5):
        if number % 2:
            north.kill()
        else:
            assert await asyncio.to_thread(north.process.terminate) == 0
        north.start()
        await asyncio.to_thread(north.process.ready)
        await done(parties, await parties.submit(SHORT_JOB))


@asynchronous
async def test_a_long_idle_then_the_update_lands_once(federation: Federation, tmp_path: Path) -> None:
    """Pings of many keepalives are welcome ("too many pings" ends connections elsewhere)."""
    with running_aggregator(federation, tmp_path / "aggregator", 30.0, keepalive_seconds=0.6) as aggregator:
        options = {"keepalive_seconds": 0.3}
        north = ScriptedAgent(federation.agents["north"], aggregator.address, federation.aggregator_id, **options)
        async with aggregator.admin() as admin, north:
            job_id = await admin.submit(job_spec(["north"], rounds=1))
            task = await north.task()
            await asyncio.sleep(5)  # the idle time itself: 16 keepalives of the agent
            await north.send(update=await north.answer(task))
            assert (await north.next()).receipts
            await north.send(update=await north.answer(await north.task()))
            assert (await north.next()).receipts
            assert (await admin.ended(job_id)).summary.state == "done"
            kinds = [event.kind async for event in admin.watch(job_id)]
    assert kinds.count("update_taken") == 1


@pytest.mark.parametrize("minutes", [3, -3], ids=["not yet valid", "just expired"])
@asynchronous
async def test_a_clock_that_is_minutes_off(federation: Federation, tmp_path: Path, minutes: int) -> None:
    """The certificate of an agent whose authority's clock is ahead, or that lapsed a moment ago, by this clock.

    It is refused at the handshake. The agent's own log says by which date; joining goes on as soon as clocks agree.
    """
    now = datetime.now(UTC)
    start, lifetime = (now + timedelta(minutes=minutes), timedelta(days=1))
    if minutes < 0:
        start, lifetime = now - timedelta(days=1), timedelta(days=1, minutes=minutes)
    files = federation.make(federation.agent_id("north"), tmp_path / "skewed", not_before=start, lifetime=lifetime)
    with running_aggregator(federation, tmp_path / "aggregator") as aggregator:
        north = ScriptedAgent(files, aggregator.address, federation.aggregator_id)
        with pytest.raises(VeilfedError) as caught:
            await north.join()
        await north._channel.close(None)
    assert caught.value.code is Code.TLS_REFUSED
    assert ("is not valid before" if minutes > 0 else "expired at") in caught.value.message


@asynchronous
async def test_a_service_whose_certificate_is_not_valid_yet(tmp_path: Path) -> None:
    """It serves, but nobody talks to it."""
    federation = make_federation(tmp_path / "federation", ["north"])
    shutil.rmtree(federation.folder / "aggregator")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    federation.make(federation.aggregator_id, federation.folder / "aggregator", not_before=tomorrow)
    with running_aggregator(federation, tmp_path / "aggregator") as aggregator:
        north = ScriptedAgent(federation.agents["north"], aggregator.address, federation.aggregator_id)
        with pytest.raises(VeilfedError, match="did not prove") as caught:
            await north.join()
        await north._channel.close(None)
    assert caught.value.code is Code.TLS_REFUSED


@asynchronous
async def test_callers_go_on_by_themselves_once_a_certificates_date_has_come(
    federation: Federation, tmp_path: Path
) -> None:
    """On the connection that they have tried before."""
    valid = (datetime.now(UTC) + timedelta(seconds=6)).replace(microsecond=0)  # certificates know whole seconds
    files = federation.make(federation.aggregator_id, tmp_path / "early", not_before=valid)
    # A stand-in, which is there at once: the aggregator's process may take seconds to start.
    async with serving(load_credentials(files), Stub()) as address:
        north = ScriptedAgent(federation.agents["north"], address, federation.aggregator_id)
        with pytest.raises(VeilfedError, match="did not prove"):
            await north.join()
        assert datetime.now(UTC) < valid
        async with asyncio.timeout(60):
            while not await _joins(north):
                pass
        await north._channel.close(None)
    assert datetime.now(UTC) > valid


async def _joins(one: ScriptedAgent) -> bool:
    try:
        await one.join()
    except VeilfedError:
        await asyncio.sleep(0.2)
        return False
    return True
