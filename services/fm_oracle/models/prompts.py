"""Prompt tokens: vectors P [M, D] that go through a frozen transformer beside each input's own tokens.

They stand between the class token, which has its position by then, and the others (VPT-Shallow as FedOPAL has it:
arXiv 2607.08368, equations 4 and 5), and have no position of their own. A client gives them in units of the model's own
tokens: the model multiplies them by the standard deviation of those, so that clients need not know it and prompts of
one size fit every model.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Pass", "embed", "gradient", "insert", "insert_mask", "remove"]

Float = NDArray[np.float32]
# The rows of some inputs, and what takes prompts [M, D] to their embeddings [rows, d].
Pass = tuple[Any, Callable[[Tensor], Tensor]]


def insert(x: Tensor, prompts: Tensor) -> Tensor:
    """Tokens [n, 1 + t, D] and prompts [M, D] -> [n, 1 + M + t, D]."""
    return torch.cat([x[:, :1], prompts.expand(len(x), -1, -1), x[:, 1:]], dim=1)


def insert_mask(mask: Tensor | None, count: int) -> Tensor | None:
    """The mask [n, 1 + t] of tokens that may be looked at, with `count` prompts: every token looks at those."""
    if mask is None:
        return None
    return torch.cat([mask[:, :1], mask.new_ones(len(mask), count), mask[:, 1:]], dim=1)


def remove(x: Tensor, count: int) -> Tensor:
    """Undoes `insert`: [n, 1 + M + t, D] -> [n, 1 + t, D]."""
    return torch.cat([x[:, :1], x[:, 1 + count :]], dim=1)


def embed(passes: Iterable[Pass], prompts: Float, shape: tuple[int, int]) -> Float:
    """The embeddings float32 [n, d], `shape`, of all passes."""
    out = np.empty(shape, np.float32)
    given = torch.from_numpy(prompts)
    for rows, encode in passes:
        with torch.inference_mode():
            out[rows] = encode(given).numpy()
    return out


def gradient(
    passes: Iterable[Pass], prompts: Float, head: Float, labels: NDArray[np.int64], shape: tuple[int, int]
) -> tuple[Float, Float]:
    """What `Model.prompt_gradient` says. One pass is in memory at a time; the gradients are added in float64."""
    out = np.empty(shape, np.float32)
    total = np.zeros(prompts.shape)
    classifier = torch.from_numpy(head)
    for rows, encode in passes:
        given = torch.from_numpy(prompts).requires_grad_()
        with torch.enable_grad():
            h = encode(given)
            loss = cross_entropy(h, classifier, torch.from_numpy(labels[rows]))
        (slope,) = torch.autograd.grad(loss, given)
        out[rows] = h.detach().numpy()
        total += slope.double().numpy()
    return total.astype(np.float32), out


def cross_entropy(h: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """sum_i -log softmax(head h_i / ||h_i||)[labels_i], of h [n, d] and head [K, d]."""
    lengths = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    return torch.nn.functional.cross_entropy((h / lengths) @ head.T, labels, reduction="sum")
