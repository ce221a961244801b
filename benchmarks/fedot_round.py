"""The share of a FEDOT round over the real services that is not training.

    python -m benchmarks.fedot_round [--task vader] [--rounds 20] [--json FILE]

The demonstration's federation: one institution held out, the others train, every party a process of its own on this
machine. Two jobs: with the task's own number of blocks, and with one block (plain FEDOT, whose steps take longest). A
round lasts from the publication before it to its own; of it, what the slowest institution spent in its training is
training, and the rest is not: evaluation, keeping the result on disk, the egress gate and its ledger, transport,
update gate, database, fold, receipts. Round 0, which embeds the data, is left out. Medians over the rounds.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from veilfed.demo import federation as parties
from veilfed.demo.run import fetch
from veilfed.demo.study import Cell, job_spec
from veilfed.demo.tasks import TASKS, Task
from veilfed.demo.workspace import Workspace
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.packages import default_folder
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2 import SubmitJobRequest, WatchJobRequest
from veilfed.v1.aggregator_pb2_grpc import JobServiceStub


async def published(federation: parties.Federation, spec: str) -> tuple[str, dict[int, int]]:
    """Runs a job; its id, and when each training round was published (milliseconds)."""
    workspace = federation.workspace
    credentials = load_credentials(TlsFiles.in_folder(workspace.admin_folder / "identity"))
    address = federation.addresses["aggregator"]
    with translated(credentials, address):
        async with open_channel(credentials, address, workspace.aggregator) as channel:
            jobs: Any = JobServiceStub(channel)
            job_id = (await jobs.SubmitJob(SubmitJobRequest(spec=spec), timeout=30)).job_id
            times = {}
            async for event in jobs.WatchJob(WatchJobRequest(job_id=job_id)):
                if event.kind == "round_published":
                    times[event.round] = event.time_unix_ms
    return str(job_id), times


def trained(workspace: Workspace, job_id: str) -> dict[int, float]:
    """Milliseconds of the slowest training in each round, by the agents' own logs."""
    slowest: dict[int, float] = {}
    for institution in workspace.institutions:
        log = workspace.log(f"agent-{institution.name}").with_suffix(".err")
        for line in log.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "trained" and entry["job"] == job_id:
                slowest[entry["round"]] = max(slowest.get(entry["round"], 0.0), 1000 * entry["seconds"])
    return slowest


def row(federation: parties.Federation, task: Task, rounds: int) -> dict[str, Any]:
    held_out = list(task.domains)[-1]
    spec = job_spec(task, Cell(held_out, 50, "orthogonal"), rounds)
    job_id, times = asyncio.run(published(federation, spec.model_dump_json()))
    training = trained(federation.workspace, job_id)
    lasted = {number: times[number] - times[number - 1] for number in range(1, rounds)}
    outside = [lasted[number] - training[number] for number in lasted]
    return {
        "blocks": task.blocks,
        "round_ms": round(statistics.median(lasted.values()), 1),
        "training_ms": round(statistics.median(training[number] for number in lasted), 1),
        "outside_ms": round(statistics.median(outside), 1),
        "share": round(statistics.median(o / lasted[n] for n, o in zip(lasted, outside, strict=True)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="vader")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    task, packages = TASKS[options.task], default_folder()
    fetch(task.model, task.name, packages)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder), task)
        with parties.running(workspace, packages, lambda step: None) as federation:
            rows = [row(federation, replace(task, blocks=blocks), options.rounds) for blocks in (task.blocks, 1)]
    document = {"task": task.name, "dimension": task.dimension, "institutions": len(task.domains), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
