"""Jobs with privacy over the real services: noise, charges before messages, refusals, and what administrators see."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.agents import DIMENSION, spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, running_parties
from tests.support.processes import until, veilfed
from veilfed.ledger import Record, read, verify
from veilfed.privacy import Release, epsilon
from veilfed.v1.aggregator_pb2 import GetJobResponse

INSTITUTIONS = ["north", "south", "west"]
STRICT = {"required": True, "min_noise_multiplier": 2.0, "max_epsilon_per_job": 3.0}
UPDATE = {"mode": "update", "noise_multiplier": 5.0, "clip": 0.05}
STATISTICS = {"mode": "statistics", "noise_multiplier": 3.0}
SAMPLE = {"mode": "sample", "noise_multiplier": 2.0, "clip": 1.0, "sampling_rate": 0.25}


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    folder = tmp_path_factory.mktemp("parties")
    with running_parties(federation, folder, INSTITUTIONS, policies={"west": {"privacy": STRICT}}) as made:
        yield made


async def done(parties: Parties, document: dict[str, Any]) -> tuple[str, GetJobResponse]:
    job_id = await parties.submit(document)
    return job_id, await parties.ended(job_id)


def records(parties: Parties, institution: str, job_id: str) -> list[Record]:
    ledger = parties.folder / institution / "state" / "ledger.jsonl"
    verify(ledger, bundle_pem=parties.federation.root.read_bytes())
    return [record for record in read(ledger) if record.get("job") == job_id]


def report(parties: Parties, folder: Path, job_id: str, *more: str) -> str:
    """What `veilfed job report` prints."""
    admin = folder / "admin.yaml"
    address = {"aggregator": parties.address, "aggregator_id": str(parties.federation.aggregator_id)}
    admin.write_text(yaml.safe_dump({"identity": str(parties.federation.admin.certificate.parent), **address}))
    arguments = veilfed("job", "report", job_id, "--config", admin, *more)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout


def listed(parties: Parties, job_id: str) -> dict[str, Any]:
    """The privacy of a job by `veilfed agent jobs`."""
    arguments = veilfed("agent", "jobs", "--config", parties.folder / "north" / "agent.yaml", "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    (found,) = [row["privacy"] for row in json.loads(done.stdout) if row["job"] == job_id]
    return dict(found)


@pytest.mark.parametrize("privacy", [UPDATE, SAMPLE], ids=lambda privacy: privacy["mode"])
@asynchronous
async def test_each_update_is_charged_before_it_leaves(
    parties: Parties, tmp_path: Path, privacy: dict[str, Any]
) -> None:
    document = {**spec(["north", "south"], ["west"], rounds=2), "privacy": privacy}
    job_id, job = await done(parties, document)
    assert job.summary.state == "done", job.summary.error
    kept = records(parties, "north", job_id)
    charged = [record for record in kept if record["kind"] == "privacy"]
    sent = [record for record in kept if record.get("purpose") == "update"]
    release = Release(5.0) if privacy is UPDATE else Release(2.0, 0.25, 4)
    spent = [round(epsilon([release] * count, 1e-5), 6) for count in (1, 2)]
    assert [record["epsilon"] for record in charged] == spent
    # A message may be sent again, after a connection that was lost: it is the same one, and costs nothing.
    told = [record["privacy"]["epsilon"] for record in sent]
    assert list(dict.fromkeys(told)) == spent
    assert all(charged[spent.index(cost)]["seq"] < message["seq"] for cost, message in zip(told, sent, strict=True))
    reported = json.loads(report(parties, tmp_path, job_id, "--json"))["privacy"]
    assert (reported["mode"], reported["updates"]) == (privacy["mode"], 2)
    assert reported["epsilon"] == pytest.approx(spent[1], rel=1e-5)
    assert "Privacy of each institution" in report(parties, tmp_path, job_id)
    assert listed(parties, job_id) | privacy == listed(parties, job_id)
    # An institution that evaluates only spends nothing.
    assert not any(record["kind"] == "privacy" for record in records(parties, "west", job_id))


@asynchronous
async def test_statistics_survive_a_kill_and_are_charged_once(parties: Parties, tmp_path: Path) -> None:
    document = {**spec(["north", "south", "west"], rounds=1, name="afl", ridge=50.0), "privacy": STATISTICS}
    job_id = await parties.submit(document)
    north = parties.agents["north"]

    def charged() -> list[Record]:
        ledger = parties.folder / "north" / "state" / "ledger.jsonl"
        return [
            record
            for record in map(json.loads, ledger.read_text().splitlines(keepends=False))
            if record.get("job") == job_id and record["kind"] == "privacy"
        ]

    await asyncio.to_thread(until, lambda: bool(charged()), 30.0, "a charge")
    north.kill()
    north.start()
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    assert len({record["charge"] for record in charged()}) == 1
    assert [record["epsilon"] for record in charged()][-1] == round(epsilon([Release(3.0)], 1e-5), 6)
    messages = [record for record in records(parties, "north", job_id) if record.get("purpose") == "update"]
    shapes = {tensor["name"]: tensor["shape"] for tensor in messages[-1]["tensors"]}
    assert shapes == {"gram": [DIMENSION * (DIMENSION + 1) // 2], "cross": [DIMENSION, 2], "counts": [2]}
    card = json.loads(report(parties, tmp_path, job_id, "--json"))
    # The model card is made of noisy counts: none of them is the true one but by chance.
    assert card["privacy"]["epsilon"] == pytest.approx(epsilon([Release(3.0)], 1e-5), rel=1e-5)
    true = {"consonants": 90, "vowels": 90}
    assert any(row["samples"] != true[row["class"]] for row in card["classes"])


@pytest.mark.parametrize(
    "privacy",
    [None, {**UPDATE, "noise_multiplier": 1.9}, {**UPDATE, "noise_multiplier": 2.0}],
    ids=["none", "little noise", "beyond the budget"],
)
@asynchronous
async def test_an_institution_refuses_what_is_less_than_it_asks_for(parties: Parties, privacy: Any) -> None:
    document = {**spec(["west"], rounds=3), "privacy": privacy}
    job_id, job = await done(parties, document)
    assert job.summary.state == "failed"
    (client,) = job.rounds[0].clients
    assert (client.state, client.code) == ("excluded", "POLICY_DENIED")
    assert client.reason == "the institution's policy does not allow this"
    assert not any(record.get("purpose") == "update" for record in records(parties, "west", job_id))
