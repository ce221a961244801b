"""FedOPAL over the real services, with the real MiniLM: what is tuned, what leaves, and what the closed form equals."""

import asyncio
import csv
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from client_agent.cache import EmbeddingCache
from client_agent.data.config import TableConfig
from client_agent.data.source import class_indices, load, split
from client_agent.state import Finished, StateFolder
from client_agent.trainers import State
from fm_oracle.models.minilm import MiniLM
from tests.support.agents import CLASSES, spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.models import published
from tests.support.parties import Parties, running_parties
from tests.support.processes import until, veilfed
from veilfed.ledger import read, verify
from veilfed.v1.aggregator_pb2 import AddClientRequest, ForgetClientRequest, GetJobResponse
from veilfed.wire.tensors import Arrays, parse_map

Float = NDArray[np.float32]

INSTITUTIONS = ["north", "south"]
D, SAMPLES, RIDGE = 384, 60, 0.5
UPDATES = {"update", "evaluation"}
EPS = float(np.finfo(np.float64).eps)
GOOD = ["wonderful", "lovely", "a joy", "brilliant", "charming", "perfect"]
BAD = ["awful", "a bore", "terrible", "clumsy", "a waste", "dreadful"]
THINGS = ["film", "meal", "book", "phone", "hotel", "song", "play", "tool"]


def write_sentences(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(SAMPLES):
            words = GOOD if number % 2 else BAD
            writer.writerow([f"The {rng.choice(THINGS)} {number} was {rng.choice(words)}.", CLASSES[number % 2]])


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    oracle = {"folder": str(published("minilm")), "prompts": "gradients", "max_batch": 64, "quota": 5000}
    folder = tmp_path_factory.mktemp("parties")
    with running_parties(federation, folder, INSTITUTIONS, D, oracle=oracle) as made:
        for seed, name in enumerate(INSTITUTIONS):
            write_sentences(folder / name / "data.csv", seed)
        yield made


def job(train: Sequence[str] = INSTITUTIONS, **strategy: Any) -> dict[str, Any]:
    rounds = 2 if strategy.get("reextract") else 1
    values = {"prompts": 4, "prompt_width": D, "batch_size": 16, "ridge": RIDGE, "min_class_count": 1, **strategy}
    return spec(train, rounds=rounds, name="fedopal", dimension=D, **values)


async def run(parties: Parties, **strategy: Any) -> tuple[str, GetJobResponse]:
    job_id = await parties.submit(job(**strategy))
    ended = await parties.ended(job_id, 150)
    assert ended.summary.state == "done", ended.summary.error
    return job_id, ended


def kept(parties: Parties, institution: str, job_id: str, number: int) -> Finished:
    found = StateFolder(parties.folder / institution / "state").job(job_id).finished(number)
    assert found is not None
    return found


def model(parties: Parties, job_id: str, rounds: int = 1) -> Arrays:
    """The last one."""
    return parse_map(kept(parties, "north", job_id, rounds).model)


def doubles(array: Any) -> NDArray[np.float64]:
    return np.asarray(array, np.float64)


def state(parties: Parties, institution: str, job_id: str, rounds: int) -> NDArray[np.float64]:
    """The prompts that an institution keeps."""
    data = kept(parties, institution, job_id, rounds).state
    return doubles(State.from_bytes(data, State.zeros({"prompts": (4, D)}, {})).tensors["prompts"])


def training(parties: Parties, institution: str) -> tuple[list[str], NDArray[np.int64]]:
    samples = load(TableConfig(source="table", path=parties.folder / institution / "data.csv"))
    rows, _ = split(samples, CLASSES, 0.4, 50)
    return [cast(str, samples.inputs[row]) for row in rows], class_indices(samples.labels, CLASSES)[rows]


def features(parties: Parties, institution: str, prompts: Any) -> tuple[Float, NDArray[np.int64]]:
    """Of the training split with these prompts, as its agent has them."""
    texts, labels = training(parties, institution)
    folder = parties.folder / institution / "state" / "embeddings"
    version = MiniLM.load(published("minilm")).card.version
    with EmbeddingCache(folder, version, "text", D, np.asarray(prompts, np.float32)) as cache:
        found, absent = cache.get(texts)
    assert not len(absent)
    return found, labels


def centralised(parts: list[tuple[Float, NDArray[np.int64]]]) -> tuple[NDArray[Any], float]:
    """Ridge regression on the pooled features, one sample after the other: W [K, d], and what it may differ by."""
    matrix, right = RIDGE * np.eye(D), np.zeros((D, len(CLASSES)))
    for rows, labels in parts:
        for row, label in zip(rows.astype(np.float64), labels, strict=True):
            h = row / np.linalg.norm(row)
            matrix += np.outer(h, h)
            right[:, label] += h
    return np.linalg.solve(matrix, right).T, max(1e-10, 100 * EPS * float(np.linalg.cond(matrix)))


def difference(found: Any, expected: NDArray[Any]) -> float:
    return float(np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected))


