"""Changes of a job that is done and whose statistics are kept: an institution is added, forgotten, or all solved anew.

Each is one more turn of rounds: one that is folded from the statistics of all that are in the job by then, and a
closing evaluation. An institution is in the job when it has a training task in the state done. The job's specification
never changes; an institution that is added gets one of its own, in which it is named, and keeps it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, select, update

from aggregator.artifacts import Ref
from aggregator.rounds.book import Job
from aggregator.rounds.machine import Machine
from aggregator.rounds.records import Effects, JobState, Live, Part, RoundState, TaskState
from aggregator.store.schema import JobRow, RoundRow, TaskRow
from aggregator.strategies import with_ridge
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.jobs import Cohort

__all__ = ["Changes"]


class Changes(Machine):
    """All methods run in one transaction of the caller; they return the number of the new round, and its effects.

    They raise VeilfedError: NOT_FOUND; JOB_RUNNING; JOB_ENDED for a job that failed or was cancelled, or was changed as
    often as its institutions agreed to; INPUT_INVALID for what makes no sense in the job.
    """

    def add_client(
        self, connection: Connection, job_id: str, institution: str, by: Identity, live: Live
    ) -> tuple[int, Effects]:
        """Asks the institution for its statistics."""
        job, number, model = self._reopen(connection, job_id)
        if number > job.spec.last_round:
            raise VeilfedError(Code.JOB_ENDED, f"job {job_id}: its institutions agreed to {job.spec.changes} changes")
        members = self._members(connection, job_id)
        if institution in members:
            raise VeilfedError(Code.INPUT_INVALID, f"{institution} is in job {job_id} already")
        part = Part(institution, True, True, self._spec_for(connection, job, institution, members))
        effects, opening = Effects(), self._opening(job)
        self._insert_round(connection, job_id, number, model, **opening)
        self._issue(connection, job, number, model, opening["deadline_ms"], live, [part], effects)
        self.event(connection, effects, job_id, "client_asked", round=number, institution=institution, text=f"by {by}")
        return number, effects

    def forget_client(self, connection: Connection, job_id: str, institution: str, by: Identity) -> tuple[int, Effects]:
        """Takes an institution out of the job. Its statistics are to be deleted once this is committed."""
        job, number, model = self._reopen(connection, job_id)
        members = self._members(connection, job_id)
        if institution not in members:
            raise VeilfedError(Code.NOT_FOUND, f"{institution} has no statistics in job {job_id}")
        if len(members) == 1:
            raise VeilfedError(Code.INPUT_INVALID, f"{institution} is the last in job {job_id}: nothing would be left")
        connection.execute(
            update(TaskRow)
            .where(TaskRow.job_id == job_id, TaskRow.institution == institution, *_BROUGHT)
            .values(state=TaskState.FORGOTTEN, update_sha256="")
        )
        effects = self._fold_again(connection, job, number, model)
        text = f"by {by}"
        self.event(connection, effects, job_id, "client_forgotten", round=number, institution=institution, text=text)
        return number, effects

    def resolve(self, connection: Connection, job_id: str, ridge: str, by: Identity) -> tuple[int, Effects]:
        """Solves with another ridge, "gcv" or a number, now and in later changes."""
        job, number, model = self._reopen(connection, job_id)
        with_ridge(job.spec, ridge)
        if number > job.spec.last_round:
            raise VeilfedError(Code.JOB_ENDED, f"job {job_id}: its institutions agreed to {job.spec.changes} changes")
        effects = self._fold_again(connection, job, number, model, ridge=ridge)
        self.event(connection, effects, job_id, "ridge_changed", round=number, text=f"{ridge}, by {by}")
        return number, effects

    def _reopen(self, connection: Connection, job_id: str) -> tuple[Job, int, Ref]:
        """The job, running again; the number of its next round, and its newest model."""
        job = self.job(connection, job_id)
        if not job.strategy.sealed:
            raise VeilfedError(Code.INPUT_INVALID, f"a job of {job.spec.strategy.name} keeps no statistics")
        reopened = connection.execute(
            update(JobRow)
            .where(JobRow.id == job_id, JobRow.state == JobState.DONE)
            .values(state=JobState.RUNNING, ended_ms=0)
        )
        if reopened.rowcount == 0:
            state = connection.execute(select(JobRow.state).where(JobRow.id == job_id)).scalar_one()
            code = Code.JOB_RUNNING if state == JobState.RUNNING else Code.JOB_ENDED
            raise VeilfedError(code, f"job {job_id} is {state}: a job that is done can be changed")
        newest = connection.execute(
            select(RoundRow.number, RoundRow.model_sha256, RoundRow.published_sha256, RoundRow.model_size)
            .where(RoundRow.job_id == job_id)
            .order_by(RoundRow.number.desc())
            .limit(1)
        ).one()
        turn = job.spec.rounds + 1
        # All models of a job have one length.
        model = Ref(newest.published_sha256 or newest.model_sha256, newest.model_size)
        return job, (newest.number // turn + 1) * turn, model

    def _fold_again(self, connection: Connection, job: Job, number: int, model: Ref, **values: Any) -> Effects:
        """A round that asks nobody."""
        now = self.clock()
        times = {"opened_ms": now, "deadline_ms": now, "due_ms": now}
        self._insert_round(connection, job.id, number, model, state=RoundState.FOLDING, **times, **values)
        return Effects(folds={(job.id, number): None})

    def _members(self, connection: Connection, job_id: str) -> dict[str, str]:
        """The institutions in the job, each with its own specification or ""."""
        rows = connection.execute(
            select(TaskRow.institution, TaskRow.spec_json)
            .where(TaskRow.job_id == job_id, *_BROUGHT)
            .order_by(TaskRow.institution)
        )
        return {row.institution: row.spec_json for row in rows}

    def _spec_for(self, connection: Connection, job: Job, institution: str, members: Mapping[str, str]) -> str:
        """The specification of an institution that is added: the one that it got before, if any."""
        if institution in job.spec.cohort.train:
            return ""
        before = connection.execute(
            select(TaskRow.spec_json)
            .where(TaskRow.job_id == job.id, TaskRow.institution == institution, TaskRow.spec_json != "")
            .limit(1)
        ).scalar()
        if before:
            return before
        train = [*members, institution]
        try:
            cohort = Cohort(train=train, evaluate=job.spec.cohort.evaluate)
        except ValidationError:
            what = "evaluates only in" if institution in job.spec.cohort.evaluate else "cannot be named in"
            raise VeilfedError(Code.INPUT_INVALID, f"{institution[:63]!r} {what} job {job.id}") from None
        changed = {"cohort": cohort, "quorum": min(job.spec.quorum, len(train))}
        return job.spec.model_copy(update=changed).model_dump_json()

    def _parts(self, connection: Connection, job: Job, number: int) -> list[Part]:
        """After a change also those that were added, and not those that were forgotten."""
        parts = super()._parts(connection, job, number)
        if number <= job.spec.rounds:
            return parts
        members = self._members(connection, job.id)
        forgotten = set(
            connection.execute(
                select(TaskRow.institution).where(TaskRow.job_id == job.id, TaskRow.state == TaskState.FORGOTTEN)
            ).scalars()
        )
        kept = [part for part in parts if part.institution in members or part.institution not in forgotten]
        added = [Part(name, False, True, spec) for name, spec in members.items() if spec]
        return kept + added


_BROUGHT = (TaskRow.state == TaskState.DONE, TaskRow.trains)
