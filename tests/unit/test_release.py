"""Which blocks' outputs leave an oracle: one pattern for life, without neighbours."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fm_oracle.blocks.release import fixed, secret_of
from veilfed.errors import Code, VeilfedError


@given(secret=st.binary(min_size=32, max_size=32), blocks=st.integers(1, 40))
def test_a_pattern_is_for_life_and_has_no_neighbours(secret: bytes, blocks: int) -> None:
    released = fixed(secret, "version", "a.federation", blocks)
    assert released == fixed(secret, "version", "a.federation", blocks)
    assert released
    assert released[0] >= 1
    assert released[-1] <= blocks
    assert all(other > one + 1 for one, other in pairwise(released))


def test_about_a_third_is_released_and_others_get_other_patterns() -> None:
    """With probability 1/2 where the block before was not: p = (1 - p) / 2 in the long run."""
    patterns = [fixed(bytes([number]) * 32, "version", "a.federation", 30) for number in range(200)]
    assert len(set(patterns)) == len(patterns)
    assert abs(sum(map(len, patterns)) / (30 * len(patterns)) - 1 / 3) < 0.02
    secret = bytes(32)
    assert len({fixed(secret, version, place, 30) for version in "ab" for place in "cd"}) == 4


def test_the_secret_stays(tmp_path: Path) -> None:
    state = tmp_path / "state"
    secret = secret_of(state)
    assert secret_of(state) == secret
    assert (state / "release.key").stat().st_mode & 0o777 == 0o600
    (state / "release.key").write_bytes(secret[:-1])
    with pytest.raises(VeilfedError, match="not 32 bytes") as caught:
        secret_of(state)
    assert caught.value.code is Code.STATE_CORRUPT
