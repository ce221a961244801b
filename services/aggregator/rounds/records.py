"""States, and what a transition asks the service to do once it is committed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from aggregator.artifacts import Ref

__all__ = [
    "Effects",
    "Ended",
    "Input",
    "Inputs",
    "JobState",
    "Live",
    "MaskOffer",
    "Offer",
    "Part",
    "Refused",
    "RoundState",
    "TaskState",
]

# Institution -> session (digest) of the one agent that gets its tasks.
Live = Mapping[str, str]


class JobState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RoundState(StrEnum):
    PENDING = "pending"
    OPEN = "open"
    # All have trained; what they send is masked, in several phases (aggregator.masking).
    MASKING = "masking"
    FOLDING = "folding"
    PUBLISHED = "published"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    EXCLUDED = "excluded"
    MISSING = "missing"
    # Was done; what it brought is taken out of the job and deleted.
    FORGOTTEN = "forgotten"


OPEN_TASKS = (TaskState.WAITING, TaskState.LEASED)


@dataclass(frozen=True)
class Offer:
    """A task for an agent."""

    session: str
    job_id: str
    round: int
    trains: bool
    token: str
    model: Ref
    deadline_ms: int
    # If it is not the job's.
    spec_json: str = ""


@dataclass(frozen=True)
class MaskOffer:
    """A masked round asks an institution for something: what that is is looked up when it is sent."""

    job_id: str
    round: int


@dataclass(frozen=True)
class Part:
    """What an institution does in a round: whether it trains, whether the quorum counts it."""

    institution: str
    trains: bool
    counts: bool
    # The specification that it gets, if it is not the job's.
    spec_json: str = ""


@dataclass(frozen=True)
class Ended:
    """A task that an agent need not finish."""

    session: str
    job_id: str
    round: int
    token: str
    reason: str


@dataclass(frozen=True)
class Refused:
    """Why an institution is left out of a round: a code of the catalogue, and words for people."""

    code: str
    reason: str


@dataclass(frozen=True)
class Input:
    """An update that a round took; its parameters are in a file if not here."""

    institution: str
    weight: float
    sha256: str
    parameters: bytes | None


@dataclass(frozen=True)
class Inputs:
    """What a round is folded from: the SHA-256 of the model that it started from, and its updates.

    `ridge` is the one to solve with, if not the specification's.
    """

    start: str
    updates: list[Input]
    ridge: str = ""


@dataclass
class Effects:
    """What to do after the transaction: messages to agents, rounds to fold, watchers to wake.

    A round to fold comes with its inputs where they are known.
    """

    offers: list[Offer] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    folds: dict[tuple[str, int], Inputs | None] = field(default_factory=dict)
    # Rounds whose masking begins.
    masked: set[tuple[str, int]] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    jobs_ended: set[str] = field(default_factory=set)
