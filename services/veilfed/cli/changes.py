"""`veilfed job add-client, forget, resolve, report`: changes of jobs whose statistics are kept, and what they gave."""

import json
from typing import Annotated, Any

import typer

from veilfed.cli import output
from veilfed.cli.admin import CALL_SECONDS, Admin, AdminConfig, JobId, run, settings_of
from veilfed.cli.groups import taking
from veilfed.cli.job import app
from veilfed.v1.aggregator_pb2 import (
    AddClientRequest,
    ForgetClientRequest,
    GetJobRequest,
    GetReportRequest,
    ResolveJobRequest,
)

__all__ = ["app"]

# Lists in a report that have a value for each class.
COLUMN = "class_"

Institution = Annotated[str, typer.Argument(metavar="INSTITUTION", help="The institution's name in its identity.")]


@app.command("add-client")
@taking(settings_of)
def add_client(
    settings: AdminConfig,
    job_id: JobId,
    institution: Institution,
    as_json: output.Json = False,
) -> None:
    """Asks an institution for its statistics and publishes a model with them. Analytic jobs that are done."""
    request = AddClientRequest(job_id=job_id, institution=institution)

    async def call(admin: Admin) -> int:
        return int((await admin.jobs.AddClient(request, timeout=CALL_SECONDS)).round)

    number = run(settings, call)
    _begun(job_id, number, f"{institution} is asked for its statistics", as_json)


@app.command()
@taking(settings_of)
def forget(
    settings: AdminConfig,
    job_id: JobId,
    institution: Institution,
    as_json: output.Json = False,
) -> None:
    """Deletes an institution's statistics and publishes the model without them. Analytic jobs that are done."""
    request = ForgetClientRequest(job_id=job_id, institution=institution)

    async def call(admin: Admin) -> int:
        return int((await admin.jobs.ForgetClient(request, timeout=CALL_SECONDS)).round)

    number = run(settings, call)
    _begun(job_id, number, f"the statistics of {institution} are deleted", as_json)


@app.command()
@taking(settings_of)
def resolve(
    settings: AdminConfig,
    job_id: JobId,
    ridge: Annotated[str, typer.Option("--ridge", help="gcv, or a number from 0 on.")],
    as_json: output.Json = False,
) -> None:
    """Solves with another ridge, now and in later changes; no institution is asked for statistics. Jobs of afl."""
    request = ResolveJobRequest(job_id=job_id, ridge=ridge)

    async def call(admin: Admin) -> int:
        return int((await admin.jobs.ResolveJob(request, timeout=CALL_SECONDS)).round)

    number = run(settings, call)
    _begun(job_id, number, f"solved with ridge {ridge}", as_json)


def _begun(job_id: str, number: int, what: str, as_json: bool) -> None:
    text = f"{job_id}, round {number}: {what}. Its model is published in this round; see `veilfed job watch`."
    output.result({"job_id": job_id, "round": number}, text, as_json)


@app.command()
@taking(settings_of)
def report(
    settings: AdminConfig,
    job_id: JobId,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="The round that published; the last by default.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """The model card of a job that has one: of an analytic job, and what a job with privacy has spent."""
    request = GetReportRequest(job_id=job_id)
    if round_number is not None:
        request.round = round_number

    async def call(admin: Admin) -> dict[str, Any]:
        found = await admin.jobs.GetReport(request, timeout=CALL_SECONDS)
        job = await admin.jobs.GetJob(GetJobRequest(job_id=job_id), timeout=CALL_SECONDS)
        names = json.loads(job.spec_json)["strategy"]["classes"]
        return {"job_id": job_id, "round": int(found.round), **_named(json.loads(found.report_json), names)}

    document = run(settings, call)
    output.result(document, None, as_json)
    if not as_json:
        _show(document)


def _named(told: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """With a row for each class in place of the columns that come over the wire."""
    if not any(name.startswith(COLUMN) for name in told):  # of a job whose report is about its privacy alone
        return told
    columns = {column: told.pop(column) for column in list(told) if column.startswith(COLUMN)}
    rows = [
        {"class": name, **{column.removeprefix(COLUMN): values[at] for column, values in columns.items()}}
        for at, name in enumerate(names)
    ]
    return {**told, "classes": rows, "unpublished": [row["class"] for row in rows if not row["published"]]}


def _show(document: dict[str, Any]) -> None:
    facts = [(name, _plain(value)) for name, value in document.items() if not isinstance(value, list | dict)]
    output.result(None, output.table(("", "value"), facts, "Model card"))
    if "privacy" in document:
        facts = [(name, _plain(value)) for name, value in document["privacy"].items()]
        output.result(None, output.table(("", "value"), facts, "Privacy of each institution, by the specification"))
    for title in ("institutions", "classes"):
        rows = document.get(title)
        if not rows:
            continue
        cells = [[_plain(value) for value in row.values()] for row in rows]
        output.result(None, output.table(list(rows[0]), cells, title.capitalize()))
    if document.get("unpublished"):
        output.result(None, f"Without weights, for they have too few samples: {', '.join(document['unpublished'])}")


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
