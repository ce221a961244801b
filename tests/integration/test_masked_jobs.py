"""Jobs with secure aggregation over the real services: the same published bytes, and no single update in sight.

Agents and the aggregator are killed in each phase of a round: it completes, or begins again, and nobody helps.
"""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.agents import spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, Party, running_parties
from veilfed.jobs import JobSpec
from veilfed.ledger import read, verify
from veilfed.secagg.encoding import encoding_for
from veilfed.v1.aggregator_pb2 import GetReportRequest

INSTITUTIONS = ["north", "south", "west", "east"]
STEPS = ["advertisement", "shares", "tensors", "confirmation", "reveal"]


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    with running_parties(federation, tmp_path_factory.mktemp("parties"), INSTITUTIONS) as made:
        yield made


CASES: dict[str, dict[str, Any]] = {
    "fedot": {"blocks": 4, "weighting": "samples"},
    "afl": {"name": "afl", "ridge": 0.5},
    "fedcgs": {"name": "fedcgs"},
}


def job(name: str, masked: bool) -> dict[str, Any]:
    document = spec(INSTITUTIONS, rounds=1 if name in {"afl", "fedcgs"} else 3, **CASES[name])
    if CASES[name].get("weighting") == "samples":
        document["fold"] = {"max_weight": 1000}
    return {**document, **({"secure_aggregation": {"phase_seconds": 20}} if masked else {})}


@pytest.mark.parametrize("name", CASES)
@asynchronous
async def test_masked_and_plain_jobs_publish_the_same_bytes(parties: Parties, name: str) -> None:
    published = []
    for masked in (False, True):
        job_id = await parties.submit(job(name, masked))
        ended = await parties.ended(job_id)
        assert ended.summary.state == "done", ended.summary.error
        published.append([item.published_sha256 for item in ended.rounds])
        assert {client.state for item in ended.rounds for client in item.clients} == {"done"}
    assert published[0] == published[1]
    await told(parties, job_id, name)
    left(parties, job_id, job(name, True))


async def told(parties: Parties, job_id: str, name: str) -> None:
    """The report says what was not seen."""
    async with parties.jobs() as jobs:
        report = json.loads((await jobs.GetReport(GetReportRequest(job_id=job_id))).report_json)
    assert report["secure_aggregation"]["institutions_in_the_sum"] == len(INSTITUTIONS)
    assert "update of any single institution" in report["secure_aggregation"]["not_checked"]
    assert "institutions" not in report
    assert ("samples" in report) == (name != "fedot")


def left(parties: Parties, job_id: str, document: dict[str, Any]) -> None:
    """By the ledgers, nothing of a training round left but under masks; and the aggregator has kept nothing of it."""
    words = encoding_for(JobSpec.model_validate(document), 0).form.words
    for institution in INSTITUTIONS:
        state = parties.folder / institution / "state"
        verify(state / "ledger.jsonl", bundle_pem=parties.federation.root.read_bytes())
        records = [record for record in read(state / "ledger.jsonl") if record.get("job") == job_id]
        tensors = [item for record in records for item in record.get("tensors", [])]
        expected = {"name": "masked", "shape": [words], "dtype": "uint64"}
        assert tensors == [expected] * document["rounds"]
        steps = [record["masking"] for record in records if "masking" in record]
        assert steps == STEPS * document["rounds"]
        assert (state / "jobs" / job_id / "masking.bin").stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(parties.folder / "aggregator.sqlite") as database:
        assert database.execute("SELECT count(*) FROM masks").fetchone() == (0,)
    assert not (parties.folder / "artifacts" / "updates" / job_id).exists()


