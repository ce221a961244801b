"""The transitions of rounds whose updates are masked. All methods run in one transaction of the caller.

masking: attempt 0, phases 0 to 4 --too few answers before anything is revealed--> attempt 1, phase 0
masking, last phase --all answered, or time is over--> folding
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, insert, select, update

from aggregator.rounds.book import Job
from aggregator.rounds.changes import Changes
from aggregator.rounds.closing import round_in
from aggregator.rounds.records import Effects, Refused, RoundState, TaskState
from aggregator.secagg import Phase
from aggregator.store.schema import MaskRow, RoundRow, TaskRow
from veilfed.errors import Code

__all__ = ["KeptAnswer", "Masked", "MaskedRound"]


@dataclass(frozen=True)
class MaskedRound:
    """Where a masked round stands."""

    job_id: str
    round: int
    state: str
    attempt: int
    phase: int
    due_ms: int


@dataclass(frozen=True)
class KeptAnswer:
    """What an institution answered in a phase; a masked vector is in a file if its SHA-256 is here."""

    phase: int
    institution: str
    message: bytes
    sha256: str = ""


class Masked(Changes):
    """Everything about rounds."""

    def masking(self, connection: Connection, institution: str = "") -> list[MaskedRound]:
        """The rounds that are masking; with `institution` those in which it has trained."""
        statement = select(
            RoundRow.job_id, RoundRow.number, RoundRow.state, RoundRow.attempt, RoundRow.phase, RoundRow.due_ms
        ).where(RoundRow.state == RoundState.MASKING)
        if institution:
            here = and_(TaskRow.job_id == RoundRow.job_id, TaskRow.round == RoundRow.number)
            mine = [TaskRow.institution == institution, TaskRow.trains, TaskRow.state == TaskState.DONE]
            statement = statement.join(TaskRow, here).where(*mine)
        return [MaskedRound(*row) for row in connection.execute(statement)]

    def masked_round(self, connection: Connection, job_id: str, number: int) -> MaskedRound | None:
        """Where a round stands that is masking, or is folded after that."""
        row = connection.execute(
            select(
                RoundRow.job_id, RoundRow.number, RoundRow.state, RoundRow.attempt, RoundRow.phase, RoundRow.due_ms
            ).where(
                RoundRow.job_id == job_id,
                RoundRow.number == number,
                RoundRow.state.in_((RoundState.MASKING, RoundState.FOLDING)),
            )
        ).one_or_none()
        return None if row is None else MaskedRound(*row)

    def trained(self, connection: Connection, job_id: str, number: int) -> list[str]:
        """The institutions that have trained in the round and are not excluded from it, sorted."""
        rows = connection.execute(
            select(TaskRow.institution)
            .where(TaskRow.job_id == job_id, TaskRow.round == number, TaskRow.trains)
            .where(TaskRow.state == TaskState.DONE)
            .order_by(TaskRow.institution)
        )
        return list(rows.scalars())

    def answers(self, connection: Connection, job_id: str, number: int) -> list[KeptAnswer]:
        """Of the newest attempt, in the order of the phases."""
        rows = connection.execute(
            select(MaskRow.phase, MaskRow.institution, MaskRow.message, MaskRow.sha256)
            .where(MaskRow.job_id == job_id, MaskRow.round == number)
            .order_by(MaskRow.phase, MaskRow.institution)
        )
        return [KeptAnswer(*row) for row in rows]

    def keep_answers(
        self, connection: Connection, job_id: str, number: int, attempt: int, kept: Sequence[KeptAnswer]
    ) -> bool:
        """Keeps answers of the phase in which the round is. False, and nothing, if it is in another by now."""
        phase = kept[0].phase
        here = round_in(RoundState.MASKING).where(RoundRow.attempt == attempt, RoundRow.phase == phase)
        if connection.execute(here.values(phase=phase), {"of_job": job_id, "round": number}).rowcount == 0:
            return False
        connection.execute(
            insert(MaskRow),
            [
                {
                    "job_id": job_id,
                    "round": number,
                    "phase": phase,
                    "institution": one.institution,
                    "attempt": attempt,
                    "message": one.message,
                    "sha256": one.sha256,
                }
                for one in kept
            ],
        )
        return True

    def next_phase(self, connection: Connection, job: Job, number: int, attempt: int, phase: int) -> bool:
        """From `phase` to the one after it. False, and nothing, if the round is in another by now."""
        here = round_in(RoundState.MASKING).where(RoundRow.attempt == attempt, RoundRow.phase == phase)
        moved = connection.execute(
            here.values(phase=phase + 1, due_ms=self._phase_due(job)), {"of_job": job.id, "round": number}
        )
        return moved.rowcount > 0

    def fold_masked(
        self, connection: Connection, job_id: str, number: int, attempt: int, survivors: Sequence[str]
    ) -> Effects:
        """masking -> folding. Who has trained and is not in the sum is excluded."""
        effects = Effects()
        here = round_in(RoundState.MASKING).where(RoundRow.attempt == attempt)
        moved = connection.execute(here.values(state=RoundState.FOLDING), {"of_job": job_id, "round": number})
        if moved.rowcount:
            effects.folds[job_id, number] = None
            silent = Refused(Code.TIMEOUT.name, "its masked values did not come in time")
            for institution in set(self.trained(connection, job_id, number)) - set(survivors):
                self._leave_out(connection, job_id, number, institution, silent, effects)
        return effects

    def next_attempt(self, connection: Connection, job: Job, number: int, attempt: int) -> Effects:
        """Begins again after `attempt`. Nothing if shares may have been revealed in it."""
        effects = Effects()
        # What was asked for last reveals: then there is no other attempt.
        here = round_in(RoundState.MASKING).where(RoundRow.attempt == attempt, RoundRow.phase < Phase.REVEAL)
        if connection.execute(here.values(phase=0), {"of_job": job.id, "round": number}).rowcount:
            self._begin_masking(connection, job, number, attempt + 1, effects)
        return effects

    def fail_masking(self, connection: Connection, job: Job, number: int, message: str) -> Effects:
        """The round cannot be masked. Nothing if it is masking no more."""
        effects = Effects()
        failed = connection.execute(
            round_in(RoundState.MASKING).values(state=RoundState.FAILED), {"of_job": job.id, "round": number}
        )
        if failed.rowcount:
            self._give_up(connection, job, number, f"round {number}: {message}", effects)
        return effects

    def leave_out(
        self, connection: Connection, job_id: str, number: int, institution: str, refused: Refused
    ) -> Effects:
        """Excludes an institution that has trained: it takes no part in the masked sum."""
        effects = Effects()
        self._leave_out(connection, job_id, number, institution, refused, effects)
        return effects

    def _leave_out(
        self, connection: Connection, job_id: str, number: int, institution: str, refused: Refused, effects: Effects
    ) -> None:
        left = connection.execute(
            update(TaskRow)
            .where(TaskRow.job_id == job_id, TaskRow.round == number, TaskRow.institution == institution)
            .where(TaskRow.trains, TaskRow.state == TaskState.DONE)
            .values(state=TaskState.EXCLUDED, code=refused.code, reason=refused.reason)
        )
        if left.rowcount:
            self._excluded(connection, job_id, number, institution, refused, effects)
