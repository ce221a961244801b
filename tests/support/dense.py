"""FEDOT's formulas as the paper prints them, with every matrix formed: slow and independent of the trainer."""

import torch
from torch import Tensor

__all__ = ["classify", "transform"]


def transform(x: Tensor) -> Tensor:
    """w_l [d, d] of X [r, m, m]: block-diagonal (I + R)(I - R)^-1, R = (X - X^T) / 2, by an explicit inverse."""
    blocks = []
    for part in x:
        skew = (part - part.T) / 2
        identity = torch.eye(len(part), dtype=x.dtype)
        blocks.append((identity + skew) @ torch.linalg.inv(identity - skew))
    formed: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return formed


def classify(classifier: Tensor, x: Tensor, h: Tensor, temperature: float) -> Tensor:
    """softmax(tau w_g (w_l h) / ||w_l h||) for the rows of h: [n, K]."""
    rotated = h @ transform(x).T
    rotated = rotated / rotated.norm(dim=1, keepdim=True)
    return torch.softmax(temperature * (rotated @ classifier.T), dim=1)
