"""Tokens in slots, and back."""

import numpy as np
import pytest

from veilfed.ckks.samples import arrange, token_features
from veilfed.errors import Code, VeilfedError


def test_tokens_are_where_attention_expects_them_and_come_back() -> None:
    random = np.random.default_rng(0)
    lengths = [3, 1, 4]
    samples = [random.standard_normal((length, 5)) for length in lengths]
    batch = arrange(samples, 4, 8)
    assert batch.channels[2, 1 * 8 + 2] == samples[2][1, 2]
    assert batch.mask.reshape(4, 8).sum(axis=0).tolist() == [3, 1, 4, 0, 0, 0, 0, 0]
    assert batch.padding.reshape(4, 8)[0].tolist() == [1, 3, 0, 0, 0, 0, 0, 0]
    assert not batch.channels[:, batch.mask[0] == 0].any()
    for sample, back in zip(samples, token_features(batch.channels, lengths, 8), strict=True):
        assert np.array_equal(sample, back)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([], "0 samples; a batch has between 1 and 2"),
        ([(1, 3)] * 3, "3 samples; a batch has between 1 and 2"),
        ([(1, 3), (5, 3)], "sample 1 has 5 tokens; between 1 and 4 are possible"),
        ([(0, 3)], "sample 0 has 0 tokens"),
        ([(1, 3), (1, 2)], "sample 1 has 2 channels, not 3"),
    ],
)
def test_batches_that_are_refused(shapes: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        arrange([np.zeros(shape) for shape in shapes], 4, 2)
    assert caught.value.code is Code.INPUT_INVALID
