"""How a round ends: everybody has answered, time is over, or the quorum is out of reach."""

from sqlalchemy import Connection, Update, and_, bindparam, delete, func, select, update

from aggregator.rounds.book import Book, Job
from aggregator.rounds.records import (
    OPEN_TASKS,
    Effects,
    Ended,
    Input,
    Inputs,
    JobState,
    Refused,
    RoundState,
    TaskState,
)
from aggregator.store.schema import ROUNDS, TASKS, AgentRow, JobRow, MaskRow, RoundRow, TaskRow
from veilfed.errors import Code

__all__ = ["Closing", "round_in"]


_TALLY = (
    select(TaskRow.counts, TaskRow.state, func.count())
    .where(TaskRow.job_id == bindparam("job_id"), TaskRow.round == bindparam("number"))
    .group_by(TaskRow.counts, TaskRow.state)
)
_DROP_PARAMETERS = (
    update(TASKS)
    .where(TaskRow.job_id == bindparam("of_job"), TaskRow.round >= bindparam("since"), TaskRow.parameters.is_not(None))
    .values(parameters=None)
)


def round_in(state: RoundState) -> Update:
    """An update of one round, of_job and round, that does nothing unless the round is in this state."""
    key = and_(RoundRow.job_id == bindparam("of_job"), RoundRow.number == bindparam("round"))
    return update(ROUNDS).where(key, RoundRow.state == state)


_CLOSE = round_in(RoundState.OPEN).values(state=bindparam("new_state"))
_ALL_INPUTS = (
    select(RoundRow.model_sha256, TaskRow.institution, TaskRow.weight, TaskRow.update_sha256, TaskRow.parameters)
    .join(RoundRow, and_(RoundRow.job_id == TaskRow.job_id, RoundRow.number == TaskRow.round))
    .where(TaskRow.job_id == bindparam("job_id"), TaskRow.state == TaskState.DONE, TaskRow.trains)
    .order_by(TaskRow.institution)
)
_INPUTS = _ALL_INPUTS.where(TaskRow.round == bindparam("number"))
_RIDGE = (
    select(RoundRow.ridge)
    .where(RoundRow.job_id == bindparam("job_id"), RoundRow.number <= bindparam("number"), RoundRow.ridge != "")
    .order_by(RoundRow.number.desc())
    .limit(1)
)