@asynchronous
async def test_one_round_with_gradients(parties: Parties) -> None:
    job_id, ended = await run(parties, mu=0.01, prompt_rate=30)
    final = model(parties, job_id)
    updates = {name: parse_map(kept(parties, name, job_id, 0).update) for name in ("north", "south")}
    own = {name: update["prompts"].astype(np.float64) for name, update in updates.items()}
    first = final["first_prompts"].astype(np.float64)
    for prompts in own.values():
        assert 0.01 < np.abs(prompts - first).max() < 5  # tuned, and from P_0
    assert np.abs(own["north"] - own["south"]).max() > 0.01
    assert np.allclose(final["prompts"].astype(np.float64), (own["north"] + own["south"]) / 2, rtol=0, atol=1e-6)
    # The statistics are of features that each institution's own prompts give.
    expected, tolerance = centralised([features(parties, name, updates[name]["prompts"]) for name in updates])
    assert difference(final["classifier"], expected) <= tolerance
    texts, _ = training(parties, "north")
    local = MiniLM.load(published("minilm"))
    direct = local.forward_prompted(local.prepare(texts), own["north"].astype(np.float32))
    assert np.abs(direct - features(parties, "north", own["north"])[0]).max() < 1e-4
    # Everybody has learned something; who trains also with its own prompts.
    told = {client.institution: {e.name: e.correct / e.total for e in client.evaluations} for client in last(ended)}
    assert {name: set(values) for name, values in told.items()} == {
        "north": {"personal", "global"},
        "south": {"personal", "global"},
    }
    assert min(value for values in told.values() for value in values.values()) > 0.75, told
    left(parties, job_id)
    predicted(parties, job_id, final, own["north"].astype(np.float32))


def last(ended: GetJobResponse) -> Any:
    return ended.rounds[-1].clients


def predicted(parties: Parties, job_id: str, final: Arrays, own: Float) -> None:
    """`veilfed predict` embeds with the institution's own prompts."""
    text = "The lamp was charming."
    file = parties.folder / "new.txt"
    file.write_text(text)
    config = parties.folder / "north" / "agent.yaml"
    arguments = veilfed("predict", file, "--config", config, "--job", job_id, "--json")
    (told,) = json.loads(subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True).stdout)
    local = MiniLM.load(published("minilm"))
    h = doubles(local.forward_prompted(local.prepare([text]), own)[0])
    scores = 20 * doubles(final["classifier"]) @ (h / np.linalg.norm(h))
    shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    assert told["class"] == CLASSES[int(shares.argmax())] == "vowels"
    assert told["probability"] == pytest.approx(float(shares.max()), abs=1e-4)


def updates_of(parties: Parties, institution: str, job_id: str) -> list[dict[str, list[int]]]:
    """Of each update that left for a job, the tensors' shapes, by the ledger. Long ones leave as artifacts."""
    records = read(parties.folder / institution / "state" / "ledger.jsonl")
    sent = [record for record in records if record.get("job") == job_id and record.get("purpose") in UPDATES]
    return [{tensor["name"]: tensor["shape"] for tensor in record.get("tensors", [])} for record in sent]


