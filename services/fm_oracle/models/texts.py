"""Texts -> token numbers, and batches of them with little padding; for all models that read text."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from veilfed.errors import Code, VeilfedError

__all__ = ["MAX_CHARACTERS", "check_lengths", "forward", "mean_tokens", "passes", "tokenize"]

MAX_CHARACTERS = 100_000  # far more than any model's tokens, and bounds the tokenizer's work
PADDED_TOKENS = 512  # most tokens (padding included) of one pass: its activations stay in the cache


def tokenize(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[NDArray[Any]]:
    """Token numbers, int64 [t] for each text. Raises VeilfedError(INPUT_INVALID) naming a text that is too long."""
    check_lengths(texts, MAX_CHARACTERS)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch_fast(list(texts))]


def check_lengths(texts: Sequence[str], most: int) -> None:
    """Raises VeilfedError(INPUT_INVALID) naming the first text of more than `most` characters."""
    for position, text in enumerate(texts):
        if len(text) > most:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"text {position} of the batch has {len(text)} characters; at most {most} are allowed",
            )


def forward(
    prepared: Sequence[NDArray[Any]], encode: Callable[[Tensor, Tensor | None], Tensor], dimension: int
) -> NDArray[np.float32]:
    """`encode` takes tokens int64 [n, t] and a mask [n, t] (None: no padding) to [n, d]; -> float32 [all, d]."""
    out = np.empty((len(prepared), dimension), dtype=np.float32)
    for positions, tokens, mask in passes(prepared):
        with torch.inference_mode():
            out[positions] = encode(tokens, mask).numpy()
    return out


def passes(prepared: Sequence[NDArray[Any]], prompts: int = 0) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
    """(positions, tokens int64 [n, t], mask bool [n, t] or None where none is padding) of texts of similar length.

    `prompts` tokens will go beside those of each text.
    """
    lengths = [len(tokens) for tokens in prepared]
    for positions in _grouped([length + prompts for length in lengths]):
        longest = lengths[positions[-1]]
        tokens = np.zeros((len(positions), longest), dtype=np.int64)
        for row, position in enumerate(positions):
            tokens[row, : lengths[position]] = prepared[position]
        equal = lengths[positions[0]] == longest
        # Not `tokens != 0`: a text may contain the padding token's own spelling.
        mask = np.arange(longest) < np.array([[lengths[position]] for position in positions])
        yield positions, torch.from_numpy(tokens), None if equal else torch.from_numpy(mask)


def mean_tokens(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the tokens of [n, t, d] where `mask` [n, t] is True -> [n, d]."""
    if mask is None:
        return x.mean(dim=1)
    weights = mask.to(x.dtype)[:, :, None]
    return (x * weights).sum(dim=1) / weights.sum(dim=1)


def _grouped(lengths: Sequence[int]) -> list[list[int]]:
    """Groups texts of similar length, so that little padding is computed: positions of each pass."""
    groups: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__):
        # The texts come shortest first: the newest one is the longest and sets the padding of its pass.
        if not groups or (len(groups[-1]) + 1) * lengths[position] > PADDED_TOKENS:
            groups.append([])
        groups[-1].append(position)
    return groups
