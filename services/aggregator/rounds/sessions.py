"""Sessions of agents and the leases of their tasks. All functions run in one transaction of the caller."""

import hashlib
import secrets

from sqlalchemy import Connection, and_, insert, or_, select, update

from aggregator.artifacts import Ref
from aggregator.rounds.records import Offer, RoundState, TaskState
from aggregator.store.schema import AgentRow, RoundRow, TaskRow
from aggregator.words import printable
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity

__all__ = ["check", "expire", "invalid", "join", "offer", "renew", "session_digest"]


MAX_WORDS = 64


def session_digest(secret: str) -> str:
    """What the database keeps of a session's secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def invalid() -> VeilfedError:
    return VeilfedError(Code.SESSION_INVALID, "the session is unknown, of another identity, or ended by a later Join")


def join(connection: Connection, identity: Identity, software_version: str, now: int) -> tuple[str, str]:
    """A new session for an agent: (its secret, the digest of the session that it ends or "")."""
    secret = secrets.token_urlsafe(32)
    key = AgentRow.identity == str(identity)
    before = connection.execute(select(AgentRow.session).where(key)).scalar() or ""
    values = {
        "session": session_digest(secret),
        "software_version": printable(software_version, MAX_WORDS),
        "joined_ms": now,
        "last_seen_ms": now,
        "activity": "joined",
    }
    if before:
        connection.execute(update(AgentRow).where(key).values(values))
        connection.execute(
            update(TaskRow)
            .where(TaskRow.leased_to == before, TaskRow.state == TaskState.LEASED)
            .values(state=TaskState.WAITING, leased_to="")
        )
    else:
        connection.execute(insert(AgentRow).values(identity=str(identity), institution=identity.institution, **values))
    return secret, before


def check(connection: Connection, session: str, identity: Identity) -> None:
    """Raises VeilfedError(SESSION_INVALID) unless the session (digest) is the identity's current one."""
    found = connection.execute(select(AgentRow.identity).where(AgentRow.session == session)).scalar()
    if found != str(identity):
        raise invalid()


def renew(connection: Connection, session: str, activity: str, now: int, lease_ms: int) -> None:
    """Notes a sign of life and lengthens the leases of the session. Raises VeilfedError(SESSION_INVALID)."""
    seen = connection.execute(
        update(AgentRow)
        .where(AgentRow.session == session)
        .values(last_seen_ms=now, activity=printable(activity, MAX_WORDS))
    )
    if seen.rowcount == 0:
        raise invalid()
    connection.execute(
        update(TaskRow)
        .where(TaskRow.leased_to == session, TaskRow.state == TaskState.LEASED)
        .values(lease_ms=now + lease_ms)
    )


def offer(
    connection: Connection, session: str, institution: str, now: int, lease_ms: int, again: bool = False
) -> list[Offer]:
    """Leases the institution's open tasks that nobody works on to the session.

    With `again`, also those that the session has already: its stream is new, and what was sent may be lost.
    """
    # A lease of a session that a later Join ended is void too.
    void = [TaskRow.lease_ms < now, TaskRow.leased_to.not_in(select(AgentRow.session))]
    if again:
        void.append(TaskRow.leased_to == session)
    free = [TaskRow.state == TaskState.WAITING, and_(TaskRow.state == TaskState.LEASED, or_(*void))]
    rows = connection.execute(
        select(
            TaskRow.job_id,
            TaskRow.round,
            TaskRow.trains,
            TaskRow.token,
            TaskRow.spec_json,
            RoundRow.model_sha256,
            RoundRow.model_size,
            RoundRow.deadline_ms,
        )
        .join(RoundRow, and_(RoundRow.job_id == TaskRow.job_id, RoundRow.number == TaskRow.round))
        .where(TaskRow.institution == institution, or_(*free), RoundRow.state == RoundState.OPEN)
    ).all()
    if rows:
        connection.execute(
            update(TaskRow)
            .where(TaskRow.token.in_([row.token for row in rows]))
            .values(state=TaskState.LEASED, leased_to=session, lease_ms=now + lease_ms)
        )
    return [
        Offer(
            session,
            row.job_id,
            row.round,
            row.trains,
            row.token,
            Ref(row.model_sha256, row.model_size),
            row.deadline_ms,
            row.spec_json,
        )
        for row in rows
    ]


def expire(connection: Connection, now: int) -> list[str]:
    """Ends the leases of silent agents; returns the institutions whose tasks may be offered again."""
    over = and_(TaskRow.state == TaskState.LEASED, TaskRow.lease_ms < now)
    institutions = connection.execute(select(TaskRow.institution).where(over).distinct()).scalars().all()
    if institutions:
        connection.execute(update(TaskRow).where(over).values(state=TaskState.WAITING, leased_to=""))
    return list(institutions)