@pytest.mark.slow
@asynchronous
async def test_noise_under_masks(parties: Parties) -> None:
    """Each institution charges its noisy update in its ledger, and it leaves under masks."""
    document = job("afl", True) | {"privacy": {"mode": "statistics", "noise_multiplier": 2.0}}
    job_id = await parties.submit(document)
    ended = await parties.ended(job_id)
    assert ended.summary.state == "done", ended.summary.error
    async with parties.jobs() as jobs:
        report = json.loads((await jobs.GetReport(GetReportRequest(job_id=job_id))).report_json)
    assert {"privacy", "secure_aggregation"} <= report.keys()
    left(parties, job_id, document)
    for institution in INSTITUTIONS:
        records = list(read(parties.folder / institution / "state" / "ledger.jsonl"))
        assert [one["decision"] for one in records if one["kind"] == "privacy"] == ["passed"]


@asynchronous
async def test_long_masked_updates_travel_in_chunks(parties: Parties) -> None:
    """Embeddings of few letters, but an attention of 192,000 elements is what leaves."""
    document = job("fedot", True) | {"rounds": 1}
    document["strategy"] |= {"name": "fedclip", "hidden": 3000}
    del document["strategy"]["blocks"]
    job_id = await parties.submit(document)
    ended = await parties.ended(job_id)
    assert ended.summary.state == "done", ended.summary.error
    steps = [
        record["masking"]
        for record in read(parties.folder / "north" / "state" / "ledger.jsonl")
        if record.get("job") == job_id and "masking" in record
    ]
    assert steps == ["advertisement", "shares", "artifact", "confirmation", "reveal"]


# Kills. A few cases run each time; the whole table is slow.


PHASES = ["start", "cohort", "delivery", "survivors", "confirmations"]
EACH_TIME = {("aggregator", "delivery"), ("agent", "survivors")}
TABLE = [
    pytest.param(victim, phase, marks=[] if (victim, phase) in EACH_TIME else pytest.mark.slow, id=f"{victim}-{phase}")
    for victim in ("agent", "aggregator")
    for phase in PHASES
]


def crash_job(phase_seconds: float) -> dict[str, Any]:
    """All institutions must answer: else a slow start of one would give another sum."""
    return {**spec(INSTITUTIONS, rounds=2, blocks=4), "secure_aggregation": {"phase_seconds": phase_seconds}}


@pytest.fixture(scope="module")
def undisturbed(parties: Parties) -> list[str]:
    """What a job publishes that nothing happens to."""

    async def run_once() -> Any:
        return await parties.ended(await parties.submit(crash_job(60)))

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
    job_id = await parties.submit(crash_job(60))
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
    job_id = await parties.submit(crash_job(20))
    for agent, mark in zip(victims, marks, strict=True):
        await asked(agent, job_id, "start", mark)
        agent.kill()
    await asyncio.to_thread(parties.aggregator.says, job_id, '"event": "masking failed"')
    for agent in victims:
        agent.start()
        await asyncio.to_thread(agent.process.ready)
    await whole(parties, job_id, undisturbed, attempts=3)


# The last one: it changes what east knows.


@asynchronous
async def test_a_roster_that_lacks_a_member(parties: Parties) -> None:
    """East does not know west: it reveals nothing to a cohort with west in it, and says why. The others go on."""
    east, config = parties.agents["east"], parties.folder / "east" / "agent.yaml"
    document = yaml.safe_load(config.read_text())
    document["secure_aggregation"] = {"roster": ["north", "south"]}
    config.write_text(yaml.safe_dump(document))
    assert east.process.terminate() == 0
    east.start()
    await asyncio.to_thread(east.process.ready)
    job_id = await parties.submit(job("fedot", True) | {"quorum": 3, "rounds": 1})
    ended = await parties.ended(job_id)
    assert ended.summary.state == "done", ended.summary.error
    states = {client.institution: (client.state, client.code) for client in ended.rounds[0].clients}
    assert states == {**dict.fromkeys(INSTITUTIONS[:3], ("done", "")), "east": ("excluded", "COHORT_INVALID")}
    steps = [
        record["masking"]
        for record in read(parties.folder / "east" / "state" / "ledger.jsonl")
        if record.get("job") == job_id and "masking" in record
    ]
    assert steps == ["advertisement", "refusal"]
