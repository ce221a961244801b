"""The state machine of rounds through its public methods."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from aggregator.rounds import queries, sessions
from aggregator.rounds.answers import Taken
from aggregator.rounds.records import Effects, Input, Inputs, Offer
from tests.support.rounds import ADMIN, EVALUATIONS, LEASE_MS, MODELS, World, new_world, refused
from tests.support.scripted_agent import HEAD
from veilfed.errors import Code, VeilfedError


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with new_world(tmp_path) as made:
        yield made


def test_a_job_from_start_to_end(world: World) -> None:
    job_id = world.submit(["north", "south"], ["east"])
    assert world.round_states(job_id) == ["pending"]
    world.connect("north")
    assert world.round_states(job_id) == ["pending"]
    world.connect("south")
    world.connect("east")
    for number in (0, 1):
        assert [world.tasks[name].round for name in ("north", "south", "east")] == [number] * 3
        assert [world.tasks[name].trains for name in ("north", "south", "east")] == [True, True, False]
        assert world.tasks["north"].model == MODELS[number]
        for name in ("north", "east", "south"):
            assert world.folds == []
            world.answer(name)
        assert world.folds == [(job_id, number)]
        world.publish()
    assert not any(task.trains for task in world.tasks.values())
    for name in ("north", "south", "east"):
        world.answer(name)
    job = world.job(job_id)
    assert (job.summary.state, job.summary.rounds_published, job.summary.error) == ("done", 2, "")
    assert [item.state for item in job.rounds] == ["published"] * 3
    assert [item.published_sha256 for item in job.rounds] == [MODELS[1].sha256, MODELS[2].sha256, ""]
    assert list(job.rounds[2].clients[0].evaluations) == EVALUATIONS
    assert world.kinds(job_id)[-2:] == ["round_published", "job_done"]


def test_the_first_round_waits_for_a_quorum_of_those_who_train(world: World) -> None:
    world.connect("east")
    job_id = world.submit(["north", "south", "west"], ["east"], quorum=2)
    world.pass_time(100)
    assert world.round_states(job_id) == ["pending"]
    world.connect("north")
    world.connect("south")
    assert world.round_states(job_id) == ["open"]
    assert world.client_states(job_id) == {"north": "leased", "south": "leased", "east": "leased", "west": "waiting"}


def test_a_late_joiner_gets_the_current_task(world: World) -> None:
    world.connect("north")
    job_id = world.submit(["north", "south"], quorum=1)
    world.answer("north")
    world.connect("south")
    assert world.tasks["south"].round == 0
    world.answer("south")
    assert world.folds == [(job_id, 0)]


def test_the_quorum_gives_the_others_a_grace(world: World) -> None:
    for name in ("north", "south", "west"):
        world.connect(name)
    job_id = world.submit(["north", "south", "west"], quorum=2, grace_seconds=4)
    world.answer("north")
    world.pass_time(3)
    world.answer("south")
    world.pass_time(3.5)
    assert world.folds == []
    world.pass_time(0.6)
    assert world.folds[0] == (job_id, 0)
    assert world.ended == ["west"]
    assert world.client_states(job_id) == {"north": "done", "south": "done", "west": "missing"}
    with refused(Code.ROUND_CLOSED):
        world.answer("west")


def test_no_grace(world: World) -> None:
    for name in ("north", "south"):
        world.connect(name)
    job_id = world.submit(["north", "south"], quorum=1, grace_seconds=0)
    world.answer("north")
    assert world.folds == [(job_id, 0)]


def test_the_deadline_without_a_quorum_names_who_was_missing(world: World) -> None:
    for name in ("north", "south", "west"):
        world.connect(name)
    job_id = world.submit(["north", "south", "west", "east"], quorum=3, deadline_seconds=10)
    world.answer("north")
    world.refuse("west", "POLICY_DENIED", "not this strategy")
    world.pass_time(10)
    job = world.job(job_id)
    assert (job.summary.state, job.rounds[0].state) == ("failed", "failed")
    error = job.summary.error
    assert "round 0: the quorum is 3, 1 updates had come by the deadline" in error
    assert "east (never joined)" in error
    assert "south (no answer; last seen 10 s before, joined)" in error
    assert "west (POLICY_DENIED: not this strategy)" in error
    assert "north" not in error
    assert world.ended == ["south"]


def test_the_deadline_comes_before_the_end_of_the_grace(world: World) -> None:
    for name in ("north", "south"):
        world.connect(name)
    job_id = world.submit(["north", "south"], quorum=1, grace_seconds=100, deadline_seconds=10)
    world.answer("north")
    world.pass_time(10)
    assert (job_id, 0) in world.folds


def test_an_excluded_institution_is_out_for_this_round_only(world: World) -> None:
    for name in ("north", "south"):
        world.connect(name)
    job_id = world.submit(["north", "south"], quorum=1)
    world.refuse("south")
    with refused(Code.TASK_INVALID):
        world.answer("south")
    world.answer("north")
    client = world.job(job_id).rounds[0].clients[1]
    assert (client.institution, client.state, client.code, client.reason) == (
        "south",
        "excluded",
        "UPDATE_INVALID",
        "not finite",
    )
    world.publish()
    assert world.tasks["south"].round == 1
    world.answer("south")


def test_a_quorum_out_of_reach_fails_at_once(world: World) -> None:
    for name in ("north", "south"):
        world.connect(name)
    job_id = world.submit(["north", "south"])
    world.refuse("south")
    summary = world.job(job_id).summary
    assert summary.state == "failed"
    assert "1 updates are still possible" in summary.error
    assert "south (UPDATE_INVALID: not finite)" in summary.error
    with refused(Code.ROUND_CLOSED):
        world.answer("north")


def test_those_who_only_evaluate_do_not_count_for_the_quorum(world: World) -> None:
    for name in ("north", "south", "east"):
        world.connect(name)
    job_id = world.submit(["north", "south"], ["east"], quorum=1, deadline_seconds=10)
    world.answer("east")
    world.pass_time(10)
    assert world.job(job_id).summary.state == "failed"


def test_refusals_that_exclude_nobody(world: World) -> None:
    for name in ("north", "south"):
        world.connect(name)
    world.submit(["north", "south"])
    wrong: list[dict[str, Any]] = [
        {"token": "x"},
        {"token": world.tasks["south"].token},
        {"round": 1},
        {"job_id": "other"},
    ]
    for changes in wrong:
        with refused(Code.TASK_INVALID):
            world.answer("north", **changes)
    strange: list[dict[str, Any]] = [
        {"session": "x"},
        {"session": world.live["south"]},
        {"identity": world.identity("south")},
    ]
    for changes in strange:
        with refused(Code.SESSION_INVALID):
            world.answer("north", **changes)
    world.answer("north")
    with refused(Code.UPDATE_DUPLICATE):
        world.answer("north")
    world.answer("south")
    with refused(Code.UPDATE_DUPLICATE):
        world.answer("south")


def test_answers_that_come_together(world: World) -> None:
    """Each stands for itself: what is wrong with one is not the others' fault, and no task is answered twice."""
    for name in ("north", "south", "east"):
        world.connect(name)
    job_id = world.submit(["north", "south", "east"])
    other = world.submit(["west"])
    taken = Taken("a" * 64, 1.0, EVALUATIONS, HEAD)
    claims = [
        world.claim("north"),
        world.claim("south", token="x"),
        world.claim("north"),
        world.claim("south", session=world.live["east"]),
        world.claim("south", job_id=other),
        world.claim("south"),
    ]
    outcomes: list[VeilfedError | None] = []

    def accept(connection: Connection) -> Effects:
        found, effects = world.machine.accept(connection, [(claim, taken) for claim in claims])
        outcomes.extend(found)
        return effects

    world.change(accept)
    codes = [error and error.code for error in outcomes]
    assert codes == [
        None,
        Code.TASK_INVALID,
        Code.UPDATE_DUPLICATE,
        Code.SESSION_INVALID,
        Code.TASK_INVALID,
        None,
    ]
    assert world.client_states(job_id) == {"north": "done", "south": "done", "east": "leased"}
    assert world.kinds(job_id).count("update_taken") == 2
    assert world.folds == []
    world.answer("east")
    assert world.folds == [(job_id, 0)]
    assert len(world.run(lambda c: world.machine.inputs(c, job_id, 0)).updates) == 3


