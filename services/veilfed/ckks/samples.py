"""Tokens of several samples as the slots of ciphertexts, one for each channel, and back.

Slot t * B + b is token t of sample b, of n tokens and B samples (fm_oracle computes attention on this order). With the
channels go the mask, 1 in the slots of real tokens, and the number of padded tokens of each sample, in all its slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["Arranged", "arrange", "token_features", "with_places"]

Real = NDArray[np.float64]


@dataclass(frozen=True)
class Arranged:
    """A batch: channels [d, n B], mask and padding [1, n B], all float64."""

    channels: Real
    mask: Real
    padding: Real


def arrange(samples: Sequence[Real], tokens: int, together: int) -> Arranged:
    """Samples [t_i, d] of different lengths, at most `together`, with at most `tokens` tokens each.

    Raises VeilfedError(INPUT_INVALID) for more of either, for none, and for samples of different widths.
    """
    if not 1 <= len(samples) <= together:
        raise VeilfedError(Code.INPUT_INVALID, f"{len(samples)} samples; a batch has between 1 and {together}")
    width = samples[0].shape[1]
    channels = np.zeros((width, tokens, together))
    mask = np.zeros((tokens, together))
    # Samples that are not there have rows of zeros, which no sum of a softmax may be: no token of theirs is padding.
    padding = np.zeros((tokens, together))
    for number, sample in enumerate(samples):
        length = len(sample)
        if not 1 <= length <= tokens:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"sample {number} has {length} tokens; between 1 and {tokens} are possible",
                "Shorten the sample, or use a layout with more tokens.",
            )
        if sample.shape[1] != width:
            raise VeilfedError(Code.INPUT_INVALID, f"sample {number} has {sample.shape[1]} channels, not {width}")
        channels[:, :length, number] = sample.T
        mask[:length, number] = 1
        padding[:, number] = tokens - length
    return Arranged(channels.reshape(width, -1), mask.reshape(1, -1), padding.reshape(1, -1))


def with_places(arranged: Arranged, tokens: int, together: int) -> Arranged:
    """With a channel more for each of the first `tokens` tokens, which is 1 in that token's slots of real samples."""
    padded = arranged.mask.size // together
    places = np.repeat(np.eye(tokens, padded), together, axis=1) * arranged.mask
    return Arranged(np.concatenate([arranged.channels, places]), arranged.mask, arranged.padding)


def token_features(channels: Real, lengths: Sequence[int], together: int) -> list[Real]:
    """The samples [t_i, d] that are in channels [d, n B]: the inverse of `arrange`."""
    apart = channels.reshape(len(channels), -1, together)
    return [np.ascontiguousarray(apart[:, :length, number].T) for number, length in enumerate(lengths)]
