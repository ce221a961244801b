"""The transitions of jobs and rounds. All methods run in one transaction of the caller and return its effects.

    pending --quorum is connected--> open --all answered, grace or deadline over--> folding --model kept--> published
    any of these --quorum out of reach, or deadline without it--> failed;  --an administrator--> cancelled

Round T, the closing evaluation, has nothing to fold and goes from open to published.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, bindparam, insert, select, update

from aggregator.artifacts import Ref
from aggregator.rounds import sessions
from aggregator.rounds.book import Job, evaluations_json
from aggregator.rounds.closing import Closing
from aggregator.rounds.records import (
    OPEN_TASKS,
    Effects,
    JobState,
    Live,
    Offer,
    Refused,
    RoundState,
    TaskState,
)
from aggregator.store.schema import TASKS, AgentRow, JobRow, RoundRow, TaskRow
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.jobs import JobSpec
from veilfed.v1.aggregator_pb2 import Evaluation, LedgerHead

__all__ = ["Claim", "Found", "Machine", "Taken"]


@dataclass(frozen=True)
class Taken:
    """An update that has passed the gate."""

    update_sha256: str
    weight: float
    evaluations: list[Evaluation]
    head: LedgerHead
    # None if they are in a file.
    parameters: bytes | None = None


@dataclass(frozen=True)
class Claim:
    """Who says to answer which task."""

    identity: Identity
    session: str
    job_id: str
    round: int
    token: str


@dataclass(frozen=True)
class Found:
    """The task that a claim names."""

    job_id: str
    round: int
    institution: str
    trains: bool
    token: str


# The statements of the hot path are made once: to make one takes longer than to run it.
_FIND = (
    select(
        TaskRow.job_id,
        TaskRow.round,
        TaskRow.institution,
        TaskRow.trains,
        TaskRow.state,
        TaskRow.token,
        TaskRow.leased_to,
        RoundRow.state.label("round_state"),
        AgentRow.identity.label("session_identity"),
    )
    .join(RoundRow, and_(RoundRow.job_id == TaskRow.job_id, RoundRow.number == TaskRow.round))
    .outerjoin(AgentRow, AgentRow.session == bindparam("session"))
    .where(TaskRow.token == bindparam("token"))
)
_FINISH = (
    update(TASKS)
    .where(TaskRow.token == bindparam("answered"), TaskRow.state.in_(OPEN_TASKS))
    .values(
        {
            name: bindparam(name)
            for name in (
                "state",
                "finished_ms",
                "code",
                "reason",
                "identity",
                "update_sha256",
                "parameters",
                "weight",
                "evaluations",
                "ledger_records",
                "ledger_sha256",
            )
        }
    )
)
_NEW_TASKS = insert(TASKS)


class Machine(Closing):
    """Jobs and rounds from their start; their end is in Closing."""

    # Jobs.

    def submit(self, connection: Connection, spec: JobSpec, model: Ref, live: Live) -> tuple[str, Effects]:
        """A new job, whose round 0 opens now or when a quorum is connected."""
        job_id, effects = f"{spec.name}-{secrets.token_hex(4)}", Effects()
        connection.execute(
            insert(JobRow).values(
                id=job_id,
                name=spec.name,
                strategy=spec.strategy.name,
                spec_json=spec.model_dump_json(),
                state=JobState.RUNNING,
                rounds=spec.rounds,
                created_ms=self.clock(),
            )
        )
        self._insert_round(connection, job_id, 0, model)
        self.event(connection, effects, job_id, "job_submitted", text=spec.name)
        self._open_if_quorum(connection, job_id, live, effects)
        return job_id, effects

    def cancel(self, connection: Connection, job_id: str, by: Identity) -> Effects:
        """Raises VeilfedError: NOT_FOUND, JOB_ENDED."""
        effects = Effects()
        job = self.job(connection, job_id)
        if not self._end_job(
            connection, job.id, JobState.CANCELLED, RoundState.CANCELLED, "the job was cancelled", effects
        ):
            raise VeilfedError(Code.JOB_ENDED, f"job {job_id} has ended already")
        self.event(connection, effects, job_id, "job_cancelled", text=f"by {by}")
        return effects

    def fail_unreadable(self, connection: Connection) -> Effects:
        """Fails the running jobs whose specification cannot be read, so that the others can go on."""
        effects = Effects()
        running = connection.execute(select(JobRow.id).where(JobRow.state == JobState.RUNNING)).scalars().all()
        for job_id in running:
            try:
                self.job(connection, job_id)
            except VeilfedError as error:
                self._end_job(connection, job_id, JobState.FAILED, RoundState.FAILED, error.message, effects)
                self.event(connection, effects, job_id, "job_failed", text=error.message)
        return effects

    def resume(self, connection: Connection) -> Effects:
        """After a start: rounds that are open stay so for a lease's time at least.

        Agents could not answer while the service was down, and what they have trained must not be lost by that.
        """
        due = self.clock() + self.lease_ms
        for column in (RoundRow.due_ms, RoundRow.deadline_ms):
            late = update(RoundRow).where(RoundRow.state == RoundState.OPEN, column < due)
            connection.execute(late.values({column: due}))
        return Effects()

    # Rounds.

    def _insert_round(self, connection: Connection, job_id: str, number: int, model: Ref, **values: Any) -> None:
        """A round in the state pending, unless values say otherwise."""
        row = {"state": RoundState.PENDING, "model_sha256": model.sha256, "model_size": model.size, **values}
        connection.execute(insert(RoundRow).values(job_id=job_id, number=number, **row))

    def _opening(self, job: Job) -> dict[str, Any]:
        """What a round has when it opens now."""
        now = self.clock()
        deadline = now + round(job.spec.deadline_seconds * 1000)
        return {"state": RoundState.OPEN, "opened_ms": now, "deadline_ms": deadline, "due_ms": deadline}

    def open_pending(self, connection: Connection, live: Live, institution: str = "") -> Effects:
        """Opens the rounds whose quorum is connected now; with `institution` of the jobs in which it trains only."""
        effects = Effects()
        pending = (
            connection.execute(select(RoundRow.job_id).where(RoundRow.state == RoundState.PENDING)).scalars().all()
        )
        for job_id in pending:
            if not institution or institution in self.job(connection, job_id).spec.cohort.train:
                self._open_if_quorum(connection, job_id, live, effects)
        return effects

    def _open_if_quorum(self, connection: Connection, job_id: str, live: Live, effects: Effects) -> None:
        spec = self.job(connection, job_id).spec
        if sum(name in live for name in spec.cohort.train) >= spec.quorum:
            self._open_first(connection, job_id, live, effects)

    def _open_first(self, connection: Connection, job_id: str, live: Live, effects: Effects) -> None:
        """Opens the pending round 0."""
        job = self.job(connection, job_id)
        key, opening = and_(RoundRow.job_id == job_id, RoundRow.number == 0), self._opening(job)
        opened = connection.execute(update(RoundRow).where(key, RoundRow.state == RoundState.PENDING).values(**opening))
        if opened.rowcount:
            sha256, size = connection.execute(select(RoundRow.model_sha256, RoundRow.model_size).where(key)).one()
            self._issue(connection, job, 0, Ref(sha256, size), opening["deadline_ms"], live, effects)

    def _issue(
        self,
        connection: Connection,
        job: Job,
        number: int,
        model: Ref,
        deadline_ms: int,
        live: Live,
        effects: Effects,
    ) -> None:
        """Makes the tasks of a round that opens, and leases them to the agents that are connected."""
        lease_ms = self.clock() + self.lease_ms
        tasks = []
        for institution in job.spec.cohort.train + job.spec.cohort.evaluate:
            session, token = live.get(institution, ""), secrets.token_urlsafe(24)
            trains = job.strategy.trains(institution, number)
            tasks.append(
                {
                    "job_id": job.id,
                    "round": number,
                    "institution": institution,
                    "trains": trains,
                    "counts": institution in job.spec.cohort.train,
                    "state": TaskState.LEASED if session else TaskState.WAITING,
                    "token": token,
                    "leased_to": session,
                    "lease_ms": lease_ms if session else 0,
                }
            )
            if session:
                effects.offers.append(Offer(session, job.id, number, trains, token, model, deadline_ms))
        connection.execute(_NEW_TASKS, tasks)
        self.event(connection, effects, job.id, "round_opened", round=number)

    # Answers of the agents.

    def find(self, connection: Connection, claim: Claim) -> Found:
        """The open task that a claim names.

        Raises VeilfedError: SESSION_INVALID, TASK_INVALID, UPDATE_DUPLICATE or ROUND_CLOSED. None of these excludes
        anyone: they say nothing about the institution's update.
        """
        row = connection.execute(_FIND, {"token": claim.token, "session": claim.session}).one_or_none()
        if row is None:
            sessions.check(connection, claim.session, claim.identity)
        elif row.session_identity != str(claim.identity):
            raise sessions.invalid()
        if (
            row is None
            or row.institution != claim.identity.institution
            or (row.job_id, row.round) != (claim.job_id, claim.round)
        ):
            raise VeilfedError(Code.TASK_INVALID, "no task of this institution has this job, round and token")
        where = f"round {row.round} of job {row.job_id}"
        if row.state == TaskState.DONE:
            raise VeilfedError(Code.UPDATE_DUPLICATE, f"an update of this institution is in {where} already")
        if row.state == TaskState.EXCLUDED:
            raise VeilfedError(Code.TASK_INVALID, f"this institution is excluded from {where}")
        if row.round_state != RoundState.OPEN or row.state == TaskState.MISSING:
            raise VeilfedError(Code.ROUND_CLOSED, f"{where} is {row.round_state}")
        if row.state == TaskState.LEASED and row.leased_to != claim.session:
            raise VeilfedError(Code.TASK_INVALID, f"{where} was given to another agent of this institution")
        return Found(row.job_id, row.round, row.institution, row.trains, row.token)

    def accept(self, connection: Connection, claim: Claim, taken: Taken) -> Effects:
        """Takes an update into its round. Raises as `find`."""
        row, effects = self.find(connection, claim), Effects()
        self._finish(
            connection,
            row,
            TaskState.DONE,
            identity=str(claim.identity),
            update_sha256=taken.update_sha256,
            parameters=taken.parameters,
            weight=taken.weight,
            evaluations=(evaluations := evaluations_json(taken.evaluations)),
            ledger_records=taken.head.records,
            ledger_sha256=taken.head.sha256,
        )
        self.event(
            connection,
            effects,
            row.job_id,
            "update_taken" if row.trains else "evaluation_taken",
            round=row.round,
            institution=row.institution,
            evaluations=evaluations,
        )
        self._advance(connection, row.job_id, row.round, effects)
        return effects

    def exclude(self, connection: Connection, claim: Claim, refused: Refused) -> Effects:
        """Leaves the institution out of this round. Raises as `find`."""
        row, effects = self.find(connection, claim), Effects()
        self._finish(connection, row, TaskState.EXCLUDED, code=refused.code, reason=refused.reason)
        self._excluded(connection, row.job_id, row.round, row.institution, refused, effects)
        self._advance(connection, row.job_id, row.round, effects)
        return effects

    def _finish(self, connection: Connection, row: Found, state: TaskState, **values: Any) -> None:
        empty = {"code": "", "reason": "", "identity": "", "update_sha256": "", "parameters": None, "weight": 0.0}
        empty |= {"evaluations": "[]", "ledger_records": 0, "ledger_sha256": ""}
        done = connection.execute(
            _FINISH,
            {**empty, **values, "answered": row.token, "state": state, "finished_ms": self.clock()},
        )
        if done.rowcount != 1:
            raise VeilfedError(Code.UPDATE_DUPLICATE, "the task was answered in the meantime")

    def publish(self, connection: Connection, job_id: str, number: int, model: Ref, live: Live) -> Effects:
        """folding -> published, and the next round opens. Nothing if the job has ended meanwhile."""
        effects = Effects()
        published = connection.execute(
            update(RoundRow)
            .where(RoundRow.job_id == job_id, RoundRow.number == number, RoundRow.state == RoundState.FOLDING)
            .values(state=RoundState.PUBLISHED, published_sha256=model.sha256)
        )
        if published.rowcount:
            self._drop_parameters(connection, job_id, number)
            connection.execute(update(JobRow).where(JobRow.id == job_id).values(rounds_published=number + 1))
            self.event(connection, effects, job_id, "round_published", round=number, text=model.sha256)
            job = self.job(connection, job_id)
            opening = self._opening(job)
            self._insert_round(connection, job_id, number + 1, model, **opening)
            self._issue(connection, job, number + 1, model, opening["deadline_ms"], live, effects)
        return effects

    # Time.

    def tick(self, connection: Connection, live: Live) -> Effects:
        """What time alone brings: closed rounds, ended leases, and folds that were interrupted.

        Rounds that wait for a quorum are looked at too: an agent that was silent may be heard again.
        """
        effects, now = self.open_pending(connection, live), self.clock()
        due = connection.execute(
            select(RoundRow.job_id, RoundRow.number).where(RoundRow.state == RoundState.OPEN, RoundRow.due_ms <= now)
        ).all()
        for row in due:
            self._advance(connection, row.job_id, row.number, effects, due=True)
        for institution in sessions.expire(connection, now):
            if institution in live:
                effects.offers += sessions.offer(connection, live[institution], institution, now, self.lease_ms)
        effects.folds += [key for key in self.folding(connection) if key not in effects.folds]
        return effects
