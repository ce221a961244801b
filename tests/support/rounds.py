"""The state machine of rounds on a real database, with a clock of the test and agents that the test connects."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sqlalchemy import Connection, Row, select

from aggregator.artifacts import Ref
from aggregator.rounds import queries, sessions
from aggregator.rounds.answers import Claim, Taken
from aggregator.rounds.changes import Changes
from aggregator.rounds.records import Effects, Offer, Refused
from aggregator.store.database import migrate, open_engine
from aggregator.store.schema import EVENTS, JOBS, ROUNDS, TASKS
from tests.support.aggregators import job_spec
from tests.support.scripted_agent import HEAD
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity, Role
from veilfed.jobs import JobSpec
from veilfed.v1.aggregator_pb2 import Evaluation, GetJobResponse

__all__ = ["ADMIN", "EVALUATIONS", "LEASE_MS", "MODELS", "World", "new_world", "refused"]

MODELS = [Ref(f"{number:064x}", 100) for number in range(10)]
LEASE_MS = 5_000
ADMIN = Identity("test.veilfed", Role.ADMIN, "coordinator", "admin")
EVALUATIONS = [Evaluation(name="global", correct=1, total=2)]


class World:
    """The state machine, and agents that the test connects."""

    def __init__(self, path: Path) -> None:
        self.now = 1_000_000
        self.engine = open_engine(f"sqlite:///{path}")
        self.machine = Changes(lambda: self.now, LEASE_MS)
        self.live: dict[str, str] = {}
        self.tasks: dict[str, Offer] = {}
        self.ended: list[str] = []
        self.folds: list[tuple[str, int]] = []

    def run(self, function: Callable[[Connection], Any]) -> Any:
        with self.engine.begin() as connection:
            return function(connection)

    def change(self, function: Callable[[Connection], Effects]) -> Effects:
        effects: Effects = self.run(function)
        names = {session: institution for institution, session in self.live.items()}
        for offer in effects.offers:
            self.tasks[names[offer.session]] = offer
        self.ended += [names.get(item.session, "?") for item in effects.ended]
        self.folds += effects.folds
        return effects

    def submit(self, train: list[str], evaluate: list[str] | None = None, **changes: Any) -> str:
        spec = JobSpec.model_validate(job_spec(train, evaluate, **changes))
        job_id: str = ""

        def submit(connection: Connection) -> Effects:
            nonlocal job_id
            job_id, effects = self.machine.submit(connection, spec, MODELS[0], self.live)
            return effects

        self.change(submit)
        return job_id

    def identity(self, institution: str, name: str = "agent") -> Identity:
        return Identity("test.veilfed", Role.AGENT, institution, name)

    def join(self, institution: str, name: str = "agent") -> str:
        secret, _ = self.run(lambda c: sessions.join(c, self.identity(institution, name), "1", self.now))
        return sessions.session_digest(secret)

    def connect(self, institution: str, session: str | None = None) -> str:
        session = session or self.join(institution)
        self.live[institution] = session
        self.change(lambda c: Effects(offers=sessions.offer(c, session, institution, self.now, LEASE_MS, again=True)))
        self.change(lambda c: self.machine.open_pending(c, self.live, institution))
        return session

    def claim(self, institution: str, **changes: Any) -> Claim:
        task = self.tasks[institution]
        values: dict[str, Any] = {
            "identity": self.identity(institution),
            "session": self.live[institution],
            "job_id": task.job_id,
            "round": task.round,
            "token": task.token,
        }
        return Claim(**(values | changes))

    def taken(self, institution: str, parameters: bytes | None = None) -> Taken:
        """What the institution's task asks for, as it passes the gate."""
        trains = self.tasks[institution].trains
        return Taken("a" * 64 if trains else "", float(trains), EVALUATIONS, HEAD, parameters)

    def answer(self, institution: str, parameters: bytes | None = None, **changes: Any) -> None:
        self.answer_all([(self.claim(institution, **changes), self.taken(institution, parameters))])

    def answer_all(self, answers: list[tuple[Claim, Taken]]) -> None:
        """Several answers in one transaction. Raises the first that is not taken, after the others."""

        def accept(connection: Connection) -> Effects:
            outcomes, effects = self.machine.accept(connection, answers)
            errors.extend(error for error in outcomes if error is not None)
            return effects

        errors: list[VeilfedError] = []
        self.change(accept)
        if errors:
            raise errors[0]

    def refuse(self, institution: str, code: str = "UPDATE_INVALID", reason: str = "not finite") -> None:
        claim = self.claim(institution)
        self.change(lambda c: self.machine.exclude(c, claim, Refused(code, reason)))

    def publish(self) -> None:
        """The model of the round that was to be folded first."""
        job_id, number = self.folds.pop(0)
        self.change(lambda c: self.machine.publish(c, job_id, number, MODELS[number + 1], self.live))

    def change_job(self, change: Callable[[Connection], tuple[int, Effects]]) -> int:
        """A change of a job that is done: the number of its round."""
        number = 0

        def begin(connection: Connection) -> Effects:
            nonlocal number
            number, effects = change(connection)
            return effects

        self.change(begin)
        return number

    def pass_time(self, seconds: float) -> None:
        self.now += round(seconds * 1000)
        self.change(lambda c: self.machine.tick(c, self.live))

    def job(self, job_id: str) -> GetJobResponse:
        found: GetJobResponse = self.run(lambda c: queries.details(c, job_id, set(self.live)))
        return found

    def round_states(self, job_id: str) -> list[str]:
        return [item.state for item in self.job(job_id).rounds]

    def client_states(self, job_id: str) -> dict[str, str]:
        return {client.institution: client.state for client in self.job(job_id).rounds[-1].clients}

    def rows(self, job_id: str) -> dict[str, list[Row[Any]]]:
        """All that the database has of a job, by table."""
        keys = {JOBS: JOBS.c.id, ROUNDS: ROUNDS.c.job_id, TASKS: TASKS.c.job_id, EVENTS: EVENTS.c.job_id}

        def read(connection: Connection) -> dict[str, list[Row[Any]]]:
            return {
                table.name: list(connection.execute(select(table).where(key == job_id))) for table, key in keys.items()
            }

        found: dict[str, list[Row[Any]]] = self.run(read)
        return found

    def kinds(self, job_id: str) -> list[str]:
        return [event.kind for event in self.run(lambda c: queries.events(c, job_id, 0))[0]]


@cache
def _empty_database() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "aggregator.sqlite"
        engine = open_engine(f"sqlite:///{path}")
        migrate(engine)
        engine.dispose()
        return path.read_bytes()


@contextmanager
def new_world(folder: Path) -> Iterator[World]:
    """A world with an empty database in `folder`."""
    path = folder / "aggregator.sqlite"
    path.write_bytes(_empty_database())
    made = World(path)
    try:
        yield made
    finally:
        made.engine.dispose()


def refused(code: Code) -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is code)
