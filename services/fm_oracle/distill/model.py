"""A student: an embedding where there is one, some blocks, and what makes an embedding of the last stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fm_oracle.distill.student import Observer, StudentBlock
from fm_oracle.distill.teacher import Batch, Teacher

__all__ = ["Passed", "Shape", "Student", "aligned"]


@dataclass(frozen=True)
class Passed:
    """Streams [n, t, d] after each block, attention [n, heads, t, t] of each, and the embedding [n, d]."""

    streams: list[Tensor]
    attention: list[Tensor]
    embedding: Tensor


def aligned(blocks: int, of: int) -> list[int]:
    """The teacher's blocks whose outputs some blocks of a student shall have: evenly spread, the last with the last."""
    return [(number + 1) * of // blocks - 1 for number in range(blocks)]


class Student(nn.Module):
    """For batches of a teacher. Where features are pixels, its embedding is the class token, else the tokens' mean."""

    def __init__(self, shape: "Shape") -> None:
        super().__init__()
        self.shape = shape
        made = (
            StudentBlock(shape.dimension, shape.heads, shape.hidden, post=shape.post, epsilon=shape.epsilon)
            for _ in range(shape.blocks)
        )
        self.blocks: Any = nn.ModuleList(made)  # of StudentBlock
        self.patches, self.positions, self.affine = None, None, None
        if shape.post:
            self.affine = nn.Parameter(torch.stack([torch.ones(shape.dimension), torch.zeros(shape.dimension)]))
        else:
            self.patches = nn.Linear(shape.features, shape.dimension, bias=False)
            self.positions = nn.Parameter(torch.zeros(shape.tokens, shape.dimension))

    @classmethod
    def of(cls, teacher: Teacher, blocks: int) -> Self:
        """With the weights of the teacher's blocks whose outputs it shall have."""
        made = cls(Shape.of(teacher, blocks))
        folded, affine = teacher.fold(aligned(blocks, teacher.blocks))
        with torch.no_grad():
            for block, source in zip(made.blocks, folded, strict=True):
                block.load_state_dict(source.state_dict())
            if made.affine is not None and affine is not None:
                made.affine.copy_(torch.stack(list(affine)))
            if made.patches is not None and made.positions is not None and (layer := teacher.embedding_layer()):
                made.patches.weight.copy_(layer[0])
                made.positions.copy_(layer[1])
        return made

    def start(self, batch: Batch) -> Tensor:
        """The first stream: of mean zero over channels, 0 for padding."""
        if self.patches is None or self.positions is None:
            return batch.features
        x = (self.patches(batch.features) + self.positions) * batch.mask[..., None]
        centred: Tensor = x - x.mean(dim=-1, keepdim=True)
        return centred

    def forward(self, batch: Batch, seen: Sequence[Observer] | None = None) -> Passed:
        x, streams, attention = self.start(batch), [], []
        for number, block in enumerate(self.blocks):
            x, weights = block(x, batch.mask, None if seen is None else seen[number])
            streams.append(x)
            attention.append(weights)
        return Passed(streams, attention, self.pool(x, batch.mask))

    def pool(self, x: Tensor, mask: Tensor) -> Tensor:
        """The embedding [n, d] of a last stream."""
        if self.affine is None:
            return x[:, 0]
        mean = (x * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return self.affine[0] * mean + self.affine[1]


@dataclass(frozen=True)
class Shape:
    """What a student is made of; `kind` is its teacher's model."""

    kind: str
    post: bool
    dimension: int
    heads: int
    hidden: int
    blocks: int
    features: int
    tokens: int
    epsilon: float

    @classmethod
    def of(cls, teacher: Teacher, blocks: int) -> Self:
        return cls(
            teacher.kind,
            teacher.post,
            teacher.dimension,
            teacher.heads,
            teacher.hidden,
            blocks,
            teacher.features,
            teacher.tokens,
            teacher.epsilon,
        )
