"""A job of each method over the real services: what it learns, and what leaves the institutions for it."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from client_agent.data.config import TableConfig
from client_agent.data.source import load
from client_agent.trainers import method_for
from tests.support.agents import CLASSES, LetterModel, spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, running_parties
from tests.support.processes import veilfed
from veilfed.jobs import JobSpec, StrategyName
from veilfed.ledger import read, verify
from veilfed.v1.aggregator_pb2 import GetJobResponse, RoundDetail
from veilfed.wire.tensors import digest, map_bytes
from veilfed_study import measures
from veilfed_study.parts import split_parts
from veilfed_study.simulation import rounds
from veilfed_study.subjects import of_samples

INSTITUTIONS = ["north", "south", "west"]
# What the policy of this one does not allow.
STRICT, DENIED = "west", "all-global"


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    allowed = {STRICT: [name for name in get_args(StrategyName) if name != DENIED]}
    folder = tmp_path_factory.mktemp("parties")
    with running_parties(federation, folder, INSTITUTIONS, strategies=allowed) as made:
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
ATTENTION = {"attention_in": [6, 32], "attention_out": [32, 6]}
CASES = {
    "fedot": Case({"name": "fedot", "blocks": 4}, CLASSIFIER),
    "averaging": Case({"name": "fedot", "transform": "identity"}, CLASSIFIER),
    "all-global": Case({"name": "all-global", "blocks": 2}, {**CLASSIFIER, "transform": [2, 16, 16]}),
    "fedlt": Case({"name": "fedlt"}, CLASSIFIER),
    "fedadapter": Case({"name": "fedadapter", "hidden": 6}, CLASSIFIER),
    "fedclip": Case({"name": "fedclip", "hidden": 6}, {**ATTENTION, **CLASSIFIER}),
    "fedgh": Case({"name": "fedgh", "blocks": 4}, {"means": [2, 32]}),
    "all-local": Case({"name": "all-local", "blocks": 2}, {}, learned=("personal",), models=1),
}


@pytest.mark.parametrize("name", CASES)
@asynchronous
async def test_a_job_of_each_method(parties: Parties, name: str) -> None:
    case = CASES[name]
    newcomers = ["west"] if case.strategy["name"] != DENIED else []
    document = spec(["north", "south"], newcomers, rounds=case.rounds, **case.strategy)
    job_id = await parties.submit(document)
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    assert job.summary.strategy == case.strategy["name"]
    assert len({detail.model_sha256 for detail in job.rounds}) == case.models
    told = [(detail.model_sha256, best(detail)) for detail in job.rounds]
    assert told == study(parties, JobSpec.model_validate(document))
    final = accuracies(job)
    kinds = {
        "north": {"personal", "global"},
        "south": {"personal", "global"},
        **{name: {"global"} for name in newcomers},
    }
    assert {institution: set(values) for institution, values in final.items()} == kinds
    for values in final.values():
        assert all(values[kind] > 0.75 for kind in case.learned if kind in values), final
    for institution in kinds:
        ledger = parties.folder / institution / "state" / "ledger.jsonl"
        verify(ledger, bundle_pem=parties.federation.root.read_bytes())
        sent = [shapes(record) for record in read(ledger) if record.get("job") == job_id and answers(record)]
        trained = case.rounds if institution != "west" else 0
        assert sent == [case.sent] * trained + [{}] * (case.rounds + 1 - trained)


def study(parties: Parties, job: JobSpec) -> list[tuple[str, dict[str, float]]]:
    """The same job in one process: of each round the model's digest, and each institution's accuracy."""
    torch.set_num_threads(1)  # as the agents have
    tables = {name: TableConfig(source="table", path=parties.folder / name / "data.csv") for name in INSTITUTIONS}
    cache = parties.folder / "study"
    subject = of_samples(
        "letters", "", {name: load(table) for name, table in tables.items()}, CLASSES, LetterModel(), cache
    )
    cohort = {name: subject.domains[name] for name in (*job.cohort.train, *job.cohort.evaluate)}
    parts, method = split_parts(cohort, CLASSES, job.seed), method_for(job.strategy)
    return [
        (
            digest(map_bytes(snapshot.model)),
            measures.accuracies(method, snapshot.model, snapshot.states, parts),
        )
        for snapshot in rounds(job, parts)
    ]


@pytest.fixture(scope="module")
def vectors(parties: Parties, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class vectors that an institution has its oracle embed, on a copy of its state: its agent is at work."""
    folder = tmp_path_factory.mktemp("vectors")
    prompts = folder / "prompts.yaml"
    prompts.write_text("vowels: [aeiou, eaiou]\nconsonants: bcdfg\n")
    out = folder / "vectors.npz"
    config = parties.folder / "north" / "agent.yaml"
    told = command("agent", "class-vectors", prompts, "--config", config, "--out", out)
    assert told == {"file": str(out), "classes": ["vowels", "consonants"], "dimension": 32}
    return out


