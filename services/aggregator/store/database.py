"""One connection in one thread: the only place where the aggregator touches its database."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger

__all__ = ["Database", "migrate", "open_engine"]

log = get_logger("aggregator.database")

Result = TypeVar("Result")

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_MS = 10_000
# SQLite's names of errors, by their beginnings.
UNUSABLE = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_IOERR": "the disk cannot be read or written, or a limit of size is reached",
    "SQLITE_CANTOPEN": "the file cannot be opened or made",
    "SQLITE_READONLY": "the file cannot be written",
    "SQLITE_BUSY": "another process keeps it locked",
}
DAMAGED = frozenset({"SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS"})
# Most functions that share a transaction.
MAX_GROUP = 64


def open_engine(url: str) -> Engine:
    """An engine; SQLite with write-ahead log, foreign keys and honest transactions."""
    try:
        engine = create_engine(url, hide_parameters=True)  # values of agents and jobs are nothing for a log
    except ImportError as error:
        raise VeilfedError(Code.PACKAGE_MISSING, f"database: its driver {error.name} is not installed") from None
    except SQLAlchemyError as error:
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
    """Brings the tables to the newest version.

    Raises VeilfedError: FILE_UNUSABLE when the disk is full or the file cannot be used, else STATE_CORRUPT.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError:
        raise VeilfedError(
            Code.STATE_CORRUPT, "database: its tables are of a version that this software does not know"
        ) from None
    except SQLAlchemyError as error:
        raise _explained(engine, error) from None


def _name(error: BaseException) -> str:
    """SQLite's name of what went wrong; empty for another database."""
    return str(getattr(getattr(error, "orig", None), "sqlite_errorname", ""))


def _unusable(error: BaseException) -> str | None:
    """What an operator has to see to, where the disk is to blame and not the file."""
    name = _name(error)
    if name in DAMAGED:
        return None
    return next((words for start, words in UNUSABLE.items() if name.startswith(start)), None)


def _explained(engine: Engine, error: SQLAlchemyError) -> VeilfedError:
    where = f"database {engine.url.database}"
    if words := _unusable(error):
        return VeilfedError(Code.FILE_UNUSABLE, f"{where}: {words}")
    reason = _name(error) or type(error).__name__
    return VeilfedError(Code.STATE_CORRUPT, f"{where}: cannot be opened or migrated ({reason})")


@dataclass
class _Call:
    """A function that waits for its turn, and who waits for its result."""

    function: Callable[[Connection], Any]
    future: "asyncio.Future[Any]"
    result: Any = None
    error: BaseException | None = None

    def deliver(self) -> None:
        if self.future.done():
            return  # nobody waits any more
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Database:
    """Runs functions of a connection one after the other in a thread of its own.

    Functions that come while others run share the next transaction: a commit waits for the disk, and one wait for
    many is what makes the service quick. If one of them fails, all are undone and run again, each within a savepoint.

    A commit that fails may have happened all the same, such as when the answer of a server is lost: those who wait get
    the error, and `on_doubt` is called in their event loop.
    """

    on_doubt: Callable[[], None]

    def __init__(self, url: str) -> None:
        self.on_doubt = lambda: None
        self._doubt = False
        self.engine = open_engine(url)
        self._thread = ThreadPoolExecutor(1, "database")
        self._kept: Connection | None = None
        self._waiting: deque[_Call] = deque()

    async def open(self) -> None:
        """Migrates. Raises VeilfedError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, migrate, self.engine)

    async def run(self, function: Callable[[Connection], Result]) -> Result:
        """What `function` returns; its changes are committed by then, or undone if it raises."""
        loop = asyncio.get_running_loop()
        call = _Call(function, loop.create_future())
        self._waiting.append(call)
        self._thread.submit(self._work, loop)
        result: Result = await call.future
        return result

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs what waits, in one transaction. Nothing is left for most of the submitted turns."""
        calls = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_GROUP))]
        if not calls:
            return
        try:
            self._transact(calls)
        except Exception as error:  # given to all who wait
            for call in calls:
                call.error = call.error or error
        self._note(calls)
        loop.call_soon_threadsafe(_deliver, calls)
        if self._doubt:
            self._doubt = False
            loop.call_soon_threadsafe(self.on_doubt)

    def _connection(self) -> Connection:
        """The thread's connection. One that was lost is made anew by SQLAlchemy when a transaction begins."""
        if self._kept is None:
            self._kept = self.engine.connect()
        return self._kept

    def _note(self, calls: list[_Call]) -> None:
        """The log of who has failed names no more than the kind of an error."""
        words = {_unusable(call.error) for call in calls if call.error is not None} - {None}
        for word in words:
            log.error("the database cannot be used", database=self.engine.url.database, error=word)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        connection, done = self._connection(), False
        try:
            with connection.begin():
                yield connection
                done = True
        except BaseException:
            if done:
                self._doubt = True
                _let_go(connection)
            raise

    def _transact(self, calls: list[_Call]) -> None:
        with suppress(_Again), self._transaction() as connection:
            for call in calls:
                try:
                    call.result = call.function(connection)
                except Exception:
                    if len(calls) == 1:
                        raise
                    raise _Again from None
            return
        with self._transaction() as connection:
            for call in calls:
                _attempt(connection, call)

    def close(self) -> None:
        """Waits for what runs, then closes the connection."""
        self._thread.shutdown(wait=True)
        if self._kept is not None:
            self._kept.close()
        self.engine.dispose()


class _Again(Exception):  # noqa: N818
    """One of several functions has failed."""


def _attempt(connection: Connection, call: _Call) -> None:
    """Runs one function; its failure undoes its own changes only."""
    savepoint = connection.begin_nested()
    try:
        call.result = call.function(connection)
    except Exception as error:  # given to who waits
        call.error = error
        savepoint.rollback()
    else:
        savepoint.commit()


def _let_go(connection: Connection) -> None:
    """Ends what a commit that failed may have left open at the driver: no other transaction could begin."""
    try:
        connection.connection.rollback()
    except Exception:  # it is of no use any more
        connection.invalidate()


def _deliver(calls: list[_Call]) -> None:
    for call in calls:
        call.deliver()
