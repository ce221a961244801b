"""Each party killed, paused and restarted at each step of a job: nobody helps, and the published bytes do not show it.

The parties are processes. Agents reach the aggregator through a proxy, which slows the upload down so that a fault can
find it half done. A few cases run each time; the whole table is slow.
"""

import asyncio
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.agents import CLASSES, spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import LEASE_SECONDS, Parties, Party, running_parties
from tests.support.processes import until
from veilfed.ledger import verify
from veilfed.v1.aggregator_pb2 import WatchJobRequest

INSTITUTIONS = ["north", "south"]
# 20 x 16,384 x 4 bytes: models and updates travel in chunks.
DIMENSION = 16_384
JOB = spec(
    INSTITUTIONS,
    rounds=3,
    dimension=DIMENSION,
    classes=[*CLASSES, *(f"class-{number}" for number in range(18))],
    blocks=4096,
    epochs=2,
) | {"deadline_seconds": 180}
MODEL_BYTES = 20 * DIMENSION * 4
UPLOAD_RATE = 2e6
HIT_ROUND = 1


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    folder = tmp_path_factory.mktemp("parties")
    with running_parties(make_federation(folder / "identities", INSTITUTIONS), folder, INSTITUTIONS, DIMENSION) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(parties: Parties) -> list[str]:
    """What a job publishes that nothing happens to."""

    async def run() -> Any:
        return await parties.ended(await parties.submit(JOB), 150)

    job = asyncio.run(run())
    assert job.summary.state == "done", job.summary.error
    published = [item.published_sha256 for item in job.rounds]
    assert len(set(published)) == JOB["rounds"] + 1
    return published


# The moments. Each returns when it has come; `mark` is where north's log ended when the job was submitted.


def _task(number: int) -> tuple[str, str]:
    return '"event": "task"', f'"round": {number},'


async def joining(parties: Parties, job_id: str, mark: int) -> None:
    north = parties.agents["north"]
    north.kill()
    start = len(north.log)
    north.start()
    await asyncio.to_thread(north.says, '"event": "joined"', after=start)


async def embedding(parties: Parties, job_id: str, mark: int) -> None:
    """Its embeddings are lost and asked again."""
    north = parties.agents["north"]
    north.kill()
    shutil.rmtree(parties.folder / "north" / "state" / "embeddings")
    start = len(north.log)
    north.start()
    await asyncio.to_thread(north.says, '"event": "embedding"', after=start)


async def handed_out(parties: Parties, job_id: str, mark: int) -> None:
    await asyncio.to_thread(parties.agents["north"].says, job_id, *_task(HIT_ROUND), after=mark)


async def training(parties: Parties, job_id: str, mark: int) -> None:
    line = job_id, '"event": "training"', f'"round": {HIT_ROUND},'
    await asyncio.to_thread(parties.agents["north"].says, *line, after=mark)


async def uploading(parties: Parties, job_id: str, mark: int) -> None:
    """Half of an update has gone through the link."""
    await handed_out(parties, job_id, mark)
    parties.link.rate = UPLOAD_RATE
    before = parties.link.up
    half = MODEL_BYTES // 2
    await asyncio.to_thread(until, lambda: parties.link.up - before > half, 30, "half an upload", 0.002)


async def folding(parties: Parties, job_id: str, mark: int) -> None:
    """The last update of a round has been taken."""
    taken = 0
    async with asyncio.timeout(30), parties.jobs() as jobs:
        async for event in jobs.WatchJob(WatchJobRequest(job_id=job_id)):
            taken += (event.kind, event.round) == ("update_taken", HIT_ROUND)
            if taken == len(INSTITUTIONS):
                return
    raise AssertionError("the job ended before")


async def publishing(parties: Parties, job_id: str, mark: int) -> None:
    await parties.happened(job_id, "round_published", HIT_ROUND)


# The faults.


def kill(party: Party) -> None:
    party.kill()
    party.start()


def pause(party: Party, seconds: float = LEASE_SECONDS + 1.0) -> None:
    """By default for longer than the lease."""
    party.process.signal(signal.SIGSTOP)
    time.sleep(seconds)
    party.process.signal(signal.SIGCONT)


def restart(party: Party) -> None:
    assert party.process.terminate() == 0
    party.start()


Moment = Callable[[Parties, str, int], Awaitable[None]]
MOMENTS: list[Moment] = [joining, embedding, handed_out, training, uploading, folding, publishing]
FAULTS = [kill, pause, restart]
VICTIMS = ["aggregator", "agent", "oracle"]
EACH_TIME = {
    ("aggregator", "kill", "uploading"),
    ("aggregator", "restart", "handed_out"),
    ("agent", "kill", "training"),
    ("agent", "pause", "uploading"),
    ("oracle", "kill", "embedding"),
}
TABLE = [
    pytest.param(
        victim,
        fault,
        moment,
        marks=[] if (victim, fault.__name__, moment.__name__) in EACH_TIME else pytest.mark.slow,
        id=f"{victim}-{fault.__name__}-{moment.__name__}",
    )
    for victim in VICTIMS
    for fault in FAULTS
    for moment in MOMENTS
]


def _victim(parties: Parties, name: str) -> Party:
    return {
        "aggregator": parties.aggregator,
        "agent": parties.agents["north"],
        "oracle": parties.oracles["north"],
    }[name]


@pytest.mark.parametrize(("victim", "fault", "moment"), TABLE)
@asynchronous
async def test_a_fault(
    parties: Parties, undisturbed: list[str], victim: str, fault: Callable[[Party], None], moment: Moment
) -> None:
    await does_not_show(parties, undisturbed, victim, fault, moment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment"), [("aggregator", uploading), ("agent", uploading), ("oracle", embedding)], ids=VICTIMS
)
@asynchronous
async def test_a_pause_of_30_seconds(parties: Parties, undisturbed: list[str], victim: str, moment: Moment) -> None:
    """Beyond what gRPC waits for a connection; the connections that there are outlive it."""
    await does_not_show(parties, undisturbed, victim, partial(pause, seconds=30.0), moment)


async def does_not_show(
    parties: Parties, undisturbed: list[str], victim: str, fault: Callable[[Party], None], moment: Moment
) -> None:
    mark = len(parties.agents["north"].log)
    job_id = await parties.submit(JOB)
    try:
        await moment(parties, job_id, mark)
        await asyncio.to_thread(fault, _victim(parties, victim))
    finally:
        parties.link.reset()
    await asyncio.to_thread(_victim(parties, victim).process.ready)
    job = await parties.ended(job_id, 150)
    assert job.summary.state == "done", job.summary.error
    assert [item.published_sha256 for item in job.rounds] == undisturbed
    # Every answer counted once, nobody was left out, and each round was published once.
    events = Counter((event.kind, event.round, event.institution) for event in await parties.events(job_id))
    for number in range(JOB["rounds"]):
        assert [events["update_taken", number, name] for name in INSTITUTIONS] == [1, 1]
        assert events["round_published", number, ""] == 1
    assert [events["evaluation_taken", JOB["rounds"], name] for name in INSTITUTIONS] == [1, 1]
    assert not [kind for kind, _, _ in events if kind == "client_excluded"]
    assert {client.state for item in job.rounds for client in item.clients} == {"done"}
    for name in INSTITUTIONS:
        verify(parties.folder / name / "state" / "ledger.jsonl", bundle_pem=parties.federation.root.read_bytes())
