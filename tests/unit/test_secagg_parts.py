"""Shares, vectors and masks against plain references in Python's own integers."""

import math
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from veilfed import ring, wide_ring
from veilfed.errors import VeilfedError
from veilfed.secagg import Format, shamir, threshold
from veilfed.secagg.cohort import MAX_HOLDERS, holders_of
from veilfed.secagg.masks import apply_masks
from veilfed.secagg.vectors import BLOCK

SECRETS = st.binary(min_size=32, max_size=32)


def numbers(form: Format, vector: np.ndarray) -> list[int]:
    """The elements as integers."""
    narrow, wide = form.parts(vector)
    return [int(x) for x in narrow] + [int(low) + (int(high) << 64) for low, high in wide.T]


def modulus(form: Format, place: int) -> int:
    return 2**64 if place < form.narrow else 2**128


def random_vector(form: Format, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, form.words, np.uint64, endpoint=False)


def plain_secret(points: list[int], shares: list[bytes]) -> int:
    """Lagrange at 0, one limb after the other."""
    prime, total = shamir.PRIME, 0
    for place in range(shamir.LIMBS):
        limb = 0
        for x, share in zip(points, shares, strict=True):
            weight = 1
            for other in points:
                if other != x:
                    weight = weight * other * pow(other - x, -1, prime) % prime
            limb += weight * int.from_bytes(share[4 * place : 4 * place + 4], "little")
        total += limb % prime << (shamir.LIMB_BITS * place)
    return total


