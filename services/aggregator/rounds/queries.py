"""What is told about jobs: summaries, details, events. All functions run in one transaction of the caller."""

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, bindparam, or_, select

from aggregator.rounds.book import kept_spec
from aggregator.rounds.records import JobState, TaskState
from aggregator.store.schema import AgentRow, EventRow, JobRow, RoundRow, TaskRow
from aggregator.words import cut, no_such_job
from veilfed.errors import Code, VeilfedError
from veilfed.protocol import MAX_MESSAGE_BYTES
from veilfed.v1.aggregator_pb2 import (
    ClientDetail,
    ClientRound,
    Evaluation,
    GetJobResponse,
    GetReportResponse,
    JobSummary,
    RoundDetail,
    WatchJobResponse,
)

__all__ = [
    "MAX_EVENTS",
    "details",
    "events",
    "is_model",
    "is_running",
    "report",
    "running",
    "sealed",
    "summaries",
    "takes_part",
]

MAX_SUMMARIES = 1000
# Answers stay below the limit of messages, whatever agents gave as reasons: the newest rounds are told, and long words
# are cut.
MAX_CLIENT_ROUNDS = 8000
MAX_DETAILS_BYTES = MAX_MESSAGE_BYTES * 7 // 8
MAX_WORDS_BYTES = 256 * 1024
MAX_ERROR_BYTES = 1000
MAX_EVENTS = 500
# Numbers on the wire may be larger than those of a database.
MAX_NUMBER = 2**63 - 1


def _evaluations(text: str) -> list[Evaluation]:
    return [Evaluation(name=name, correct=correct, total=total) for name, correct, total in json.loads(text)]


def _summary(row: Row[Any]) -> JobSummary:
    return JobSummary(
        job_id=row.id,
        name=row.name,
        strategy=row.strategy,
        state=row.state,
        rounds_published=row.rounds_published,
        rounds=row.rounds,
        created_unix_ms=row.created_ms,
        ended_unix_ms=row.ended_ms,
        error=row.error,
    )


def _job(connection: Connection, job_id: str) -> Row[Any]:
    row = connection.execute(select(JobRow.__table__).where(JobRow.id == job_id)).one_or_none()
    if row is None:
        raise no_such_job(job_id)
    return row


def summaries(connection: Connection, limit: int) -> list[JobSummary]:
    """The newest jobs first; long errors are cut."""
    rows = connection.execute(
        select(JobRow.__table__).order_by(JobRow.created_ms.desc(), JobRow.id).limit(min(limit or 100, MAX_SUMMARIES))
    )
    found = [_summary(row) for row in rows]
    for summary in found:
        summary.error = cut(summary.error, MAX_ERROR_BYTES)
    return found


def details(connection: Connection, job_id: str, connected: Collection[str]) -> GetJobResponse:
    """A job with its rounds (the newest, if there are very many) and clients.

    Raises VeilfedError: NOT_FOUND, STATE_CORRUPT.
    """
    job = _job(connection, job_id)
    spec = kept_spec(job_id, job.spec_json)
    named = spec.cohort.train + spec.cohort.evaluate
    asked = select(TaskRow.institution).where(TaskRow.job_id == job_id, TaskRow.spec_json != "").distinct()
    institutions = named + sorted(connection.execute(asked).scalars())  # those that were added
    answer = GetJobResponse(
        summary=_summary(job), spec_json=job.spec_json, clients=_clients(connection, institutions, connected)
    )
    size, told = answer.ByteSize(), list[RoundDetail]()
    for detail in _newest_rounds(connection, job_id, institutions):
        size += detail.ByteSize() + 8
        if told and size > MAX_DETAILS_BYTES:
            break
        told.append(detail)
    answer.rounds.extend(reversed(told))
    return answer


