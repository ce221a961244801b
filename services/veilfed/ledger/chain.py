"""An append-only, hash-chained file of records: what left an institution, one JSON object per line.

Record n (from 1) is {seq, time, previous, ...fields, sha256}: `previous` is the sha256 of record n - 1 and `sha256`
covers the canonical JSON of all the rest. A line is the canonical JSON of its record, so that no byte can change
unnoticed. What a chain alone cannot show, a cut tail, shows by countersigned heads (veilfed.ledger.receipts).
"""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity

__all__ = ["EMPTY", "MAX_RECORD_BYTES", "Head", "Ledger", "Record", "canonical", "head_statement", "read"]

Record = dict[str, Any]

# The longest line. A record holds names, counts and digests, and in a receipt a certificate chain.
MAX_RECORD_BYTES = 64 * 1024

# So many of the last heads are remembered; `holds` reads the file for those before.
RECENT = 4096

RESERVED = frozenset({"seq", "time", "previous", "sha256"})


@dataclass(frozen=True)
class Head:
    """How far a ledger has come: the number of its records and the sha256 (hexadecimal) of the last."""

    records: int
    sha256: str


EMPTY = Head(0, "0" * 64)


def canonical(document: Mapping[str, Any]) -> bytes:
    """The one JSON form of a document: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def head_statement(identity: Identity | str, job_id: str, round_number: int, head: Head) -> bytes:
    """What the aggregator signs in a receipt: whose ledger stood at which head in which round of which job."""
    return canonical(
        {
            "identity": str(identity),
            "job_id": job_id,
            "round": round_number,
            "head": {"records": head.records, "sha256": head.sha256},
        }
    )


def _broken(where: str, problem: str) -> VeilfedError:
    return VeilfedError(Code.LEDGER_BROKEN, f"{where}: {problem}")


def _check(line: bytes, before: Head, where: str) -> Record:
    """The record of a line (with its newline), which must follow `before`. Raises VeilfedError(LEDGER_BROKEN)."""
    name = f"record {before.records + 1}"
    if not line.endswith(b"\n"):
        raise _broken(where, f"{name} is incomplete or too long")
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or canonical(record) + b"\n" != line:
            raise ValueError
        found = record.pop("sha256")
        expected = hashlib.sha256(canonical(record)).hexdigest()
        timed = datetime.fromisoformat(record["time"]).tzinfo is not None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _broken(where, f"{name} is not a record as it was written") from None
    if found != expected:
        raise _broken(where, f"{name} was changed: its sha256 does not match its contents")
    if not timed:
        raise _broken(where, f"{name} does not say when it was written")
    if record.get("seq") != before.records + 1:
        raise _broken(where, f"{name} is out of order: it is numbered otherwise")
    if record.get("previous") != before.sha256:
        raise _broken(where, f"{name} does not follow the record before it")
    return {**record, "sha256": found}


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_RECORD_BYTES + 1):
        yield line


def read(path: Path) -> Iterator[Record]:
    """Every record of the file in order, each checked. Raises VeilfedError(LEDGER_BROKEN or FILE_UNUSABLE)."""
    head = EMPTY
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                record = _check(line, head, str(path))
                head = Head(head.records + 1, record["sha256"])
                yield record
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None


class Ledger:
    """A ledger opened for appending, by one process at a time; its methods may be called from any thread.

    A record is in the operating system's hands when `append` returns, so it survives the end of the process;
    `sync` makes all of them survive the end of the machine.
    """

    def __init__(self, path: Path, descriptor: int, head: Head, size: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._head = head
        self._size = size
        # How many of the records the disk is known to have.
        self._durable = 0
        self._recent: dict[int, str] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, on_record: Callable[[Record], None] | None = None) -> Self:
        """Opens or makes the file and checks it from the first record on; `on_record` sees every one of them.

        An incomplete last line (the machine ended in the middle of a write) is cut off, and a record of kind
        "recovered" says so. Raises VeilfedError(LEDGER_BROKEN), or FILE_UNUSABLE also when another process has it.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        try:
            ledger, torn = cls._replay(path, descriptor, on_record)
            if torn:
                ledger.append({"kind": "recovered", "cut_bytes": torn})
                ledger.sync()
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    @classmethod
    def _replay(cls, path: Path, descriptor: int, on_record: Callable[[Record], None] | None) -> tuple[Self, int]:
        """Locks the file, checks it, cuts an incomplete last line; returns the ledger and the bytes cut."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: another process has this ledger open") from None
        head, size, torn = EMPTY, 0, 0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            for line in _lines(file):
                if not line.endswith(b"\n") and len(line) <= MAX_RECORD_BYTES:
                    torn = len(line)
                    break
                record = _check(line, head, str(path))
                head, size = Head(head.records + 1, record["sha256"]), size + len(line)
                if on_record is not None:
                    on_record(record)
        if torn:
            os.ftruncate(descriptor, size)
        return cls(path, descriptor, head, size), torn

    @property
    def head(self) -> Head:
        return self._head

    @property
    def path(self) -> Path:
        return self._path

    def append(self, fields: Mapping[str, Any]) -> Head:
        """Adds one record of JSON values and returns the new head.

        Raises VeilfedError(FILE_UNUSABLE) when it cannot be written; the file is then as before.
        """
        if taken := RESERVED & fields.keys():
            raise VeilfedError(Code.INPUT_INVALID, f"a record's fields may not be named {sorted(taken)}")
        with self._lock:
            if self._descriptor < 0:
                raise VeilfedError(Code.FILE_UNUSABLE, f"{self._path}: the ledger is closed")
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = {**fields, "seq": self._head.records + 1, "time": time, "previous": self._head.sha256}
            sha256 = hashlib.sha256(canonical(record)).hexdigest()
            line = canonical({**record, "sha256": sha256}) + b"\n"
            if len(line) > MAX_RECORD_BYTES:
                raise VeilfedError(Code.INPUT_INVALID, f"a record of {len(line)} bytes; at most {MAX_RECORD_BYTES}")
            self._write(line)
            self._head = Head(self._head.records + 1, sha256)
            self._recent[self._head.records] = sha256
            self._recent.pop(self._head.records - RECENT, None)
            return self._head

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(0, "no space for a whole record")
        except OSError as error:
            self._take_back()
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self._path}: {error.strerror}") from None
        self._size += len(line)

    def _take_back(self) -> None:
        """Cuts a half-written line; where even that fails, nothing more is written after it."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            os.close(self._descriptor)
            self._descriptor = -1

    def holds(self, head: Head) -> bool:
        """Whether the ledger stands at `head` or once did. May read the file: call it off the event loop."""
        if head.records > self._head.records:
            return False
        if head.records == 0:
            return head == EMPTY
        if head.records in self._recent:
            return self._recent[head.records] == head.sha256
        return any(record["seq"] == head.records and record["sha256"] == head.sha256 for record in read(self._path))

    def sync(self, records: int | None = None) -> None:
        """Waits until the disk has every record, or the first `records` of them."""
        written = self._head.records
        if self._durable >= (written if records is None else records):
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self._path}: {error.strerror}") from None
        self._durable = max(self._durable, written)

    def close(self) -> None:
        """Writes everything to the disk and lets other processes have the file. May be called twice."""
        with self._lock:
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                os.fsync(descriptor)
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
