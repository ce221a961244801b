"""A block's plan, and its arithmetic on plain slots against the formulas."""

from pathlib import Path

import numpy as np
import pytest

from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.block import Block, Ranges, Weights
from fm_oracle.encrypted.plan import Planner, Shape, markdown
from tests.support.blocks import (
    CHANNELS,
    HEADS,
    PADDING_SCALE,
    PARAMETERS,
    SCALE,
    Case,
    Real,
    make_case,
    on_plain_slots,
)
from veilfed.ckks.parameters import Parameters
from veilfed.errors import VeilfedError


@pytest.fixture(scope="module", params=[False, True], ids=["pre", "post"])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(post=request.param)


def planned(case: Case, parameters: Parameters) -> Planner:
    planner, limbs = Planner(parameters), parameters.limbs
    x, mask = Shape(CHANNELS, SCALE, limbs), Shape(1, SCALE, limbs)
    made = case.block(x, mask, Shape(1, PADDING_SCALE, limbs), planner)
    assert (len(made), made.components) == (CHANNELS, 2)
    if case.block.weights.gains is None:
        assert (made.scale, made.limbs) == (SCALE, case.block.lowest + 3)
    else:
        assert made.limbs == case.block.lowest + 2
    return planner


def test_the_arithmetic_is_that_of_the_formulas(case: Case) -> None:
    found = on_plain_slots(case)
    # What is left is the rounding of the weights, and what Goldschmidt and Newton leave.
    error = np.abs(found.values.reshape(case.x.shape) - case.expected)
    assert error.max() < 1e-2 * np.abs(case.expected).max()
    assert not found.values.reshape(case.x.shape)[:, case.mask == 0].any()


def test_a_plan_has_every_phase(case: Case) -> None:
    rows = [row for row in planned(case, PARAMETERS).rows if row.work]
    parts = ("queries, keys, values", "scores", "exponential", "sums")
    heads = (f"head {head + 1}: {part}" for head in range(HEADS) for part in parts)
    attention = [*heads, "softmax", "output", "refresh"]
    hidden = (f"from channel {first}: {part}" for first in (0, 12) for part in ("hidden layer", "back"))
    feed_forward = [*hidden, "refresh"]
    pre = ["first norm", *attention, "second norm", *feed_forward]
    post = [*attention, "first norm", *feed_forward, "second norm"]
    assert [row.phase for row in rows] == (pre if case.block.weights.gains is None else post)
    assert all(row.limbs >= case.block.lowest for row in rows)


def test_parameters_without_enough_levels_are_refused_by_the_plan(case: Case) -> None:
    with pytest.raises(VeilfedError, match=r"limbs|does not hide|level"):
        planned(case, Parameters(14, (48, *[36] * 5), 48, 36))


def test_the_table_in_the_documentation_is_the_plan_s() -> None:
    """Of a block as large as ViT-B's: 768 channels, 12 heads, 64 tokens of 128 samples."""
    d = 768

    def layer(out: int, fan_in: int) -> Real:
        return np.ones((out, fan_in + 1))

    weights = Weights(layer(3 * d, d), layer(d, d), layer(4 * d, d), layer(d, 4 * d))
    ranges = Ranges(64.0, 32.0, 8.0, (20.0, 160.0), (0.3, 3.0), (0.3, 4.0))
    planner, limbs = Planner(PARAMETERS), PARAMETERS.limbs
    block = Block(weights, ranges, 12, Diagonals(64, 128, 16))
    block(Shape(d, SCALE, limbs), Shape(1, SCALE, limbs), Shape(1, PADDING_SCALE, limbs), planner)
    page = Path(__file__).parents[2] / "docs" / "explanation" / "encrypted-engine.md"
    assert markdown(planner.rows) in page.read_text()