@given(secret=SECRETS, count=st.integers(1, 12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_shares_up_to_the_threshold_give_the_secret(secret: bytes, count: int, data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(1, 10_000), min_size=count, max_size=count, unique=True))
    least = data.draw(st.integers(1, count))
    seed = data.draw(st.integers(0, 2**32))
    drawn = np.random.default_rng(seed).integers(0, shamir.PRIME, shamir.coefficients_needed(least), np.uint64)
    shares = shamir.split(secret, holders, least, drawn)
    chosen = data.draw(st.permutations(range(count)))[:least]
    points, some = [holders[j] for j in chosen], [shares[j] for j in chosen]
    assert shamir.join(points, some) == secret
    assert plain_secret(points, some) == int.from_bytes(secret, "little")


def test_fewer_shares_say_nothing() -> None:
    """With t - 1 shares each value of the secret is as possible as any other: one polynomial goes through both."""
    prime, secret = shamir.PRIME, bytes(range(32))
    drawn = np.random.default_rng(1).integers(0, prime, shamir.coefficients_needed(3), np.uint64)
    two = shamir.split(secret, [1, 2, 3, 4], 3, drawn)[:2]
    other = bytes(31) + b"\x01"
    # f' = f + c (x - 1)(x - 2) / 2 has the same shares at 1 and 2, and f'(0) = f(0) + c.
    limbs, others = shamir._limbs(secret), shamir._limbs(other)
    half = pow(2, -1, prime)
    c = [(int(b) - int(a)) % prime for a, b in zip(limbs, others, strict=True)]
    rows = drawn.reshape(2, shamir.LIMBS)
    quadratic = np.array([(int(r) + v * half) % prime for r, v in zip(rows[0], c, strict=True)], np.uint64)
    linear = np.array([(int(r) - 3 * v * half) % prime for r, v in zip(rows[1], c, strict=True)], np.uint64)
    again = shamir.split(other, [1, 2, 3, 4], 3, np.concatenate([quadratic, linear]))
    assert again[:2] == two


@pytest.mark.parametrize(
    ("points", "shares"),
    [([1, 1], [bytes(36), bytes(36)]), ([1, 2], [bytes(36), bytes(35)]), ([1], [b"\xff" * 36]), ([], [])],
)
def test_what_are_no_shares(points: list[int], shares: list[bytes]) -> None:
    with pytest.raises(VeilfedError):
        shamir.join(points, shares)


@given(narrow=st.integers(0, 9), wide=st.integers(0, 9), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_addition_is_that_of_the_rings(narrow: int, wide: int, seed: int) -> None:
    form = Format(narrow, wide)
    a, b = random_vector(form, seed), random_vector(form, seed + 1)
    expected = [
        (x + y) % modulus(form, place)
        for place, (x, y) in enumerate(zip(numbers(form, a), numbers(form, b), strict=True))
    ]
    form.add(a, b)
    assert numbers(form, a) == expected
    assert (form.from_bytes(form.to_bytes(a)) == a).all()


def test_the_rings_are_those_of_the_fold() -> None:
    values = np.array([1.5, -2.25, 1e6])
    form = Format(3, 3)
    first = np.concatenate([ring.encode(values, 32), wide_ring.encode(values).reshape(-1)])
    second = np.concatenate([ring.encode(-values / 3, 32), wide_ring.encode(-values / 3).reshape(-1)])
    form.add(first, second)
    narrow, wide = form.parts(first)
    np.testing.assert_allclose(ring.decode(narrow, 32), values * 2 / 3, rtol=1e-9)
    np.testing.assert_allclose(wide_ring.decode(wide), values * 2 / 3, rtol=1e-15)


def plain_mask(form: Format, key: bytes) -> list[int]:
    """A mask element by element, from the whole stream at once."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * form.words))
    words = [int.from_bytes(stream[place : place + 8], "little") for place in range(0, len(stream), 8)]
    elements, words = words[: form.narrow], words[form.narrow :]
    for start in range(0, form.wide, BLOCK):
        size = min(BLOCK, form.wide - start)
        low, high, words = words[:size], words[size : 2 * size], words[2 * size :]
        elements += [x + (y << 64) for x, y in zip(low, high, strict=True)]
    return elements


@pytest.mark.parametrize("form", [Format(5, 3), Format(0, 2), Format(7, 0), Format(BLOCK + 3, BLOCK + 2)])
def test_masks_are_those_of_the_reference(form: Format) -> None:
    vector = random_vector(form, 3)
    before = numbers(form, vector)
    keys = [bytes([number]) * 32 for number in range(3)]
    apply_masks(vector, form, keys[:2], keys[2:])
    masks = [plain_mask(form, key) for key in keys]
    expected = [
        (x + masks[0][place] + masks[1][place] - masks[2][place]) % modulus(form, place)
        for place, x in enumerate(before)
    ]
    assert numbers(form, vector) == expected
    apply_masks(vector, form, keys[2:], keys[:2])
    assert numbers(form, vector) == before


def test_vectors_of_another_form_are_refused() -> None:
    form = Format(2, 1)
    wrongs: list[Any] = [np.zeros(3, np.uint64), np.zeros(4, np.int64), np.zeros((2, 2), np.uint64)]
    for wrong in wrongs:
        with pytest.raises(VeilfedError):
            form.add(form.zeros(), wrong)
    with pytest.raises(VeilfedError):
        form.from_bytes(bytes(31))


@given(st.integers(1, 10_000))
def test_two_groups_of_the_threshold_have_more_than_a_third_in_common(count: int) -> None:
    assert threshold(count) <= count
    assert 3 * (2 * threshold(count) - count) > count


@pytest.mark.parametrize("members", [145, 146, 200, 500, 1000, 3000, 10_000])
def test_colluders_among_the_chosen_holders_stay_below_the_threshold(members: int) -> None:
    """The tail of the hypergeometric distribution, exactly: below 2^-40 for all members together."""
    chosen, others, bad = holders_of(members), members - 1, (members - 1) // 3
    least = threshold(chosen + 1)
    ways = sum(
        math.comb(bad, number) * math.comb(others - bad, chosen - number)
        for number in range(least, min(bad, chosen) + 1)
    )
    assert ways * members * 2**40 < math.comb(others, chosen)
    assert chosen <= MAX_HOLDERS
