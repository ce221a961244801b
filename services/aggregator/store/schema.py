"""The tables. Times are milliseconds since the Unix epoch. Changes need a migration (see migrations/)."""

from typing import cast

from sqlalchemy import (
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "EVENTS",
    "JOBS",
    "ROUNDS",
    "TASKS",
    "AgentRow",
    "Base",
    "EventRow",
    "JobRow",
    "MaskRow",
    "RoundRow",
    "TaskRow",
]

# SQLite numbers rows by itself only in a column of exactly this type.
_Number = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Its metadata describes the whole database."""


class JobRow(Base):
    """A job: running -> done, failed or cancelled."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    strategy: Mapped[str] = mapped_column(String(64))
    spec_json: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16), index=True)
    rounds: Mapped[int] = mapped_column(Integer)
    rounds_published: Mapped[int] = mapped_column(Integer, default=0)
    created_ms: Mapped[int] = mapped_column(BigInteger, index=True)
    ended_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    error: Mapped[str] = mapped_column(Text, default="")


class RoundRow(Base):
    """A round: pending -> open -> (masking ->) folding -> published, or failed or cancelled."""

    __tablename__ = "rounds"

    job_id: Mapped[str] = mapped_column(String(80), ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    # The model that the round starts from, and the one that it published.
    model_sha256: Mapped[str] = mapped_column(String(64))
    model_size: Mapped[int] = mapped_column(BigInteger)
    published_sha256: Mapped[str] = mapped_column(String(64), default="")
    opened_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    deadline_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    # When the timer must look at the round: its deadline, or earlier, when the grace after the quorum is over.
    due_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    quorum_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    # What is told of the published model, as JSON; and with which ridge it is solved, if not the specification's.
    report: Mapped[str] = mapped_column(Text, default="")
    ridge: Mapped[str] = mapped_column(String(32), default="")
    # While it is masking: which attempt, and what the institutions are asked for (aggregator.secagg.Phase).
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    phase: Mapped[int] = mapped_column(Integer, default=0)

    __table_args__ = (Index("ix_rounds_due", "state", "due_ms"),)


class TaskRow(Base):
    """What one institution is asked for in one round: waiting <-> leased -> done, excluded or missing.

    done -> forgotten, where the statistics of an institution are taken out of the job.
    """

    __tablename__ = "tasks"

    job_id: Mapped[str] = mapped_column(String(80), primary_key=True)
    round: Mapped[int] = mapped_column(Integer, primary_key=True)
    institution: Mapped[str] = mapped_column(String(63), primary_key=True)
    trains: Mapped[bool]
    # Whether the institution is one of cohort.train, which the quorum counts.
    counts: Mapped[bool]
    state: Mapped[str] = mapped_column(String(16))
    token: Mapped[str] = mapped_column(String(64), unique=True)
    # The session (its digest) that works on the task, and until when.
    leased_to: Mapped[str] = mapped_column(String(64), default="")
    lease_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    # Of an exclusion or an absence.
    code: Mapped[str] = mapped_column(String(64), default="")
    reason: Mapped[str] = mapped_column(Text, default="")
    # Of a taken update.
    identity: Mapped[str] = mapped_column(String(512), default="")
    update_sha256: Mapped[str] = mapped_column(String(64), default="")
    # Its parameters until the round is folded, if they are short; longer ones are in a file.
    parameters: Mapped[bytes | None] = mapped_column(LargeBinary)
    weight: Mapped[float] = mapped_column(Float(53), default=0.0)
    evaluations: Mapped[str] = mapped_column(Text, default="[]")
    ledger_records: Mapped[int] = mapped_column(BigInteger, default=0)
    ledger_sha256: Mapped[str] = mapped_column(String(64), default="")
    finished_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    # The specification that an institution got which was added later; empty for the job's.
    spec_json: Mapped[str] = mapped_column(Text, default="")

    __table_args__ = (
        ForeignKeyConstraint(["job_id", "round"], ["rounds.job_id", "rounds.number"]),
        Index("ix_tasks_institution", "institution", "state"),
        Index("ix_tasks_lease", "state", "lease_ms"),
    )


class MaskRow(Base):
    """What an institution answered in one phase of the newest attempt of a masked round, until the round is folded."""

    __tablename__ = "masks"

    job_id: Mapped[str] = mapped_column(String(80), primary_key=True)
    round: Mapped[int] = mapped_column(Integer, primary_key=True)
    phase: Mapped[int] = mapped_column(Integer, primary_key=True)
    institution: Mapped[str] = mapped_column(String(63), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer)
    # A serialised message of secagg.proto. Of a masked vector the TensorMap, or nothing where that is in a file.
    message: Mapped[bytes] = mapped_column(LargeBinary)
    sha256: Mapped[str] = mapped_column(String(64), default="")

    __table_args__ = (ForeignKeyConstraint(["job_id", "round"], ["rounds.job_id", "rounds.number"]),)


class AgentRow(Base):
    """An agent that has joined. One session each: a later Join replaces it. Sessions are kept as digests."""

    __tablename__ = "agents"

    identity: Mapped[str] = mapped_column(String(512), primary_key=True)
    institution: Mapped[str] = mapped_column(String(63), index=True)
    session: Mapped[str] = mapped_column(String(64), unique=True)
    software_version: Mapped[str] = mapped_column(String(64), default="")
    joined_ms: Mapped[int] = mapped_column(BigInteger)
    last_seen_ms: Mapped[int] = mapped_column(BigInteger)
    activity: Mapped[str] = mapped_column(String(64), default="")


class EventRow(Base):
    """What happened, for those who watch."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(_Number, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(String(80), ForeignKey("jobs.id"))
    time_ms: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(64))
    round: Mapped[int] = mapped_column(Integer, default=0)
    institution: Mapped[str] = mapped_column(String(63), default="")
    text: Mapped[str] = mapped_column(Text, default="")
    evaluations: Mapped[str] = mapped_column(Text, default="[]")

    __table_args__ = (Index("ix_events_job", "job_id", "number"),)


# As plain tables, for the statements of the hot path.
JOBS = cast(Table, JobRow.__table__)
ROUNDS = cast(Table, RoundRow.__table__)
TASKS = cast(Table, TaskRow.__table__)
EVENTS = cast(Table, EventRow.__table__)
