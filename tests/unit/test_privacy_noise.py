"""The discrete Gaussian against its own formula and against its algorithm in plain fractions."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from client_agent.privacy.gaussian import _below_exp, _decided, bernoulli, discrete_gaussian, seeded
from client_agent.privacy.lattice import clipped
from tests.support.discrete_gaussian import sample
from veilfed.errors import Code, VeilfedError

# Of one test; all of them together fail by chance once in ten thousand changes of the seeds.
LEAST_P = 1e-5


def pmf(variance: int, values: Any) -> Any:
    """P[X = x] by summation; what is left out is below e^-200."""
    reach = np.arange(-20 * math.isqrt(variance) - 20, 20 * math.isqrt(variance) + 21)
    return np.exp(-(values**2) / (2 * variance)) / np.exp(-(reach**2) / (2 * variance)).sum()


def p_value(found: np.ndarray, variance: int) -> float:
    """Of Pearson's chi-square, cells with fewer than ten expected put together."""
    from scipy.stats import chisquare  # noqa: PLC0415  not of all parties

    values = np.arange(-6 * math.isqrt(variance) - 6, 6 * math.isqrt(variance) + 7)
    expected = len(found) * pmf(variance, values)
    counts = np.array([(found == value).sum() for value in values], np.float64)
    common = expected >= 10
    observed = np.append(counts[common], len(found) - counts[common].sum())
    wanted = np.append(expected[common], len(found) - expected[common].sum())
    if wanted[-1] < 10:
        observed[-2:-1] += observed[-1]
        wanted[-2:-1] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("variance", [1, 2, 5, 100, 1000])
def test_samples_have_the_formula_of_the_distribution(variance: int) -> None:
    assert p_value(discrete_gaussian(variance, 200_000, seeded(variance)), variance) > LEAST_P


def test_the_plain_algorithm_has_the_same_distribution() -> None:
    source = seeded(3)
    assert p_value(np.array([sample(Fraction(5), source) for _ in range(4000)]), 5) > LEAST_P


def test_wide_noise_has_the_moments_and_the_tail_of_a_gaussian() -> None:
    variance = 2**80 + 1
    found = discrete_gaussian(variance, 400_000, seeded(1)) / 2.0**40
    assert abs(found.mean()) < 5 / math.sqrt(len(found))
    assert abs(found.var() - 1) < 5 * math.sqrt(2 / len(found))
    assert abs((np.abs(found) > 2).mean() - math.erfc(math.sqrt(2))) < 5 * math.sqrt(0.0455 / len(found))
    # Neither the last digits nor the sign have a pattern.
    integers = discrete_gaussian(variance, 400_000, seeded(2))
    for part in (integers & 1, (integers >> 10) & 1, integers < 0):
        assert abs(part.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(integers))


def test_the_default_source_is_not_a_constant() -> None:
    assert (discrete_gaussian(2**40, 100) != discrete_gaussian(2**40, 100)).any()


@pytest.mark.parametrize("variance", [0, -1, 2**92])
def test_noise_that_cannot_be_made_is_refused(variance: int) -> None:
    with pytest.raises(VeilfedError) as refused:
        discrete_gaussian(variance, 1)
    assert refused.value.code is Code.INPUT_INVALID


def replayed(*words: int) -> Callable[[int], bytes]:
    """A source that gives these words, then zeros."""
    left = list(words)
    return lambda count: b"".join((left.pop(0) if left else 0).to_bytes(8, "little") for _ in range(count // 8))


def test_where_64_bits_do_not_decide_the_next_ones_do() -> None:
    """1/e in binary is 0.5e2d58d8b3bcdf1abadec7829054f90d..., by the reciprocal sum of factorials."""
    terms = 40
    e = sum(Fraction(1, math.factorial(k)) for k in range(terms))
    binary = int((1 / e) * 2**128)
    first, second = binary >> 64, binary & (2**64 - 1)
    for word, further, expected in (
        (first, second - 1, True),
        (first, second + 1, False),
        (first, 0, True),
        (first - 1, 2**64 - 1, True),
        (first + 1, 0, False),
    ):
        assert _decided(word, Fraction(1), replayed(further)) is expected
        # The same through the arrays: so near, the fast way leaves the decision to the exact one.
        found = _below_exp(np.ones(1), lambda index: Fraction(1), replayed(word, further))
        assert bool(found[0]) is expected


@given(st.integers(0, 2**64 - 1), st.fractions(0, 60, max_denominator=10**12))
def test_fast_and_exact_decisions_are_the_same(word: int, gamma: Fraction) -> None:
    fast = _below_exp(np.array([float(gamma)]), lambda index: gamma, replayed(word))
    assert bool(fast[0]) is _decided(word, gamma, replayed())


def test_decisions_have_their_probability() -> None:
    for probability in (0.001, 0.05, 0.5):
        found = bernoulli(probability, 400_000, seeded(5)).mean()
        assert abs(found - probability) < 5 * math.sqrt(probability / 400_000)
    assert bernoulli(1.0, 1000).all()


ROWS = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 40)),
    elements=st.floats(-1e6, 1e6, allow_subnormal=False),
)


@settings(max_examples=200)
@given(ROWS, st.floats(1e-3, 1e3), st.integers(8, 40))
def test_what_is_clipped_has_the_bound_exactly(rows: np.ndarray, bound: float, bits: int) -> None:
    units = clipped(rows, bound, bits)
    limit = (Fraction(bound) * 2**bits) ** 2
    for row, whole in zip(units.tolist(), rows, strict=True):
        assert sum(value * value for value in row) <= limit
        norm = float(np.linalg.norm(whole))
        wanted = whole * min(1.0, bound / norm) if norm else whole
        assert np.abs(np.array(row) * 2.0**-bits - wanted).max() <= 2.0**-bits + 1e-8 * bound


def test_what_cannot_be_clipped_is_refused() -> None:
    for rows, bound in ((np.full((1, 2), np.nan), 1.0), (np.full((1, 2), np.inf), 1.0), (np.ones((1, 2)), 2.0**40)):
        with pytest.raises(VeilfedError) as refused:
            clipped(rows, bound, 32)
        assert refused.value.code is Code.INPUT_INVALID
