"""AFL and FedCGS over the real services: one round, one upload, and the classifier of the pooled samples."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from aggregator.strategies import strategy_for
from client_agent.data.config import TableConfig
from client_agent.data.source import class_indices, load, split
from client_agent.trainers.statistics import Statistics
from tests.support.agents import CLASSES, DIMENSION, LetterModel, spec
from tests.support.analytic import difference, ridge
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, running_parties
from tests.support.processes import veilfed
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.jobs import JobSpec
from veilfed.ledger import read, verify
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import FetchRequest, GetJobResponse
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub
from veilfed.wire.tensors import digest, map_bytes, parse_map

INSTITUTIONS = ["north", "south", "west"]
STATISTICS = {"gram": [DIMENSION * (DIMENSION + 1) // 2], "cross": [DIMENSION, 2], "counts": [2]}
RIDGE = 0.5
Samples = tuple[Any, Any]


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    with running_parties(federation, tmp_path_factory.mktemp("parties"), INSTITUTIONS) as made:
        yield made


def training(parties: Parties, institution: str) -> Samples:
    """Embeddings and labels of an institution's training split."""
    samples = load(TableConfig(source="table", path=parties.folder / institution / "data.csv"))
    rows, _ = split(samples, CLASSES, 0.4, 50)
    features = LetterModel().forward(LetterModel().prepare([str(text) for text in samples.inputs]))
    return features[rows], class_indices(samples.labels, CLASSES)[rows]


def expected(parties: Parties, document: dict[str, Any], institutions: list[str]) -> bytes:
    """The model of the statistics of some institutions, as a fresh job would publish it."""
    updates = []
    for name in reversed(institutions):
        statistics = Statistics(DIMENSION, 2)
        statistics.add(*training(parties, name))
        updates.append((1.0, statistics.arrays()))
    return map_bytes(strategy_for(JobSpec.model_validate(document)).fold(updates, dict))


async def fetched(parties: Parties, job_id: str, sha256: str) -> bytes:
    credentials = load_credentials(parties.federation.admin)
    async with open_channel(credentials, parties.address, parties.federation.aggregator_id) as channel:
        with translated(credentials, parties.address):
            request = FetchRequest(job_id=job_id, sha256=sha256)
            return b"".join([response.chunk async for response in CoordinatorStub(channel).Fetch(request)])


def published(job: GetJobResponse) -> str:
    return [detail.published_sha256 for detail in job.rounds if detail.published_sha256][-1]


def answers(parties: Parties, institution: str, job_id: str) -> list[dict[str, list[int]]]:
    """The tensors of each answer that an institution gave in a job."""
    ledger = parties.folder / institution / "state" / "ledger.jsonl"
    verify(ledger, bundle_pem=parties.federation.root.read_bytes())
    sent = [
        record
        for record in read(ledger)
        if record.get("job") == job_id and record.get("purpose") in {"update", "evaluation"}
    ]
    return [{tensor["name"]: tensor["shape"] for tensor in record.get("tensors", [])} for record in sent]


def sealed(parties: Parties, job_id: str) -> set[str]:
    """The institutions whose statistics the aggregator keeps."""
    folder = parties.folder / "artifacts" / "sealed" / job_id
    return {path.name.split(".")[0] for path in folder.iterdir()} if folder.exists() else set()


