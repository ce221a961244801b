"""What a student learns from: a model's streams and attention, block by block, on the student's own tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fm_oracle.distill.folding import Affine, fold_minilm, fold_vit
from fm_oracle.distill.student import StudentBlock
from fm_oracle.models.base import Attention, Model
from fm_oracle.models.minilm import MiniLM
from fm_oracle.models.vit import PATCH, ViT, normalise
from veilfed.errors import Code, VeilfedError
from veilfed.images import decode, square

__all__ = ["Batch", "ImageTeacher", "Lesson", "Teacher", "TextTeacher", "teacher_of"]


@dataclass(frozen=True)
class Batch:
    """What enters a student: features [n, t, f] that are encrypted, and the mask [n, t], 1 for real tokens."""

    features: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Lesson:
    """The teacher's streams [n, t, d] after some blocks, normalised, and attention [n, heads, t, t]; its embedding."""

    streams: list[Tensor]
    attention: list[Tensor]
    embedding: Tensor


class Teacher(ABC):
    """A model of the oracle, seen from inside."""

    kind: str
    dimension: int
    heads: int
    hidden: int
    blocks: int
    post: bool
    epsilon: float
    features: int
    tokens: int

    def __init__(self, model: Model[Any]) -> None:
        self.model = model

    @abstractmethod
    def prepare(self, inputs: Sequence[Any]) -> list[NDArray[Any]]:
        """Token numbers or pixels of each input."""

    @abstractmethod
    def length(self, prepared: NDArray[Any]) -> int:
        """How many tokens a prepared input has."""

    @abstractmethod
    def batch(self, prepared: Sequence[NDArray[Any]]) -> Batch:
        """Of some prepared inputs."""

    @abstractmethod
    def lesson(self, prepared: Sequence[NDArray[Any]], after: Sequence[int]) -> Lesson:
        """The streams after the blocks with these numbers."""

    @abstractmethod
    def embedding_layer(self) -> tuple[Tensor, Tensor] | None:
        """The matrix [d, f] and the positions [t, d] that make the first stream of features; None where they are it."""

    @abstractmethod
    def fold(self, numbers: Sequence[int]) -> tuple[list[StudentBlock], Affine | None]:
        """Student blocks with the weights of these blocks, and what makes an embedding of the last stream."""


def teacher_of(model: Model[Any], tokens: int, image_side: int) -> Teacher:
    """Raises VeilfedError(INPUT_INVALID) for a model whose blocks are not known, and for a side that is no multiple."""
    if isinstance(model, MiniLM):
        return TextTeacher(model, tokens)
    if isinstance(model, ViT):
        return ImageTeacher(model, image_side)
    raise VeilfedError(Code.INPUT_INVALID, f"{model.card.name} has no blocks that are known; minilm and vit have")


