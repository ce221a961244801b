"""The database: migrations, transactions."""

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import IntegrityError

from aggregator.store.database import Database, migrate, open_engine
from aggregator.store.schema import AgentRow, Base, EventRow
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
