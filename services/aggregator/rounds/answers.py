"""What agents answer to their tasks: updates, counts, refusals. All methods run in one transaction of the caller."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, or_, select, update

from aggregator.rounds import sessions
from aggregator.rounds.book import evaluations_json
from aggregator.rounds.closing import Closing
from aggregator.rounds.records import OPEN_TASKS, Effects, Refused, RoundState, TaskState
from aggregator.store.schema import TASKS, AgentRow, RoundRow, TaskRow
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.v1.aggregator_pb2 import Evaluation, LedgerHead

__all__ = ["Answers", "Claim", "Found", "Taken"]


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
        AgentRow.identity.label("holder"),
    )
    .join(RoundRow, and_(RoundRow.job_id == TaskRow.job_id, RoundRow.number == TaskRow.round))
    .outerjoin(AgentRow, AgentRow.session == TaskRow.leased_to)
    .where(TaskRow.token.in_(bindparam("tokens", expanding=True)))
)
_SESSIONS = select(AgentRow.session, AgentRow.identity).where(
    AgentRow.session.in_(bindparam("sessions", expanding=True))
)
_NOTHING = {"code": "", "reason": "", "identity": "", "update_sha256": "", "parameters": None, "weight": 0.0}
_NOTHING |= {"evaluations": "[]", "ledger_records": 0, "ledger_sha256": ""}
_FINISH = (
    update(TASKS)
    .where(TaskRow.token == bindparam("answered"), or_(*(TaskRow.state == state for state in OPEN_TASKS)))
    .values({name: bindparam(name) for name in ("state", "finished_ms", *_NOTHING)})
)


class Answers(Closing):
    """The open tasks that agents answer. Several answers are taken in a few statements."""

    def find(self, connection: Connection, claim: Claim) -> Found:
        """The open task that a claim names.

        Raises VeilfedError: SESSION_INVALID, TASK_INVALID, UPDATE_DUPLICATE or ROUND_CLOSED. None of these excludes
        anyone: they say nothing about the institution's update.
        """
        (found,) = self._find(connection, [claim])
        if isinstance(found, VeilfedError):
            raise found
        return found

    def _find(self, connection: Connection, claims: Sequence[Claim]) -> list[Found | VeilfedError]:
        """For each claim its open task, or why there is none."""
        tasks = {row.token: row for row in connection.execute(_FIND, {"tokens": [claim.token for claim in claims]})}
        # Most sessions are known by what is leased to them.
        identities = {row.leased_to: row.holder for row in tasks.values() if row.holder is not None}
        if others := {claim.session for claim in claims} - identities.keys():
            named = connection.execute(_SESSIONS, {"sessions": sorted(others)})
            identities |= {row.session: row.identity for row in named}
        found: set[str] = set()
        outcomes: list[Found | VeilfedError] = []
        for claim in claims:
            try:
                task = _open_task(claim, tasks.get(claim.token), identities.get(claim.session))
                if claim.token in found:
                    raise _duplicate(task)
                found.add(claim.token)
                outcomes.append(task)
            except VeilfedError as error:
                outcomes.append(error)
        return outcomes

    def accept(
        self, connection: Connection, answers: Sequence[tuple[Claim, Taken]]
    ) -> tuple[list[VeilfedError | None], Effects]:
        """Takes updates into their rounds. For each None, or why it is not taken: errors as in `find`."""
        effects, rows, events = Effects(), [], []
        found = self._find(connection, [claim for claim, _ in answers])
        for (claim, taken), task in zip(answers, found, strict=True):
            if isinstance(task, VeilfedError):
                continue
            evaluations = evaluations_json(taken.evaluations)
            rows.append(
                self._finished(
                    task,
                    TaskState.DONE,
                    identity=str(claim.identity),
                    update_sha256=taken.update_sha256,
                    parameters=taken.parameters,
                    weight=taken.weight,
                    evaluations=evaluations,
                    ledger_records=taken.head.records,
                    ledger_sha256=taken.head.sha256,
                )
            )
            kind = "update_taken" if task.trains else "evaluation_taken"
            details = {"round": task.round, "institution": task.institution, "evaluations": evaluations}
            events.append((task.job_id, kind, details))
        if rows:
            connection.execute(_FINISH, rows)
            self.events(connection, effects, events)
        for job_id, number in dict.fromkeys((task.job_id, task.round) for task in found if isinstance(task, Found)):
            self._advance(connection, job_id, number, effects)
        return [task if isinstance(task, VeilfedError) else None for task in found], effects

    def exclude(self, connection: Connection, claim: Claim, refused: Refused) -> Effects:
        """Leaves the institution out of this round. Raises as `find`."""
        task, effects = self.find(connection, claim), Effects()
        connection.execute(_FINISH, self._finished(task, TaskState.EXCLUDED, code=refused.code, reason=refused.reason))
        self._excluded(connection, task.job_id, task.round, task.institution, refused, effects)
        self._advance(connection, task.job_id, task.round, effects)
        return effects

    def _finished(self, task: Found, state: TaskState, **values: Any) -> dict[str, Any]:
        return {**_NOTHING, **values, "answered": task.token, "state": state, "finished_ms": self.clock()}


def _duplicate(task: Found | Row[Any]) -> VeilfedError:
    where = f"round {task.round} of job {task.job_id}"
    return VeilfedError(Code.UPDATE_DUPLICATE, f"an update of this institution is in {where} already")


def _open_task(claim: Claim, row: Any, session_identity: str | None) -> Found:
    """The open task that a claim names: `row` is the task of its token, if any. Raises VeilfedError."""
    if session_identity != str(claim.identity):
        raise sessions.invalid()
    if (
        row is None
        or row.institution != claim.identity.institution
        or (row.job_id, row.round) != (claim.job_id, claim.round)
    ):
        raise VeilfedError(Code.TASK_INVALID, "no task of this institution has this job, round and token")
    where = f"round {row.round} of job {row.job_id}"
    if row.state == TaskState.DONE:
        raise _duplicate(row)
    if row.state == TaskState.EXCLUDED:
        raise VeilfedError(Code.TASK_INVALID, f"this institution is excluded from {where}")
    if row.round_state != RoundState.OPEN or row.state == TaskState.MISSING:
        raise VeilfedError(Code.ROUND_CLOSED, f"{where} is {row.round_state}")
    if row.state == TaskState.LEASED and row.leased_to != claim.session:
        raise VeilfedError(Code.TASK_INVALID, f"{where} was given to another agent of this institution")
    return Found(row.job_id, row.round, row.institution, row.trains, row.token)
