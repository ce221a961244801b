"""The transitions of jobs and rounds. All methods run in one transaction of the caller and return its effects.

    pending --quorum is connected--> open --all answered, grace or deadline over--> folding --model kept--> published
    with secure aggregation, open --> masking --enough is revealed--> folding
    any of these --quorum out of reach, or deadline without it--> failed;  --an administrator--> cancelled

Round T, the closing evaluation, has nothing to fold and goes from open to published.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, and_, bindparam, insert, select, update

from aggregator.artifacts import Ref
from aggregator.rounds import sessions
from aggregator.rounds.answers import Answers
from aggregator.rounds.book import Job
from aggregator.rounds.closing import round_in
from aggregator.rounds.records import Effects, JobState, Live, Offer, Part, RoundState, TaskState
from aggregator.store.schema import JOBS, ROUNDS, TASKS, JobRow, RoundRow
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.jobs import JobSpec

__all__ = ["Machine"]

# Made once, as in aggregator.rounds.answers.
_NEW_TASKS = insert(TASKS)
_NEW_ROUND = insert(ROUNDS)
_PUBLISH = round_in(RoundState.FOLDING).values(
    state=RoundState.PUBLISHED, published_sha256=bindparam("published_sha256"), report=bindparam("report")
)
_COUNT_PUBLISHED = (
    update(JOBS).where(JobRow.id == bindparam("of_job")).values(rounds_published=bindparam("rounds_published"))
)


class Machine(Answers):
    """Jobs and rounds from their start; what agents answer is in Answers, how rounds end in Closing."""

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
        newest = self._newest_round(connection, job_id)
        change = newest > job.spec.rounds
        if change:
            self._drop_change(connection, job_id, newest)
        state, kind = (JobState.DONE, "change_cancelled") if change else (JobState.CANCELLED, "job_cancelled")
        if not self._end_job(connection, job.id, state, RoundState.CANCELLED, "the job was cancelled", effects):
            raise VeilfedError(Code.JOB_ENDED, f"job {job_id} has ended already")
        self.event(connection, effects, job_id, kind, text=f"by {by}")
        return effects

    def _newest_round(self, connection: Connection, job_id: str) -> int:
        newest = select(RoundRow.number).where(RoundRow.job_id == job_id).order_by(RoundRow.number.desc()).limit(1)
        return int(connection.execute(newest).scalar_one())

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
            late = update(RoundRow).where(RoundRow.state.in_((RoundState.OPEN, RoundState.MASKING)), column < due)
            connection.execute(late.values({column: due}))
        return Effects()

    # Rounds.

    def _insert_round(self, connection: Connection, job_id: str, number: int, model: Ref, **values: Any) -> None:
        """A round in the state pending, unless values say otherwise."""
        row = {"state": RoundState.PENDING, "opened_ms": 0, "deadline_ms": 0, "due_ms": 0, **values}
        row |= {"job_id": job_id, "number": number, "model_sha256": model.sha256, "model_size": model.size}
        connection.execute(_NEW_ROUND, row)

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
            parts = self._parts(connection, job, 0)
            self._issue(connection, job, 0, Ref(sha256, size), opening["deadline_ms"], live, parts, effects)
            self.event(connection, effects, job_id, "round_opened", round=0)

    def _parts(self, connection: Connection, job: Job, number: int) -> list[Part]:
        """Who has a task in a round."""
        evaluated = number > 0 or job.strategy.evaluates_first
        return [
            Part(institution, job.strategy.trains(institution, number), institution in job.spec.cohort.train)
            for institution in job.spec.cohort.train + (job.spec.cohort.evaluate if evaluated else [])
        ]

    def _issue(
        self,
        connection: Connection,
        job: Job,
        number: int,
        model: Ref,
        deadline_ms: int,
        live: Live,
        parts: Sequence[Part],
        effects: Effects,
    ) -> None:
        """Makes the tasks of a round that opens, and leases them to the agents that are connected."""
        lease_ms = self.clock() + self.lease_ms
        tasks = []
        for part in parts:
            session, token = live.get(part.institution, ""), secrets.token_urlsafe(24)
            tasks.append(
                {
                    "job_id": job.id,
                    "round": number,
                    "institution": part.institution,
                    "trains": part.trains,
                    "counts": part.counts,
                    "state": TaskState.LEASED if session else TaskState.WAITING,
                    "token": token,
                    "leased_to": session,
                    "lease_ms": lease_ms if session else 0,
                    "spec_json": part.spec_json,
                }
            )
            if session:
                offer = Offer(session, job.id, number, part.trains, token, model, deadline_ms, part.spec_json)
                effects.offers.append(offer)
        connection.execute(_NEW_TASKS, tasks)

    def publish(
        self, connection: Connection, job_id: str, number: int, model: Ref, live: Live, report: str = ""
    ) -> Effects:
        """folding -> published, and the next round opens. Nothing if the job has ended meanwhile."""
        effects, happened = Effects(), list[tuple[str, str, dict[str, Any]]]()
        published = connection.execute(
            _PUBLISH, {"of_job": job_id, "round": number, "published_sha256": model.sha256, "report": report}
        )
        if published.rowcount:
            self._drop_parameters(connection, job_id, number)
            job = self.job(connection, job_id)
            if job.spec.secure_aggregation is not None:
                self._drop_masks(connection, job_id, number)
            happened.append((job_id, "round_published", {"round": number, "text": model.sha256}))
            if number < job.spec.rounds:
                connection.execute(_COUNT_PUBLISHED, {"of_job": job_id, "rounds_published": number + 1})
            if number < job.spec.last_round:
                opening = self._opening(job)
                self._insert_round(connection, job_id, number + 1, model, **opening)
                parts = self._parts(connection, job, number + 1)
                self._issue(connection, job, number + 1, model, opening["deadline_ms"], live, parts, effects)
                happened.append((job_id, "round_opened", {"round": number + 1}))
            else:  # nobody agreed to be asked so often
                self._end_job(connection, job_id, JobState.DONE, RoundState.FAILED, "", effects)
                happened.append((job_id, "job_done", {"round": number}))
            self.events(connection, effects, happened)
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
        for key in self.folding(connection):
            effects.folds.setdefault(key)
        return effects