def test_a_later_join_ends_the_session_and_frees_its_tasks(world: World) -> None:
    old = world.connect("north")
    world.submit(["north"], quorum=1)
    token = world.tasks["north"].token
    new = world.connect("north")
    assert (world.tasks["north"].session, world.tasks["north"].token) == (new, token)
    with refused(Code.SESSION_INVALID):
        world.answer("north", session=old)
    world.answer("north")


def test_the_same_session_gets_its_task_again(world: World) -> None:
    session = world.connect("north")
    world.submit(["north"], quorum=1)
    first = world.tasks.pop("north")
    world.connect("north", session)
    assert world.tasks["north"] == first


def test_a_task_leased_to_a_replaced_session_is_free(world: World) -> None:
    """The round opened with a session that a Join had just replaced."""
    world.connect("north")
    new = world.join("north")
    world.submit(["north"], quorum=1)
    world.tasks.clear()
    world.connect("north", new)
    assert world.tasks["north"].session == new


def test_two_agents_of_one_institution(world: World) -> None:
    world.connect("north")
    world.submit(["north"], quorum=1)
    spare = world.join("north", "spare")

    def offers() -> list[Offer]:
        found: list[Offer] = world.run(lambda c: sessions.offer(c, spare, "north", world.now, LEASE_MS))
        return found

    assert offers() == []
    with refused(Code.TASK_INVALID):
        world.answer("north", session=spare, identity=world.identity("north", "spare"))
    world.now += LEASE_MS + 1
    assert [offer.token for offer in offers()] == [world.tasks["north"].token]
    with refused(Code.TASK_INVALID):
        world.answer("north")


