"""What the agent keeps on disk, so that it can be killed at any instant and go on.

    state/lock                   held by the one agent of this folder
    state/ledger.jsonl           the egress gate's ledger
    state/embeddings/            the cache of embeddings
    state/jobs/ID/spec.json      the specification as it was first offered
    state/jobs/ID/approval.json  the consent, bound to that specification
    state/jobs/ID/round-R.bin    a finished task: what is sent, and the private state after it
    state/jobs/ID/tuning.bin     where a tuning of prompts stands
    state/jobs/ID/sent.bin       of a job in which something is sent once: what that is
    state/jobs/ID/charge.json    the name of a charge to the budget of privacy whose result is not kept yet
    state/jobs/ID/masking.bin    of a job with secure aggregation: the secrets of the newest attempt at a round

A finished task is one file that is there whole or not at all. Round r starts from the newest state of an earlier
round, never from its own result, and its file answers the same task again with the same bytes.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from client_agent.frame import framed, unframed
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.jobs import JobSpec, parse_job
from veilfed.wire.tensors import digest

__all__ = ["Counts", "Finished", "JobFolder", "StateFolder"]

_MAGIC = b"veilfed round 1\n"
_LENGTH_BYTES = 8
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ROUND_FILE = re.compile(r"round-([0-9]+)\.bin")

TUNING = "tuning.bin"
CHARGE = "charge.json"
MASKING = "masking.bin"

# The newest result, and the state that it started from.
KEPT_ROUNDS = 2


@dataclass(frozen=True)
class Counts:
    """An evaluation: `correct` right answers among `total` samples."""

    name: str
    correct: int
    total: int


@dataclass(frozen=True)
class Finished:
    """A finished task. `update` is empty for an evaluation, `state` for an institution that only evaluates."""

    round: int
    # The round whose state this one started from; -1 for none.
    previous: int
    trained: bool
    # SHA-256 of `model`.
    model_sha256: str
    weight: float
    evaluations: tuple[Counts, ...]
    # The model that the task brought, the trained parameters (both serialised TensorMaps), and the private state.
    model: bytes
    update: bytes
    state: bytes
    # How many results this round has had, of different models, this one included.
    answers: int = 1

    def to_bytes(self) -> bytes:
        """A header and the three parts, framed: no code in it."""
        header = {
            "round": self.round,
            "previous": self.previous,
            "trained": self.trained,
            "model_sha256": self.model_sha256,
            "weight": self.weight,
            "answers": self.answers,
            "evaluations": [[counts.name, counts.correct, counts.total] for counts in self.evaluations],
        }
        parts = (json.dumps(header).encode(), self.model, self.update, self.state)
        body = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)
        return framed(_MAGIC, body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Raises VeilfedError(STATE_CORRUPT) that names `where`."""
        body = unframed(_MAGIC, data)
        if body is None:
            raise VeilfedError(Code.STATE_CORRUPT, f"{where}: not a whole result of a round")
        header_bytes, model, update, state = _parts(body)
        header: dict[str, Any] = json.loads(header_bytes)
        evaluations = tuple(Counts(name, correct, total) for name, correct, total in header.pop("evaluations"))
        return cls(**header, evaluations=evaluations, model=model, update=update, state=state)


def _parts(body: bytes) -> list[bytes]:
    """The length-prefixed parts of a body whose digest was right."""
    parts, position = [], 0
    while position < len(body):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(body[position:start], "little")
        parts.append(body[start:position])
    return parts


