"""FedOPAL at the coordinator and at an institution, without an oracle: what is asked, folded, published, refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.strategies import strategy_for, with_ridge
from aggregator.strategies.base import Strategy
from client_agent.trainers import method_for
from client_agent.trainers.fedopal import Fedopal, Tuned
from client_agent.trainers.state import State
from tests.support.analytic import analytic, pool, ridge, sums
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec, parse_job
from veilfed.wire.tensors import Arrays, map_bytes

DIMENSION, CLASSES, M, WIDTH = 6, 3, 4, 5
EPS = float(np.finfo(np.float64).eps)
PARTS = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9], [], list(range(10, 40))]


def fedopal(**changes: Any) -> Strategy:
    values = {"prompts": M, "prompt_width": WIDTH, "ridge": 0.5, **changes}
    return analytic(DIMENSION, CLASSES, 4, name="fedopal", **values)


def reextracting(**changes: Any) -> Strategy:
    document = fedopal().spec.model_dump()
    document["strategy"] |= {"reextract": True, **changes}
    return strategy_for(JobSpec.model_validate(document | {"rounds": 2}))


def updates(seed: int = 0) -> list[Arrays]:
    """Of four institutions, one of which has no samples."""
    rng = np.random.default_rng(seed)
    rows = [np.array(part, np.intp) for part in PARTS]
    made = sums(pool(40, DIMENSION, CLASSES), DIMENSION, CLASSES, rows)
    return [{**update, "prompts": rng.standard_normal((M, WIDTH)).astype(np.float32)} for update in made]


def fold(coordinator: Strategy, given: list[Arrays], start: Arrays | None = None) -> Arrays:
    current = coordinator.initial() if start is None else start
    return coordinator.fold(((1.0, update) for update in given), lambda: current)


def counts(update: Arrays) -> int:
    return int(np.asarray(update["counts"]).sum())


def doubles(array: Any) -> NDArray[np.float64]:
    return np.asarray(array, np.float64)


# The first model.


def test_all_start_from_one_prompt_of_the_jobs_seed() -> None:
    model = fedopal().initial()
    assert map_bytes(model) == map_bytes(fedopal().initial())
    assert np.array_equal(model["prompts"], model["first_prompts"])
    assert str(model["prompts"].dtype) == "float32"
    assert model["prompts"].shape == (M, WIDTH)
    assert not np.asarray(model["classifier"]).any()
    other = fedopal().spec.model_copy(update={"seed": 51})
    assert not np.array_equal(strategy_for(other).initial()["prompts"], model["prompts"])
    many = fedopal(prompts=64, prompt_width=1000).initial()["prompts"].astype(np.float64)
    assert (abs(many.mean()) < 0.02, abs(many.std() - 1) < 0.02) == (True, True)


# The fold.


@settings(max_examples=30)
@given(st.permutations(range(4)), st.sampled_from(["uniform", "samples"]), st.integers(0, 5))
def test_the_classifier_is_afls_and_the_prompt_the_mean_in_every_order(
    order: list[int], weighting: str, seed: int
) -> None:
    given_ = updates(seed)
    model = fold(fedopal(prompt_weighting=weighting), [given_[at] for at in order])
    assert map_bytes(model) == map_bytes(fold(fedopal(prompt_weighting=weighting), given_))
    statistics = [{name: update[name] for name in ("gram", "cross", "counts")} for update in given_]
    afl = analytic(DIMENSION, CLASSES, 4, ridge=0.5).fold(((1.0, update) for update in statistics), dict)
    assert model["classifier"].tobytes() == afl["classifier"].tobytes()
    weights = [counts(update) if weighting == "samples" else min(counts(update), 1) for update in given_]
    expected = np.average([doubles(update["prompts"]) for update in given_], axis=0, weights=weights)
    assert np.allclose(doubles(model["prompts"]), expected, rtol=0, atol=1e-6)
    assert np.array_equal(model["first_prompts"], fedopal().initial()["prompts"])


def test_an_institution_without_samples_has_no_part_in_the_mean() -> None:
    given_ = updates()
    without = fold(fedopal(), [given_[0], given_[1], given_[3]])
    assert map_bytes(fold(fedopal(), given_)) == map_bytes(without)


def test_leaving_one_out_is_never_having_had_it() -> None:
    """The prompts of who is left are as they were: they depend on P_0 and their own samples alone."""
    given_, coordinator = updates(), fedopal()
    later = fold(coordinator, given_[1:], start=fold(coordinator, given_))
    assert map_bytes(later) == map_bytes(fold(coordinator, given_[1:]))


def test_another_ridge_can_be_solved_for_afterwards() -> None:
    given_ = updates()
    again = with_ridge(fedopal().spec, "2.5")
    model = fold(again, given_)
    expected, condition = ridge(pool(40, DIMENSION, CLASSES), CLASSES, 2.5)
    error = np.linalg.norm(doubles(model["classifier"]) - expected) / np.linalg.norm(expected)
    assert error <= max(1e-10, 100 * EPS * condition)
    assert np.array_equal(model["prompts"], fold(fedopal(), given_)["prompts"])


def test_the_card_tells_what_it_tells_of_afl() -> None:
    given_, coordinator = updates(), fedopal()
    named = [(f"i{number}", 1.0, update) for number, update in enumerate(given_)]
    model, report = coordinator.fold_reported(named, coordinator.initial)
    assert map_bytes(model) == map_bytes(fold(coordinator, given_))
    assert (report["method"], report["samples"], len(report["institutions"])) == ("fedopal", 40, 4)


def test_reextracting_takes_two_rounds() -> None:
    given_, coordinator = updates(), reextracting()
    assert not coordinator.sealed
    prompts = [{name: update[name] for name in ("prompts", "counts")} for update in given_]
    statistics = [{name: update[name] for name in ("gram", "cross", "counts")} for update in given_]
    first = fold(coordinator, prompts)
    whole = fold(fedopal(), given_)
    assert np.array_equal(first["prompts"], whole["prompts"])
    assert not np.asarray(first["classifier"]).any()
    second = fold(coordinator, statistics, start=first)
    assert np.array_equal(second["prompts"], first["prompts"])
    assert second["classifier"].tobytes() == whole["classifier"].tobytes()
    for update in prompts:
        coordinator.check(update, 0)
    for update in statistics:
        coordinator.check(update, 1)


# The update gate.


def changed(**arrays: Any) -> Arrays:
    return {**updates()[0], **arrays}


BAD: dict[str, tuple[Arrays, str]] = {
    "no prompts": ({name: array for name, array in changed().items() if name != "prompts"}, "expected the tensors"),
    "another shape": (changed(prompts=np.zeros((M, WIDTH + 1), np.float32)), "prompts: expected shape"),
    "float64": (changed(prompts=np.zeros((M, WIDTH))), "prompts: expected float32"),
    "not a number": (changed(prompts=np.full((M, WIDTH), np.nan, np.float32)), "prompts: not finite"),
    "infinite": (changed(prompts=np.full((M, WIDTH), np.inf, np.float32)), "prompts: not finite"),
    "too large": (changed(prompts=np.full((M, WIDTH), 1001, np.float32)), "larger than max_abs"),
    "sums that do not fit": (changed(counts=np.array([100, 0, 0])), "trace"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_updates_are_refused(case: str) -> None:
    arrays, message = BAD[case]
    with pytest.raises(VeilfedError, match=message) as caught:
        fedopal().check(arrays, 0)
    assert caught.value.code is Code.UPDATE_INVALID


def test_each_round_takes_its_own_tensors_alone() -> None:
    whole = changed()
    prompts = {name: whole[name] for name in ("prompts", "counts")}
    statistics = {name: whole[name] for name in ("gram", "cross", "counts")}
    fedopal().check(whole, 0)
    fedopal().check(whole, 2)  # of a later turn
    for arrays, number in ((whole, 0), (statistics, 0), (whole, 1), (prompts, 1)):
        with pytest.raises(VeilfedError, match="expected the tensors"):
            reextracting().check(arrays, number)
    with pytest.raises(VeilfedError, match="negative"):
        reextracting().check({**prompts, "counts": np.array([-1, 2, 3])}, 0)


# The job.


def document(**changes: Any) -> str:
    strategy = {"name": "fedopal", "classes": ["a", "b"], "dimension": 4, "prompt_width": 8, **changes}
    rounds = strategy.pop("rounds", 1)
    return str({"name": "x", "strategy": strategy, "cohort": {"train": ["one"]}, "rounds": rounds, "quorum": 1})


def test_the_defaults() -> None:
    strategy: Any = parse_job(document()).strategy
    assert (strategy.prompts, strategy.mu, strategy.epochs, strategy.tuning) == (10, 0.1, 1, "gradients")
    rates = [parse_job(document(tuning=tuning)).strategy for tuning in ("gradients", "forward-only")]
    assert [getattr(found, "eta", None) for found in rates] == [10, 0.05]
    assert getattr(parse_job(document(prompt_rate=3)).strategy, "eta", None) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 2}, "rounds must be 1"),
        ({"reextract": True}, "rounds must be 2"),
        ({"prompts": 65}, "prompts"),
        ({"mu": -1}, "mu"),
        ({"mu": float("inf")}, "mu"),
        ({"tuning": "guess"}, "tuning"),
        ({"weighting": "samples"}, "weighting"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VeilfedError, match=message) as caught:
        parse_job(document(**changes))
    assert caught.value.code is Code.JOB_INVALID


def test_a_job_that_reextracts_cannot_be_changed_afterwards() -> None:
    assert parse_job(document(reextract=True, rounds=2)).last_round == 2
    assert parse_job(document()).last_round > 2


# The institution.


def method() -> Fedopal:
    found = method_for(fedopal().spec.strategy)
    assert isinstance(found, Fedopal)
    return found


def samples() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return pool(40, DIMENSION, CLASSES)


def test_what_it_sends_is_its_statistics_and_prompts_and_what_it_keeps_its_prompts() -> None:
    own = updates()[1]["prompts"].astype(np.float32)
    model = fedopal().initial()
    arrays, state = Tuned(method(), *samples(), own).train(model, None, 0)
    fedopal().check(arrays, 0)
    (expected,) = sums(samples(), DIMENSION, CLASSES, [np.arange(40)])
    assert all(np.array_equal(arrays[name], array) for name, array in expected.items())
    assert state is not None
    again = method().read_state(state.to_bytes())
    assert np.array_equal(again.tensors["prompts"], own)
    prompts = method().prompts(model, again)
    assert prompts is not None
    assert np.array_equal(prompts, own)
    newcomer = method().prompts(model, None)
    assert newcomer is not None
    assert np.array_equal(newcomer, model["prompts"])


def test_of_prompts_alone_it_sends_the_counts_and_in_the_second_round_it_keeps_them() -> None:
    own = updates()[1]["prompts"].astype(np.float32)
    arrays, state = Tuned(method(), None, samples()[1], own).train({}, None, 0)
    reextracting().check(arrays, 0)
    later, kept = Tuned(method(), *samples(), None).train({}, state, 1)
    reextracting().check(later, 1)
    assert kept is state


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(VeilfedError, match="north") as caught:
        method().read_state(State.zeros({"prompts": (M, WIDTH + 1)}, {}).to_bytes(), "north")
    assert caught.value.code is Code.STATE_CORRUPT
