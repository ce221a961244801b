"""Whole jobs: agents and the aggregator as processes, oracles of a tiny model in this one."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.agents import DIMENSION, LetterModel, agent_config, running, serving_oracle, spec, write_data
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import Process, free_port, veilfed
from veilfed.errors import Code
from veilfed.identity.material import load_credentials
from veilfed.ledger import read, verify
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import GetJobRequest, GetJobResponse, SubmitJobRequest, WatchJobRequest
from veilfed.v1.aggregator_pb2_grpc import JobServiceStub

INSTITUTIONS = ["north", "south", "west"]
SECONDS = 60


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)


@dataclass
class Bench:
    """An aggregator that can be started again at the same address, and an oracle and a configuration for each agent."""

    federation: Federation
    folder: Path
    aggregator: Process
    port: int
    models: dict[str, LetterModel]
    configs: dict[str, Path]

    def ledger(self, institution: str) -> Path:
        return self.folder / institution / "state" / "ledger.jsonl"

    async def submit(self, document: dict[str, Any]) -> str:
        async with self._jobs() as jobs:
            job_id: str = (await jobs.SubmitJob(SubmitJobRequest(spec=json.dumps(document)))).job_id
            return job_id

    async def ended(self, job_id: str) -> GetJobResponse:
        """Waits for the job's end."""
        async with asyncio.timeout(SECONDS), self._jobs() as jobs:
            async for _ in jobs.WatchJob(WatchJobRequest(job_id=job_id)):
                pass
            job: GetJobResponse = await jobs.GetJob(GetJobRequest(job_id=job_id))
            return job

    async def published(self, job_id: str, rounds: int) -> None:
        """Waits until so many rounds of the job are published."""
        async with asyncio.timeout(SECONDS), self._jobs() as jobs:
            async for event in jobs.WatchJob(WatchJobRequest(job_id=job_id)):
                if event.kind == "round_published" and event.round + 1 >= rounds:
                    return

    @asynccontextmanager
    async def _jobs(self) -> AsyncIterator[Any]:
        credentials, address = load_credentials(self.federation.admin), f"127.0.0.1:{self.port}"
        async with open_channel(credentials, address, self.federation.aggregator_id) as channel:
            with translated(credentials, address):
                yield JobServiceStub(channel)

    async def restart_aggregator(self) -> None:
        self.aggregator.kill()
        self.aggregator = start_aggregator(self.federation, self.folder, self.port)
        await asyncio.to_thread(self.aggregator.ready)


def start_aggregator(federation: Federation, folder: Path, port: int) -> Process:
    document = {
        "identity": {name: str(path) for name, path in federation.aggregator},
        "listen": f"127.0.0.1:{port}",
        "database": f"sqlite:///{folder / 'aggregator.sqlite'}",
        "artifacts": str(folder / "artifacts"),
        "lease_seconds": 6,
    }
    path = folder / "aggregator.yaml"
    path.write_text(yaml.safe_dump(document))
    return Process(veilfed("aggregator", "serve", "--config", path), folder / "aggregator")


@asynccontextmanager
async def bench(
    federation: Federation, folder: Path, dimension: int = DIMENSION, institutions: list[str] | None = None
) -> AsyncIterator[Bench]:
    port = free_port()
    made = Bench(federation, folder, start_aggregator(federation, folder, port), port, {}, {})
    async with AsyncExitStack() as stack:
        try:
            await asyncio.to_thread(made.aggregator.ready)
            for seed, name in enumerate(institutions or INSTITUTIONS):
                made.models[name] = LetterModel(dimension)
                oracle = await stack.enter_async_context(
                    serving_oracle(federation, name, made.models[name], folder / f"oracle-{name}")
                )
                made.configs[name] = agent_config(federation, name, folder / name, f"127.0.0.1:{made.port}", oracle)
                write_data(folder / name / "data.csv", seed)
            yield made
        finally:
            made.aggregator.kill()


def counts(job: GetJobResponse, round_number: int) -> dict[str, dict[str, float]]:
    """institution -> name -> accuracy."""
    return {
        client.institution: {e.name: e.correct / e.total for e in client.evaluations}
        for client in job.rounds[round_number].clients
    }


