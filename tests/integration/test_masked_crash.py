"""Agents and the aggregator killed in each phase of a masked round: it completes, or begins again, and nobody helps.

A few cases run each time; the whole table is slow.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, Party, running_parties
from veilfed.ledger import read, verify

INSTITUTIONS = ["north", "south", "west", "east"]
PHASES = ["start", "cohort", "delivery", "survivors", "confirmations"]
EACH_TIME = {("aggregator", "delivery"), ("agent", "survivors"), ("aggregator", "confirmations")}
TABLE = [
    pytest.param(victim, phase, marks=[] if (victim, phase) in EACH_TIME else pytest.mark.slow, id=f"{victim}-{phase}")
    for victim in ("agent", "aggregator")
    for phase in PHASES
]


def job(phase_seconds: float) -> dict[str, Any]:
    """All institutions must answer: else a slow start of one would give another sum."""
    return {**spec(INSTITUTIONS, rounds=2, blocks=4), "secure_aggregation": {"phase_seconds": phase_seconds}}


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    folder = tmp_path_factory.mktemp("parties")
    with running_parties(make_federation(folder / "identities", INSTITUTIONS), folder, INSTITUTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(parties: Parties) -> list[str]:
    """What a job publishes that nothing happens to."""

    async def run_once() -> Any:
        return await parties.ended(await parties.submit(job(60)))

    ended = asyncio.run(run_once())
    assert ended.summary.state == "done", ended.summary.error
    return [item.published_sha256 for item in ended.rounds]


async def asked(agent: Party, job_id: str, phase: str, mark: int) -> None:
    await asyncio.to_thread(agent.says, job_id, '"event": "masking"', f'"phase": "{phase}"', after=mark)


async def whole(parties: Parties, job_id: str, undisturbed: list[str], attempts: int) -> None:
    """The job published what it would have published, in so many attempts at its rounds."""
    ended = await parties.ended(job_id, 100)
    assert ended.summary.state == "done", ended.summary.error
    assert [item.published_sha256 for item in ended.rounds] == undisturbed
    events = Counter((event.kind, event.round) for event in await parties.events(job_id))
    assert sum(count for (kind, _), count in events.items() if kind == "masking_started") == attempts
    assert [events["round_published", number] for number in range(3)] == [1, 1, 1]
    assert not [kind for kind, _ in events if kind == "client_excluded"]
    for name in INSTITUTIONS:
        ledger = parties.folder / name / "state" / "ledger.jsonl"
        verify(ledger, bundle_pem=parties.federation.root.read_bytes())
        tensors = [item for one in read(ledger) if one.get("job") == job_id for item in one.get("tensors", [])]
        assert {item["name"] for item in tensors} == {"masked"}


@pytest.mark.parametrize(("victim", "phase"), TABLE)
@asynchronous
async def test_killed_in_a_phase(parties: Parties, undisturbed: list[str], victim: str, phase: str) -> None:
    north = parties.agents["north"]
    mark = len(north.log)
    job_id = await parties.submit(job(60))
    await asked(north, job_id, phase, mark)
    hit = north if victim == "agent" else parties.aggregator
    hit.kill()
    hit.start()
    await asyncio.to_thread(hit.process.ready)
    await whole(parties, job_id, undisturbed, attempts=2)


@pytest.mark.slow
@asynchronous
async def test_too_few_are_left_and_come_back(parties: Parties, undisturbed: list[str]) -> None:
    """Two of four are gone before the sum is fixed: nothing is revealed, and the round begins again with new keys."""
    victims = [parties.agents[name] for name in ("north", "south")]
    marks = [len(agent.log) for agent in victims]
    job_id = await parties.submit(job(20))
    for agent, mark in zip(victims, marks, strict=True):
        await asked(agent, job_id, "start", mark)
        agent.kill()
    await asyncio.to_thread(parties.aggregator.says, job_id, '"event": "masking failed"')
    for agent in victims:
        agent.start()
        await asyncio.to_thread(agent.process.ready)
    await whole(parties, job_id, undisturbed, attempts=3)
