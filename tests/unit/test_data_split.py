"""The split of an institution's samples, and class names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.data.source import Samples, class_indices, split
from veilfed.errors import Code, VeilfedError

CLASSES = ["cat", "dog", "emu"]


def samples_of(rows: list[tuple[str, str]]) -> Samples:
    """Samples of (class, group)."""
    return Samples("text", ["x"] * len(rows), [label for label, _ in rows], [group for _, group in rows])


rows = st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(0, 12).map(str)), max_size=60)


@given(rows=rows, fraction=st.floats(0.05, 0.95), seed=st.integers(0, 2**31))
def test_every_sample_is_on_one_side_and_no_group_on_both(
    rows: list[tuple[str, str]], fraction: float, seed: int
) -> None:
    rows = [*rows, ("cat", "so that"), ("cat", "both sides exist")]
    samples = samples_of(rows)
    train, test = split(samples, CLASSES, fraction, seed)
    assert sorted([*train, *test]) == list(range(len(rows)))
    assert len(train)
    assert len(test)
    assert not {rows[index][1] for index in train} & {rows[index][1] for index in test}
    again = split(samples, CLASSES, fraction, seed)
    assert np.array_equal(train, again[0])
    assert np.array_equal(test, again[1])


@given(
    sizes=st.lists(st.integers(2, 60), min_size=2, max_size=3), fraction=st.floats(0.1, 0.9), seed=st.integers(0, 99)
)
def test_each_class_keeps_the_fraction_and_both_sides(sizes: list[int], fraction: float, seed: int) -> None:
    labels = [name for name, size in zip(CLASSES, sizes, strict=False) for _ in range(size)]
    samples = samples_of([(label, f"{label}{number}") for number, label in enumerate(labels)])
    train, test = split(samples, CLASSES, fraction, seed)
    for name, size in zip(CLASSES, sizes, strict=False):
        tested = sum(labels[index] == name for index in test)
        assert 1 <= tested < size
        assert abs(tested - fraction * size) <= 1
        assert tested + sum(labels[index] == name for index in train) == size


def test_institutions_with_the_same_groups_put_them_on_the_same_side() -> None:
    rows = [(name, f"{name}{number}") for name in CLASSES for number in range(28)]
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled = [rows[index] for index in order]
    _, here = split(samples_of(rows), CLASSES, 0.4, 50)
    _, there = split(samples_of(shuffled), CLASSES[::-1], 0.4, 50)
    assert {rows[index] for index in here} == {shuffled[index] for index in there}
    _, other_seed = split(samples_of(rows), CLASSES, 0.4, 77)
    assert set(here.tolist()) != set(other_seed.tolist())


def test_the_order_of_groups_is_that_of_sha256_of_seed_and_group() -> None:
    """`printf 7:c | sha256sum` gives 18ec..., a 82d9..., d d3a3..., b ec2a...: other programs can draw the split."""
    rows = [("cat", group) for group in "abcd"] + [("dog", group) for group in "wxyz"]
    train, test = split(samples_of(rows), CLASSES, 0.5, 7)
    assert {rows[index][1] for index in test} & set("abcd") == {"c", "a"}
    assert {rows[index][1] for index in train} & set("abcd") == {"d", "b"}


def test_a_class_of_one_group_is_for_training() -> None:
    rows = [("cat", str(number)) for number in range(10)] + [("dog", "only")] * 5
    train, test = split(samples_of(rows), CLASSES, 0.4, 50)
    assert set(range(10, 15)) <= set(train.tolist())
    assert len(test) == 4


@pytest.mark.parametrize("rows", [[("cat", "a"), ("dog", "a"), ("dog", "a")], [("cat", "a"), ("dog", "b")]])
def test_too_few_groups_are_refused(rows: list[tuple[str, str]]) -> None:
    with pytest.raises(VeilfedError) as caught:
        split(samples_of(rows), CLASSES, 0.4, 50)
    assert caught.value.code is Code.DATA_INVALID


def test_names_are_mapped_by_the_job_s_list() -> None:
    indices = class_indices(["emu", "cat", "emu"], CLASSES)
    assert indices.tolist() == [2, 0, 2]
    assert indices.dtype == np.int64


def test_names_that_the_job_does_not_have_are_named() -> None:
    with pytest.raises(VeilfedError) as caught:
        class_indices(["cat", "fox", "Dog"], CLASSES)
    assert caught.value.code is Code.DATA_INVALID
    assert "'Dog', 'fox'" in caught.value.message
    with pytest.raises(VeilfedError, match="and 3 more"):
        class_indices([str(number) for number in range(8)], CLASSES)