def command(*arguments: str | Path) -> Any:
    done = subprocess.run(veilfed(*arguments, "--json"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@asynchronous
async def test_a_job_from_start_to_end(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        with running(b.configs["north"]) as north, running(b.configs["south"]), running(b.configs["west"]):
            job_id = await b.submit(spec(["north", "south"], ["west"], rounds=4, blocks=4))
            job = await b.ended(job_id)
            assert job.summary.state == "done", job.summary.error
            final = counts(job, 4)
            assert final["north"].keys() == final["south"].keys() == {"personal", "global"}
            # Who only evaluates gives out no more than that.
            assert final["west"].keys() == {"global"}
            assert all(value > 0.75 for values in final.values() for value in values.values())
            assert {name: model.seen for name, model in b.models.items()} == dict.fromkeys(INSTITUTIONS, 100)

            # A second job needs no embedding again; its answers do not wait for anything of the first.
            again = await b.ended(await b.submit(spec(["north", "south"], ["west"], rounds=1, transform="identity")))
            assert again.summary.state == "done"
            assert b.models["north"].seen == 100
            assert await asyncio.to_thread(north.terminate) == 0
            texts = b.folder / "new.txt"
            texts.write_text("aeiouaeiou\n\nbcdfgbcdfg\n")
            arguments = ("predict", "--config", b.configs["north"], "--job", job_id, texts)
            predicted = await asyncio.to_thread(command, *arguments)
        assert [row["class"] for row in predicted] == ["vowels", "consonants"]
        assert [row["input"] for row in predicted] == [f"{texts}:1", f"{texts}:3"]
        assert all(row["probability"] > 0.5 for row in predicted)
        for name in INSTITUTIONS:
            # One receipt for each task of the two jobs.
            assert verify(b.ledger(name), bundle_pem=federation.root.read_bytes()).receipts == 5 + 2
        verify(b.folder / "north" / "state" / "ledger-predict.jsonl")
        left = {record["purpose"] for record in read(b.ledger("west")) if record["kind"] == "message"}
        assert left == {"join", "heartbeat", "describe", "embed", "evaluation"}


@asynchronous
async def test_kills_of_agent_and_aggregator(federation: Federation, tmp_path: Path) -> None:
    """The models of a job whose parties were killed are those of a job that nothing happened to, bit for bit."""
    document = spec(["north", "south"], rounds=6, epochs=20)
    async with bench(federation, tmp_path, institutions=["north", "south"]) as b:
        with running(b.configs["south"]):
            with running(b.configs["north"]) as north:
                quiet = await b.ended(await b.submit(document))
                north.kill()
            disturbed_id = await b.submit(document)
            with running(b.configs["north"]):
                await b.published(disturbed_id, 2)
            await b.restart_aggregator()
            with running(b.configs["north"]):
                await b.published(disturbed_id, 4)
                await b.restart_aggregator()
                disturbed = await b.ended(disturbed_id)
        assert quiet.summary.state == disturbed.summary.state == "done"
        models = [[detail.model_sha256 for detail in job.rounds] for job in (quiet, disturbed)]
        assert models[0] == models[1]
        assert len(set(models[0])) == 7
        assert counts(quiet, 6) == counts(disturbed, 6)
        for name in ("north", "south"):
            verify(b.ledger(name), bundle_pem=federation.root.read_bytes())


@asynchronous
async def test_models_longer_than_a_message(federation: Federation, tmp_path: Path) -> None:
    """22 x 65,536 x 4 bytes: more than a message may hold, so models and updates travel in chunks."""
    classes = ["consonants", "vowels", *(f"class-{number}" for number in range(20))]
    async with bench(federation, tmp_path, 65_536, ["north"]) as b:
        with running(b.configs["north"]):
            document = spec(["north"], rounds=2, transform="identity", dimension=65_536, classes=classes)
            job = await b.ended(await b.submit(document))
        assert job.summary.state == "done", job.summary.error
        uploads = [r for r in read(b.ledger("north")) if r.get("purpose") == "upload" and r["decision"] == "passed"]
        assert sum(record["bytes"] for record in uploads) > 2 * len(classes) * 65_536 * 4


@asynchronous
async def test_an_institution_that_cannot_take_part_is_named(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path, institutions=["north", "south"]) as b:
        write_data(b.folder / "south" / "data.csv", 1, samples=4)
        with running(b.configs["north"]), running(b.configs["south"]):
            document = spec(["north", "south"], rounds=1, classes=["vowels", "else"]) | {"quorum": 1}
            job = await b.ended(await b.submit(document))
        assert job.summary.state == "failed"
        shown = {client.institution: client for client in job.rounds[0].clients}
        for name in ("north", "south"):
            assert shown[name].state == "excluded"
            assert shown[name].code == Code.DATA_INVALID.name
            assert "consonants" not in shown[name].reason
