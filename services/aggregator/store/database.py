"""One connection in one thread: the only place where the aggregator touches its database."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from veilfed.errors import Code, VeilfedError

__all__ = ["Database", "migrate", "open_engine"]

Result = TypeVar("Result")

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_MS = 10_000


def open_engine(url: str) -> Engine:
    """An engine; SQLite with write-ahead log, foreign keys and honest transactions."""
    try:
        engine = create_engine(url)
    except (SQLAlchemyError, ImportError) as error:
        raise VeilfedError(Code.CONFIG_INVALID, f"database: not a usable URL ({type(error).__name__})") from None
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        # The driver would begin transactions late and by itself; "begin" below does it.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # What a receipt promises must outlive a power cut.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def began(connection: Connection) -> None:
        # At once a writer: a transaction that reads first and writes later cannot lose its turn in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def migrate(engine: Engine) -> None:
    """Brings the tables to the newest version. Raises VeilfedError(STATE_CORRUPT) when that fails."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except SQLAlchemyError as error:
        raise VeilfedError(
            Code.STATE_CORRUPT, f"database: cannot be opened or migrated ({type(error).__name__})"
        ) from None


class Database:
    """Runs functions of a connection, each in one transaction, one after the other in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self._thread = ThreadPoolExecutor(1, "database")

    async def open(self) -> None:
        """Migrates. Raises VeilfedError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, migrate, self._engine)

    async def run(self, function: Callable[[Connection], Result]) -> Result:
        """What `function` returns; its changes are committed by then, or undone if it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, function)

    def _transaction(self, function: Callable[[Connection], Result]) -> Result:
        with self._engine.begin() as connection:
            return function(connection)

    def close(self) -> None:
        """Waits for what runs, then closes the connection."""
        self._thread.shutdown(wait=True)
        self._engine.dispose()
