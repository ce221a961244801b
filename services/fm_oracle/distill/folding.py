"""A student's first weights from its teacher's: everything around the linear layers goes into them."""

import math

import torch
from torch import Tensor, nn

from fm_oracle.distill.student import StudentBlock
from fm_oracle.models import minilm, vit

__all__ = ["Affine", "fold_minilm", "fold_vit"]

# Gain and shift [d] of a normalisation whose output is gain x + shift.
Affine = tuple[Tensor, Tensor]


@torch.no_grad()
def fold_vit(block: vit.Block) -> StudentBlock:
    """Of a pre-normalised block with scaled layers."""
    dimension, hidden = block.up.in_features, block.up.out_features
    student = StudentBlock(dimension, block.attention.heads, hidden, post=False, epsilon=block.norm1.eps)
    _after(student.qkv, block.attention.qkv, (block.norm1.weight, block.norm1.bias))
    _scale_queries(student)
    _scaled(student.out, block.attention.out, block.scale1)
    _after(student.up, block.up, (block.norm2.weight, block.norm2.bias))
    _scaled(student.down, block.down, block.scale2)
    return student


@torch.no_grad()
def fold_minilm(block: minilm.Block, before: Affine) -> tuple[StudentBlock, Affine]:
    """Of a post-normalised block whose input is `before` of a normalised stream; and the same of its output."""
    dimension, hidden = block.up.in_features, block.up.out_features
    student = StudentBlock(dimension, block.attention.heads, hidden, post=True, epsilon=block.norm.eps)
    between = block.attention_norm.weight, block.attention_norm.bias
    _after(student.qkv, block.attention.qkv, before)
    _scale_queries(student)
    _shifted(student.out, block.attention.out, before[1])
    _after(student.up, block.up, between)
    _shifted(student.down, block.down, between[1])
    assert student.gains is not None  # noqa: S101  for mypy: post-normalised
    student.gains.copy_(torch.stack([before[0], between[0]]))
    return student, (block.norm.weight, block.norm.bias)


def _after(layer: nn.Linear, teacher: nn.Linear, affine: Affine) -> None:
    """layer(x) = teacher(gain x + shift)."""
    gain, shift = affine
    layer.weight.copy_(teacher.weight * gain)
    layer.bias.copy_(teacher.bias + teacher.weight @ shift)


def _scaled(layer: nn.Linear, teacher: nn.Linear, scale: Tensor) -> None:
    """layer(x) = scale * teacher(x)."""
    layer.weight.copy_(scale[:, None] * teacher.weight)
    layer.bias.copy_(scale * teacher.bias)


def _shifted(layer: nn.Linear, teacher: nn.Linear, shift: Tensor) -> None:
    """layer(x) = teacher(x) + shift."""
    layer.weight.copy_(teacher.weight)
    layer.bias.copy_(teacher.bias + shift)


def _scale_queries(student: StudentBlock) -> None:
    """Scores are divided by the square root of a head's width: by its queries."""
    dimension = student.out.in_features
    factor = 1 / math.sqrt(dimension // student.heads)
    student.qkv.weight[:dimension] *= factor
    student.qkv.bias[:dimension] *= factor
