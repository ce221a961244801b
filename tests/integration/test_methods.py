"""A job of each method over the real services: what it learns, and what leaves the institutions for it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.agents import spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, running_parties
from veilfed.ledger import read, verify
from veilfed.v1.aggregator_pb2 import GetJobResponse

INSTITUTIONS = ["north", "south", "west"]


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    with running_parties(federation, tmp_path_factory.mktemp("parties"), INSTITUTIONS) as made:
        yield made


@dataclass(frozen=True)
class Case:
    """A method: its strategy, the tensors that leave in each training round, and who is right at the end."""

    strategy: dict[str, Any]
    sent: dict[str, list[int]]
    learned: tuple[str, ...] = ("personal", "global")
    rounds: int = 3
    models: int = field(default=4)  # distinct ones, the first included


CLASSIFIER = {"classifier": [2, 32]}
CASES = {
    "fedot": Case({"name": "fedot", "blocks": 4}, CLASSIFIER),
    "averaging": Case({"name": "fedot", "transform": "identity"}, CLASSIFIER),
    "all-local": Case({"name": "all-local", "blocks": 2}, {}, learned=("personal",), models=1),
}


@pytest.mark.parametrize("name", CASES)
@asynchronous
async def test_a_job_of_each_method(parties: Parties, name: str) -> None:
    case = CASES[name]
    document = spec(["north", "south"], ["west"], rounds=case.rounds, **case.strategy)
    job_id = await parties.submit(document)
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    assert job.summary.strategy == case.strategy["name"]
    assert len({detail.model_sha256 for detail in job.rounds}) == case.models
    final = accuracies(job)
    assert {institution: set(values) for institution, values in final.items()} == {
        "north": {"personal", "global"},
        "south": {"personal", "global"},
        "west": {"global"},
    }
    for values in final.values():
        assert all(values[kind] > 0.75 for kind in case.learned if kind in values), final
    for institution in INSTITUTIONS:
        ledger = parties.folder / institution / "state" / "ledger.jsonl"
        verify(ledger, bundle_pem=parties.federation.root.read_bytes())
        sent = [shapes(record) for record in read(ledger) if record.get("job") == job_id and answers(record)]
        trained = case.rounds if institution != "west" else 0
        assert sent == [case.sent] * trained + [{}] * (case.rounds + 1 - trained)


def accuracies(job: GetJobResponse) -> dict[str, dict[str, float]]:
    """institution -> name -> accuracy, of the closing evaluation."""
    return {
        client.institution: {e.name: e.correct / e.total for e in client.evaluations}
        for client in job.rounds[-1].clients
    }


def answers(record: dict[str, Any]) -> bool:
    return record["kind"] == "message" and record["purpose"] in {"update", "evaluation"}


def shapes(record: dict[str, Any]) -> dict[str, list[int]]:
    return {tensor["name"]: tensor["shape"] for tensor in record.get("tensors", [])}
