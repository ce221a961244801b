"""The aggregator's memory over rounds and over clients.

    python -m benchmarks.memory --json FILE

500 rounds of a 10 x 768 classifier with eight agents (their transport, gate and ledger are the real ones), then a job
with eight and one with a hundred light clients, each of them on a fresh aggregator. `rss_growth_mb` is the growth of
the resident memory from the end of the warm-up to the last round; `rss_mb_8` and `rss_mb_100` are what the light
clients leave it at, and `kb_per_client` the difference for one more client, which is its TLS connection, its stream
and its task (`idle_kb_per_client` of it before any work: connection and stream). `bare_kb_per_client` is what one more
client costs a grpc server that does nothing but echo such messages over mutual TLS: it is grpc's, not ours. MB = 1e6
bytes.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import tell
from benchmarks.transport import FEDERATION, ROOT, make_identities, start_aggregator
from veilfed.demo.processes import Process
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.rpc.channel import open_channel
from veilfed.v1.aggregator_pb2 import GetJobRequest, SubmitJobRequest, WatchJobRequest
from veilfed.v1.aggregator_pb2_grpc import JobServiceStub

FEW, MANY = 8, 100
WARM_UP = 100
PER_PROCESS = 25
SAMPLES = 20


def rss_mb(pid: int) -> float:
    """The process's resident memory now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmRSS")


@dataclass
class Bench:
    """An aggregator and its clients, all of them processes."""

    folder: Path
    server: Process
    address: str

    async def job(self, clients: int, rounds: int) -> tuple[float, list[float]]:
        """Runs a job; the memory once all clients are connected, and after each round."""
        credentials = load_credentials(TlsFiles.in_folder(self.folder / "admin"))
        aggregator = Identity(FEDERATION, Role.AGGREGATOR, "coordinator", "aggregator")
        found: list[float] = []
        async with open_channel(credentials, self.address, aggregator) as channel:
            jobs = JobServiceStub(channel)
            await connected(jobs, clients)
            idle = rss_mb(self.server.pid)
            submitted = await jobs.SubmitJob(SubmitJobRequest(spec=specification(clients, rounds)))
            async for event in jobs.WatchJob(WatchJobRequest(job_id=submitted.job_id)):
                if event.kind == "round_published" and event.round < rounds:
                    found.append(rss_mb(self.server.pid))
            state = (await jobs.GetJob(GetJobRequest(job_id=submitted.job_id))).summary
            assert state.state == "done", state.error
        return idle, found


async def connected(jobs: Any, clients: int) -> None:
    """Waits until all clients are there and have taken part in a job of one round."""
    probe = await jobs.SubmitJob(SubmitJobRequest(spec=specification(clients, 1)))
    async for _ in jobs.WatchJob(WatchJobRequest(job_id=probe.job_id)):
        pass


def specification(clients: int, rounds: int) -> str:
    strategy = {"name": "fedot", "classes": [f"class{index}" for index in range(10)], "dimension": 768}
    sites = [f"site{index}" for index in range(clients)]
    return json.dumps(
        {"name": "memory", "strategy": strategy, "cohort": {"train": sites}, "rounds": rounds, "quorum": clients}
    )


@contextmanager
def bench(clients: int, light: bool) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_identities(folder, clients)
        server, address = start_aggregator(folder)
        processes = [server]
        step = PER_PROCESS if light else 1
        module = "benchmarks.light_clients" if light else "benchmarks.transport_agent"
        try:
            for first in range(0, clients, step):
                sites = [f"site{index}" for index in range(first, min(clients, first + step))]
                arguments = [sys.executable, "-m", module, str(folder), ",".join(sites), address]
                processes.append(Process(arguments, folder / f"log-{first}", {"PYTHONPATH": str(ROOT)}))
            yield Bench(folder, server, address)
        finally:
            for process in processes:
                process.kill()


def bare(clients: int) -> float:
    """The memory of a bare grpc server with so many connections that are in use."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_identities(folder, clients)
        module, environment = [sys.executable, "-m", "benchmarks.bare_streams"], {"PYTHONPATH": str(ROOT)}
        server = Process([*module, "serve", str(folder)], folder / "bare-log", environment)
        processes = [server]
        try:
            address = f"127.0.0.1:{server.ready()['port']}"
            for first in range(0, clients, PER_PROCESS):
                sites = ",".join(f"site{index}" for index in range(first, min(clients, first + PER_PROCESS)))
                process = Process([*module, str(folder), sites, address], folder / f"log-{first}", environment)
                processes.append(process)
            for process in processes[1:]:
                process.ready()
            return rss_mb(server.pid)
        finally:
            for process in processes:
                process.kill()


def level(values: list[float]) -> float:
    return statistics.median(values)


def measure(rounds: int, light_rounds: int) -> dict[str, float]:
    with bench(FEW, light=False) as running:
        series = asyncio.run(running.job(FEW, rounds))[1]
    after_warm_up = level(series[WARM_UP : WARM_UP + SAMPLES])
    found = {
        "rounds": float(rounds),
        "warm_up_rounds": float(WARM_UP),
        "rss_mb_after_warm_up": after_warm_up,
        "rss_mb_at_end": level(series[-SAMPLES:]),
        "rss_growth_mb": level(series[-SAMPLES:]) - after_warm_up,
    }
    for clients in (FEW, MANY):
        with bench(clients, light=True) as running:
            idle, series = asyncio.run(running.job(clients, light_rounds))
        found[f"idle_rss_mb_{clients}"] = idle
        found[f"rss_mb_{clients}"] = level(series[-SAMPLES:])
    found["kb_per_client"] = (found["rss_mb_100"] - found["rss_mb_8"]) * 1000 / (MANY - FEW)
    found["idle_kb_per_client"] = (found["idle_rss_mb_100"] - found["idle_rss_mb_8"]) * 1000 / (MANY - FEW)
    found["bare_kb_per_client"] = (bare(MANY) - bare(FEW)) * 1000 / (MANY - FEW)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--light-rounds", type=int, default=60)
    arguments = parser.parse_args()
    tell(measure(arguments.rounds, arguments.light_rounds), arguments.json)


if __name__ == "__main__":
    main()