def _normalised(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


def _attention(layer: Attention, x: Tensor, mask: Tensor | None) -> Tensor:
    """The weights [n, heads, t, t]."""
    n, tokens, dimension = x.shape
    width = dimension // layer.heads
    q, k, _ = layer.qkv(x).view(n, tokens, 3, layer.heads, width).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / width**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    weights: Tensor = scores.softmax(dim=-1)
    return weights


class TextTeacher(Teacher):
    """MiniLM. Its features are the first stream, normalised: whoever encrypts them needs the owner's token table."""

    kind, post = "minilm", True

    def __init__(self, model: MiniLM, tokens: int) -> None:
        super().__init__(model)
        self.bert = model.bert
        self.tokenizer = model.tokenizer
        self.layers: list[Any] = list(self.bert.blocks)
        first = self.layers[0]
        self.dimension = self.features = model.card.dimension
        self.heads, self.hidden = first.attention.heads, first.up.out_features
        self.blocks, self.epsilon, self.tokens = len(self.layers), first.norm.eps, tokens

    def prepare(self, inputs: Sequence[str]) -> list[NDArray[Any]]:
        """Token numbers; of texts that are too long the first ones, and the one that ends a text."""
        found = self.model.prepare(inputs)
        return [ids if len(ids) <= self.tokens else np.append(ids[: self.tokens - 1], ids[-1]) for ids in found]

    def length(self, prepared: NDArray[Any]) -> int:
        return len(prepared)

    def _padded(self, prepared: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prepared))
        tokens = torch.zeros(len(prepared), longest, dtype=torch.long)
        for row, ids in enumerate(prepared):
            tokens[row, : len(ids)] = torch.from_numpy(ids)
        return tokens, torch.arange(longest) < torch.tensor([[len(ids)] for ids in prepared])

    @torch.no_grad()
    def batch(self, prepared: Sequence[NDArray[Any]]) -> Batch:
        tokens, mask = self._padded(prepared)
        positions = self.bert.positions.weight[: tokens.shape[1]]
        summed = self.bert.words(tokens) + positions + self.bert.types.weight[0]
        features = nn.functional.layer_norm(summed, (self.dimension,), eps=self.epsilon)
        real = mask.to(features.dtype)
        return Batch(features * real[..., None], real)

    @torch.no_grad()
    def lesson(self, prepared: Sequence[NDArray[Any]], after: Sequence[int]) -> Lesson:
        tokens, mask = self._padded(prepared)
        x = self.bert.embed_tokens(tokens)
        streams, attention = [], []
        for number in range(self.blocks):
            if number in after:
                attention.append(_attention(self.layers[number].attention, x, mask))
            x = self.bert.block(number, x, mask)
            if number in after:
                streams.append(_normalised(x))
        return Lesson(streams, attention, self.bert.pool(x, mask))

    def embedding_layer(self) -> None:
        return None

    def fold(self, numbers: Sequence[int]) -> tuple[list[StudentBlock], Affine | None]:
        affine: Affine = (self.bert.norm.weight, self.bert.norm.bias)
        made = []
        for number in numbers:
            before = affine if number == 0 else _after(self.layers[number - 1])
            block, affine = fold_minilm(self.layers[number], before)
            made.append(block)
        return made, affine


def _after(block: Any) -> Affine:
    return block.norm.weight, block.norm.bias


class ImageTeacher(Teacher):
    """ViT. Its features are the pixels of a patch for each token, and none for the class token."""

    kind, post = "vit", False

    def __init__(self, model: ViT, side: int) -> None:
        super().__init__(model)
        if side < PATCH or side % PATCH:
            raise VeilfedError(Code.INPUT_INVALID, f"a side of {side} pixels is no multiple of {PATCH}")
        self.vision, self.side = model.transformer, side
        self.layers: list[Any] = list(self.vision.blocks)
        first = self.layers[0]
        self.dimension, self.features = model.card.dimension, 3 * PATCH * PATCH
        self.heads, self.hidden = first.attention.heads, first.up.out_features
        self.blocks, self.epsilon = len(self.layers), first.norm1.eps
        self.tokens = 1 + (side // PATCH) ** 2

    def prepare(self, inputs: Sequence[bytes]) -> list[NDArray[Any]]:
        return [square(decode(data, position), self.side) for position, data in enumerate(inputs)]

    def length(self, prepared: NDArray[Any]) -> int:
        return self.tokens

    def _pixels(self, prepared: Sequence[NDArray[Any]]) -> Tensor:
        return normalise(torch.from_numpy(np.stack(prepared)))

    def batch(self, prepared: Sequence[NDArray[Any]]) -> Batch:
        patches = nn.functional.unfold(self._pixels(prepared), PATCH, stride=PATCH).transpose(1, 2)
        features = torch.cat([torch.zeros(len(patches), 1, self.features), patches], dim=1)
        return Batch(features, torch.ones(features.shape[:2]))

    @torch.no_grad()
    def lesson(self, prepared: Sequence[NDArray[Any]], after: Sequence[int]) -> Lesson:
        x = self.vision.embed_tokens(self._pixels(prepared))
        streams, attention = [], []
        for number in range(self.blocks):
            block = self.layers[number]
            if number in after:
                attention.append(_attention(block.attention, block.norm1(x), None))
            x = self.vision.block(number, x)
            if number in after:
                streams.append(_normalised(x))
        return Lesson(streams, attention, self.vision.pool(x))

    @torch.no_grad()
    def embedding_layer(self) -> tuple[Tensor, Tensor]:
        matrix = self.vision.patches.weight.reshape(self.dimension, -1)
        empty = torch.zeros(1, 3, self.side, self.side)
        # Of no pixels at all the first stream is the positions, with the patches' bias and the class token in them.
        return matrix, self.vision.embed_tokens(empty)[0]

    def fold(self, numbers: Sequence[int]) -> tuple[list[StudentBlock], Affine | None]:
        return [fold_vit(self.layers[number]) for number in numbers], None
