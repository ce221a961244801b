"""Fixed point in Z/2^64."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from veilfed import ring
from veilfed.errors import Code, VeilfedError

VALUES = st.floats(-1e3, 1e3, width=64)


@given(arrays(np.float64, (4, 3), elements=VALUES), st.integers(8, 48))
def test_decode_is_the_inverse_up_to_half_a_step(values: np.ndarray, bits: int) -> None:
    encoded = ring.encode(values, bits)
    assert (encoded.dtype, encoded.shape) == (np.dtype(np.uint64), values.shape)
    assert np.all(np.abs(ring.decode(encoded, bits) - values) <= 2.0 ** -(bits + 1))


@given(st.lists(arrays(np.float64, (5,), elements=VALUES), min_size=1, max_size=6), st.randoms())
def test_any_order_gives_the_same_sum(terms: list[np.ndarray], shuffler: np.random.Generator) -> None:
    def total(ordered: list[np.ndarray]) -> bytes:
        result = ring.zeros((5,))
        for term in ordered:
            ring.add(result, ring.encode(term, 32))
        return result.tobytes()

    shuffled = list(terms)
    shuffler.shuffle(shuffled)
    assert total(shuffled) == total(terms)


def test_known_values() -> None:
    encoded = ring.encode(np.array([1.0, -1.0, 0.0, 2.0**-32, 2.0**-34]), 32)
    assert encoded.tolist() == [2**32, 2**64 - 2**32, 0, 1, 0]


def test_sums_wrap_as_two_s_complement() -> None:
    total = ring.encode(np.array([-5.0]), 16)
    ring.add(total, ring.encode(np.array([3.5]), 16))
    assert ring.decode(total, 16).tolist() == [-1.5]


def test_scalars() -> None:
    assert float(ring.decode(ring.encode(np.asarray(2.5), 8), 8)) == 2.5


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**63, -(2.0**63)])
def test_out_of_range(value: float, bits: int) -> None:
    with pytest.raises(VeilfedError, match=rf"below 2\^{63 - bits} .* with {bits} fraction bits") as caught:
        ring.encode(np.array([0.0, value * 2.0**-bits]), bits)
    assert caught.value.code is Code.INPUT_INVALID


def test_the_largest_values_fit() -> None:
    largest = np.nextafter(2.0**31, 0)
    assert ring.decode(ring.encode(np.array([largest, -largest]), 32), 32).tolist() == [largest, -largest]


@pytest.mark.parametrize("bits", [-1, 63])
def test_fraction_bits(bits: int) -> None:
    with pytest.raises(VeilfedError, match="fraction bits"):
        ring.encode(np.zeros(1), bits)


def test_the_most_fraction_bits() -> None:
    assert ring.decode(ring.encode(np.array([1.5, -1.5]), 62), 62).tolist() == [1.5, -1.5]


@pytest.mark.parametrize(("total", "term"), [((2,), (1,)), ((1,), (2,)), ((2, 3), (3,)), ((3,), (2, 3))])
def test_shapes_must_agree(total: tuple[int, ...], term: tuple[int, ...]) -> None:
    kept = ring.zeros(total)
    with pytest.raises(VeilfedError, match=rf"shape \[{str(term)[1]}.*\] to \[{str(total)[1]}"):
        ring.add(kept, np.ones(term, np.uint64))
    assert not kept.any()


@given(arrays(np.float64, (5,), elements=VALUES), st.floats(2.0**-10, 1e3), st.integers(8, 40))
def test_a_factor_is_rounded_once(values: np.ndarray, factor: float, bits: int) -> None:
    exact = [Fraction(float(value)) * Fraction(factor) for value in values]
    found = ring.decode(ring.encode(values, bits, factor), bits)
    for value, product in zip(found, exact, strict=True):
        # Half a step, and the rounding of the product to float64.
        assert abs(Fraction(float(value)) - product) <= Fraction(2) ** -(bits + 1) + abs(product) * Fraction(2) ** -53
