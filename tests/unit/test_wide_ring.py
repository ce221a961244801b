"""Fixed point of 128 bits, against Python's integers and fractions."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from veilfed import wide_ring
from veilfed.errors import Code, VeilfedError

REALS = st.floats(-(2.0**62), 2.0**62, allow_nan=False)
SMALL = st.floats(-(2.0**37), 2.0**37, allow_nan=False)
EDGES = [0.0, -0.0, 0.5, -0.5, 1.5, 0.49999999999999994, -1e-20, 2.0**-65, 3 * 2.0**-65, -(2.0**-64), 5e-324]


def integers(limbs: NDArray[np.uint64]) -> list[int]:
    """The elements as Python integers, in units of 2^-64."""
    flat = limbs.reshape(2, -1)
    values = [(int(high) << 64) | int(low) for low, high in zip(*flat, strict=True)]
    return [value - 2**128 if value >= 2**127 else value for value in values]


def rounded(value: float) -> int:
    """In units of 2^-64, half to even."""
    return round(Fraction(value) * 2**64)


@settings(max_examples=200)
@given(st.lists(REALS, min_size=1, max_size=20))
@example(EDGES)
def test_values_are_rounded_half_to_even(values: list[float]) -> None:
    limbs = wide_ring.encode(np.array(values))
    assert integers(limbs) == [rounded(value) for value in values]
    for real, units in zip(wide_ring.decode(limbs), integers(limbs), strict=True):
        exact = Fraction(units, 2**64)
        assert abs(Fraction(float(real)) - exact) <= abs(exact) * Fraction(1, 2**52)


@settings(max_examples=100)
@given(arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 5)), elements=SMALL), st.randoms())
@example(np.array([EDGES] * 3), None)
def test_sums_are_exact_in_any_order(terms: NDArray[np.float64], random: Any) -> None:
    expected = [sum(rounded(float(value)) for value in column) for column in terms.T]
    order = list(range(len(terms)))
    if random is not None:
        random.shuffle(order)
    quick, slow = wide_ring.Total(terms.shape[1:]), wide_ring.zeros(terms.shape[1:])
    for at in order:
        quick.add(terms[at])
        wide_ring.add(slow, wide_ring.encode(terms[at]))
    assert integers(quick.ring()) == integers(slow) == expected


def test_blocks_make_no_difference() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 2 * wide_ring.BLOCK + 7)) * 10.0 ** rng.integers(-20, 9, 2 * wide_ring.BLOCK + 7)
    total = wide_ring.Total(values.shape[1:])
    for row in values:
        total.add(row)
    expected = wide_ring.zeros(values.shape[1:])
    for row in values:
        wide_ring.add(expected, wide_ring.encode(row))
    np.testing.assert_array_equal(total.ring(), expected)
    np.testing.assert_allclose(wide_ring.decode(total.ring()), values.sum(axis=0), rtol=1e-12, atol=1e-15)


def test_addition_wraps() -> None:
    largest = wide_ring.encode(np.array([2.0**62]))
    total = wide_ring.zeros((1,))
    for _ in range(4):
        wide_ring.add(total, largest)
    assert integers(total) == [0]


def test_shapes_are_kept() -> None:
    values = np.arange(6.0).reshape(2, 3) - 2.5
    np.testing.assert_array_equal(wide_ring.decode(wide_ring.encode(values)), values)
    total = wide_ring.Total((2, 3))
    total.add(values)
    assert total.ring().shape == (2, 2, 3)
    assert wide_ring.decode(wide_ring.Total((0, 3)).ring()).shape == (0, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**63, -(2.0**63)])
def test_what_has_no_fixed_point_is_refused(bad: float) -> None:
    for add in (wide_ring.encode, wide_ring.Total((2,)).add):
        with pytest.raises(VeilfedError, match="finite") as refused:
            add(np.array([1.0, bad]))
        assert refused.value.code is Code.INPUT_INVALID


def test_a_total_has_bounds_so_that_it_cannot_overflow() -> None:
    assert wide_ring.MAX_TERMS * wide_ring.LARGEST <= 2**53
    with pytest.raises(VeilfedError, match="below"):
        wide_ring.Total((1,)).add(np.array([wide_ring.LARGEST]))
    total = wide_ring.Total((1,))
    for _ in range(wide_ring.MAX_TERMS):
        total.add(np.array([-1.5]))
    assert integers(total.ring()) == [wide_ring.MAX_TERMS * rounded(-1.5)]
    with pytest.raises(VeilfedError, match="terms"):
        total.add(np.array([0.0]))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(VeilfedError, match="cannot add shape"):
        wide_ring.add(wide_ring.zeros((2,)), wide_ring.zeros((3,)))
    with pytest.raises(VeilfedError, match="cannot add shape"):
        wide_ring.Total((2,)).add(np.zeros(3))