class JobFolder:
    """The private state of one job. Its methods read and write files: call them off the event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job_id = path.name

    def offer(self, spec_json: str) -> JobSpec:
        """Keeps the specification of a job that is offered, and returns it.

        Raises VeilfedError: JOB_INVALID for what is no specification, or not the one that this job came with at first;
        STATE_CORRUPT.
        """
        spec = _parse(spec_json, f"job {self.job_id}")
        known = self._read("spec.json")
        if known is None:
            _make_folder(self.path)
            write_atomic(self.path / "spec.json", spec_json.encode())
        elif known != spec_json.encode():
            self.spec()  # damaged rather than changed?
            raise VeilfedError(Code.JOB_INVALID, f"job {self.job_id}: its specification was changed")
        return spec

    def spec(self) -> JobSpec:
        """The specification that was offered. Raises VeilfedError(NOT_FOUND or STATE_CORRUPT)."""
        data = self._offered()
        try:
            return parse_job(data.decode(errors="replace"), str(self.path / "spec.json"))
        except VeilfedError as error:  # it was valid when it was offered
            raise VeilfedError(Code.STATE_CORRUPT, error.message) from None

    def approve(self) -> None:
        """Consents to the job as it was offered. Raises VeilfedError(NOT_FOUND)."""
        approval = {"spec_sha256": digest(self._offered()), "time": datetime.now(UTC).isoformat(timespec="seconds")}
        write_atomic(self.path / "approval.json", json.dumps(approval).encode())

    @property
    def approved(self) -> bool:
        """Whether the job was approved with the specification that is kept."""
        spec, approval = self._read("spec.json"), self._read("approval.json")
        if spec is None or approval is None:
            return False
        try:
            return bool(json.loads(approval)["spec_sha256"] == digest(spec))
        except (ValueError, KeyError, TypeError):
            raise VeilfedError(Code.STATE_CORRUPT, f"{self.path / 'approval.json'}: not an approval") from None

    def rounds(self) -> list[int]:
        """The finished rounds that are kept, oldest first."""
        if not self.path.is_dir():
            return []
        matches = (_ROUND_FILE.fullmatch(name) for name in os.listdir(self.path))  # noqa: PTH208  names alone
        return sorted(int(match[1]) for match in matches if match)

    def finished(self, round_number: int) -> Finished | None:
        """The result of a round, or None. Raises VeilfedError(STATE_CORRUPT)."""
        data = self._read(f"round-{round_number}.bin")
        return None if data is None else Finished.from_bytes(data, str(self._round_file(round_number)))

    def before(self, round_number: int) -> Finished | None:
        """The newest result of an earlier round: where the round starts from. None for none.

        Raises VeilfedError(TASK_INVALID) when that state is not kept any more, because later rounds are finished.
        """
        rounds = self.rounds()
        earlier = [number for number in rounds if number < round_number]
        found = self.finished(earlier[-1]) if earlier else None
        later = [number for number in rounds if number >= round_number]
        if later:
            following = self.finished(later[0])
            if following is not None and (found.round if found else -1) != following.previous:
                raise VeilfedError(
                    Code.TASK_INVALID,
                    f"job {self.job_id}: round {round_number} is past, the state before it is not kept any more",
                )
        return found

    def latest(self) -> Finished | None:
        """The newest result, or None."""
        rounds = self.rounds()
        return self.finished(rounds[-1]) if rounds else None

    def save(self, finished: Finished) -> None:
        """Keeps a result in one step, then drops what it replaces. Raises VeilfedError(FILE_UNUSABLE)."""
        _make_folder(self.path)
        write_atomic(self._round_file(finished.round), finished.to_bytes())
        (self.path / TUNING).unlink(missing_ok=True)
        rounds = self.rounds()
        done = [number for number in rounds if number <= finished.round]
        # A later one can only be of a history that the aggregator has lost.
        for number in sorted({*rounds} - {*done[-KEPT_ROUNDS:]}):
            self._round_file(number).unlink(missing_ok=True)
        for left in (
            *self.path.glob(".round-*.tmp"),
            *self.path.glob(f".{TUNING}*.tmp"),
        ):  # of an agent that was killed in the middle of writing
            left.unlink(missing_ok=True)

    def keep_tuning(self, model_sha256: str, data: bytes) -> None:
        """Keeps where a tuning stands that started from this model. Raises VeilfedError(FILE_UNUSABLE)."""
        _make_folder(self.path)
        write_atomic(self.path / TUNING, model_sha256.encode() + b"\n" + data)

    def tuning(self, model_sha256: str) -> bytes | None:
        """Where the tuning from this model stands; None where there is none. Raises VeilfedError(FILE_UNUSABLE)."""
        known, _, data = (self._read(TUNING) or b"").partition(b"\n")
        return data if known == model_sha256.encode() else None

    def sent(self) -> bytes | None:
        """What was kept by `keep_sent`, or None. Raises VeilfedError(STATE_CORRUPT)."""
        return self._digested("sent.bin")

    def _digested(self, name: str) -> bytes | None:
        """A file that begins with the digest of the rest."""
        data = self._read(name)
        if data is None:
            return None
        body = unframed(b"", data)
        if body is None:
            raise VeilfedError(Code.STATE_CORRUPT, f"{self.path / name}: not whole")
        return body

    def keep_sent(self, update: bytes) -> None:
        """Keeps the update of a job that gets one from this institution, however often it asks."""
        _make_folder(self.path)
        write_atomic(self.path / "sent.bin", framed(b"", update))

    def charge(self, round_number: int, answer: int) -> str:
        """The name of the charge for a result: the same until `charged`, so that a kill charges nothing twice.

        Raises VeilfedError: STATE_CORRUPT, FILE_UNUSABLE.
        """
        place = [round_number, answer]
        data = self._read(CHARGE)
        if data is not None:
            try:
                found = json.loads(data)
                if found["place"] == place:
                    return str(found["name"])
            except (ValueError, KeyError, TypeError):
                raise VeilfedError(Code.STATE_CORRUPT, f"{self.path / CHARGE}: not a charge") from None
        name = secrets.token_hex(16)
        _make_folder(self.path)
        write_atomic(self.path / CHARGE, json.dumps({"place": place, "name": name}).encode())
        return name

    def charged(self) -> None:
        """The result that was charged is kept."""
        (self.path / CHARGE).unlink(missing_ok=True)

    def masking(self) -> bytes | None:
        """What was kept by `keep_masking`, or None. Raises VeilfedError(STATE_CORRUPT)."""
        return self._digested(MASKING)

    def keep_masking(self, data: bytes) -> None:
        """Keeps what this institution must remember of a masked round, before anything is sent that follows from it."""
        _make_folder(self.path)
        write_atomic(self.path / MASKING, framed(b"", data))

    @property
    def spec_sha256(self) -> str:
        """Of the specification as it was offered. Raises VeilfedError(NOT_FOUND)."""
        return digest(self._offered())

    def purge(self) -> None:
        """Removes everything of this job; what a kill leaves over is removed at the next start."""
        removed = self.path.with_name(f".purged-{self.job_id}")
        try:
            if removed.exists():
                shutil.rmtree(removed)
            self.path.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self.path}: {error.strerror}") from None

    def _round_file(self, round_number: int) -> Path:
        return self.path / f"round-{round_number}.bin"

    def _offered(self) -> bytes:
        data = self._read("spec.json")
        if data is None:
            raise VeilfedError(
                Code.NOT_FOUND, f"job {self.job_id} was not offered here", "See `veilfed agent jobs --config FILE`."
            )
        return data

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self.path / name}: {error.strerror}") from None


class StateFolder:
    """The agent's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def predictions_ledger(self) -> Path:
        """`veilfed predict` may run beside the agent, so it has a ledger of its own."""
        return self.path / "ledger-predict.jsonl"

    @property
    def embeddings(self) -> Path:
        return self.path / "embeddings"

    def job(self, job_id: str) -> JobFolder:
        """The folder of a job, whether it exists or not. Raises VeilfedError(INPUT_INVALID) for an odd name."""
        if not _JOB_ID.fullmatch(job_id):
            raise VeilfedError(Code.INPUT_INVALID, "a job's id has letters, digits, '.', '_' and '-' only")
        return JobFolder(self.path / "jobs" / job_id)

    def jobs(self) -> list[JobFolder]:
        """All jobs that were offered and not purged, by id. Raises VeilfedError(FILE_UNUSABLE)."""
        folder = self.path / "jobs"
        try:
            paths = sorted(folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
        return [JobFolder(path) for path in paths if _JOB_ID.fullmatch(path.name)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the folder for this process. Raises VeilfedError(FILE_UNUSABLE) when another one has it."""
        _make_folder(self.path)
        lock = self.path / "lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{lock}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise VeilfedError(
                Code.FILE_UNUSABLE, f"{self.path}: another agent has this folder", "Stop that agent first."
            ) from None
        try:
            for left in (self.path / "jobs").glob(".purged-*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)


@lru_cache(maxsize=8)
def _parse(spec_json: str, where: str) -> JobSpec:
    """A specification comes again with each round."""
    return parse_job(spec_json, where)


def _make_folder(path: Path) -> None:
    """Makes a folder for the owner alone, with its parents."""
    missing = []
    while not path.is_dir() and path not in missing:
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would not give the mode to the parents
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
