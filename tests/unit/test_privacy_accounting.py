"""What a sequence of noisy releases spends, against the exact curve of the Gaussian."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from veilfed.privacy import Release, epsilon

DELTA = 1e-5


def exact(multiplier: float) -> float:
    """Of one Gaussian (Balle and Wang, 2018, theorem 8): the epsilon at which delta is DELTA."""

    def above(e: float) -> float:
        a, b = 1 / (2 * multiplier), e * multiplier
        return float(norm.cdf(a - b) - math.exp(e) * norm.cdf(-a - b) - DELTA)

    return float(brentq(above, 0, 500))


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0, 4.0, 10.0, 50.0])
def test_a_release_spends_what_the_curve_says_or_a_little_more(multiplier: float) -> None:
    assert exact(multiplier) <= epsilon([Release(multiplier)], DELTA) <= 1.2 * exact(multiplier)


def test_releases_add_up_as_one_with_less_noise() -> None:
    many = epsilon([Release(10.0)] * 25, DELTA)
    assert many == pytest.approx(epsilon([Release(2.0)], DELTA), rel=1e-3)
    assert epsilon([Release(10.0, steps=25)], DELTA) == many
    assert epsilon([Release(3.0), Release(4.0)], DELTA) == epsilon([Release(4.0), Release(3.0)], DELTA)
    # 1 / z^2 adds up, whatever the parts.
    assert epsilon([Release(3.0), Release(4.0)], DELTA) == pytest.approx(epsilon([Release(2.4)], DELTA), rel=1e-3)
    assert epsilon([], DELTA) == 0


def test_sampling_saves_and_full_sampling_does_not() -> None:
    assert epsilon([Release(1.0, 1.0, 10)], DELTA) == epsilon([Release(1.0, steps=10)], DELTA)
    curve = [epsilon([Release(1.0, rate, 100)], DELTA) for rate in (0.01, 0.05, 0.2, 0.999)]
    assert curve == sorted(curve)
    assert curve[0] < 0.05 * curve[-1]


def test_sampling_is_accounted_at_orders_at_which_discrete_noise_has_the_same_moments() -> None:
    """The moments of (1 - q) + q P(x - 1) / P(x), by summation over the integers in units of the grid."""
    multiplier, rate, grid = 1.5, 0.1, 8
    variance = (multiplier * grid) ** 2
    x = np.arange(-60 * grid, 60 * grid + 1)
    weights = np.exp(-(x**2) / (2 * variance))
    weights /= weights.sum()
    ratio = 1 - rate + rate * np.exp((2 * x * grid - grid**2) / (2 * variance))
    for order in (2, 3, 8, 16):
        moment = float((weights * ratio**order).sum())
        terms = (
            math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp((k * k - k) / (2 * multiplier**2))
            for k in range(order + 1)
        )
        assert moment == pytest.approx(sum(terms), rel=1e-9)
