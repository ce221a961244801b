"""`veilfed job` and `veilfed aggregator` as processes, against an aggregator over mutual TLS."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import Process, until, veilfed
from tests.support.scripted_agent import ScriptedAgent
from veilfed.errors import Code
from veilfed.protocol import MAX_MESSAGE_BYTES
from veilfed.wire.class_vectors import write_class_vectors


@pytest.fixture(scope="module")
def aggregator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregator]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), ["north"])
    with running_aggregator(federation, tmp_path_factory.mktemp("aggregator")) as started:
        yield started


def admin_config(aggregator: Aggregator, folder: Path) -> Path:
    path = folder / "admin.yaml"
    federation = aggregator.federation
    document = {
        "identity": str(federation.admin.certificate.parent),
        "aggregator": aggregator.address,
        "aggregator_id": str(federation.aggregator_id),
    }
    path.write_text(yaml.safe_dump(document))
    return path


async def job(*arguments: str | Path, code: int = 0) -> Any:
    """What `veilfed job ... --json` prints: one document, or one per line; of a failure, the error."""
    command = veilfed("job", *arguments, "--json")
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    text = done.stdout if code == 0 else done.stderr
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def agent(aggregator: Aggregator) -> ScriptedAgent:
    federation: Federation = aggregator.federation
    return ScriptedAgent(federation.agents["north"], aggregator.address, federation.aggregator_id)


@asynchronous
async def test_a_job_by_its_commands(aggregator: Aggregator, tmp_path: Path) -> None:
    config = admin_config(aggregator, tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_spec(["north"], rounds=2)))
    job_id = (await job("submit", file, "--config", config))["job_id"]
    listed = await job("list", "--config", config)
    assert [(item["job_id"], item["state"]) for item in listed] == [(job_id, "running")]
    none = await job("fetch", job_id, "--out", tmp_path / "none", "--config", config, code=Code.NOT_FOUND.exit_code)
    assert none["error"] == "NOT_FOUND"
    other = await job("show", "another", "--config", config, code=Code.NOT_FOUND.exit_code)
    assert other["message"] == "there is no job another"
    async with agent(aggregator) as north:
        working = asyncio.create_task(north.work())
        events = await job("watch", job_id, "--config", config)
        shown = await job("show", job_id, "--config", config)
        working.cancel()
    assert [event["kind"] for event in events][-1] == "job_done"
    assert all(isinstance(event["number"], int) and isinstance(event["time_unix_ms"], int) for event in events)
    assert shown["summary"]["state"] == "done"
    assert shown["clients"][0]["institution"] == "north"
    assert shown["clients"][0]["last_seen_unix_ms"] > 0
    assert shown["rounds"][2]["clients"][0]["evaluations"] == [{"name": "global", "correct": 3, "total": 4}]

    fetched = await job("fetch", job_id, "--out", tmp_path / "model.npz", "--config", config)
    assert (fetched["round"], fetched["tensors"]) == (1, {"classifier": [2, 4]})
    first = await job("fetch", job_id, "--out", tmp_path / "first.bin", "--round", "0", "--config", config)
    assert first["sha256"] == shown["rounds"][0]["published_sha256"]
    with np.load(tmp_path / "model.npz") as arrays:
        assert arrays["classifier"].shape == (2, 4)
        assert arrays["classifier"].dtype == np.float32
    ended = await job("cancel", job_id, "--config", config, code=Code.JOB_ENDED.exit_code)
    assert ended["error"] == "JOB_ENDED"


@asynchronous
async def test_options_and_text(aggregator: Aggregator, tmp_path: Path) -> None:
    config = admin_config(aggregator, tmp_path)
    settings = yaml.safe_load(config.read_text())
    options = ["--identity", settings["identity"], "--aggregator", settings["aggregator"]]
    missing = await job("list", *options, code=Code.CONFIG_INVALID.exit_code)
    assert "aggregator-id" in missing["message"]
    assert "VEILFED_ADMIN_AGGREGATOR_ID" in missing["hint"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_spec(["north"])))
    options += ["--aggregator-id", settings["aggregator_id"]]
    job_id = (await job("submit", file, *options))["job_id"]
    for words in (["show", job_id], ["list"]):
        command = veilfed("job", *words, *options)
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
        assert job_id in done.stdout
    assert (await job("cancel", job_id, *options))["state"] == "cancelled"
    file.write_text("name: x")
    invalid = await job("submit", file, *options, code=Code.JOB_INVALID.exit_code)
    assert str(file) in invalid["message"]


@asynchronous
async def test_watching_a_job_that_fails(aggregator: Aggregator, tmp_path: Path) -> None:
    config = admin_config(aggregator, tmp_path)
    async with aggregator.admin() as admin, agent(aggregator) as north:
        job_id = await admin.submit(job_spec(["north"]))
        await north.refuse(await north.task(), "POLICY_DENIED", "not today")
        await admin.ended(job_id)
    failed = await asyncio.to_thread(
        subprocess.run,
        veilfed("job", "watch", job_id, "--config", config),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert failed.returncode == Code.JOB_FAILED.exit_code
    assert "POLICY_DENIED: not today" in failed.stderr


@asynchronous
async def test_a_watch_that_is_interrupted_says_so_and_is_no_success(aggregator: Aggregator, tmp_path: Path) -> None:
    config = admin_config(aggregator, tmp_path)
    async with aggregator.admin() as admin:
        job_id = await admin.submit(job_spec(["north"]))
        # A signal that is ignored here, as in what a shell runs in the background, would be ignored by the command too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            watching = Process(veilfed("job", "watch", job_id, "--config", config), tmp_path / "watch")
        finally:
            signal.signal(signal.SIGINT, before)
        await asyncio.to_thread(until, lambda: "job_submitted" in watching.out.read_text(), 60, "an event")
        watching.signal(signal.SIGINT)
        assert await asyncio.to_thread(watching.wait, 60) == Code.CANCELLED.exit_code
        await admin.cancel(job_id)
    assert watching.err.read_text().splitlines() == [
        "error CANCELLED: stopped by the user",
        f"hint: {Code.CANCELLED.hint}",
    ]


@asynchronous
async def test_class_vectors_that_no_message_holds(aggregator: Aggregator, tmp_path: Path) -> None:
    config, file, vectors = admin_config(aggregator, tmp_path), tmp_path / "job.yaml", tmp_path / "vectors.npz"
    classes, dimension = [f"class-{number}" for number in range(20)], 65_536
    strategy = {"classes": classes, "dimension": dimension, "initial": "class_vectors"}
    file.write_text(yaml.safe_dump(job_spec(["north"], strategy=strategy)))
    write_class_vectors(vectors, classes, np.ones((len(classes), dimension), np.float32))
    code = Code.MESSAGE_TOO_LARGE.exit_code
    told = await job("submit", file, "--class-vectors", vectors, "--config", config, code=code)
    assert str(vectors) in told["message"]
    assert str(MAX_MESSAGE_BYTES) in told["message"]


def test_the_aggregator_does_not_start_with_another_role(aggregator: Aggregator, tmp_path: Path) -> None:
    files = aggregator.federation.admin
    config = tmp_path / "aggregator.yaml"
    identity = {"certificate": str(files.certificate), "key": str(files.key), "bundle": str(files.bundle)}
    config.write_text(yaml.safe_dump({"identity": identity, "artifacts": str(tmp_path / "artifacts")}))
    command = veilfed("aggregator", "serve", "--config", config)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Code.IDENTITY_INVALID.exit_code
    assert "not the identity of an aggregator" in done.stderr


def test_one_aggregator_per_folder(aggregator: Aggregator) -> None:
    command = veilfed("aggregator", "serve", "--config", aggregator.folder / "aggregator.yaml")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Code.FILE_UNUSABLE.exit_code
    assert "another aggregator" in done.stderr
