"""`veilfed job`: submit, list, show, watch, cancel and fetch, for administrators; see also veilfed.cli.changes."""

import hashlib
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from veilfed.cli import output
from veilfed.cli.admin import CALL_SECONDS, Admin, AdminConfig, JobId, run, settings_of
from veilfed.cli.groups import taking
from veilfed.config import MAX_YAML_BYTES
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.identity.material import read_file
from veilfed.jobs import parse_job
from veilfed.protocol import MAX_MESSAGE_BYTES
from veilfed.rpc.progress import moving
from veilfed.v1.aggregator_pb2 import (
    CancelJobRequest,
    Evaluation,
    FetchRequest,
    GetJobRequest,
    GetJobResponse,
    JobSummary,
    ListJobsRequest,
    SubmitJobRequest,
    WatchJobRequest,
    WatchJobResponse,
)
from veilfed.wire.class_vectors import read_class_vectors
from veilfed.wire.tensors import parse_map, to_tensor

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Jobs at the aggregator, for administrators.")


def _document(message: Message) -> dict[str, Any]:
    """A message as plain JSON, with all fields and their names in the protos."""
    document: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    numbered: dict[str, Any] = _numbers(document)
    return numbered


_NUMBERS = ("_unix_ms", "number", "correct", "total", "size")


def _numbers(value: Any, key: str = "") -> Any:
    """64-bit integers as numbers: protobuf's JSON has them as text."""
    if isinstance(value, dict):
        return {name: _numbers(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part, key) for part in value]
    return int(value) if isinstance(value, str) and key.endswith(_NUMBERS) else value


def _time(unix_ms: int) -> str:
    if unix_ms == 0:
        return ""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _accuracies(evaluations: list[Evaluation]) -> str:
    return ", ".join(f"{item.name} {item.correct / item.total:.3f} of {item.total}" for item in evaluations)


