"""Rounds and uploads per second: our transport, database and gates over mutual TLS, against Flower in plaintext.

    python -m benchmarks.transport --json FILE

Eight agents of their own processes average a 10 x 768 classifier (small: how many rounds per second) and one of
1000 x 1024 (large: how many megabytes per second arrive). Both systems run in one run, one after the other, `--repeats`
times in turn; the median counts. Flower 1.28 is installed in an environment of its own. Every ratio is ours / peer;
MB = 1e6 bytes; RSS is the server's peak.

One run on two cores with a little other work: 30 rounds per second against 49 (ratio 0.62), 56 MB per second
against 107 (0.52), 210 MB against 548 (0.38). What dominates, in processor time of a round, all processes together:

- Small: 35 ms against the peer's 21. The server has 18 (event loop and grpc 10, of which about a third is sending
  under TLS; the database's thread 6 to 7), each agent 2. The floor, an echo of as many such
  messages by grpc.aio under TLS, is 1.8 for the server and 0.45 for each agent. Of an agent's, grpc and TLS need
  about 0.5, the gate 0.1,
  the ledger's fsync 0.1 to 0.3, the rest is spread thin.
- Large: about 0.8 s against 0.39. A bare grpc.aio stream of 1 MiB messages under TLS needs 1.9 ms per MiB to
  receive and 2.5 to send, so 0.26 s of it are the floor; SHA-256 is made five times of each update (about 0.1 s in
  all).

What was tried, and gave (processor time of a small round, server / each agent, in ms):

- before: 36 / 4.2. Updates taken in batches, statements made once, one connection kept: 22. One transaction fewer
  for the fold's inputs, no second look of the gate at each update, no thread for the ledger's fsync: 19 / 2.6.
  Receipts with the next task instead of messages of their own, kept in batches: 18 / 2.1.
- One heap for all threads (MALLOC_ARENA_MAX=1): 210 MB instead of 360 with large models, no slower.
- Large: a heap that keeps its memory: 1,500 page faults in a round instead of 14,000, the server from 430 ms to 380.
- Large: fewer copies of protobuf's bytes, chunks compared as bytes and not as memoryviews, blocks that fit the
  cache: the server from 590 ms to 390, each agent from 79 to 60.
- No gain: the short updates of a round in a file of theirs instead of in their rows (the database's thread 1.2 ms
  less, making, syncing and removing the file as much more, and a second wait for the disk); uvloop; larger HTTP/2
  frames and windows; a shorter switch interval.
- Not done, as it would weaken a promise: longer messages without chunks, fewer digests, no fsync.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer import peer_python
from benchmarks.result import tell
from veilfed.demo.processes import Process, command
from veilfed.identity.authority import CertificateAuthority, make_identity_files
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.rpc.channel import open_channel
from veilfed.v1.aggregator_pb2 import GetJobRequest, SubmitJobRequest, WatchJobRequest
from veilfed.v1.aggregator_pb2_grpc import JobServiceStub

ROOT = Path(__file__).parents[1]
FEDERATION = "bench.veilfed"
CLIENTS = 8
PEER = "flwr==1.28.0"


@dataclass(frozen=True)
class Size:
    """A job: the shape of its classifier, and enough rounds to time."""

    classes: int
    dimension: int
    rounds: int

    @property
    def megabytes(self) -> float:
        return self.classes * self.dimension * 4 / 1e6


SMALL = Size(10, 768, 200)
LARGE = Size(1000, 1024, 12)


def peak_rss_mb(pid: int) -> float:
    """The process's peak resident memory so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmHWM")


def make_identities(folder: Path, clients: int = CLIENTS) -> None:
    authority = CertificateAuthority.create(folder / "ca", FEDERATION)
    for role, institution, name, target in (
        (Role.AGGREGATOR, "coordinator", "aggregator", "aggregator"),
        (Role.ADMIN, "coordinator", "admin", "admin"),
        *((Role.AGENT, f"site{index}", "agent", f"site{index}") for index in range(clients)),
    ):
        make_identity_files(authority, Identity(FEDERATION, role, institution, name), folder / target)