def left(parties: Parties, job_id: str) -> None:
    """What left `north` for the job: one update with these tensors alone; labels and prompts to its own zone only."""
    ledger = parties.folder / "north" / "state" / "ledger.jsonl"
    verify(ledger, bundle_pem=parties.federation.root.read_bytes())
    records = [record for record in read(ledger) if record["kind"] == "message" and record["decision"] == "passed"]
    shapes, nothing = updates_of(parties, "north", job_id)
    assert nothing == {}  # the closing evaluation
    assert shapes == {"counts": [2], "cross": [D, 2], "gram": [D * (D + 1) // 2], "prompts": [4, D]}
    gradients = [record for record in records if record["purpose"] == "prompt_gradient"]
    assert sum(record["labels"] for record in gradients) == sum(record["inputs"] for record in gradients) >= 36
    told = [record for record in records if record.get("tensors") and record["purpose"] in {"prompt_gradient", "embed"}]
    assert all(record["own_zone"] and "/oracle/north/" in record["destination"] for record in told)


@asynchronous
async def test_an_infinite_mu_is_afl_on_the_first_prompts(parties: Parties) -> None:
    job_id, _ = await run(parties, mu=1e300)
    final = model(parties, job_id)
    for name in ("north", "south"):
        update = parse_map(kept(parties, name, job_id, 0).update)
        assert update["prompts"].tobytes() == final["first_prompts"].tobytes()
    assert final["prompts"].tobytes() == final["first_prompts"].tobytes()
    expected, tolerance = centralised([features(parties, name, final["first_prompts"]) for name in ("north", "south")])
    assert difference(final["classifier"], expected) <= tolerance


@asynchronous
async def test_reextracting_is_the_ridge_regression_on_what_the_mean_prompt_gives(parties: Parties) -> None:
    job_id, _ = await run(parties, reextract=True, mu=0.01, prompt_rate=30)
    final = model(parties, job_id, rounds=2)
    assert np.abs(doubles(final["prompts"]) - doubles(final["first_prompts"])).max() > 0.01
    second = parse_map(kept(parties, "north", job_id, 1).update)
    assert set(second) == {"gram", "cross", "counts"}
    expected, tolerance = centralised([features(parties, name, final["prompts"]) for name in ("north", "south")])
    assert difference(final["classifier"], expected) <= tolerance
    sent = [shapes for shapes in updates_of(parties, "north", job_id) if shapes]
    assert [set(shapes) for shapes in sent] == [{"prompts", "counts"}, {"gram", "cross", "counts"}]
    # What each institution tuned it keeps, and it is what the mean was made of.
    own = [state(parties, name, job_id, rounds=2) for name in INSTITUTIONS]
    assert np.allclose(doubles(final["prompts"]), np.mean(own, axis=0), rtol=0, atol=1e-6)
    assert not (parties.folder / "north" / "state" / "jobs" / job_id / "tuning.bin").exists()


@pytest.mark.parametrize("kind", ["forward-only", "cma-es"])
@asynchronous
async def test_without_gradients(parties: Parties, kind: str) -> None:
    """The ledger has as many inputs as was said: 36 samples, for each of the prompts that are tried on a batch."""
    tries, before, asked = {"forward-only": 2, "cma-es": 4}[kind], gradients(parties), embeddings(parties)
    job_id, ended = await run(parties, tuning=kind, mu=0.01, population=4, subspace=4)
    assert gradients(parties) == before
    # Once more for the statistics, and twice the test split of 24 for the evaluation.
    assert embeddings(parties) - asked == 36 * (tries + 1) + 2 * 24
    final = model(parties, job_id)
    assert np.abs(doubles(final["prompts"]) - doubles(final["first_prompts"])).max() > 1e-4
    assert all(e.correct / e.total > 0.75 for client in last(ended) for e in client.evaluations)
    until(lambda: "queries" in parties.agents["north"].log, 10, "the number of queries in the log")


def gradients(parties: Parties) -> int:
    """Inputs that `north` has sent for gradients, by its ledger: 36 in an epoch."""
    return asked_for(parties, "prompt_gradient")


def embeddings(parties: Parties) -> int:
    return asked_for(parties, "embed")


def asked_for(parties: Parties, purpose: str) -> int:
    records = read(parties.folder / "north" / "state" / "ledger.jsonl")
    return sum(record["inputs"] for record in records if record.get("purpose") == purpose and "inputs" in record)


@asynchronous
async def test_a_tuning_that_was_killed_ends_as_if_it_had_not_been(parties: Parties) -> None:
    before = gradients(parties)
    job_id = await parties.submit(job(["north"], epochs=10))
    folder = parties.folder / "north" / "state" / "jobs" / job_id
    await asyncio.to_thread(until, (folder / "tuning.bin").exists, 30, "a tuning that is kept")
    parties.agents["north"].kill()
    assert not (folder / "round-0.bin").exists()
    assert (folder / "tuning.bin").stat().st_mode & 0o777 == 0o600
    parties.agents["north"].start()
    assert (await parties.ended(job_id)).summary.state == "done"
    again = await parties.submit(job(["north"], epochs=10))
    assert (await parties.ended(again)).summary.state == "done"
    assert kept(parties, "north", job_id, 0).update == kept(parties, "north", again, 0).update
    # What was kept was not asked for twice: without it the first run would have begun anew.
    asked = gradients(parties) - before
    assert 720 <= asked < 720 + 360


@asynchronous
async def test_who_joins_later_or_leaves_makes_no_difference(parties: Parties) -> None:
    """It starts from P_0 as all did; the prompts of the others depend on their own samples alone."""

    async def published(job_id: str) -> str:
        ended = await parties.ended(job_id)
        assert ended.summary.state == "done", ended.summary.error
        return next(detail.published_sha256 for detail in reversed(ended.rounds) if detail.published_sha256)

    both = await published(await parties.submit(job()))
    alone = await published(job_id := await parties.submit(job(["north"])))
    async with parties.jobs() as jobs:
        await jobs.AddClient(AddClientRequest(job_id=job_id, institution="south"), timeout=20)
        assert await published(job_id) == both != alone
        await jobs.ForgetClient(ForgetClientRequest(job_id=job_id, institution="south"), timeout=20)
        assert await published(job_id) == alone


@asynchronous
async def test_a_tuning_that_the_quota_is_too_small_for_does_not_begin(parties: Parties) -> None:
    ledger = parties.folder / "north" / "state" / "ledger.jsonl"
    before = len([record for record in read(ledger) if record.get("inputs")])
    ended = await parties.ended(await parties.submit(job(["north"], epochs=300)))
    assert (ended.summary.state, "QUOTA_EXCEEDED" in str(ended)) == ("failed", True)
    assert len([record for record in read(ledger) if record.get("inputs")]) == before
