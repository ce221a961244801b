"""Parameter sets: the standard's table, and SEAL's choice of primes."""

import math

import pytest

from veilfed.ckks.parameters import MAX_LOG_MODULUS, Parameters
from veilfed.errors import Code, VeilfedError


def test_primes_are_of_the_lengths_that_were_asked_for_and_fit_the_ring() -> None:
    parameters = Parameters(14, (48, 36, 36, 45), 48, 36)
    assert [q.bit_length() for q in parameters.primes] == [48, 36, 36, 45, 48]
    assert len(set(parameters.primes)) == 5
    for q in parameters.primes:
        assert q % (2 * parameters.n) == 1
        assert all(q % divisor for divisor in range(2, 2000))


def test_a_set_fills_the_table_and_not_more() -> None:
    filled = Parameters(13, (34,) * 5, 48, 30)
    assert filled.log_modulus == MAX_LOG_MODULUS[13] == 218
    assert math.log2(math.prod(filled.primes)) <= 218


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((13, (35,) * 5, 48, 30), "128 bits of security allow 218"),
        ((9, (30,), 30, 20), "a ring of degree 2\\^9"),
        ((14, (50, 36), 50, 36), "primes of"),
        ((14, (24, 36), 48, 36), "primes of"),
        ((14, (48, 36), 36, 36), "special prime is shorter"),
        ((14, (), 48, 36), "primes of"),
        ((14, (36,), 48, 36), "a scale of 36 bits"),
        ((15, (25,) * 34, 25, 20), "there are not 35 primes of 25 bits"),
    ],
)
def test_sets_that_are_refused(arguments: tuple[int, tuple[int, ...], int, int], words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        Parameters(*arguments)
    assert caught.value.code is Code.INPUT_INVALID
