"""The oracle's door: embeddings go out only within a quota and a rate per institution.

Both are counted per institution, not per certificate, and on disk: neither a second identity nor a restart gives more.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from veilfed.errors import Code, VeilfedError

__all__ = ["Charge", "Limits", "ReleaseGate"]

FILE = "quota.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS release (
    institution TEXT PRIMARY KEY,
    released INTEGER NOT NULL,  -- embeddings, in all
    tokens REAL NOT NULL,       -- of the token bucket; negative while requests are held back
    filled_at REAL NOT NULL     -- when `tokens` was right, seconds since the Unix epoch
)
"""


@dataclass(frozen=True)
class Limits:
    """What an institution may ask for. None: no limit."""

    quota: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    rate: float | None = None  # embeddings per second
    burst: int = 256
    rate_wait_seconds: float = 30.0

    def quota_of(self, institution: str) -> int | None:
        return self.quotas.get(institution, self.quota)


@dataclass(frozen=True)
class Charge:
    """A request that was let through: what is left, and how long to hold it back to keep the rate."""

    quota_left: int | None
    wait_seconds: float


class ReleaseGate:
    """Counts in an SQLite file; every change is one transaction. Methods block: call them off the event loop."""

    def __init__(self, state: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        """Opens or creates the file in the folder `state`. Raises VeilfedError(FILE_UNUSABLE or STATE_CORRUPT)."""
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._path = state / FILE
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self._path}: {error.strerror}") from None
        with self._errors():
            self._connection = sqlite3.connect(self._path, timeout=10, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            # FULL: not even pulling the plug gives a quota back.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(SCHEMA)

    def charge(self, institution: str, count: int) -> Charge:
        """Takes `count` embeddings from the institution's quota and rate, or nothing at all.

        Raises VeilfedError(QUOTA_EXCEEDED), or RATE_LIMITED if the request would be held back for too long.
        """
        quota = self._limits.quota_of(institution)
        with self._transaction() as connection:
            now = self._clock()
            row = connection.execute(
                "SELECT released, tokens, filled_at FROM release WHERE institution = ?", (institution,)
            ).fetchone()
            released, tokens, filled_at = row or (0, float(self._limits.burst), now)
            if quota is not None and released + count > quota:
                raise VeilfedError(
                    Code.QUOTA_EXCEEDED,
                    f"{institution} has had {released} of {quota} embeddings and asks for {count} more",
                )
            tokens, wait = self._spend(institution, tokens, now - filled_at, count)
            connection.execute(
                "INSERT OR REPLACE INTO release (institution, released, tokens, filled_at) VALUES (?, ?, ?, ?)",
                (institution, released + count, tokens, now),
            )
        return Charge(None if quota is None else quota - released - count, wait)

    def _spend(self, institution: str, tokens: float, elapsed: float, count: int) -> tuple[float, float]:
        """The token bucket after `count` more, and the seconds until it is out of debt."""
        rate = self._limits.rate
        if rate is None:
            return float(self._limits.burst), 0.0
        # A clock that was set back must not take tokens away.
        tokens = min(float(self._limits.burst), tokens + max(0.0, elapsed) * rate) - count
        wait = max(0.0, -tokens) / rate
        if wait > self._limits.rate_wait_seconds:
            raise VeilfedError(
                Code.RATE_LIMITED,
                f"{institution} asks for more than {rate:g} embeddings per second; the next are free in {wait:.1f} s",
            )
        return tokens, wait

    def refund(self, institution: str, count: int) -> None:
        """Gives back quota for embeddings that were not released. The rate stays spent: the work may have been done."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE release SET released = MAX(0, released - ?) WHERE institution = ?", (count, institution)
            )

    def left(self, institution: str) -> int | None:
        """Embeddings that the institution may still ask for; None if there is no quota."""
        quota = self._limits.quota_of(institution)
        return None if quota is None else max(0, quota - self.released().get(institution, 0))

    def released(self) -> dict[str, int]:
        """Embeddings released so far, by institution."""
        with self._lock, self._errors():
            rows = self._connection.execute("SELECT institution, released FROM release ORDER BY institution")
            return {institution: int(count) for institution, count in rows}

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction, also against other processes; undone when the block raises."""
        with self._lock, self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self._path}: {error}") from None
        except sqlite3.DatabaseError:
            raise VeilfedError(Code.STATE_CORRUPT, f"{self._path}: not a readable database") from None