def start_aggregator(folder: Path) -> tuple[Process, str]:
    files = TlsFiles.in_folder(folder / "aggregator")
    config = folder / "aggregator.json"  # JSON is YAML
    config.write_text(
        json.dumps(
            {
                "identity": {name: str(path) for name, path in files.model_dump().items()},
                "listen": "127.0.0.1:0",
                "database": f"sqlite:///{folder / 'aggregator.sqlite'}",
                "artifacts": str(folder / "artifacts"),
                "log_level": "warning",
            }
        )
    )
    process = Process(command("aggregator", "serve", "--config", config), folder / "aggregator-log")
    return process, f"127.0.0.1:{process.ready()['port']}"


def job(size: Size) -> str:
    sites = [f"site{index}" for index in range(CLIENTS)]
    return json.dumps(
        {
            "name": "transport",
            "strategy": {
                "name": "fedot",
                "classes": [f"class{index}" for index in range(size.classes)],
                "dimension": size.dimension,
            },
            "cohort": {"train": sites},
            "rounds": size.rounds,
            "quorum": CLIENTS,
        }
    )


async def timed_job(folder: Path, address: str, size: Size) -> float:
    """Rounds per second, from the end of the first round to the end of the last."""
    credentials = load_credentials(TlsFiles.in_folder(folder / "admin"))
    aggregator = Identity(FEDERATION, Role.AGGREGATOR, "coordinator", "aggregator")
    ends = []
    async with open_channel(credentials, address, aggregator) as channel:
        jobs = JobServiceStub(channel)
        submitted = await jobs.SubmitJob(SubmitJobRequest(spec=job(size)))
        async for event in jobs.WatchJob(WatchJobRequest(job_id=submitted.job_id)):
            if event.kind == "round_published" and event.round < size.rounds:
                ends.append(time.monotonic())
        shown = await jobs.GetJob(GetJobRequest(job_id=submitted.job_id))
        assert shown.summary.state == "done", shown.summary.error
    assert len(ends) == size.rounds
    return (len(ends) - 1) / (ends[-1] - ends[0])


def ours(size: Size) -> dict[str, float]:
    """One measurement of our side: rounds per second and the aggregator's peak memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_identities(folder)
        server, address = start_aggregator(folder)
        agents = [
            Process(
                [sys.executable, "-m", "benchmarks.transport_agent", str(folder), f"site{index}", address],
                folder / f"site{index}-log",
                {"PYTHONPATH": str(ROOT)},
            )
            for index in range(CLIENTS)
        ]
        try:
            rate = asyncio.run(timed_job(folder, address, size))
            return {"rounds_per_s": rate, "rss_mb": peak_rss_mb(server.pid)}
        finally:
            for process in (*agents, server):
                process.kill()


def peer(size: Size, port: int) -> dict[str, float]:
    """One measurement of the peer."""
    script = Path(__file__).parent / "peers" / "flower_transport.py"
    arguments = [CLIENTS, size.classes, size.dimension, size.rounds, port]
    done = subprocess.run(
        [str(peer_python(PEER)), str(script), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(size: Size, repeats: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for _ in range(repeats):
        found["ours"].append(ours(size))
        found["peer"].append(peer(size, free_port()))
    return found


def median(runs: list[dict[str, float]], field: str) -> float:
    return statistics.median(run[field] for run in runs)


def document(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    rounds = {side: median(small[side], "rounds_per_s") for side in ("ours", "peer")}
    upload = {side: median(large[side], "rounds_per_s") * CLIENTS * LARGE.megabytes for side in ("ours", "peer")}
    memory = {side: median(large[side], "rss_mb") for side in ("ours", "peer")}
    return {
        "clients": CLIENTS,
        "peer": PEER,
        "ours_rounds_per_s": rounds["ours"],
        "peer_rounds_per_s": rounds["peer"],
        "ratio_rounds": rounds["ours"] / rounds["peer"],
        "ours_upload_mb_per_s": upload["ours"],
        "peer_upload_mb_per_s": upload["peer"],
        "ratio_upload": upload["ours"] / upload["peer"],
        "ours_rss_mb": memory["ours"],
        "peer_rss_mb": memory["peer"],
        "ratio_rss": memory["ours"] / memory["peer"],
        "runs": {"10x768": small, "1000x1024": large},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found = document(measure(SMALL, arguments.repeats), measure(LARGE, arguments.repeats))
    tell(found, arguments.json)


if __name__ == "__main__":
    main()