def command(parties: Parties, folder: Path, *arguments: str) -> Any:
    """The administrator's `veilfed job`."""
    admin = folder / "admin.yaml"
    address = {"aggregator": parties.address, "aggregator_id": str(parties.federation.aggregator_id)}
    admin.write_text(yaml.safe_dump({"identity": str(parties.federation.admin.certificate.parent), **address}))
    done = subprocess.run(
        veilfed("job", *arguments, "--config", admin, "--json"), capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        return json.loads(done.stderr)["error"]
    return json.loads(done.stdout)


@pytest.mark.parametrize("strategy", [{"name": "afl", "ridge": RIDGE}, {"name": "fedcgs"}], ids=lambda s: s["name"])
@asynchronous
async def test_one_round_gives_the_classifier_of_the_pooled_samples(parties: Parties, strategy: dict[str, Any]) -> None:
    document = spec(["north", "south"], ["west"], rounds=1, **strategy)
    job_id = await parties.submit(document)
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    assert [detail.state for detail in job.rounds] == ["published", "published"]
    for client in job.rounds[1].clients:
        (told,) = client.evaluations
        assert (told.name, told.correct / told.total > 0.75) == ("global", True)
    assert [client.institution for client in job.rounds[0].clients] == ["north", "south"]
    assert not any(client.evaluations for client in job.rounds[0].clients)
    data = await fetched(parties, job_id, published(job))
    assert data == expected(parties, document, ["north", "south"])
    if strategy["name"] == "afl":
        one, two = training(parties, "north"), training(parties, "south")
        pooled = (np.concatenate([one[0], two[0]]), np.concatenate([one[1], two[1]]))
        weights, condition = ridge(pooled, 2, RIDGE)
        assert difference(parse_map(data)["classifier"], weights) <= max(1e-10, 2e-14 * condition)
    assert answers(parties, "north", job_id) == answers(parties, "south", job_id) == [STATISTICS, {}]
    assert answers(parties, "west", job_id) == [{}]
    # The statistics are kept, and nobody gets them.
    assert sealed(parties, job_id) == {"north", "south"}
    for path in (parties.folder / "artifacts" / "sealed" / job_id).iterdir():
        assert digest(path.read_bytes()) == path.name.split(".")[1]
        with pytest.raises(VeilfedError) as refused:
            await fetched(parties, job_id, path.name.split(".")[1])
        assert refused.value.code is Code.NOT_FOUND


@asynchronous
async def test_what_cannot_be_solved_fails_with_the_reason(parties: Parties) -> None:
    """Texts have few different letters: the sums have no full rank."""
    job_id = await parties.submit(spec(["north", "south"], rounds=1, name="afl", ridge=0))
    job = await parties.ended(job_id)
    assert job.summary.state == "failed"
    assert "SINGULAR: the sum of the statistics with ridge 0 is singular" in job.summary.error
    assert [detail.state for detail in job.rounds] == ["failed"]


def restart(parties: Parties) -> None:
    """kill -9, and again on the same files."""
    parties.aggregator.kill()
    parties.aggregator.start()
    parties.aggregator.process.ready()


async def fresh(parties: Parties, train: list[str]) -> str:
    """The digest of the model of a job of its own."""
    job = await parties.ended(await parties.submit(spec(train, rounds=1, name="afl", ridge=RIDGE)))
    assert job.summary.state == "done", job.summary.error
    return published(job)


@asynchronous
async def test_a_killed_aggregator_goes_on_and_publishes_the_same_bytes(parties: Parties) -> None:
    document = spec(["north", "south", "west"], rounds=1, name="afl", ridge=RIDGE)
    job_id = await parties.submit(document)
    await parties.happened(job_id, "update_taken")
    restart(parties)
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    assert await fetched(parties, job_id, published(job)) == expected(parties, document, INSTITUTIONS)


@asynchronous
async def test_adding_and_forgetting_is_a_fresh_job_without_and_with(parties: Parties, tmp_path: Path) -> None:
    whole, without = await fresh(parties, ["west", "north", "south"]), await fresh(parties, ["south", "west"])
    job_id = await parties.submit(spec(["north", "south"], rounds=1, name="afl", ridge=RIDGE))
    assert published(await parties.ended(job_id)) not in {whole, without}

    def job(*arguments: str) -> Any:
        return command(parties, tmp_path, *arguments)

    told = await asyncio.to_thread(job, "add-client", job_id, "west")
    assert told == {"job_id": job_id, "round": 2}
    added = await parties.ended(job_id)
    assert (added.summary.state, published(added)) == ("done", whole)
    assert {client.institution for client in added.rounds[2].clients} == {"west"}
    assert {client.institution for client in added.rounds[3].clients} == set(INSTITUTIONS)
    assert all(client.evaluations for client in added.rounds[3].clients)
    assert answers(parties, "west", job_id) == [STATISTICS, {}]
    assert answers(parties, "north", job_id) == [STATISTICS, {}, {}]
    assert await asyncio.to_thread(job, "add-client", job_id, "west") == "INPUT_INVALID"

    told = await asyncio.to_thread(job, "forget", job_id, "north")
    assert told == {"job_id": job_id, "round": 4}
    assert sealed(parties, job_id) == {"south", "west"}
    restart(parties)  # in the middle of the round
    forgot = await parties.ended(job_id)
    assert (forgot.summary.state, published(forgot)) == ("done", without)
    assert {client.institution: client.state for client in forgot.rounds[0].clients}["north"] == "forgotten"
    assert {client.institution for client in forgot.rounds[5].clients} == {"south", "west"}
    assert await asyncio.to_thread(job, "forget", job_id, "north") == "NOT_FOUND"

    card = await asyncio.to_thread(job, "report", job_id)
    assert [one["institution"] for one in card["institutions"]] == ["south", "west"]
    assert sum(one["share"] for one in card["institutions"]) == pytest.approx(1, abs=1e-5)
    assert (card["round"], card["ridge"], card["chosen_by"], card["unpublished"]) == (4, RIDGE, "job", [])
    assert [row["class"] for row in card["classes"]] == CLASSES
    assert sum(row["samples"] for row in card["classes"]) == card["samples"] == 120

    await asyncio.to_thread(job, "resolve", job_id, "--ridge", "gcv")
    solved = await parties.ended(job_id)
    assert published(solved) not in {whole, without}
    card = await asyncio.to_thread(job, "report", job_id)
    assert (card["round"], card["chosen_by"], len(card["institutions"])) == (6, "gcv", 2)
    await asyncio.to_thread(job, "resolve", job_id, "--ridge", str(RIDGE))
    assert published(await parties.ended(job_id)) == without

    # The aggregator keeps what it needs.
    restart(parties)
    await asyncio.to_thread(job, "add-client", job_id, "north")
    assert published(await parties.ended(job_id)) == whole
    assert sealed(parties, job_id) == set(INSTITUTIONS)
