"""Faults of a database."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aggregator.store.database import Database

__all__ = ["failing_commit"]


@contextmanager
def failing_commit(database: Database, kept: bool) -> Iterator[None]:
    """The next commit fails; what it was to keep is kept, as when the answer of a server is lost, or it is not."""
    dialect: Any = database.engine.dialect
    commit = dialect.do_commit

    def fail(connection: Any) -> None:
        dialect.do_commit = commit
        if kept:
            commit(connection)
        raise sqlite3.OperationalError("the connection was lost")

    dialect.do_commit = fail
    try:
        yield
    finally:
        dialect.do_commit = commit