def _newest_rounds(connection: Connection, job_id: str, institutions: list[str]) -> list[RoundDetail]:
    """The newest first."""
    rounds = connection.execute(
        select(RoundRow.__table__)
        .where(RoundRow.job_id == job_id)
        .order_by(RoundRow.number.desc())
        .limit(max(1, MAX_CLIENT_ROUNDS // len(institutions)))
    ).all()
    tasks: dict[int, list[ClientRound]] = {}
    first = rounds[-1].number if rounds else 0
    for row in connection.execute(
        select(TaskRow.round, TaskRow.institution, TaskRow.state, TaskRow.code, TaskRow.reason, TaskRow.evaluations)
        .where(TaskRow.job_id == job_id, TaskRow.round >= first)
        .order_by(TaskRow.round, TaskRow.institution)
    ):
        tasks.setdefault(row.round, []).append(
            ClientRound(
                institution=row.institution,
                state=row.state,
                code=row.code,
                reason=cut(row.reason, MAX_WORDS_BYTES // len(institutions)),
                evaluations=_evaluations(row.evaluations),
            )
        )
    return [
        RoundDetail(
            round=row.number,
            state=row.state,
            model_sha256=row.model_sha256 if row.opened_ms else "",
            published_sha256=row.published_sha256,
            clients=tasks.get(row.number, []),
        )
        for row in rounds
    ]


def _clients(connection: Connection, institutions: list[str], connected: Collection[str]) -> list[ClientDetail]:
    seen = {
        row.institution: row
        for row in connection.execute(
            select(AgentRow.institution, AgentRow.last_seen_ms, AgentRow.activity)
            .where(AgentRow.institution.in_(institutions))
            .order_by(AgentRow.last_seen_ms)
        )
    }
    return [
        ClientDetail(
            institution=name,
            last_seen_unix_ms=seen[name].last_seen_ms if name in seen else 0,
            activity=cut(seen[name].activity, MAX_WORDS_BYTES // len(institutions)) if name in seen else "",
            connected=name in connected,
        )
        for name in institutions
    ]


def report(connection: Connection, job_id: str, number: int | None) -> GetReportResponse:
    """What is told of the model that a round published, by default the newest. Raises VeilfedError(NOT_FOUND)."""
    _job(connection, job_id)
    rounds = select(RoundRow.number, RoundRow.report).where(RoundRow.job_id == job_id, RoundRow.report != "")
    if number is not None:
        rounds = rounds.where(RoundRow.number == number)
    found = connection.execute(rounds.order_by(RoundRow.number.desc()).limit(1)).one_or_none()
    if found is None:
        what = f"job {job_id} has no report" + ("" if number is None else f" of round {number}")
        raise VeilfedError(
            Code.NOT_FOUND, what, "Analytic jobs and those with privacy have one, once they have published a model."
        )
    return GetReportResponse(round=found.number, report_json=found.report)


def takes_part(connection: Connection, job_id: str, institution: str) -> bool:
    """Whether the institution was asked for something in the job, and not forgotten since."""
    asked = select(TaskRow.token).where(
        TaskRow.job_id == job_id, TaskRow.institution == institution, TaskRow.state != TaskState.FORGOTTEN
    )
    return connection.execute(asked.limit(1)).scalar() is not None


def sealed(connection: Connection, job_id: str) -> set[tuple[str, str]]:
    """(institution, SHA-256) of the sealed updates that a job needs: none unless it is done, or runs."""
    state = connection.execute(_STATE, {"job_id": job_id}).scalar()
    if state not in {JobState.DONE, JobState.RUNNING}:
        return set()
    rows = connection.execute(
        select(TaskRow.institution, TaskRow.update_sha256).where(
            TaskRow.job_id == job_id, TaskRow.state == TaskState.DONE, TaskRow.trains
        )
    )
    return {(row.institution, row.update_sha256) for row in rows}


_STATE = select(JobRow.state).where(JobRow.id == bindparam("job_id"))
_EVENTS = (
    select(EventRow.__table__)
    .where(EventRow.job_id == bindparam("job_id"), EventRow.number > bindparam("after"))
    .order_by(EventRow.number)
    .limit(MAX_EVENTS)
)


def events(connection: Connection, job_id: str, after: int) -> tuple[list[WatchJobResponse], bool]:
    """The next events of a job after a number, up to MAX_EVENTS; and whether no more can come.

    Raises VeilfedError(NOT_FOUND).
    """
    state = connection.execute(_STATE, {"job_id": job_id}).scalar()
    if state is None:
        raise no_such_job(job_id)
    rows = connection.execute(_EVENTS, {"job_id": job_id, "after": min(after, MAX_NUMBER)}).all()
    found = [
        WatchJobResponse(
            number=row.number,
            time_unix_ms=row.time_ms,
            kind=row.kind,
            round=row.round,
            institution=row.institution,
            text=row.text,
            evaluations=_evaluations(row.evaluations),
        )
        for row in rows
    ]
    return found, len(found) < MAX_EVENTS and state != JobState.RUNNING


_IS_MODEL = (
    select(RoundRow.number)
    .where(
        RoundRow.job_id == bindparam("job_id"),
        or_(RoundRow.model_sha256 == bindparam("sha256"), RoundRow.published_sha256 == bindparam("sha256")),
    )
    .limit(1)
)


def is_model(connection: Connection, job_id: str, sha256: str) -> bool:
    """Whether the job started a round from this model or published it."""
    return connection.execute(_IS_MODEL, {"job_id": job_id, "sha256": sha256}).scalar() is not None


def is_running(connection: Connection, job_id: str) -> bool:
    """Whether the job has not ended."""
    return connection.execute(_STATE, {"job_id": job_id}).scalar() == JobState.RUNNING


def running(connection: Connection) -> set[str]:
    """The jobs that have not ended."""
    return set(connection.execute(select(JobRow.id).where(JobRow.state == JobState.RUNNING)).scalars())
