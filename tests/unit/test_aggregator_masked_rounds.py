"""The transitions of masked rounds on a real database: each is a compare-and-set."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.rounds.masked import KeptAnswer, Masked
from aggregator.rounds.records import Refused
from aggregator.secagg import Phase
from tests.support.rounds import ADMIN, LEASE_MS, World, new_world

NAMES = ["north", "south", "west", "east"]
PHASE_MS = 7000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with new_world(tmp_path) as made:
        made.machine = Masked(lambda: made.now, LEASE_MS)
        yield made


def machine(world: World) -> Masked:
    assert isinstance(world.machine, Masked)
    return world.machine


def masking(world: World) -> str:
    """A job whose first round is masking."""
    for name in NAMES:
        world.connect(name)
    job_id = world.submit(NAMES, quorum=3, grace_seconds=60, secure_aggregation={"phase_seconds": PHASE_MS / 1000})
    for name in NAMES:
        world.answer(name)
    return job_id


def stands(world: World, job_id: str) -> tuple[str, int, int, int]:
    found = world.run(lambda c: machine(world).masked_round(c, job_id, 0))
    return found.state, found.attempt, found.phase, found.due_ms - world.now


def keep(world: World, job_id: str, phase: Phase, name: str, attempt: int = 0) -> bool:
    kept = [KeptAnswer(phase, name, b"answer")]
    return bool(world.run(lambda c: machine(world).keep_answers(c, job_id, 0, attempt, kept)))


def move(world: World, job_id: str, phase: Phase) -> bool:
    job = world.run(lambda c: world.machine.job(c, job_id))
    return bool(world.run(lambda c: machine(world).next_phase(c, job, 0, 0, phase)))


def again(world: World, job_id: str, attempt: int = 0) -> None:
    job = world.run(lambda c: world.machine.job(c, job_id))
    world.change(lambda c: machine(world).next_attempt(c, job, 0, attempt))


def test_a_round_is_masking_when_all_have_trained(world: World) -> None:
    job_id = masking(world)
    assert stands(world, job_id) == ("masking", 0, Phase.ADVERTISE, PHASE_MS)
    assert world.folds == []
    assert [one.job_id for one in world.run(machine(world).masking)] == [job_id]
    assert [one.round for one in world.run(lambda c: machine(world).masking(c, "north"))] == [0]
    assert world.run(lambda c: machine(world).masking(c, "elsewhere")) == []


def test_answers_are_kept_in_their_phase_alone(world: World) -> None:
    job_id = masking(world)
    assert keep(world, job_id, Phase.ADVERTISE, "north")
    assert not keep(world, job_id, Phase.SHARE, "north")
    assert not keep(world, job_id, Phase.ADVERTISE, "south", attempt=1)
    world.now += 100
    assert move(world, job_id, Phase.ADVERTISE)
    assert not move(world, job_id, Phase.ADVERTISE), "once"
    assert stands(world, job_id) == ("masking", 0, Phase.SHARE, PHASE_MS)
    assert not keep(world, job_id, Phase.ADVERTISE, "south")
    assert keep(world, job_id, Phase.SHARE, "south")
    answers = world.run(lambda c: machine(world).answers(c, job_id, 0))
    assert [(one.phase, one.institution) for one in answers] == [(Phase.ADVERTISE, "north"), (Phase.SHARE, "south")]


def test_another_attempt_starts_from_nothing(world: World) -> None:
    job_id = masking(world)
    keep(world, job_id, Phase.ADVERTISE, "north")
    move(world, job_id, Phase.ADVERTISE)
    again(world, job_id)
    assert stands(world, job_id) == ("masking", 1, Phase.ADVERTISE, PHASE_MS)
    assert world.run(lambda c: machine(world).answers(c, job_id, 0)) == []
    again(world, job_id)  # that was the first one
    assert stands(world, job_id)[1] == 1


def test_there_is_no_other_attempt_after_the_last_phase_was_asked_for(world: World) -> None:
    job_id = masking(world)
    for phase in (Phase.ADVERTISE, Phase.SHARE, Phase.MASK, Phase.CONFIRM):
        assert move(world, job_id, phase)
    again(world, job_id)
    assert stands(world, job_id)[:3] == ("masking", 0, Phase.REVEAL)


def test_who_is_not_in_the_sum_is_left_out_by_name(world: World) -> None:
    job_id = masking(world)
    refused = Refused("COHORT_INVALID", "strangers")
    world.change(lambda c: machine(world).leave_out(c, job_id, 0, "west", refused))
    assert world.run(lambda c: machine(world).trained(c, job_id, 0)) == ["east", "north", "south"]
    world.change(lambda c: machine(world).fold_masked(c, job_id, 0, 0, ["north", "south"]))
    assert stands(world, job_id)[0] == "folding"
    assert world.folds == [(job_id, 0)]
    states = world.client_states(job_id)
    assert states == {"north": "done", "south": "done", "east": "excluded", "west": "excluded"}
    clients = {client.institution: client for client in world.job(job_id).rounds[0].clients}
    assert (clients["west"].code, clients["east"].code) == ("COHORT_INVALID", "TIMEOUT")
    assert not move(world, job_id, Phase.ADVERTISE)


def test_a_round_that_cannot_be_masked_fails_with_its_job(world: World) -> None:
    job_id = masking(world)
    job = world.run(lambda c: world.machine.job(c, job_id))
    keep(world, job_id, Phase.ADVERTISE, "north")
    world.change(lambda c: machine(world).fail_masking(c, job, 0, "too few"))
    assert (world.job(job_id).summary.state, world.job(job_id).summary.error) == ("failed", "round 0: too few")
    assert world.run(lambda c: machine(world).answers(c, job_id, 0)) == []


def test_a_job_that_is_cancelled_masks_no_more(world: World) -> None:
    job_id = masking(world)
    world.change(lambda c: world.machine.cancel(c, job_id, ADMIN))
    assert world.round_states(job_id) == ["cancelled"]
    assert world.run(machine(world).masking) == []
    assert not keep(world, job_id, Phase.ADVERTISE, "north")


def test_after_a_start_there_is_time_for_an_answer(world: World) -> None:
    job_id = masking(world)
    world.now += 2 * PHASE_MS
    world.change(machine(world).resume)
    assert stands(world, job_id)[3] == LEASE_MS
