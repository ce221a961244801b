"""How far one sample can move the statistics, and an institution its update: as docs/explanation prove it."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from client_agent.privacy.gaussian import seeded
from client_agent.privacy.lattice import clipped
from client_agent.privacy.mechanisms import STATISTICS_BITS, Noise, PrivateStatistics, noisy_update, share
from veilfed import triangle
from veilfed.jobs import StatisticsPrivacy, UpdatePrivacy
from veilfed.wire.tensors import Arrays

D, K = 6, 3
UNIT = 4**STATISTICS_BITS

vectors = arrays.arrays(np.float64, (D,), elements=st.floats(-1, 1, allow_subnormal=False)).filter(
    lambda v: np.linalg.norm(v) > 1e-3
)
labels = st.integers(0, K - 1)


def sums(h: np.ndarray, classes: list[int]) -> tuple[np.ndarray, ...]:
    statistics = PrivateStatistics(D, K)
    if len(classes):
        statistics.add(h / np.linalg.norm(h, axis=1, keepdims=True), np.array(classes, np.int64))
    return statistics.exact()


def distance(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...], counts: bool) -> Fraction:
    """The squared distance of (R, C) or (R, C, counts), exactly."""
    total = sum(
        (int(x) - int(y)) ** 2
        for a, b in zip(one[:2], other[:2], strict=True)
        for x, y in zip(a.flat, b.flat, strict=True)
    )
    found = Fraction(total, UNIT)
    return found + (sum((int(x) - int(y)) ** 2 for x, y in zip(one[2], other[2], strict=True)) if counts else 0)


@settings(max_examples=150)
@given(st.lists(st.tuples(vectors, labels), max_size=5), vectors, labels)
def test_one_sample_more_moves_the_sums_by_root_two_and_with_the_counts_by_root_three(
    others: list[tuple[np.ndarray, int]], h: np.ndarray, label: int
) -> None:
    rows = np.array([row for row, _ in others]).reshape(-1, D)
    classes = [c for _, c in others]
    without, with_it = sums(rows, classes), sums(np.vstack([rows, h]), [*classes, label])
    assert distance(without, with_it, counts=False) <= 2
    assert distance(without, with_it, counts=True) <= 3
    # And nearly by so much: rounding to the grid takes little away.
    assert distance(without, with_it, counts=True) > 3 - 1e-3


@settings(max_examples=150)
@given(st.lists(st.tuples(vectors, labels), max_size=5), vectors, labels, vectors, labels)
def test_one_sample_replaced_moves_the_sums_by_less_than_three_over_root_two(
    others: list[tuple[np.ndarray, int]], h: np.ndarray, label: int, g: np.ndarray, other: int
) -> None:
    rows = np.array([row for row, _ in others]).reshape(-1, D)
    classes = [c for _, c in others]
    one = sums(np.vstack([rows, h]), [*classes, label])
    two = sums(np.vstack([rows, g]), [*classes, other])
    grid = Fraction(1, 1000)
    if label == other:
        assert distance(one, two, counts=True) <= Fraction(9, 2) + grid
    else:
        assert distance(one, two, counts=False) <= 4 + grid
        assert distance(one, two, counts=True) <= 6 + grid


@pytest.mark.parametrize(
    ("cosine", "classes", "counts", "squared"),
    # Two is what orthogonal embeddings give; of one class, opposite by 120 degrees give more: 3 / root 2.
    [(0.0, (0, 0), False, 4.0), (0.0, (0, 1), False, 4.0), (-0.5, (0, 0), True, 4.5), (0.0, (0, 1), True, 6.0)],
)
def test_the_bounds_of_a_replacement_are_reached(
    cosine: float, classes: tuple[int, int], counts: bool, squared: float
) -> None:
    h, g = np.eye(D)[0], cosine * np.eye(D)[0] + math.sqrt(1 - cosine**2) * np.eye(D)[1]
    found = distance(sums(h[None], [classes[0]]), sums(g[None], [classes[1]]), counts)
    assert abs(float(found) - squared) < 1e-3


def test_what_is_charged_is_the_noise_over_what_one_sample_moves() -> None:
    """Of each element the square of its move over the variance of its noise: together 1 / z^2."""
    privacy = StatisticsPrivacy(mode="statistics", noise_multiplier=2.0)
    variance = privacy.variance(STATISTICS_BITS)
    gram, cross, counts = sums(np.array([[1.0, 2, 3, -4, 5, 6]]), [1])
    spent = Fraction(0)
    for (i, j), value in np.ndenumerate(gram):
        if i <= j:
            spent += Fraction(int(value) ** 2, variance if i == j else share(variance, 2))
    spent += sum(Fraction(int(value) ** 2, variance) for value in cross.flat)
    spent += sum(Fraction(int(value) ** 2, privacy.variance(0)) for value in counts)
    assert 0.999 / 4 < spent <= Fraction(1, 4)


def test_the_noise_of_statistics_is_symmetric_and_of_the_variance_that_is_charged() -> None:
    d, k, z = 120, 40, 3.0
    privacy = StatisticsPrivacy(mode="statistics", noise_multiplier=z)
    found = PrivateStatistics(d, k).noisy(privacy, Noise(privacy, source=seeded(1)))
    gram, cross, counts = triangle.unpack(found["gram"]), found["cross"], found["counts"]
    variance = 3 * z**2
    for values, wanted in (
        (gram[np.triu_indices(d, 1)], variance / 2),
        (np.diag(gram), variance),
        (cross, variance),
        (counts, variance),
    ):
        flat = np.asarray(values, np.float64).ravel()
        assert abs(flat.var() / wanted - 1) < 5 * math.sqrt(2 / flat.size)
        assert abs(flat.mean()) < 5 * math.sqrt(wanted / flat.size)
    assert counts.dtype == np.int64


def test_a_share_of_the_noise_adds_up_to_all_of_it() -> None:
    privacy = StatisticsPrivacy(mode="statistics", noise_multiplier=2.0)
    noises = [Noise(privacy, parties=4, source=seeded(seed)) for seed in range(4)]
    made = [PrivateStatistics(60, 60).noisy(privacy, noise) for noise in noises]
    cross = np.sum([np.asarray(arrays["cross"], np.float64) for arrays in made], axis=0)
    assert abs(cross.var() / 12 - 1) < 5 * math.sqrt(2 / 3600)
    # Counts are on the grid of whole numbers, where less than a variance of 4 each would not add up to the same.
    counts = np.concatenate([np.asarray(arrays["counts"], np.float64) for arrays in made])
    assert abs(counts.var() / 4 - 1) < 5 * math.sqrt(2 / 240)


def test_an_update_is_clipped_jointly_and_noised_on_the_grid_of_the_ring() -> None:
    rng = np.random.default_rng(0)
    start: Arrays = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": rng.standard_normal((2, 5)).astype(np.float32),
    }
    trained: Arrays = {name: np.add(array, 10, dtype=np.float64).astype(np.float32) for name, array in start.items()}
    tiny = UpdatePrivacy(mode="update", noise_multiplier=1e-6, clip=0.5)
    update = noisy_update(start, trained, tiny, Noise(tiny, 40, source=seeded(0)))
    change = np.concatenate([np.subtract(update[name], start[name], dtype=np.float64).ravel() for name in ("a", "b")])
    assert np.linalg.norm(change) == pytest.approx(0.5, rel=1e-4)
    assert np.ptp(change) < 1e-4
    large: Arrays = {"a": np.zeros((100, 100), np.float32)}
    wide = UpdatePrivacy(mode="update", noise_multiplier=3.0, clip=0.25)
    noised = noisy_update(large, large, wide, Noise(wide, 32, source=seeded(0)))["a"]
    assert noised.dtype == np.float32
    assert abs(np.asarray(noised, np.float64).var() / (3.0 * 2 * 0.25) ** 2 - 1) < 5 * math.sqrt(2 / noised.size)


@settings(max_examples=60)
@given(vectors, vectors, st.floats(0.01, 10))
def test_two_updates_differ_by_two_clips_or_less(one: np.ndarray, other: np.ndarray, clip: float) -> None:
    a, b = clipped(one[None] * 100, clip, 32)[0], clipped(other[None] * 100, clip, 32)[0]
    squared = sum((int(x) - int(y)) ** 2 for x, y in zip(a, b, strict=True))
    assert squared <= (2 * Fraction(clip) * 2**32) ** 2
    privacy = UpdatePrivacy(mode="update", noise_multiplier=1.0, clip=clip)
    assert squared <= privacy.variance(32)
