"""The agent as a process against a stand-in coordinator and a real oracle: crashes, consent, refusals."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.agents import (
    CLASSES,
    DIMENSION,
    LetterModel,
    agent_config,
    running,
    serving_oracle,
    spec,
    wait_for,
    write_data,
)
from tests.support.coordinator_stub import serving
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import Process, until, veilfed
from tests.support.standin_coordinator import StandInCoordinator
from veilfed import protocol
from veilfed.errors import Code
from veilfed.identity.material import load_credentials
from veilfed.ledger import read, verify
from veilfed.v1.aggregator_pb2 import TASK_KIND_EVALUATE, TASK_KIND_TRAIN, Task, TaskEnded, Update, WorkResponse
from veilfed.v1.tensor_pb2 import Artifact, TensorMap
from veilfed.wire.tensors import digest, map_bytes, parse_map, to_map, unpack_map

JOB = "letters-1"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


@dataclass
class Bench:
    federation: Federation
    coordinator: StandInCoordinator
    model: LetterModel
    folder: Path
    aggregator: str
    oracle: str

    def config(self, **settings: Any) -> Path:
        return agent_config(self.federation, "north", self.folder, self.aggregator, self.oracle, **settings)

    @property
    def ledger(self) -> Path:
        return self.folder / "state" / "ledger.jsonl"

    async def update(self) -> Update:
        update: Update = await wait_for(self.coordinator.updates.get())
        return update

    async def refusal(self) -> Any:
        return await wait_for(self.coordinator.refusals.get())


@asynccontextmanager
async def bench(
    federation: Federation, folder: Path, dimension: int = DIMENSION, **settings: Any
) -> AsyncIterator[Bench]:
    coordinator, model = StandInCoordinator(**settings), LetterModel(dimension)
    write_data(folder / "data.csv", seed=1)
    async with (
        serving(load_credentials(federation.aggregator), coordinator) as aggregator,
        serving_oracle(federation, "north", model, folder / "oracle") as oracle,
    ):
        yield Bench(federation, coordinator, model, folder, aggregator, oracle)


def model(seed: int = 0, dimension: int = DIMENSION) -> TensorMap:
    values = np.random.default_rng(seed).standard_normal((len(CLASSES), dimension)).astype(np.float32)
    return to_map({"classifier": values})


def offer(
    round_number: int,
    token: str = "token",  # noqa: S107  of a task
    tensors: TensorMap | None = None,
    kind: Any = TASK_KIND_TRAIN,
    job: dict[str, Any] | None = None,
) -> WorkResponse:
    task = Task(job_id=JOB, round=round_number, kind=kind, token=token, tensors=tensors or model())
    task.spec_json = json.dumps(job or spec(["north", "south"], rounds=9))
    return WorkResponse(task=task)


def without_head(update: Update) -> bytes:
    copy = Update()
    copy.CopyFrom(update)
    copy.ClearField("ledger_head")
    return copy.SerializeToString(deterministic=True)


async def trains(process: Process) -> None:
    """Waits for the log: a heartbeat tells it up to a second later, when a short training is over."""
    await asyncio.to_thread(until, lambda: '"event": "training"' in process.err.read_text(), 60, "training")


async def ready(process: Process) -> None:
    line = await asyncio.to_thread(process.ready)
    assert line == {"ready": True, "service": "agent"}


@asynchronous
async def test_a_killed_agent_answers_with_the_same_bytes(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        config = b.config()
        b.coordinator.open = [offer(0)]
        with running(config) as agent:
            await ready(agent)
            first = await b.update()
            # The aggregator did not say that it has it.
        asked = b.model.seen
        assert asked == 100
        with running(config):
            again = await b.update()
            assert without_head(again) == without_head(first)
            # Round 1 of this history, and of one in which nobody was killed: the same.
            trained = first.tensors
            b.coordinator.send(offer(1, "token-1", trained))
            second = await b.update()
        assert b.model.seen == asked
        assert [e.name for e in second.evaluations] == ["personal", "global"]
        assert unpack_map(second.tensors)["classifier"].shape == (len(CLASSES), DIMENSION)
        verify(b.ledger)
        # An agent that was never killed sends the same bytes in both rounds.
        other = tmp_path / "never-killed"
        write_data(other / "data.csv", seed=1)
        b.coordinator.open = [offer(0)]
        with running(agent_config(federation, "north", other, b.aggregator, b.oracle)):
            assert without_head(await b.update()) == without_head(first)
            b.coordinator.send(offer(1, "token-1", trained))
            assert without_head(await b.update()) == without_head(second)


@asynchronous
async def test_killed_while_it_trains(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        config = b.config()
        job = spec(["north", "south"], rounds=9, epochs=400, batch_size=4)
        b.coordinator.open = [offer(0, job=job)]
        with running(config) as agent:
            await trains(agent)
        assert b.coordinator.updates.empty()
        with running(config):
            first = await b.update()
            # The connection ends and the same task comes again with another token.
            b.coordinator.open = [offer(0, "another", job=job)]
            b.coordinator.hang_up()
            again = await b.update()
        assert again.token == "another"
        again.token = first.token
        assert without_head(again) == without_head(first)


@asynchronous
async def test_consent(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        config = b.config(policy={"consent": "ask"})
        b.coordinator.open = [offer(0)]
        with running(config) as agent:
            await ready(agent)
            await b.coordinator.activity("waiting for consent")
            listed = await asyncio.to_thread(command, "agent", "jobs", "--config", config)
            assert [(row["job"], row["consent"]) for row in listed] == [(JOB, "waiting")]
            assert b.coordinator.updates.empty()
            assert b.model.seen == 0
            await asyncio.to_thread(command, "agent", "approve", "--config", config, JOB)
            await b.update()
            busy = await asyncio.to_thread(run, "agent", "purge", "--config", config, JOB)
            assert busy.returncode == Code.FILE_UNUSABLE.exit_code
            assert await asyncio.to_thread(agent.terminate) == 0
        notes = [record["text"] for record in read(b.ledger) if record["kind"] == "note"]
        assert len(notes) == 1
        assert "approved by the institution" in notes[0]
        assert command("agent", "purge", "--config", config, JOB) == {"purged": [JOB]}
        assert command("agent", "jobs", "--config", config) == []


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(veilfed(*arguments, "--json"), capture_output=True, text=True, timeout=60, check=False)


def command(*arguments: str | Path) -> Any:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@asynchronous
async def test_what_cannot_be_done_is_refused_without_details(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.open = [offer(0)]
        with running(b.config()) as agent:
            await b.update()
            cases = [
                (spec(["north"], rounds=8, dimension=16), "JOB_INVALID", JOB),
                (spec(["north"], dimension=16), "INPUT_INVALID", "other-1"),
                (spec(["north"], classes=["secret", "vowels"]), "DATA_INVALID", "other-2"),
                (spec(["south"]), "TASK_INVALID", "other-3"),
                (spec([], ["north"]) | {"quorum": 1}, "JOB_INVALID", "other-4"),
            ]
            for job, code, job_id in cases:
                response = offer(1, job=job, tensors=model(dimension=job["strategy"]["dimension"]))
                response.task.job_id = job_id
                b.coordinator.send(response)
                refusal = await b.refusal()
                assert (refusal.job_id, refusal.code) == (job_id, code)
                assert "consonants" not in refusal.reason
                assert str(b.folder) not in refusal.reason
            bad = offer(1, tensors=to_map({"classifier": np.full((2, DIMENSION), np.nan, np.float32)}))
            b.coordinator.send(bad)
            assert (await b.refusal()).code == "PROTOCOL_VIOLATION"
            # A bad name of a job is not answered, and does no harm.
            odd = offer(1)
            odd.task.job_id = "../../odd"
            b.coordinator.send(odd)
            b.coordinator.send(offer(1, tensors=model(5)))
            assert (await b.update()).round == 1
            assert agent.running()


@asynchronous
async def test_counts_over_few_samples_stay(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.open = [offer(0)]
        with running(b.config(policy={"consent": "allow", "min_evaluation_samples": 60})):
            update = await b.update()
            assert not update.evaluations
            b.coordinator.send(offer(9, kind=TASK_KIND_EVALUATE))
            assert (await b.refusal()).code == "POLICY_DENIED"


@asynchronous
async def test_an_ended_task_is_dropped_and_raw_data_stays_in_its_zone(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.open = [offer(0, job=spec(["north", "south"], rounds=9, epochs=1000, batch_size=1))]
        config = b.config()
        with running(config):
            await b.coordinator.activity("training")
            b.coordinator.send(WorkResponse(ended=TaskEnded(job_id=JOB, token="token", reason="the round is closed")))
            await b.coordinator.activity("idle")
            assert b.coordinator.updates.empty()
            # One agent per folder.
            with running(config, "second") as second:
                assert await asyncio.to_thread(second.wait, 60) == Code.FILE_UNUSABLE.exit_code
        b.coordinator.open = [offer(0)]
        foreign = tmp_path / "foreign"
        write_data(foreign / "data.csv", seed=2)
        async with serving_oracle(federation, "south", LetterModel(), foreign / "oracle") as oracle:
            identity = federation.oracle_id("south")
            settings = {"root": str(federation.zone_roots["south"]), "address": oracle, "identity": str(identity)}
            with running(agent_config(federation, "north", foreign, b.aggregator, oracle, oracle=settings)):
                assert (await b.refusal()).code == "POLICY_DENIED"
        assert not [
            r for r in read(foreign / "state" / "ledger.jsonl") if r.get("inputs") and r["decision"] == "passed"
        ]


@asynchronous
async def test_an_older_aggregator_ends_the_agent(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path, protocol_version=0) as b:
        with running(b.config()) as agent:
            assert await asyncio.to_thread(agent.wait, 60) == Code.PROTOCOL_VERSION.exit_code


LONG = 65_536
MANY_CLASSES = [*CLASSES, *(f"class-{number}" for number in range(8))]


def long_offer(b: Bench) -> WorkResponse:
    """A task whose model comes in three chunks."""
    values = np.random.default_rng(0).standard_normal((len(MANY_CLASSES), LONG)).astype(np.float32)
    data = b.coordinator.model = map_bytes({"classifier": values})
    assert len(data) > 2 * protocol.CHUNK_BYTES
    response = offer(0, job=spec(["north"], transform="identity", dimension=LONG, classes=MANY_CLASSES))
    response.task.artifact.CopyFrom(Artifact(sha256=digest(data), size=len(data)))
    return response


@asynchronous
async def test_transfers_that_break_off_go_on_where_they_were(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path, LONG) as b:
        b.coordinator.open = [long_offer(b)]
        b.coordinator.cuts = {"Fetch", "Push"}
        with running(b.config()):
            update = await b.update()
        assert [request.offset for request in b.coordinator.fetches] == [0, protocol.CHUNK_BYTES]
        assert [header.offset for header in b.coordinator.headers] == [0, protocol.CHUNK_BYTES]
        assert digest(bytes(b.coordinator.pushed)) == update.artifact.sha256
        assert parse_map(bytes(b.coordinator.pushed))["classifier"].shape == (len(MANY_CLASSES), LONG)


@pytest.mark.parametrize("method", ["Fetch", "Push"])
@asynchronous
async def test_a_session_that_ends_in_the_middle_of_a_transfer(
    federation: Federation, tmp_path: Path, method: str
) -> None:
    async with bench(federation, tmp_path, LONG) as b:
        b.coordinator.open = [long_offer(b)]
        b.coordinator.stalls = {method}
        with running(b.config()) as agent:
            await wait_for(b.coordinator.stalled.wait())
            b.coordinator.hang_up()
            update = await b.update()
            assert await asyncio.to_thread(agent.terminate) == 0
        assert b.coordinator.joins == 2
        assert b.coordinator.refusals.empty()
        assert digest(bytes(b.coordinator.pushed)) == update.artifact.sha256
        transfers = b.coordinator.fetches if method == "Fetch" else b.coordinator.headers
        assert [transfer.offset for transfer in transfers] == [0, protocol.CHUNK_BYTES]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, float("nan"), float("inf")])
@asynchronous
async def test_heartbeats_without_pause_are_refused(federation: Federation, tmp_path: Path, seconds: float) -> None:
    async with bench(federation, tmp_path, lease_seconds=seconds) as b:
        with running(b.config()) as agent:
            await asyncio.to_thread(until, lambda: b.coordinator.joins > 1, 30, "a second attempt to join")
            assert agent.running()
        assert b.coordinator.activities.empty()
        assert "heartbeat" not in {record.get("purpose") for record in read(b.ledger)}


@asynchronous
async def test_an_oracle_that_the_federation_could_make_up_is_refused(federation: Federation, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(federation.zone_roots["north"].read_bytes() + federation.root.read_bytes())
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    async with bench(federation, tmp_path) as b:
        for root in (federation.root, both, empty):
            oracle = {"root": str(root), "address": b.oracle, "identity": str(federation.oracle_id("north"))}
            with running(b.config(oracle=oracle)) as agent:
                assert await asyncio.to_thread(agent.wait, 60) == Code.IDENTITY_INVALID.exit_code
        assert b.coordinator.joins == 0


@asynchronous
async def test_more_than_the_job_says_is_refused(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        job = spec(["north", "south"], rounds=2)
        longer = offer(0, job=job)
        longer.task.artifact.CopyFrom(Artifact(sha256="0" * 64, size=1 << 20))
        beyond = {
            "training in the closing evaluation": (offer(2, job=job), "TASK_INVALID"),
            "a round after it": (offer(3, job=job, kind=TASK_KIND_EVALUATE), "TASK_INVALID"),
            "a longer model": (longer, "PROTOCOL_VIOLATION"),
        }
        b.coordinator.open = [offer(1, job=job)]
        with running(b.config()):
            await b.update()
            for what, (response, code) in beyond.items():
                b.coordinator.send(response)
                assert (await b.refusal()).code == code, what
            b.coordinator.send(offer(2, job=job, kind=TASK_KIND_EVALUATE))
            assert (await b.update()).round == 2
        assert b.coordinator.fetches == []


@asynchronous
async def test_another_model_than_the_named_one_is_refused(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.model = b"x" * 100
        response = offer(0)
        response.task.artifact.CopyFrom(Artifact(sha256="0" * 64, size=100))
        b.coordinator.open = [response]
        with running(b.config()):
            assert (await b.refusal()).code == "PROTOCOL_VIOLATION"


@asynchronous
async def test_a_budget_that_is_used_up_ends_no_session(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.open = [offer(0)]
        with running(b.config(policy={"consent": "allow", "max_bytes_per_job": 300})):
            assert (await b.refusal()).code == "POLICY_DENIED"
            # More refusals than the budget lets out: they are left out, and the agent goes on with other jobs.
            for number in range(1, 4):
                b.coordinator.send(offer(number, tensors=model(number)))
                other = offer(0, kind=TASK_KIND_EVALUATE)
                other.task.job_id = f"other-{number}"
                b.coordinator.send(other)
                assert (await b.update()).job_id == other.task.job_id
        assert b.coordinator.joins == 1
        assert b.coordinator.updates.empty()
        denied = [r["purpose"] for r in read(b.ledger) if r.get("decision") == "refused"]
        assert {"update", "refusal"} <= set(denied)