def command(*arguments: str | Path) -> Any:
    done = subprocess.run(veilfed(*arguments, "--json"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def submit(parties: Parties, folder: Path, document: dict[str, Any], vectors: Path) -> str:
    """By the administrator's command."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    admin = folder / "admin.yaml"
    address = {"aggregator": parties.address, "aggregator_id": str(parties.federation.aggregator_id)}
    admin.write_text(yaml.safe_dump({"identity": str(parties.federation.admin.certificate.parent), **address}))
    return str(command("job", "submit", file, "--config", admin, "--class-vectors", vectors)["job_id"])


@asynchronous
async def test_zero_shot_is_class_vectors_without_training(parties: Parties, vectors: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"transform": "identity", "initial": "class_vectors"}
    document = spec(["north", "south"], ["west"], rounds=0, **changes)
    job = await parties.ended(await asyncio.to_thread(submit, parties, tmp_path, document, vectors))
    assert job.summary.state == "done", job.summary.error
    assert len(job.rounds) == 1
    for values in accuracies(job).values():
        assert all(value > 0.75 for value in values.values())
    ledger = read(parties.folder / "north" / "state" / "ledger.jsonl")
    assert [r["purpose"] for r in ledger if r.get("job") == job.summary.job_id and answers(r)] == ["evaluation"]
    asked = read(parties.folder / "north" / "state" / "ledger-predict.jsonl")
    assert sum(record.get("inputs", 0) for record in asked) == 3


@asynchronous
async def test_fedclip_on_class_vectors_sends_the_attention_alone(
    parties: Parties, vectors: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"name": "fedclip", "hidden": 6, "initial": "class_vectors", "train_classifier": False}
    document = spec(["north", "south"], rounds=2, **changes)
    job_id = await asyncio.to_thread(submit, parties, tmp_path, document, vectors)
    job = await parties.ended(job_id)
    assert job.summary.state == "done", job.summary.error
    assert all(value > 0.75 for values in accuracies(job).values() for value in values.values())
    ledger = read(parties.folder / "north" / "state" / "ledger.jsonl")
    sent = [shapes(record) for record in ledger if record.get("job") == job_id and answers(record)]
    assert sent == [ATTENTION, ATTENTION, {}]


@asynchronous
async def test_a_method_that_a_policy_does_not_list_is_refused_by_name(parties: Parties) -> None:
    """It is asked for its transform and says no; the job fails, as it needs both."""
    job = await parties.ended(await parties.submit(spec(["north", STRICT], name=DENIED)))
    assert job.summary.state == "failed"
    assert f"{STRICT} (POLICY_DENIED" in job.summary.error
    ledger = read(parties.folder / STRICT / "state" / "ledger.jsonl")
    assert {r["purpose"] for r in ledger if r.get("job") == job.summary.job_id} == {"refusal"}
    told = await asyncio.to_thread(command, "agent", "jobs", "--config", parties.folder / STRICT / "agent.yaml")
    shown = next(row for row in told if row["job"] == job.summary.job_id)
    assert (shown["consent"], shown["sends"]) == ("denied by the policy", ["classifier", "transform"])


def best(detail: RoundDetail) -> dict[str, float]:
    """institution -> accuracy with its private state, where it has one."""
    found = {client.institution: {e.name: e.correct / e.total for e in client.evaluations} for client in detail.clients}
    return {name: values.get("personal", values["global"]) for name, values in found.items()}


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
