"""The database: migrations, transactions."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, event, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from aggregator.store.database import Database, migrate, open_engine
from aggregator.store.schema import AgentRow, Base, EventRow
from tests.support.databases import failing_commit
from tests.support.loops import asynchronous
from veilfed.errors import Code, VeilfedError


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'aggregator.sqlite'}"


def test_the_migrations_make_the_schema(tmp_path: Path) -> None:
    engine = open_engine(url(tmp_path))
    migrate(engine)
    migrate(engine)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        pragmas = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2}


def test_events_need_their_job(tmp_path: Path) -> None:
    engine = open_engine(url(tmp_path))
    migrate(engine)
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(insert(EventRow).values(job_id="none", time_ms=0, kind="x"))


def test_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "aggregator.sqlite").write_bytes(b"no database " * 1000)
    with pytest.raises(VeilfedError) as caught:
        migrate(open_engine(url(tmp_path)))
    assert caught.value.code is Code.STATE_CORRUPT


def unusable(engine: Engine, words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        migrate(engine)
    assert caught.value.code is Code.FILE_UNUSABLE
    assert str(engine.url.database) in caught.value.message


def test_a_full_disk_is_no_damage_and_what_was_kept_stays(tmp_path: Path) -> None:
    """SQLite says the same of a file that may not grow."""
    engine = open_engine(url(tmp_path))

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 4")

    unusable(engine, "the disk is full")
    migrate(open_engine(url(tmp_path)))


def test_a_file_that_cannot_be_used_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable(open_engine(url(tmp_path / "file")), "cannot be opened")
    (tmp_path / "aggregator.sqlite").mkdir()
    unusable(open_engine(url(tmp_path)), "cannot be opened")


def test_a_locked_file_is_no_damage(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "aggregator.sqlite")) as other:
        other.execute("BEGIN EXCLUSIVE")
        unusable(open_engine(url(tmp_path) + "?timeout=0.01"), "another process")


def test_tables_of_a_later_version(tmp_path: Path) -> None:
    engine = open_engine(url(tmp_path))
    migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(VeilfedError, match="version") as caught:
        migrate(engine)
    assert caught.value.code is Code.STATE_CORRUPT


def test_an_unusable_url() -> None:
    with pytest.raises(VeilfedError) as caught:
        open_engine("nonsense")
    assert caught.value.code is Code.CONFIG_INVALID


def _join(connection: Connection) -> None:
    connection.execute(insert(AgentRow).values(identity="a", institution="a", session="s", joined_ms=0, last_seen_ms=0))


@asynchronous
async def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    database = Database(url(tmp_path))
    await database.open()

    def fails(connection: Connection) -> None:
        _join(connection)
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        await database.run(fails)
    assert await database.run(lambda c: c.execute(select(AgentRow.identity)).all()) == []
    await database.run(_join)
    database.close()
    with sqlite3.connect(tmp_path / "aggregator.sqlite") as connection:
        assert connection.execute("SELECT identity FROM agents").fetchall() == [("a",)]


def _agent(name: str) -> Callable[[Connection], str]:
    def join(connection: Connection) -> str:
        connection.execute(
            insert(AgentRow).values(identity=name, institution=name, session=name, joined_ms=0, last_seen_ms=0)
        )
        return name

    return join


def _fail(connection: Connection) -> str:
    _agent("lost")(connection)
    raise VeilfedError(Code.TASK_INVALID, "half way")


@asynchronous
async def test_functions_that_share_a_transaction_fail_alone(tmp_path: Path) -> None:
    database = Database(url(tmp_path))
    await database.open()
    commits = 0

    def count(_: Connection) -> None:
        nonlocal commits
        commits += 1

    started, go_on = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        started.set()
        go_on.wait(10)

    held = asyncio.create_task(database.run(hold))
    await asyncio.to_thread(started.wait, 10)
    event.listen(database.engine, "commit", count)
    waiting = [
        asyncio.create_task(database.run(function))
        for function in (_agent("a"), _fail, _agent("b"), _agent("a"), _agent("c"))
    ]
    await asyncio.sleep(0)
    go_on.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    await held
    assert [str(result) for result in results if not isinstance(result, IntegrityError)] == [
        "a",
        "TASK_INVALID: half way",
        "b",
        "c",
    ]
    assert isinstance(results[3], IntegrityError)  # the same agent twice
    assert commits == 2  # that of `hold` and one for the others
    kept = await database.run(
        lambda c: c.execute(select(AgentRow.identity).order_by(AgentRow.identity)).scalars().all()
    )
    assert kept == ["a", "b", "c"]
    database.close()


@pytest.mark.parametrize("kept", [False, True], ids=["undone", "kept"])
@asynchronous
async def test_a_commit_that_fails_is_told_and_the_next_one_works(tmp_path: Path, kept: bool) -> None:
    """Nobody knows whether it has happened: the answer of a server may be lost."""
    database, told = Database(url(tmp_path)), asyncio.Event()
    await database.open()
    database.on_doubt = told.set
    with failing_commit(database, kept), pytest.raises(OperationalError):
        await database.run(_agent("a"))
    await asyncio.wait_for(told.wait(), 10)
    assert await database.run(lambda c: c.execute(select(AgentRow.identity)).scalars().all()) == ["a"] * kept
    assert await database.run(_agent("b")) == "b"
    database.close()
