"""The private state in bytes: whole or refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.trainers import State
from tests.support.methods import stepwise, strategy
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import map_bytes

FEDOT = {"classes": ["a", "b"], "dimension": 6, "blocks": 2}


def state() -> State:
    rng = np.random.default_rng(0)
    transform, mean, square = rng.normal(size=(3, 2, 3, 3)).astype(np.float32)
    classifier_mean, classifier_square = rng.normal(size=(2, 2, 6)).astype(np.float32)
    return State(
        {"transform": transform},
        {"transform": mean, "classifier": classifier_mean},
        {"transform": square, "classifier": classifier_square},
        steps=17,
        last_round=4,
    )


def read(data: bytes, **changes: Any) -> State:
    return stepwise(strategy("fedot", **FEDOT | changes)).read_state(data, "jobs/x/state")


def test_the_state_comes_back() -> None:
    back = read(state().to_bytes())
    assert back.to_bytes() == state().to_bytes()
    np.testing.assert_array_equal(back.tensors["transform"], state().tensors["transform"])
    assert (back.steps, back.last_round) == (17, 4)


@given(st.data())
def test_any_changed_or_missing_byte_is_found(draws: st.DataObject) -> None:
    whole = state().to_bytes()
    position = draws.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[position] ^= draws.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:position], whole + b"\0"):
        with pytest.raises(VeilfedError) as refused:
            read(damaged)
        assert refused.value.code is Code.STATE_CORRUPT


@pytest.mark.parametrize("change", [{"blocks": 3}, {"classes": ["a", "b", "c"]}, {"transform": "identity"}])
def test_the_state_of_another_job_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(VeilfedError, match="the job needs") as refused:
        read(state().to_bytes(), **change)
    assert refused.value.code is Code.STATE_CORRUPT
    assert "jobs/x/state" in refused.value.message


def test_values_that_training_never_gives_are_refused() -> None:
    bad = state()
    bad.tensors["transform"][0, 0, 0] = np.nan
    with pytest.raises(VeilfedError, match="not finite"):
        read(bad.to_bytes())
    with pytest.raises(VeilfedError, match="negative"):
        read(replace(state(), steps=-1).to_bytes())


def test_something_else_is_refused() -> None:
    with pytest.raises(VeilfedError) as refused:
        read(map_bytes({"classifier": np.zeros((2, 6), np.float32)}))
    assert refused.value.code is Code.STATE_CORRUPT
