"""Encoders made of parts: what another library computes, between our preprocessing and our card."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from fm_oracle.models import texts
from fm_oracle.models.base import Card, Model
from fm_oracle.models.library import loading, read_json
from fm_oracle.models.preprocessing import Preprocessing, unsupported
from veilfed.errors import Code, VeilfedError

__all__ = ["ImageEncoder", "Reader", "TextEncoder", "read_text_folder"]

MAX_PROMPT = 10_000  # characters; tokenized in the thread of the model
MOST_TOKENS, USUAL_TOKENS = 8192, 512  # of a text: the limit of every model, and of one that names none
NO_LIMIT = 10**6  # larger numbers stand for "not known" in the files

# float32 [n, 3, h, w] -> [n, d]
EncodeImages = Callable[[Tensor], Tensor]
# Texts -> [n, d], where the model has a text tower.
EncodeTexts = Callable[[Sequence[str]], Tensor]
# int64 [n, t] and its mask (None without padding) -> [n, t, d], or [n, d] of a model that pools by itself.
EncodeTokens = Callable[[Tensor, Tensor | None], Tensor]


class ImageEncoder(Model[bytes]):
    """Encoded images -> embeddings, not normalised. `card.dimension` is measured, not taken."""

    def __init__(
        self, card: Card, preprocessing: Preprocessing, encode: EncodeImages, encode_texts: EncodeTexts | None = None
    ) -> None:
        self._preprocessing = preprocessing
        self._encode = encode
        self._encode_texts = encode_texts
        with loading(card.name):
            dimension = preprocessing.dimension(encode, card.name)
        self.card = replace(
            card, dimension=dimension, image_size=max(preprocessing.size), text_tower=encode_texts is not None
        )

    def prepare(self, inputs: Sequence[bytes]) -> list[NDArray[Any]]:
        return self._preprocessing.prepare(inputs)

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        return self._preprocessing.forward(prepared, self._encode)

    def embed_texts(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        if self._encode_texts is None:
            return super().embed_texts(prompts)
        texts.check_lengths(prompts, MAX_PROMPT)
        rows = [np.empty((0, self.card.dimension), np.float32)]
        for text in prompts:  # one at a time: no padding can have a part in it, and classes are few
            with torch.inference_mode():
                rows.append(self._encode_texts([text]).float().numpy())
        return np.concatenate(rows)


class TextEncoder(Model[str]):
    """Texts -> embeddings, not normalised. `card.dimension` is measured, with a text of the greatest length."""

    def __init__(self, card: Card, reader: "Reader", encode: EncodeTokens) -> None:
        self._reader = reader
        self._encode = encode
        with loading(card.name):
            longest = texts.tokenize(reader.tokenizer, ["a " * reader.max_tokens])
            with torch.inference_mode():
                output = self._pooled(torch.from_numpy(np.stack(longest)), None)
        if output.ndim != 2:
            raise unsupported(card.name, f"an output of the shape {list(output.shape)}")
        self.card = replace(card, dimension=output.shape[1], max_tokens=reader.max_tokens)

    def prepare(self, inputs: Sequence[str]) -> list[NDArray[Any]]:
        return texts.tokenize(self._reader.tokenizer, inputs)

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        return texts.forward(prepared, self._pooled, self.card.dimension)

    def _pooled(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        output = self._encode(tokens, mask).float()
        return self._reader.pool(output, mask) if output.ndim == 3 else output


@dataclass(frozen=True)
class Reader:
    """How the model in a folder reads text: its tokenizer, which cuts at `max_tokens`, and its pooling."""

    tokenizer: tokenizers.Tokenizer
    max_tokens: int
    pooling: Literal["mean", "class token"]

    def pool(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """[n, t, d] -> [n, d]; `mask` bool [n, t] is True for tokens, None without padding."""
        return tokens[:, 0] if self.pooling == "class token" else texts.mean_tokens(tokens, mask)


def read_text_folder(folder: Path) -> Reader:
    """Of a folder of transformers or sentence-transformers, or of their export to ONNX.

    Raises VeilfedError: MODEL_MISSING, STATE_CORRUPT, or INPUT_INVALID for what an oracle cannot do.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json")
    limits = [
        (read_json(path) if (path := folder / name).is_file() else {}).get(key)
        for name, key in (
            ("config.json", "max_position_embeddings"),
            ("tokenizer_config.json", "model_max_length"),
            ("sentence_bert_config.json", "max_seq_length"),
        )
    ]
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 1 <= limit < NO_LIMIT]
    max_tokens = min(*known, MOST_TOKENS) if known else USUAL_TOKENS
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return Reader(tokenizer, max_tokens, _pooling(folder))


def _tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise VeilfedError(
            Code.MODEL_MISSING, f"{path}: there is no such file", "Save the model with a fast tokenizer of its library."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001, RUF100  the library raises bare exceptions
        raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not a tokenizer that can be read") from None


def _pooling(folder: Path) -> Literal["mean", "class token"]:
    """As sentence-transformers wrote it down; else the mean."""
    steps = folder / "modules.json"
    if steps.is_file():
        kinds = re.findall(r'"type"\s*:\s*"([^"]*)"', steps.read_text(encoding="utf-8", errors="replace"))
        for kind in kinds:
            if kind.rsplit(".", 1)[-1] not in {"Transformer", "Pooling", "Normalize"}:
                raise unsupported(str(folder), f"the step {kind}")
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    config = read_json(path)
    named = config.get("pooling_mode")
    modes = {named} if isinstance(named, str) else {key for key, value in config.items() if value is True}
    modes = {mode.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for mode in modes}
    modes.discard("include_prompt")
    if modes == {"mean"}:
        return "mean"
    if modes == {"cls"}:
        return "class token"
    raise unsupported(str(folder), f"pooling by {', '.join(sorted(modes)) or 'nothing'}")