class Closing(Book):
    """All methods run in one transaction of the caller."""

    def _end_job(
        self, connection: Connection, job_id: str, state: JobState, round_state: RoundState, why: str, effects: Effects
    ) -> bool:
        """Ends a running job and its current round; False if it was not running."""
        error = why if state is JobState.FAILED else ""
        ended = connection.execute(
            update(JobRow)
            .where(JobRow.id == job_id, JobRow.state == JobState.RUNNING)
            .values(state=state, ended_ms=self.clock(), error=error)
        )
        if ended.rowcount == 0:
            return False
        current = (RoundState.PENDING, RoundState.OPEN, RoundState.MASKING, RoundState.FOLDING)
        connection.execute(
            update(RoundRow).where(RoundRow.job_id == job_id, RoundRow.state.in_(current)).values(state=round_state)
        )
        self._end_tasks(connection, job_id, None, why, effects)
        self._drop_parameters(connection, job_id)
        self._drop_masks(connection, job_id)
        effects.jobs_ended.add(job_id)
        return True

    def _excluded(
        self, connection: Connection, job_id: str, number: int, institution: str, refused: Refused, effects: Effects
    ) -> None:
        text = f"{refused.code}: {refused.reason}"
        self.event(connection, effects, job_id, "client_excluded", round=number, institution=institution, text=text)

    def _advance(self, connection: Connection, job_id: str, number: int, effects: Effects, due: bool = False) -> None:
        """Closes the round if it is time: all have answered, or `due`, or the quorum is out of reach."""
        job = self.job(connection, job_id)
        tally = {
            (counts, state): n for counts, state, n in connection.execute(_TALLY, {"job_id": job_id, "number": number})
        }
        done, quorum = tally.get((True, TaskState.DONE), 0), _quorum(job, number)
        possible = sum(n for (counts, state), n in tally.items() if counts and state != TaskState.EXCLUDED)
        waiting = any(state in OPEN_TASKS for _, state in tally)
        if possible < quorum:
            self._fail(connection, job, number, f"{possible} updates are still possible", effects)
        elif done >= quorum and (due or not waiting or job.spec.grace_seconds == 0):
            self._close(connection, job, number, waiting, effects)
        elif due:
            self._fail(connection, job, number, f"{done} updates had come by the deadline", effects)
        elif done >= quorum:
            self._start_grace(connection, job, number)

    def _start_grace(self, connection: Connection, job: Job, number: int) -> None:
        now = self.clock()
        over = now + round(job.spec.grace_seconds * 1000)
        key = and_(RoundRow.job_id == job.id, RoundRow.number == number)
        first = connection.execute(update(RoundRow).where(key, RoundRow.quorum_ms == 0).values(quorum_ms=now))
        if first.rowcount:
            connection.execute(update(RoundRow).where(key, RoundRow.due_ms > over).values(due_ms=over))

    def _close(self, connection: Connection, job: Job, number: int, waiting: bool, effects: Effects) -> None:
        """Ends the wait for updates; the fold comes next, except after the closing evaluation."""
        closing, masking = job.spec.closes(number), job.spec.secure_aggregation
        new_state = RoundState.MASKING if masking is not None else RoundState.FOLDING
        if closing:
            new_state = RoundState.PUBLISHED
        closed = connection.execute(_CLOSE, {"of_job": job.id, "round": number, "new_state": new_state})
        if closed.rowcount == 0:
            return
        if waiting:
            self._end_tasks(connection, job.id, number, "the round closed after quorum and grace", effects)
        if new_state is RoundState.MASKING:
            self._begin_masking(connection, job, number, 0, effects)
            return
        if not closing:
            effects.folds[job.id, number] = self.inputs(connection, job.id, number)
            return
        self.event(connection, effects, job.id, "round_published", round=number, text="closing evaluation")
        self._end_job(connection, job.id, JobState.DONE, RoundState.FAILED, "", effects)
        self.event(connection, effects, job.id, "job_done", round=number)

    def _begin_masking(self, connection: Connection, job: Job, number: int, attempt: int, effects: Effects) -> None:
        """An attempt begins: what an earlier one has brought is of no use in it."""
        self._drop_masks(connection, job.id, number)
        connection.execute(
            round_in(RoundState.MASKING).values(attempt=attempt, phase=0, due_ms=self._phase_due(job)),
            {"of_job": job.id, "round": number},
        )
        effects.masked.add((job.id, number))
        text = f"attempt {attempt + 1}"
        self.event(connection, effects, job.id, "masking_started", round=number, text=text)

    def _phase_due(self, job: Job) -> int:
        masking = job.spec.secure_aggregation
        return self.clock() + round(1000 * masking.phase_seconds if masking is not None else 0)

    def _drop_masks(self, connection: Connection, job_id: str, number: int | None = None) -> None:
        where = [MaskRow.job_id == job_id] + ([] if number is None else [MaskRow.round == number])
        connection.execute(delete(MaskRow).where(*where))

    def _end_tasks(
        self, connection: Connection, job_id: str, number: int | None, why: str, effects: Effects
    ) -> list[str]:
        """Marks the open tasks of the job (and round) as missing, each with what is known; returns the reports."""
        where = [TaskRow.job_id == job_id, TaskRow.state.in_(OPEN_TASKS)]
        if number is not None:
            where.append(TaskRow.round == number)
        rows = connection.execute(
            select(TaskRow.institution, TaskRow.round, TaskRow.state, TaskRow.leased_to, TaskRow.token).where(*where)
        ).all()
        reports = []
        for row in rows:
            reason = self._absence(connection, row.institution)
            reports.append(f"{row.institution} ({reason})")
            connection.execute(
                update(TaskRow)
                .where(TaskRow.token == row.token)
                .values(state=TaskState.MISSING, reason=reason, finished_ms=self.clock())
            )
            if row.leased_to:
                effects.ended.append(Ended(row.leased_to, job_id, row.round, row.token, why))
            self.event(
                connection,
                effects,
                job_id,
                "client_missing",
                round=row.round,
                institution=row.institution,
                text=reason,
            )
        return reports

    def _absence(self, connection: Connection, institution: str) -> str:
        """What is known of an institution that did not answer."""
        seen = connection.execute(
            select(AgentRow.last_seen_ms, AgentRow.activity)
            .where(AgentRow.institution == institution)
            .order_by(AgentRow.last_seen_ms.desc())
            .limit(1)
        ).one_or_none()
        if seen is None:
            return "never joined"
        ago = max(0, self.clock() - seen.last_seen_ms) / 1000
        return f"no answer; last seen {ago:.0f} s before, {seen.activity or 'activity unknown'}"

    def _fail(self, connection: Connection, job: Job, number: int, what: str, effects: Effects) -> None:
        missing = self._end_tasks(connection, job.id, number, "the round failed", effects)
        excluded = [
            f"{row.institution} ({row.code}: {row.reason})"
            for row in connection.execute(
                select(TaskRow.institution, TaskRow.code, TaskRow.reason).where(
                    TaskRow.job_id == job.id, TaskRow.round == number, TaskRow.state == TaskState.EXCLUDED
                )
            )
        ]
        message = f"round {number}: the quorum is {_quorum(job, number)}, {what}"
        for label, names in (("missing", missing), ("excluded", excluded)):
            if names:
                message += f"; {label}: " + ", ".join(names[:50]) + (", ..." if len(names) > 50 else "")
        self._give_up(connection, job, number, message, effects)

    def _give_up(self, connection: Connection, job: Job, number: int, message: str, effects: Effects) -> None:
        """Fails the job; where the round is of a change, the change alone: the job is done as it was before."""
        change = number > job.spec.rounds
        if change:
            self._drop_change(connection, job.id, number)
        state, kind = (JobState.DONE, "change_failed") if change else (JobState.FAILED, "job_failed")
        if self._end_job(connection, job.id, state, RoundState.FAILED, message, effects):
            self.event(connection, effects, job.id, kind, round=number, text=message)

    def _drop_change(self, connection: Connection, job_id: str, number: int) -> None:
        """What came for a change that is given up is not in the job."""
        came = [TaskRow.job_id == job_id, TaskRow.round == number, TaskRow.state == TaskState.DONE, TaskRow.trains]
        connection.execute(update(TaskRow).where(*came).values(state=TaskState.MISSING, reason="the change failed"))

    def fail_fold(self, connection: Connection, job_id: str, number: int, message: str) -> Effects:
        """What came cannot be folded, and never will. Nothing if the round is folded no more."""
        effects = Effects()
        failed = connection.execute(
            round_in(RoundState.FOLDING).values(state=RoundState.FAILED), {"of_job": job_id, "round": number}
        )
        if failed.rowcount:
            self._give_up(connection, self.job(connection, job_id), number, f"round {number}: {message}", effects)
        return effects

    # Folding.

    def folding(self, connection: Connection) -> list[tuple[str, int]]:
        """The rounds that are to be folded: after a restart, those that were being folded before."""
        rows = connection.execute(
            select(RoundRow.job_id, RoundRow.number).where(RoundRow.state == RoundState.FOLDING)
        ).all()
        return [(row.job_id, row.number) for row in rows]

    def inputs(self, connection: Connection, job_id: str, number: int) -> Inputs:
        """What the round is folded from."""
        key = {"job_id": job_id, "number": number}
        if self.job(connection, job_id).strategy.sealed:
            # Of all institutions that are in the job by now.
            rows = connection.execute(_ALL_INPUTS, {"job_id": job_id}).all()
            ridge = connection.execute(_RIDGE, key).scalar() or ""
        else:
            rows, ridge = connection.execute(_INPUTS, key).all(), ""
        return Inputs(rows[0].model_sha256 if rows else "", [Input(*row[1:]) for row in rows], ridge)

    def _drop_parameters(self, connection: Connection, job_id: str, since: int = 0) -> None:
        """Removes the parameters of updates from rows of the job: their round is folded, or will never be."""
        connection.execute(_DROP_PARAMETERS, {"of_job": job_id, "since": since})

    def lose(self, connection: Connection, job_id: str, number: int, institutions: list[str]) -> Effects:
        """Excludes institutions whose kept updates were damaged, while folding; the fold starts again without.

        Nothing if the round is folded no more: the updates of a job that was cancelled are removed, not damaged.
        """
        effects, refused = Effects(), Refused(Code.STATE_CORRUPT.name, "the kept update is damaged")
        folding = connection.execute(
            update(RoundRow)
            .where(RoundRow.job_id == job_id, RoundRow.number == number, RoundRow.state == RoundState.FOLDING)
            .values(state=RoundState.FOLDING)
        )
        if folding.rowcount == 0:
            return effects
        for institution in institutions:
            where = [TaskRow.job_id == job_id, TaskRow.institution == institution, TaskRow.trains]
            if not self.job(connection, job_id).strategy.sealed:
                where.append(TaskRow.round == number)
            lost = connection.execute(
                update(TaskRow)
                .where(*where, TaskRow.state == TaskState.DONE)
                .values(state=TaskState.EXCLUDED, code=refused.code, reason=refused.reason)
            )
            if lost.rowcount:
                self._excluded(connection, job_id, number, institution, refused, effects)
        job = self.job(connection, job_id)
        left = len(self.inputs(connection, job_id, number).updates)
        if left < _quorum(job, number):
            self._fail(connection, job, number, f"{left} updates are left", effects)
        return effects


def _quorum(job: Job, number: int) -> int:
    """Answers without which a round fails. In a change the one that is asked for, and nobody at its end."""
    if number <= job.spec.rounds:
        return job.spec.quorum
    return 0 if job.spec.closes(number) else 1
