"""A whole federation of processes, each of which can be killed, paused and started again on its files and port."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.support.agents import DIMENSION, agent_config, write_data
from tests.support.identities import Federation
from tests.support.processes import Process, free_port, until, veilfed
from tests.support.proxy import Proxy, proxied
from veilfed.identity.material import load_credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import GetJobRequest, GetJobResponse, SubmitJobRequest, WatchJobRequest
from veilfed.v1.aggregator_pb2_grpc import JobServiceStub

__all__ = ["Parties", "Party", "running_parties"]

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 1.5
# Many processes start at once, on a machine that may be busy otherwise.
READY_SECONDS = 240


class Party:
    """One service, whatever process it is at the moment. Its log goes on over restarts."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._arguments, self._log = list(arguments), log
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process(self._arguments, self._log, {"PYTHONPATH": str(ROOT)})

    @property
    def process(self) -> Process:
        assert self._process is not None, "not started"
        return self._process

    def kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGCONT)
            self._process.kill()

    @property
    def log(self) -> str:
        return self.process.err.read_text(errors="replace")

    def says(self, *words: str, after: int = 0, timeout: float = 30.0) -> None:
        """Waits for a line of the log, past its first `after` characters, with all of these words."""

        def said() -> bool:
            return any(all(word in line for word in words) for line in self.log[after:].splitlines())

        until(said, timeout, f"{self._log.name}: {' '.join(words)}")


class Parties:
    """The aggregator, and an oracle and an agent for each institution."""

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        institutions: Sequence[str],
        dimension: int,
        port: int,
        link: Proxy,
        strategies: Mapping[str, Sequence[str]],
        oracle: Mapping[str, Any],
        policies: Mapping[str, Mapping[str, Any]],
        agents: Mapping[str, Any],
    ) -> None:
        self.federation, self.folder, self.dimension, self.port = federation, folder, dimension, port
        self._institutions = list(institutions)
        # The agents' way to the aggregator.
        self.link = link
        # What the policies of some institutions allow; the others allow everything.
        self._strategies = strategies
        # Other rules of the policies of some institutions.
        self._policies = policies
        # Further settings of the agents.
        self._agent_settings = agents
        # Settings of the oracles.
        self._oracle_settings = oracle
        self.aggregator = Party(
            veilfed("aggregator", "serve", "--config", self._aggregator_config()), folder / "aggregator"
        )
        self.oracles: dict[str, Party] = {}
        self.agents: dict[str, Party] = {}
        self._addresses: dict[str, str] = {}
        for seed, name in enumerate(institutions):
            self._addresses[name] = f"127.0.0.1:{free_port()}"
            self.oracles[name] = self._oracle(name)
            write_data(folder / name / "data.csv", seed)
            self.agents[name] = self.agent(name, folder / name)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def agent(self, institution: str, folder: Path, keepalive_seconds: float = 30.0) -> Party:
        """An agent of the institution on data.csv in `folder`, with its state there."""
        config = agent_config(self.federation, institution, folder, self.link.address, self._addresses[institution])
        document = yaml.safe_load(config.read_text())
        document["aggregator"]["keepalive_seconds"] = keepalive_seconds
        document["secure_aggregation"] = {"roster": self._institutions}
        document |= self._agent_settings
        if institution in self._strategies:
            document["policy"]["strategies"] = list(self._strategies[institution])
        document["policy"] |= self._policies.get(institution, {})
        _written(config, document)
        return Party(veilfed("agent", "serve", "--config", config), folder / "agent")

    def twin(self, institution: str, folder: Path, keepalive_seconds: float = 30.0) -> Party:
        """Another agent with the same identity and the same data."""
        folder.mkdir()
        shutil.copy(self.folder / institution / "data.csv", folder / "data.csv")
        return self.agent(institution, folder, keepalive_seconds)

    def _aggregator_config(self) -> Path:
        document = {
            "identity": {name: str(path) for name, path in self.federation.aggregator},
            "listen": self.address,
            "database": f"sqlite:///{self.folder / 'aggregator.sqlite'}",
            "artifacts": str(self.folder / "artifacts"),
            "lease_seconds": LEASE_SECONDS,
        }
        return _written(self.folder / "aggregator.yaml", document)

    def _oracle(self, institution: str) -> Party:
        document = {
            "identity": {name: str(path) for name, path in self.federation.oracles[institution]},
            "listen": self._addresses[institution],
            "model": "minilm",
            "state": str(self.folder / f"oracle-{institution}"),
            "max_batch": 8,
            **self._oracle_settings,
        }
        config = _written(self.folder / f"oracle-{institution}.yaml", document)
        if "folder" in document:  # the real model
            return Party(veilfed("oracle", "serve", "--config", config), self.folder / f"oracle-{institution}")
        arguments = [sys.executable, "-m", "tests.support.oracle_process", str(config), str(self.dimension), "0.02"]
        return Party(arguments, self.folder / f"oracle-{institution}")

    def start(self) -> None:
        """One group after the other: all at once would take each of them longer than it is waited for."""
        for group in ([self.aggregator], self.oracles.values(), self.agents.values()):
            for party in group:
                party.start()
            for party in group:
                party.process.ready(READY_SECONDS)

    def stop(self) -> None:
        for party in (*self.agents.values(), *self.oracles.values(), self.aggregator):
            party.kill()

    # The administrator.

    @asynccontextmanager
    async def jobs(self) -> AsyncIterator[Any]:
        credentials = load_credentials(self.federation.admin)
        async with open_channel(credentials, self.address, self.federation.aggregator_id) as channel:
            with translated(credentials, self.address):
                yield JobServiceStub(channel)

    async def submit(self, document: dict[str, Any]) -> str:
        async with self.jobs() as jobs:
            return str((await jobs.SubmitJob(SubmitJobRequest(spec=json.dumps(document)), timeout=20)).job_id)

    async def happened(self, job_id: str, kind: str, number: int = 0) -> None:
        """Waits for an event of a round."""
        async with asyncio.timeout(60), self.jobs() as jobs:
            async for event in jobs.WatchJob(WatchJobRequest(job_id=job_id)):
                if event.kind == kind and event.round >= number:
                    return
        raise AssertionError(f"the job ended without {kind}")

    async def ended(self, job_id: str, seconds: float = 60.0) -> GetJobResponse:
        async with asyncio.timeout(seconds), self.jobs() as jobs:
            async for _ in jobs.WatchJob(WatchJobRequest(job_id=job_id)):
                pass
            job: GetJobResponse = await jobs.GetJob(GetJobRequest(job_id=job_id), timeout=20)
            return job

    async def events(self, job_id: str) -> list[Any]:
        """Of a job that has ended."""
        async with asyncio.timeout(20), self.jobs() as jobs:
            return [event async for event in jobs.WatchJob(WatchJobRequest(job_id=job_id))]


def _written(path: Path, document: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def running_parties(
    federation: Federation,
    folder: Path,
    institutions: Sequence[str],
    dimension: int = DIMENSION,
    strategies: Mapping[str, Sequence[str]] = MappingProxyType({}),
    oracle: Mapping[str, Any] = MappingProxyType({}),
    policies: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    agents: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Parties]:
    """All of them started and ready; killed when the block ends.

    Oracles have a model that needs no weights, unless their settings in `oracle` name a `folder` of models.
    """
    port = free_port()
    with proxied(f"127.0.0.1:{port}") as link:
        parties = Parties(federation, folder, institutions, dimension, port, link, strategies, oracle, policies, agents)
        try:
            parties.start()
            yield parties
        finally:
            parties.stop()
