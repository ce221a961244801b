"""What all transitions share: the clock, the jobs' specifications, the events."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, insert, select

from aggregator.rounds.records import Effects
from aggregator.store.schema import EVENTS, JobRow
from aggregator.strategies import Strategy, strategy_for
from aggregator.words import no_such_job
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.v1.aggregator_pb2 import Evaluation

__all__ = ["Book", "Job", "evaluations_json", "kept_spec"]


@dataclass(frozen=True)
class Job:
    """What of a job never changes."""

    id: str
    spec: JobSpec
    spec_json: str
    strategy: Strategy


def kept_spec(job_id: str, spec_json: str) -> JobSpec:
    """The specification in the database. Raises VeilfedError(STATE_CORRUPT), such as for one of another version."""
    try:
        return JobSpec.model_validate_json(spec_json)
    except ValidationError:
        raise VeilfedError(Code.STATE_CORRUPT, f"job {job_id}: the kept specification is not valid") from None


def evaluations_json(evaluations: list[Evaluation]) -> str:
    """The form in which the database keeps counts."""
    return json.dumps([[item.name, item.correct, item.total] for item in evaluations])


_NEW_EVENT = insert(EVENTS)
_NO_DETAILS = {"round": 0, "institution": "", "text": "", "evaluations": "[]"}


class Book:
    """`clock` gives milliseconds since the Unix epoch."""

    def __init__(self, clock: Callable[[], int], lease_ms: int) -> None:
        self.clock = clock
        self.lease_ms = lease_ms
        self._jobs: dict[str, Job] = {}

    def job(self, connection: Connection, job_id: str) -> Job:
        """Raises VeilfedError: NOT_FOUND, STATE_CORRUPT."""
        if job_id not in self._jobs:
            spec_json = connection.execute(select(JobRow.spec_json).where(JobRow.id == job_id)).scalar()
            if spec_json is None:
                raise no_such_job(job_id)
            spec = kept_spec(job_id, spec_json)
            self._jobs[job_id] = Job(job_id, spec, spec_json, strategy_for(spec))
        return self._jobs[job_id]

    def remembered(self, job_id: str) -> Job | None:
        """The job, if it need not be read."""
        return self._jobs.get(job_id)

    def event(self, connection: Connection, effects: Effects, job_id: str, kind: str, **values: Any) -> None:
        """Writes down what happened; values are columns of EventRow."""
        self.events(connection, effects, [(job_id, kind, values)])

    def events(
        self, connection: Connection, effects: Effects, happened: Sequence[tuple[str, str, dict[str, Any]]]
    ) -> None:
        """Writes down several: (job, kind, other columns of EventRow)."""
        now = self.clock()
        rows = [
            {"job_id": job_id, "time_ms": now, "kind": kind, **_NO_DETAILS, **values}
            for job_id, kind, values in happened
        ]
        connection.execute(_NEW_EVENT, rows)
        effects.changed.update(job_id for job_id, _, _ in happened)

    def forget(self, job_id: str) -> None:
        """Drops what is remembered of a job that has ended; it can be read again."""
        self._jobs.pop(job_id, None)
