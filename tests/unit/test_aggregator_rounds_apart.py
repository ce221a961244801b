"""The state machine with several jobs and rounds in the tables: nothing changes but what is meant, and when it is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Row, update

from aggregator.rounds import sessions
from aggregator.rounds.changes import Changes
from aggregator.rounds.records import Input, Inputs
from aggregator.store.schema import JobRow
from tests.support.rounds import ADMIN, LEASE_MS, MODELS, World, new_world

NAMES = ["north", "south", "west"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with new_world(tmp_path) as made:
        for name in NAMES:
            made.connect(name)
        yield made


def cancelled(world: World, job_id: str) -> None:
    world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))


def in_its_second_round(world: World, job_id: str) -> None:
    world.refuse("west")
    for name in ("north", "south", "east"):
        world.answer(name, b"of round 0")
    world.publish()


def in_its_grace(world: World, job_id: str) -> None:
    world.refuse("west")
    for name in ("north", "south"):
        world.answer(name, b"of round 0")


def folding(world: World, job_id: str) -> None:
    for name in (*NAMES, "east"):
        world.answer(name, b"of round 0")
    world.folds.clear()


def in_every_state(world: World) -> list[str]:
    """Jobs of the same institutions, with ids that are sorted before and after those of other jobs.

    Those that are made last are the ones that a fault of the earlier ones would not have changed already.
    """
    world.connect("east")
    made = [world.submit(["away"], name=f"{letter}-waiting") for letter in "az"]
    for bring in (cancelled, in_its_second_round, in_its_grace, folding):
        for letter in "az":
            made.append(world.submit([*NAMES, "east"], name=f"{letter}-{bring.__name__}".replace("_", "-"), quorum=2))
            bring(world, made[-1])
    assert [world.round_states(job)[-1] for job in made] == [
        state for state in ("pending", "cancelled", "open", "open", "folding") for _ in "az"
    ]
    assert [sum(row.parameters is not None for row in world.rows(job)["tasks"]) for job in made[-4:]] == [2, 2, 4, 4]
    return made


def test_what_happens_to_one_job_changes_no_other(world: World) -> None:
    others = in_every_state(world)
    kept = {job: world.rows(job) for job in others}

    def step(change: Callable[[], object]) -> None:
        change()
        assert {job: world.rows(job) for job in others} == kept
        world.folds[:] = [key for key in world.folds if key[0] not in others]

    whole = world.submit(NAMES, quorum=2, grace_seconds=1)
    step(lambda: world.refuse("west"))
    step(lambda: world.answer("north", b"n"))
    step(lambda: world.answer("south", b"s"))
    step(world.publish)
    step(lambda: world.answer("north", b"n"))
    step(lambda: world.answer("south", b"s"))
    step(lambda: world.pass_time(1))
    step(lambda: world.change(lambda c: world.machine.lose(c, whole, 1, ["west"])))
    step(world.publish)
    for name in NAMES:
        step(lambda name=name: world.answer(name))  # type: ignore[misc]
    assert world.round_states(whole) == ["published"] * 3

    late = world.submit(NAMES, deadline_seconds=1)
    step(lambda: world.pass_time(1))
    stopped = world.submit(NAMES)
    step(lambda: world.change(lambda c: world.machine.cancel(c, stopped, ADMIN)))
    damaged = world.submit(NAMES, quorum=1, grace_seconds=0)
    step(lambda: world.answer("north", b"n"))
    step(lambda: world.change(lambda c: world.machine.lose(c, damaged, 0, ["north"])))
    states = {job: world.job(job).summary.state for job in (whole, late, stopped, damaged)}
    assert list(states.values()) == ["done", "failed", "cancelled", "failed"]

    unreadable = world.submit(NAMES)
    world.run(lambda c: c.execute(update(JobRow).where(JobRow.id.in_([unreadable, whole])).values(spec_json="{}")))
    world.machine = Changes(lambda: world.now, LEASE_MS)  # as after a start
    ended = world.rows(whole)
    step(lambda: world.change(world.machine.fail_unreadable))
    assert world.rows(unreadable)["jobs"][0].state == "failed"
    assert world.rows(whole) == ended


def of_round(world: World, job_id: str, number: int) -> list[Row[Any]]:
    rows = world.rows(job_id)
    return [row for row in rows["rounds"] if row.number == number] + [
        row for row in rows["tasks"] if row.round == number
    ]


def test_what_happens_in_one_round_changes_none_before_it(world: World) -> None:
    job_id = world.submit(NAMES, quorum=1, grace_seconds=1, rounds=5)
    world.answer("north", b"north 0")
    world.refuse("west", "UPDATE_INVALID", "of round 0")
    world.pass_time(1)
    world.publish()
    first = of_round(world, job_id, 0)
    assert [row.parameters for row in first[1:]] == [None] * 3

    for name in NAMES:
        world.answer(name, name.encode())
    world.change(lambda c: world.machine.lose(c, job_id, 1, ["south", "nobody"]))
    inputs = world.run(lambda c: world.machine.inputs(c, job_id, 1))
    assert (inputs.start, inputs.updates) == (
        MODELS[1].sha256,
        [Input(name, 1.0, "a" * 64, name.encode()) for name in ("north", "west")],
    )
    world.publish()
    second = of_round(world, job_id, 1)
    assert of_round(world, job_id, 0) == first
    inputs = world.run(lambda c: world.machine.inputs(c, job_id, 0))
    assert inputs == Inputs(MODELS[0].sha256, [Input("north", 1.0, "a" * 64, None)])

    world.refuse("south", "UPDATE_INVALID", "of round 2")
    world.pass_time(4000)
    assert (of_round(world, job_id, 0), of_round(world, job_id, 1)) == (first, second)
    error = world.job(job_id).summary.error
    assert error.endswith("; excluded: south (UPDATE_INVALID: of round 2)")
    assert error.count("no answer") == 2
    assert world.round_states(job_id) == ["published", "published", "failed"]


def test_a_round_that_was_published_long_ago_is_not_published_again(world: World) -> None:
    job_id = world.submit(["north"])
    world.answer("north", b"of round 0")
    world.publish()
    world.answer("north", b"of round 1")
    kept = world.rows(job_id)
    world.change(lambda c: world.machine.publish(c, job_id, 0, MODELS[5], world.live))
    assert world.rows(job_id) == kept
    world.publish()
    assert world.round_states(job_id) == ["published", "published", "open"]


def test_updates_are_gone_once_they_can_never_be_folded(world: World) -> None:
    job_id = world.submit(NAMES, quorum=2, grace_seconds=0)
    for name in ("north", "south"):
        world.answer(name, b"of round 0")
    world.publish()
    world.answer("north", b"of round 1")
    world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))
    assert {row.parameters for row in world.rows(job_id)["tasks"]} == {None}


def test_a_damaged_update_of_a_round_that_is_not_folded_excludes_nobody(world: World) -> None:
    job_id = world.submit(NAMES)
    world.answer("north", b"north")
    kept = world.rows(job_id)
    world.change(lambda c: world.machine.lose(c, job_id, 0, ["north"]))
    assert world.rows(job_id) == kept


def test_more_answers_than_the_quorum(world: World) -> None:
    job_id = world.submit(NAMES, quorum=1, grace_seconds=30)
    world.answer_all([(world.claim(name), world.taken(name)) for name in ("north", "south")])
    assert world.folds == []
    world.answer("west")
    assert world.folds == [(job_id, 0)]
    world.publish()
    world.answer_all([(world.claim(name), world.taken(name)) for name in ("north", "south")])
    world.pass_time(29.999)
    assert world.folds == []
    world.pass_time(0.001)
    assert (job_id, 1) in world.folds


def test_answers_to_several_jobs_that_come_together(world: World) -> None:
    first = world.submit(NAMES, name="m")
    tasks = dict(world.tasks)
    answers, others = [], [world.submit(["north"], name=name) for name in "az"]
    for job_id in others:
        (row,) = world.rows(job_id)["tasks"]
        answers.append((world.claim("north", job_id=job_id, token=row.token), world.taken("north")))
    world.tasks = tasks
    answers.append((world.claim("south"), world.taken("south")))
    world.answer_all(answers)
    assert world.folds == [(job_id, 0) for job_id in others]
    assert world.client_states(first) == {"north": "leased", "south": "done", "west": "leased"}
    assert [row.institution for row in world.rows(first)["events"][2:]] == ["south"]
    # The other jobs' rounds of the same number are closed now.
    world.answer("north")
    world.refuse("west")
    assert world.client_states(first) == {"north": "done", "south": "done", "west": "excluded"}


def test_the_grace_counts_from_the_quorum(world: World) -> None:
    world.connect("east")
    job_id = world.submit([*NAMES, "east"], quorum=2, grace_seconds=4)
    world.answer("north")
    world.answer("south")
    world.pass_time(3)
    world.answer("west")
    world.pass_time(0.999)
    assert world.folds == []
    world.pass_time(0.001)
    assert (job_id, 0) in world.folds
    (row,) = world.rows(job_id)["rounds"]
    assert (row.quorum_ms, row.due_ms) == (world.now - 4000, world.now)


def test_the_deadline_is_to_the_millisecond(world: World) -> None:
    job_id = world.submit(NAMES, deadline_seconds=10)
    assert world.tasks["north"].deadline_ms == world.now + 10_000
    world.pass_time(9.999)
    assert world.round_states(job_id) == ["open"]
    world.pass_time(0.001)
    assert world.round_states(job_id) == ["failed"]


@pytest.mark.parametrize(("ago_ms", "words"), [(10_600, "last seen 11 s before, joined"), (-1, "last seen 0 s")])
def test_how_long_ago_a_missing_institution_was_seen(world: World, ago_ms: int, words: str) -> None:
    job_id = world.submit(NAMES, deadline_seconds=10)
    world.run(lambda c: sessions.renew(c, world.live["west"], "", world.now + 10_000 - ago_ms, LEASE_MS))
    world.run(lambda c: sessions.renew(c, world.live["north"], "joined", world.now + 10_000 - ago_ms, LEASE_MS))
    world.pass_time(10)
    error = world.job(job_id).summary.error
    assert f"north (no answer; {words}" in error
    assert "before, activity unknown)" in error


def test_the_agent_that_was_seen_last_speaks_for_its_institution(world: World) -> None:
    job_id = world.submit(NAMES, deadline_seconds=10)
    world.join("north", "spare")
    world.now += 4000
    world.run(lambda c: sessions.renew(c, world.live["north"], "training", world.now, LEASE_MS))
    world.pass_time(6)
    assert "north (no answer; last seen 6 s before, training)" in world.job(job_id).summary.error


@pytest.mark.parametrize("many", [50, 51])
def test_of_very_many_who_are_missing_some_are_named(world: World, many: int) -> None:
    job_id = world.submit(["north", *(f"i{number}" for number in range(many))], quorum=1, deadline_seconds=10)
    world.refuse("north")
    world.pass_time(10)
    error = world.job(job_id).summary.error
    assert error.count("never joined") == 50
    assert (", ...; excluded" in error) == (many > 50)


def test_rounds_that_were_late_at_a_start_stay_open_for_a_lease(world: World) -> None:
    late = world.submit(NAMES, deadline_seconds=10)
    graced = world.submit(NAMES, quorum=2, grace_seconds=2)
    world.answer("north")
    world.answer("south")
    soon = world.submit(NAMES, deadline_seconds=18)
    folding = world.submit(["north"])
    world.answer("north")
    cancelled = world.submit(NAMES, deadline_seconds=10)
    world.change(lambda c: world.machine.cancel(c, cancelled, ADMIN))
    waiting = world.submit(["away"], deadline_seconds=10)
    later = world.submit(["north"], deadline_seconds=10)
    world.folds.clear()
    world.answer("north")
    world.publish()
    published = of_round(world, later, 0)
    kept = {job: world.rows(job) for job in (soon, folding, cancelled, waiting)}
    started, world.now = world.now, world.now + 12_000
    world.change(world.machine.resume)

    def times(job: str) -> tuple[int, int]:
        (row,) = world.rows(job)["rounds"]
        return row.due_ms, row.deadline_ms

    assert times(late) == (world.now + LEASE_MS, world.now + LEASE_MS)
    assert times(graced) == (world.now + LEASE_MS, started + 60_000)
    assert {job: world.rows(job) for job in kept} == kept
    assert of_round(world, later, 0) == published
    world.pass_time(LEASE_MS / 1000 - 0.001)
    assert (late, 0) not in world.folds
    assert world.round_states(late) == ["open"]
    world.pass_time(0.001)
    assert world.round_states(late) == ["failed"]
    assert (graced, 0) in world.folds