@app.command()
@taking(settings_of)
def submit(
    settings: AdminConfig,
    file: Annotated[Path, typer.Argument(help="The job's specification (YAML or JSON).")],
    class_vectors: Annotated[
        Path | None, typer.Option("--class-vectors", help="NAME.npz, as `veilfed agent class-vectors` makes it.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Submits a job and prints its id."""
    data = read_file(file)
    if len(data) > MAX_YAML_BYTES:
        raise VeilfedError(Code.JOB_INVALID, f"{file}: longer than {MAX_YAML_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise VeilfedError(Code.JOB_INVALID, f"{file}: not UTF-8 text") from None
    spec, request = parse_job(text, str(file)), SubmitJobRequest(spec=text)
    if class_vectors is not None:
        request.class_vectors.CopyFrom(to_tensor(read_class_vectors(class_vectors, spec.strategy.classes)))
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            raise VeilfedError(
                Code.MESSAGE_TOO_LARGE,
                f"{class_vectors}: {request.ByteSize()} bytes with the job, and a message holds {MAX_MESSAGE_BYTES}",
                "Class vectors travel in one message: use fewer classes, or a model of a smaller dimension.",
            )

    async def call(admin: Admin) -> str:
        return str((await admin.jobs.SubmitJob(request, timeout=CALL_SECONDS)).job_id)

    job_id = run(settings, call)
    output.result({"job_id": job_id}, job_id, as_json)


@app.command("list")
@taking(settings_of)
def list_jobs(
    settings: AdminConfig,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many, newest first.")] = 100,
    as_json: output.Json = False,
) -> None:
    """Lists the jobs, newest first."""

    async def call(admin: Admin) -> list[JobSummary]:
        return list((await admin.jobs.ListJobs(ListJobsRequest(limit=limit), timeout=CALL_SECONDS)).jobs)

    jobs = run(settings, call)
    rows = [
        (job.job_id, job.strategy, job.state, f"{job.rounds_published}/{job.rounds}", _time(job.created_unix_ms))
        for job in jobs
    ]
    shown = output.table(("job", "strategy", "state", "rounds", "created"), rows)
    output.result([_document(job) for job in jobs], shown, as_json)


@app.command()
@taking(settings_of)
def show(
    settings: AdminConfig,
    job_id: JobId,
    as_json: output.Json = False,
) -> None:
    """Shows a job: its state, its clients with last seen, what each did in the last round."""

    async def call(admin: Admin) -> GetJobResponse:
        found: GetJobResponse = await admin.jobs.GetJob(GetJobRequest(job_id=job_id), timeout=CALL_SECONDS)
        return found

    job = run(settings, call)
    output.result(_document(job), None, as_json)
    if not as_json:
        _show(job)


def _show(job: GetJobResponse) -> None:
    summary = job.summary
    lines = [
        f"{summary.job_id}: {summary.state}, {summary.rounds_published} of {summary.rounds} rounds published",
        f"created {_time(summary.created_unix_ms)}",
    ]
    if summary.ended_unix_ms:
        lines.append(f"ended {_time(summary.ended_unix_ms)}")
    if summary.error:
        lines.append(f"failed: {summary.error}")
    output.result(None, "\n".join(lines))
    clients = [
        (
            client.institution,
            "connected" if client.connected else "not connected",
            _time(client.last_seen_unix_ms) or "never",
            client.activity,
        )
        for client in job.clients
    ]
    output.result(None, output.table(("institution", "", "last seen", "activity"), clients, "Clients"))
    if job.rounds:
        last = job.rounds[-1]
        rows = [
            (
                client.institution,
                client.state,
                f"{client.code}: {client.reason}" if client.code else client.reason,
                _accuracies(list(client.evaluations)),
            )
            for client in last.clients
        ]
        title = f"Round {last.round}, {last.state}"
        output.result(None, output.table(("institution", "state", "reason", "accuracy"), rows, title))


@app.command()
@taking(settings_of)
def watch(
    settings: AdminConfig,
    job_id: JobId,
    after: Annotated[int, typer.Option(min=0, help="Only events with a greater number.")] = 0,
    as_json: output.Json = False,
) -> None:
    """Prints the events of a job until it has ended. Ends with JOB_FAILED if the job failed."""

    async def call(admin: Admin) -> JobSummary:
        async for event in admin.jobs.WatchJob(WatchJobRequest(job_id=job_id, after=after)):
            _print_event(event, as_json)
        summary: JobSummary = (await admin.jobs.GetJob(GetJobRequest(job_id=job_id), timeout=CALL_SECONDS)).summary
        return summary

    summary = run(settings, call)
    if summary.state == "failed":
        raise VeilfedError(Code.JOB_FAILED, f"{job_id}: {summary.error}")


def _print_event(event: WatchJobResponse, as_json: bool) -> None:
    """One line per event; with --json one document per line, so that it can be read while it grows."""
    if as_json:
        output.line(_document(event))
        return
    words = [_time(event.time_unix_ms), f"round {event.round}", event.kind, event.institution, event.text]
    words.append(_accuracies(list(event.evaluations)))
    output.result(None, "  ".join(word for word in words if word))


@app.command()
@taking(settings_of)
def cancel(
    settings: AdminConfig,
    job_id: JobId,
    as_json: output.Json = False,
) -> None:
    """Cancels a job; its published models stay."""

    async def call(admin: Admin) -> None:
        await admin.jobs.CancelJob(CancelJobRequest(job_id=job_id), timeout=CALL_SECONDS)

    run(settings, call)
    output.result({"job_id": job_id, "state": "cancelled"}, f"{job_id} is cancelled", as_json)


@app.command()
@taking(settings_of)
def fetch(
    settings: AdminConfig,
    job_id: JobId,
    out: Annotated[Path, typer.Option("--out", help="NAME.npz for NumPy; else the bytes of a TensorMap message.")],
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="The model that this round published; the last by default.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Downloads a published model and checks its digest."""

    async def call(admin: Admin) -> tuple[int, str, bytes]:
        job = await admin.jobs.GetJob(GetJobRequest(job_id=job_id), timeout=CALL_SECONDS)
        number, sha256 = _published(job, round_number)
        data = bytearray()
        async for response in moving(
            admin.coordinator.Fetch(FetchRequest(job_id=job_id, sha256=sha256)), "the download"
        ):
            data += response.chunk
        return number, sha256, bytes(data)

    number, sha256, data = run(settings, call)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise VeilfedError(Code.ARTIFACT_INVALID, f"{job_id}: the download does not have its SHA-256", "Fetch again.")
    arrays = parse_map(data)
    if out.suffix == ".npz":
        packed = io.BytesIO()
        np.savez(packed, **arrays)  # type: ignore[arg-type]
        data = packed.getvalue()
    write_atomic(out, data, 0o644)
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    document = {"job_id": job_id, "round": number, "sha256": sha256, "file": str(out), "tensors": shapes}
    output.result(document, f"{out}: the model that round {number} published, SHA-256 {sha256}", as_json)


def _published(job: GetJobResponse, number: int | None) -> tuple[int, str]:
    """(round, SHA-256) of a published model."""
    found = {detail.round: detail.published_sha256 for detail in job.rounds if detail.published_sha256}
    chosen = max(found, default=-1) if number is None else number
    if chosen not in found:
        what = "no model yet" if number is None else f"no model in round {number}, or too long ago to be listed"
        hint = "See `veilfed job show` for what it has published."
        raise VeilfedError(Code.NOT_FOUND, f"{job.summary.job_id} has published {what}", hint)
    return chosen, found[chosen]
