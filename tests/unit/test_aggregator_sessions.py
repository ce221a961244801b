"""Sessions of agents and the leases of their tasks: whose they are, and until when."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from aggregator.rounds import sessions
from aggregator.rounds.records import Offer
from aggregator.store.schema import AgentRow
from tests.support.rounds import ADMIN, LEASE_MS, MODELS, World, new_world, refused
from veilfed.errors import Code


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with new_world(tmp_path) as made:
        for name in ("north", "south"):
            made.connect(name)
        yield made


def agent(world: World, institution: str) -> AgentRow:
    table = AgentRow.__table__
    found: AgentRow = world.run(lambda c: c.execute(select(table).where(table.c.institution == institution)).one())
    return found


def offers(world: World, session: str, institution: str, again: bool = False) -> list[Offer]:
    found: list[Offer] = world.run(lambda c: sessions.offer(c, session, institution, world.now, LEASE_MS, again))
    return found


def leases(world: World, job_id: str) -> dict[str, tuple[str, str, int]]:
    """Institution -> (state, session, until when)."""
    return {row.institution: (row.state, row.leased_to, row.lease_ms) for row in world.rows(job_id)["tasks"]}


def test_what_is_kept_of_an_agent(world: World) -> None:
    secret, before = world.run(lambda c: sessions.join(c, world.identity("west"), "1.2\x1b[2J" + "x" * 99, world.now))
    kept = agent(world, "west")
    assert before == ""
    assert (kept.identity, kept.institution) == (str(world.identity("west")), "west")
    assert kept.session == sessions.session_digest(secret)
    assert kept.software_version == "1.2 [2J" + "x" * 57
    assert (kept.joined_ms, kept.last_seen_ms, kept.activity) == (world.now, world.now, "joined")
    assert len(secret) >= 43  # 256 bits

    world.now += 7
    world.run(lambda c: sessions.renew(c, kept.session, "y" * 99, world.now, LEASE_MS))
    seen = agent(world, "west")
    assert (seen.joined_ms, seen.last_seen_ms, seen.activity) == (kept.joined_ms, world.now, "y" * 64)

    world.now += 7
    other, ended = world.run(lambda c: sessions.join(c, world.identity("west"), "2", world.now))
    later = agent(world, "west")
    assert (ended, later.session) == (kept.session, sessions.session_digest(other))
    assert other != secret
    assert (later.software_version, later.joined_ms, later.last_seen_ms) == ("2", world.now, world.now)
    assert agent(world, "north").joined_ms == world.now - 14


def test_a_session_is_of_one_identity(world: World) -> None:
    session = world.live["north"]
    world.run(lambda c: sessions.check(c, session, world.identity("north")))
    for wrong, identity in (
        (session, world.identity("south")),
        (session, world.identity("north", "spare")),
        (world.live["south"], world.identity("north")),
        ("", world.identity("north")),
    ):
        with refused(Code.SESSION_INVALID):
            world.run(partial(sessions.check, session=wrong, identity=identity))
    world.join("north")
    with refused(Code.SESSION_INVALID):
        world.run(lambda c: sessions.check(c, session, world.identity("north")))


def test_a_sign_of_life_lengthens_the_leases_of_its_session_alone(world: World) -> None:
    answered = world.submit(["north", "south"])
    world.answer("north")
    cancelled = world.submit(["north"])
    world.change(lambda c: world.machine.cancel(c, cancelled, ADMIN))
    ended = [world.rows(answered)["tasks"][0], *world.rows(cancelled)["tasks"]]
    job_id = world.submit(["north", "south"])
    until = world.now + LEASE_MS
    north, south = world.live["north"], world.live["south"]
    assert leases(world, job_id) == {"north": ("leased", north, until), "south": ("leased", south, until)}
    with refused(Code.SESSION_INVALID):
        world.run(lambda c: sessions.renew(c, "unknown", "training", world.now + 9, LEASE_MS))
    world.run(lambda c: sessions.renew(c, north, "training", world.now + 9, LEASE_MS))
    assert leases(world, job_id) == {"north": ("leased", north, until + 9), "south": ("leased", south, until)}
    assert [agent(world, name).activity for name in ("north", "south")] == ["training", "joined"]
    assert [world.rows(answered)["tasks"][0], *world.rows(cancelled)["tasks"]] == ended


def test_a_later_join_frees_the_open_tasks_of_its_own_session_alone(world: World) -> None:
    answered = world.submit(["north"], quorum=1, grace_seconds=60)
    world.answer("north")
    done = leases(world, answered)
    opened = world.submit(["north", "south"])
    south = leases(world, opened)["south"]
    world.join("north")
    assert leases(world, answered) == done
    assert leases(world, opened)["north"][:2] == ("waiting", "")
    assert leases(world, opened)["south"] == south


def test_a_lease_is_over_after_its_last_millisecond(world: World) -> None:
    job_id = world.submit(["north", "south"])
    spare = world.join("north", "spare")
    del world.live["south"]
    world.now += LEASE_MS
    kept = leases(world, job_id)
    assert offers(world, spare, "north") == []
    assert world.run(lambda c: sessions.expire(c, world.now)) == []
    assert leases(world, job_id) == kept

    world.run(lambda c: sessions.renew(c, world.live["north"], "training", world.now, LEASE_MS))
    renewed = leases(world, job_id)["north"]
    world.now += 1
    assert world.run(lambda c: sessions.expire(c, world.now)) == ["south"]
    assert leases(world, job_id)["north"] == renewed
    assert leases(world, job_id)["south"][:2] == ("waiting", "")
    assert world.run(lambda c: sessions.expire(c, world.now)) == []


def test_the_tick_gives_a_task_that_was_let_go_to_the_agent_that_is_there(world: World) -> None:
    job_id = world.submit(["north", "south"])
    new = world.join("north", "spare")
    world.live["north"] = new
    del world.live["south"]
    world.pass_time(LEASE_MS / 1000 + 0.001)
    assert (world.tasks["north"].session, world.tasks["north"].token) == (new, world.claim("north").token)
    assert leases(world, job_id)["north"] == ("leased", new, world.now + LEASE_MS)
    assert leases(world, job_id)["south"][:2] == ("waiting", "")


def test_an_offer_is_the_institution_s_own_open_tasks(world: World) -> None:
    jobs = [world.submit(["north", "south"], ["west"], quorum=1, grace_seconds=0) for _ in range(2)]
    world.answer("north")  # the second job: its round is folded, and then the next one opens
    world.publish()
    world.now += 1
    session = world.live["north"]
    first, second = sorted(offers(world, session, "north", again=True), key=lambda offer: jobs.index(offer.job_id))
    assert (first.job_id, first.round, first.model, first.trains) == (jobs[0], 0, MODELS[0], True)
    assert (second.job_id, second.round, second.model, second.trains) == (jobs[1], 1, MODELS[1], True)
    assert (first.deadline_ms, second.deadline_ms) == (world.now - 1 + 60_000,) * 2
    assert second.token == world.tasks["north"].token
    for job in jobs:
        assert leases(world, job)["north"][1:] == (session, world.now + LEASE_MS)
        assert leases(world, job)["south"][2] == world.now - 1 + LEASE_MS
    assert offers(world, session, "north") == []
    west = offers(world, world.join("west"), "west")
    assert [(offer.job_id, offer.trains) for offer in west] == [(jobs[0], False), (jobs[1], False)]


def test_nobody_answers_for_another_institution(world: World) -> None:
    """Not even a task that nobody works on, by who has somehow come to know its token."""
    job_id = world.submit(["north", "south"])
    for name in ("north", "south"):
        world.join(name)  # its tasks wait
    assert {state for state, _, _ in leases(world, job_id).values()} == {"waiting"}
    for name, other in (("north", "south"), ("south", "north")):
        session = world.join(name)
        with refused(Code.TASK_INVALID):
            world.answer(name, session=session, token=world.tasks[other].token)
    assert {state for state, _, _ in leases(world, job_id).values()} == {"waiting"}