def test_leases_end_with_silence_and_are_renewed_by_heartbeats(world: World) -> None:
    session = world.connect("north")
    job_id = world.submit(["north"], quorum=1)
    for _ in range(3):
        world.now += LEASE_MS - 1
        world.run(lambda c: sessions.renew(c, session, "training", world.now, LEASE_MS))
        world.pass_time(0)
        assert world.client_states(job_id) == {"north": "leased"}
    del world.live["north"]
    world.pass_time(LEASE_MS / 1000 + 1)
    assert world.client_states(job_id) == {"north": "waiting"}
    assert world.job(job_id).clients[0].activity == "training"
    # The agent was only slow: its task is still open, and the right token is enough.
    world.live["north"] = session
    world.answer("north")
    assert world.client_states(job_id) == {"north": "done"}


def test_cancel(world: World) -> None:
    world.connect("north")
    job_id = world.submit(["north"], quorum=1)
    world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))
    assert world.job(job_id).summary.state == "cancelled"
    assert world.round_states(job_id) == ["cancelled"]
    assert world.ended == ["north"]
    with refused(Code.ROUND_CLOSED):
        world.answer("north")
    with refused(Code.JOB_ENDED):
        world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))
    with refused(Code.NOT_FOUND):
        world.change(lambda c: world.machine.cancel(c, "none", ADMIN))


def test_a_job_cancelled_while_it_folds_publishes_nothing(world: World) -> None:
    world.connect("north")
    job_id = world.submit(["north"], quorum=1)
    world.answer("north")
    world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))
    world.publish()
    assert world.round_states(job_id) == ["cancelled"]
    assert world.job(job_id).summary.rounds_published == 0


def test_publishing_twice_changes_nothing(world: World) -> None:
    world.connect("north")
    job_id = world.submit(["north"], quorum=1)
    world.answer("north")
    world.folds *= 2
    world.publish()
    world.publish()
    assert world.round_states(job_id) == ["published", "open"]


def test_an_interrupted_fold_is_taken_up(world: World) -> None:
    world.connect("north")
    job_id = world.submit(["north"], quorum=1)
    world.answer("north")
    world.folds.clear()
    world.pass_time(0)
    assert world.folds == [(job_id, 0)]
    inputs = world.run(lambda c: world.machine.inputs(c, job_id, 0))
    assert inputs == Inputs(MODELS[0].sha256, [Input("north", 1.0, "a" * 64, None)])


def test_a_damaged_update_is_left_out(world: World) -> None:
    for name in ("north", "south"):
        world.connect(name)
    job_id = world.submit(["north", "south"], quorum=1)
    world.answer("north")
    world.answer("south")
    world.change(lambda c: world.machine.lose(c, job_id, 0, ["south"]))
    inputs = world.run(lambda c: world.machine.inputs(c, job_id, 0))
    assert [item.institution for item in inputs.updates] == ["north"]
    assert world.round_states(job_id) == ["folding"]
    world.change(lambda c: world.machine.lose(c, job_id, 0, ["north"]))
    assert "0 updates are left" in world.job(job_id).summary.error


def test_jobs_do_not_disturb_each_other(world: World) -> None:
    world.connect("north")
    first = world.submit(["north"], quorum=1)
    task = world.tasks["north"]
    second = world.submit(["north"], quorum=1)
    world.answer("north", token=task.token, job_id=first)
    assert world.folds == [(first, 0)]
    assert world.client_states(second) == {"north": "leased"}
    (newest,) = world.run(lambda c: queries.summaries(c, 1))
    assert newest.job_id in (first, second)
    assert {summary.job_id for summary in world.run(lambda c: queries.summaries(c, 0))} == {first, second}


def test_only_models_of_the_job_are_given_out(world: World) -> None:
    world.connect("north")
    job_id = world.submit(["north"], quorum=1)
    world.answer("north")
    assert world.run(lambda c: queries.is_model(c, job_id, MODELS[0].sha256))
    assert not world.run(lambda c: queries.is_model(c, job_id, MODELS[1].sha256))
    assert not world.run(lambda c: queries.is_model(c, job_id, "a" * 64))
    world.publish()
    assert world.run(lambda c: queries.is_model(c, job_id, MODELS[1].sha256))


def test_session_secrets_are_not_kept(world: World, tmp_path: Path) -> None:
    secret, before = world.run(lambda c: sessions.join(c, world.identity("north"), "1", world.now))
    assert before == ""
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.encode() not in kept
    assert sessions.session_digest(secret).encode() in kept
