"""What every foundation model offers to the oracle, and the parts that transformers share."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fm_oracle.models import prompts as prompting
from fm_oracle.models.prompts import Pass
from veilfed import packages
from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile

__all__ = ["Attention", "Card", "Loader", "Model", "digest_of", "empty", "freeze", "read_file", "version_of"]

PREPARED = 64  # inputs that are prepared at a time

Input = TypeVar("Input", str, bytes)


@dataclass(frozen=True)
class Card:
    """What may be known of a model: nothing of its weights."""

    name: str
    version: str  # SHA-256 over weights and preprocessing: equal versions give interchangeable embeddings
    modality: Literal["text", "image"]
    dimension: int  # d, the length of an embedding
    blocks: int  # transformer blocks that are computed, 0 if not known
    max_tokens: int  # 0 if not known
    image_size: int  # side in pixels, 0 for text
    text_tower: bool = False  # whether a model of images embeds texts too, in the same space
    prompt_width: int = 0  # D, the width of a prompt token; 0: none are taken


class Model(ABC, Generic[Input]):
    """A frozen foundation model. `Input` is str for text and bytes (an encoded image) for images."""

    files: ClassVar[Sequence[PackageFile]] = ()
    named: ClassVar[bool] = False
    card: Card

    @abstractmethod
    def prepare(self, inputs: Sequence[Input]) -> list[NDArray[Any]]:
        """One array per input: token numbers or pixels. Called from threads, several at a time.

        Raises VeilfedError(INPUT_INVALID) that names the position of a bad input, never its content.
        """

    @abstractmethod
    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """The embeddings [n, d] of prepared inputs, in their order. Called from one thread."""

    def embed(self, inputs: Sequence[Input]) -> NDArray[np.float32]:
        """The embeddings [n, d] of any number of inputs, a few at a time: prepared images take much memory."""
        parts = [np.empty((0, self.card.dimension), np.float32)]
        for start in range(0, len(inputs), PREPARED):
            parts.append(self.forward(self.prepare(inputs[start : start + PREPARED])))
        return np.concatenate(parts)

    def embed_texts(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Texts in the space of the embeddings, [n, d]: vectors of classes, from a description of each.

        Called from the thread of `forward`. Raises VeilfedError(INPUT_INVALID) for a model that reads no text.
        """
        if self.card.modality == "text":
            inputs: Any = prompts
            return self.embed(inputs)
        raise VeilfedError(Code.INPUT_INVALID, f"the model {self.card.name} reads images alone: it has no text tower")

    def prompted(self, prepared: Sequence[NDArray[Any]], count: int) -> Iterator[Pass]:
        """The passes of a forward pass with `count` prompt tokens beside those of each input.

        Raises VeilfedError(INPUT_INVALID): this model takes none.
        """
        raise VeilfedError(Code.INPUT_INVALID, f"the model {self.card.name} takes no prompt tokens")

    def forward_prompted(self, prepared: Sequence[NDArray[Any]], prompts: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `forward`, with prompt tokens [M, D]."""
        shape = len(prepared), self.card.dimension
        return prompting.embed(self.prompted(prepared, len(prompts)), prompts, shape)

    def prompt_gradient(
        self,
        prepared: Sequence[NDArray[Any]],
        prompts: NDArray[np.float32],
        head: NDArray[np.float32],
        labels: NDArray[np.int64],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(gradient [M, D], embeddings [n, d]) of inputs with the classes `labels` [n], rows of `head` [K, d].

        The gradient with respect to the prompts of sum_i -log softmax(head h_i / ||h_i||)[labels_i].
        """
        shape = len(prepared), self.card.dimension
        return prompting.gradient(self.prompted(prepared, len(prompts)), prompts, head, labels, shape)


class Loader(Protocol):
    """What an entry point `veilfed.models` names: most often the class of a model.

    `load(folder)` reads the model, its `files` from the packages folder. If it is `named` it stands for many models,
    the configuration says which (`model: open_clip:ViT-B-32`), and it is `load(folder, name)`.

    `load` raises VeilfedError: MODEL_MISSING or STATE_CORRUPT; where `named` also INPUT_INVALID for a model that there
    is not or that cannot be served, and PACKAGE_MISSING.
    """

    files: Sequence[PackageFile]
    named: bool
    load: Callable[..., Model[Any]]


class Attention(nn.Module):
    """Multi-head self-attention over [n, t, d], with one matrix for queries, keys and values (in this order)."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dimension, 3 * dimension)
        self.out = nn.Linear(dimension, dimension)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is broadcast to [n, heads, t, t]: False where a token must not be looked at."""
        n, tokens, dimension = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, dimension // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, tokens, dimension))
        return out


def read_file(file: PackageFile, folder: Path) -> bytes:
    """The bytes of a model's file, checked against its known digest.

    Raises VeilfedError(MODEL_MISSING), or STATE_CORRUPT when the file is not the one that was published.
    """
    try:
        return packages.read(file, folder)
    except VeilfedError as error:
        if error.code is Code.DATA_MISSING:
            raise VeilfedError(Code.MODEL_MISSING, f"{file.member} of {file.package} is not in {folder}") from None
        if error.code is Code.STATE_CORRUPT:
            raise VeilfedError(error.code, error.message, "Remove it and run `veilfed oracle fetch`.") from None
        raise


def version_of(digests: Iterable[str], parameters: Mapping[str, object]) -> str:
    """SHA-256 over the digests of the files (weights, vocabulary) and all parameters of preprocessing and pooling."""
    document = {"files": sorted(digests), "parameters": dict(parameters)}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of a model's weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def freeze(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights into a module for inference. Raises VeilfedError(STATE_CORRUPT) when they do not fit."""
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError:
        raise VeilfedError(
            Code.STATE_CORRUPT, "the model's weights do not have the expected names and shapes"
        ) from None
    module.eval().requires_grad_(requires_grad=False)


def empty(make: type[nn.Module]) -> Any:
    """A module without memory for its parameters, to be filled by `freeze`."""
    with torch.device("meta"):
        return make()
