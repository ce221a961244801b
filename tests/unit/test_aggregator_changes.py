"""Changes of an analytic job that is done: who is asked, who counts, and what a failed change leaves behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rounds import ADMIN, LEASE_MS, World, new_world, refused
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec

AFL = {"name": "afl"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with new_world(tmp_path) as made:
        yield made


def add(world: World, job_id: str, institution: str) -> int:
    return world.change_job(lambda c: world.machine.add_client(c, job_id, institution, ADMIN, world.live))


def forget(world: World, job_id: str, institution: str) -> int:
    return world.change_job(lambda c: world.machine.forget_client(c, job_id, institution, ADMIN))


def resolve(world: World, job_id: str, ridge: str) -> int:
    return world.change_job(lambda c: world.machine.resolve(c, job_id, ridge, ADMIN))


def inputs(world: World, job_id: str, number: int) -> Any:
    return world.run(lambda c: world.machine.inputs(c, job_id, number))


def brought(world: World, job_id: str, number: int) -> list[str]:
    return [item.institution for item in inputs(world, job_id, number).updates]


def state(world: World, job_id: str) -> str:
    return str(world.job(job_id).summary.state)


def done(world: World, train: list[str], connected: str = "abc", **changes: Any) -> str:
    """A job that is done."""
    for name in connected:
        world.connect(name)
    strategy = {**AFL, **changes.pop("strategy", {})}
    job_id = world.submit(train, rounds=1, strategy=strategy, **changes)
    for name in train:
        world.answer(name)
    world.publish()
    close(world, [*train, *changes.get("evaluate", [])])
    assert state(world, job_id) == "done"
    return job_id


def close(world: World, institutions: list[str]) -> None:
    for name in institutions:
        world.answer(name)


def test_a_late_client_is_asked_alone_and_then_counts_with_the_others(world: World) -> None:
    job_id = done(world, ["a", "b"])
    assert add(world, job_id, "c") == 2
    assert (state(world, job_id), world.client_states(job_id)) == ("running", {"c": "leased"})
    task = world.tasks["c"]
    assert (task.round, task.trains) == (2, True)
    assert JobSpec.model_validate_json(task.spec_json).cohort.train == ["a", "b", "c"]
    assert world.tasks["a"].round == 1, "the others are not asked"
    world.answer("c")
    assert world.folds == [(job_id, 2)]
    assert brought(world, job_id, 2) == ["a", "b", "c"]
    world.publish()
    assert {name: world.tasks[name].round for name in "abc"} == {"a": 3, "b": 3, "c": 3}
    assert (world.tasks["a"].spec_json, world.tasks["c"].spec_json) == ("", task.spec_json)
    close(world, ["a", "b", "c"])
    assert state(world, job_id) == "done"
    assert world.round_states(job_id) == ["published"] * 4
    assert [client.institution for client in world.job(job_id).clients] == ["a", "b", "c"]
    assert world.kinds(job_id).count("job_done") == 2


def test_a_late_client_that_comes_later_gets_its_task_then(world: World) -> None:
    job_id = done(world, ["a", "b"], connected="ab")
    add(world, job_id, "c")
    assert world.client_states(job_id) == {"c": "waiting"}
    world.connect("c")
    assert (world.tasks["c"].round, world.tasks["c"].trains) == (2, True)
    assert world.tasks["c"].spec_json != ""


def test_an_institution_that_was_missing_can_be_added_with_the_job_s_own_specification(world: World) -> None:
    for name in "ab":
        world.connect(name)
    job_id = world.submit(["a", "b", "c"], rounds=1, strategy=AFL, quorum=2, grace_seconds=1)
    world.answer("a")
    world.answer("b")
    world.pass_time(2)
    world.publish()
    close(world, ["a", "b"])
    world.pass_time(2)
    assert state(world, job_id) == "done"
    world.connect("c")
    add(world, job_id, "c")
    assert (world.tasks["c"].spec_json, world.tasks["c"].trains) == ("", True)


def test_a_forgotten_client_is_in_nothing_that_follows(world: World) -> None:
    job_id = done(world, ["a", "b", "c"])
    assert forget(world, job_id, "b") == 2
    assert world.folds == [(job_id, 2)]
    assert brought(world, job_id, 2) == ["a", "c"]
    first = {client.institution: client.state for client in world.job(job_id).rounds[0].clients}
    assert first == {"a": "done", "b": "forgotten", "c": "done"}
    rows = [row for row in world.rows(job_id)["tasks"] if row.institution == "b"]
    assert not any(row.update_sha256 for row in rows)
    world.publish()
    assert world.client_states(job_id) == {"a": "leased", "c": "leased"}
    close(world, ["a", "c"])
    assert state(world, job_id) == "done"
    # It may come back, with the specification that it knows.
    add(world, job_id, "b")
    assert (world.tasks["b"].round, world.tasks["b"].spec_json) == (4, "")
    world.answer("b")
    assert brought(world, job_id, 4) == ["a", "b", "c"]


def test_a_late_client_that_was_forgotten_gets_the_same_specification_again(world: World) -> None:
    job_id = done(world, ["a", "b"])
    add(world, job_id, "c")
    first = world.tasks["c"].spec_json
    world.answer("c")
    world.publish()
    close(world, ["a", "b", "c"])
    forget(world, job_id, "c")
    world.publish()
    assert world.client_states(job_id) == {"a": "leased", "b": "leased"}
    close(world, ["a", "b"])
    add(world, job_id, "c")
    assert world.tasks["c"].spec_json == first


def test_another_ridge_holds_for_later_changes_too(world: World) -> None:
    job_id = done(world, ["a", "b"])
    assert inputs(world, job_id, 0).ridge == ""
    assert resolve(world, job_id, "gcv") == 2
    assert inputs(world, job_id, 2).ridge == "gcv"
    world.publish()
    close(world, ["a", "b"])
    forget(world, job_id, "a")
    assert inputs(world, job_id, 4).ridge == "gcv"
    assert inputs(world, job_id, 1).ridge == ""


def test_a_change_that_fails_leaves_the_job_as_it_was(world: World) -> None:
    job_id = done(world, ["a", "b"])
    newest = world.job(job_id).rounds[-1].model_sha256
    add(world, job_id, "c")
    world.refuse("c", "POLICY_DENIED", "no")
    assert (state(world, job_id), world.job(job_id).summary.error) == ("done", "")
    assert world.kinds(job_id)[-1] == "change_failed"
    # And once more, until the deadline.
    assert add(world, job_id, "c") == 4
    assert world.tasks["c"].model.sha256 == newest
    for _ in range(30):
        world.pass_time(LEASE_MS / 2000)
        world.live["c"] = world.live["c"]
    world.pass_time(60)
    assert state(world, job_id) == "done"
    assert world.round_states(job_id)[2:] == ["failed", "failed"]
    assert brought(world, job_id, 4) == ["a", "b"]


@pytest.mark.parametrize("ended", ["cancelled", "singular"])
def test_what_came_for_a_change_that_is_given_up_is_not_in_the_job(world: World, ended: str) -> None:
    job_id = done(world, ["a", "b"])
    add(world, job_id, "c")
    world.answer("c")
    if ended == "cancelled":
        world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))
    else:
        world.change(lambda c: world.machine.fail_fold(c, job_id, 2, "SINGULAR: no"))
    assert state(world, job_id) == "done"
    assert world.kinds(job_id)[-1] == {"cancelled": "change_cancelled", "singular": "change_failed"}[ended]
    assert brought(world, job_id, 2) == ["a", "b"]
    world.publish()
    assert world.round_states(job_id)[2:] == ["cancelled" if ended == "cancelled" else "failed"]


def test_a_first_round_that_cannot_be_folded_fails_the_job(world: World) -> None:
    for name in "ab":
        world.connect(name)
    job_id = world.submit(["a", "b"], rounds=1, strategy=AFL)
    world.answer("a")
    world.answer("b")
    world.change(lambda c: world.machine.fail_fold(c, job_id, 0, "SINGULAR: no"))
    assert (state(world, job_id), world.job(job_id).summary.error) == ("failed", "round 0: SINGULAR: no")
    world.pass_time(10)
    assert world.folds == [(job_id, 0)], "it is not folded again"
    with refused(Code.JOB_ENDED):
        add(world, job_id, "c")


def test_kept_statistics_that_are_damaged_are_left_out_by_name(world: World) -> None:
    job_id = done(world, ["a", "b", "c"])
    forget(world, job_id, "a")
    world.change(lambda c: world.machine.lose(c, job_id, 2, ["b"]))
    assert brought(world, job_id, 2) == ["c"]
    assert world.kinds(job_id)[-1] == "client_excluded"
    world.publish()
    assert world.round_states(job_id)[2:] == ["published", "open"]


def test_nobody_is_asked_more_often_than_was_agreed(world: World) -> None:
    job_id = done(world, ["a", "b", "c"], strategy={"max_changes": 1})
    resolve(world, job_id, "2")
    world.publish()
    close(world, ["a", "b", "c"])
    with refused(Code.JOB_ENDED):
        add(world, job_id, "d")
    with refused(Code.JOB_ENDED):
        resolve(world, job_id, "3")
    assert state(world, job_id) == "done"
    # Who wants to be forgotten is: the model is published, and nobody evaluates it.
    assert forget(world, job_id, "c") == 4
    world.publish()
    assert state(world, job_id) == "done"
    assert world.round_states(job_id)[-1] == "published"
    assert forget(world, job_id, "b") == 6


def test_changes_that_make_no_sense(world: World) -> None:
    job_id = done(world, ["a", "b"], evaluate=["c"])
    for institution in ("a", "c", "No Name", "x" * 100, ""):
        with refused(Code.INPUT_INVALID):
            add(world, job_id, institution)
    for institution in ("c", "nobody"):
        with refused(Code.NOT_FOUND):
            forget(world, job_id, institution)
    for ridge in ("", "-1", "nan", "inf", "much", "1e13"):
        with refused(Code.INPUT_INVALID):
            resolve(world, job_id, ridge)
    with refused(Code.NOT_FOUND):
        forget(world, "none", "a")
    assert state(world, job_id) == "done", "nothing was begun"
    forget(world, job_id, "a")
    with refused(Code.JOB_RUNNING):
        forget(world, job_id, "b")
    world.publish()
    close(world, ["b", "c"])
    with refused(Code.INPUT_INVALID):
        forget(world, job_id, "b")


def test_only_jobs_that_keep_statistics_can_be_changed(world: World) -> None:
    world.connect("a")
    fedot = world.submit(["a"], rounds=0)
    world.answer("a")
    assert state(world, fedot) == "done"
    with pytest.raises(VeilfedError, match="keeps no statistics") as told:
        add(world, fedot, "b")
    assert told.value.code is Code.INPUT_INVALID
    fedcgs = done(world, ["a", "b"], strategy={"name": "fedcgs"})
    with pytest.raises(VeilfedError, match="has no ridge"):
        resolve(world, fedcgs, "1")
