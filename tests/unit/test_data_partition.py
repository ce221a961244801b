"""Dividing samples among clients: invariants for any labels and groups."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.data.partition import Indices, by_domain, dirichlet
from veilfed.errors import Code, VeilfedError

# (label, group) of each sample.
SAMPLES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30).map(str)), min_size=1, max_size=80)


def check(parts: list[Indices], groups: list[str]) -> None:
    """Each sample once, nobody empty, no group at two clients."""
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(groups)))
    assert all(len(part) for part in parts)
    assert all(np.array_equal(part, np.sort(part)) for part in parts)
    owners = [{groups[index] for index in part} for part in parts]
    assert sum(len(owner) for owner in owners) == len(set(groups))


@given(samples=SAMPLES, clients=st.integers(1, 12), alpha=st.floats(1e-6, 1e6), seed=st.integers(0, 2**32))
def test_a_dirichlet_division_is_one(samples: list[tuple[str, str]], clients: int, alpha: float, seed: int) -> None:
    labels, groups = [label for label, _ in samples], [group for _, group in samples]
    if len(set(groups)) < clients:
        with pytest.raises(VeilfedError, match="too few") as caught:
            dirichlet(labels, groups, clients, alpha, seed)
        assert caught.value.code is Code.DATA_INVALID
        return
    parts = dirichlet(labels, groups, clients, alpha, seed)
    assert len(parts) == clients
    check(parts, groups)
    again = dirichlet(labels, groups, clients, alpha, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@given(
    domains=st.lists(st.lists(st.integers(0, 20).map(str), min_size=1, max_size=40), min_size=1, max_size=4),
    extra=st.integers(0, 20),
    seed=st.integers(0, 2**32),
)
def test_a_division_by_domain_is_one(domains: list[list[str]], extra: int, seed: int) -> None:
    clients = len(domains) + extra
    if sum(len(set(groups)) for groups in domains) < clients:
        with pytest.raises(VeilfedError, match="too few"):
            by_domain(domains, clients, seed)
        return
    parts = by_domain(domains, clients, seed)
    assert len(parts) == clients
    for domain, groups in enumerate(domains):
        check([indices for owner, indices in parts if owner == domain], groups)
    again = by_domain(domains, clients, seed)
    assert all(np.array_equal(one[1], other[1]) for one, other in zip(parts, again, strict=True))


LABELS = [str(index % 10) for index in range(5000)]
ALONE = [str(index) for index in range(5000)]


def skew(parts: list[Indices]) -> float:
    """Mean over clients of the share of the most frequent class: 0.1 for even ones, 1 for one class each."""
    return float(np.mean([max(Counter(LABELS[index] for index in part).values()) / len(part) for part in parts]))


def test_small_alpha_gives_few_classes_and_large_alpha_all() -> None:
    skews = [skew(dirichlet(LABELS, ALONE, 20, alpha, 50)) for alpha in (1e-3, 0.1, 1, 1e4)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.9
    assert skews[-1] < 0.13


def test_shares_are_those_of_the_distribution() -> None:
    """The variance of a client's share of a class under Dirichlet(alpha) is (N - 1) / (N^2 (N alpha + 1))."""
    clients, alpha = 5, 0.5
    shares = []
    for seed in range(40):
        for part in dirichlet(LABELS, ALONE, clients, alpha, seed):
            counts = Counter(LABELS[index] for index in part)
            shares += [counts[str(name)] / 500 for name in range(10)]
    assert np.mean(shares) == pytest.approx(1 / clients)
    assert np.var(shares) == pytest.approx((clients - 1) / (clients**2 * (clients * alpha + 1)), rel=0.1)


def test_another_seed_is_another_division() -> None:
    one, other = (dirichlet(LABELS, ALONE, 5, 1.0, seed) for seed in (50, 77))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    first, second = (by_domain([ALONE], 5, seed) for seed in (50, 77))
    assert any(not np.array_equal(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_domains_get_clients_by_their_size_and_deal_evenly() -> None:
    domains = [[f"{domain}-{index}" for index in range(size)] for domain, size in enumerate((600, 300, 100))]
    parts = by_domain(domains, 75, 50)
    assert Counter(domain for domain, _ in parts) == {0: 45, 1: 22, 2: 8}
    assert {len(indices) for domain, indices in parts if domain == 0} == {13, 14}


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bad_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(VeilfedError, match="alpha") as caught:
        dirichlet(["a"], ["1"], 1, alpha, 50)
    assert caught.value.code is Code.INPUT_INVALID


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(VeilfedError, match="at least one"):
        dirichlet(["a"], ["1"], 0, 1.0, 50)
    with pytest.raises(VeilfedError, match="no samples"):
        dirichlet([], [], 1, 1.0, 50)
    with pytest.raises(VeilfedError, match="no samples"):
        by_domain([["1"], []], 2, 50)
    with pytest.raises(VeilfedError, match="2 domains"):
        by_domain([["1"], ["2"]], 1, 50)
