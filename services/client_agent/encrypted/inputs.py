"""From raw inputs to what is encrypted, by the file that the model's owner publishes for it.

Texts become the first stream: rows of the owner's token table, with positions, normalised. Images become the pixels of
each patch. Nothing of the model's blocks is in the file.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import tokenizers
from numpy.typing import NDArray
from PIL import Image

from veilfed.errors import Code, VeilfedError
from veilfed.images import decode, square
from veilfed.protocol import INPUTS_FORMAT

__all__ = ["Inputs", "load_inputs"]

Real = NDArray[np.float64]


class Inputs(ABC):
    """`modality` of the samples; `indicators`: channels of their own that say which token a slot has."""

    modality: str
    indicators: int = 0

    @abstractmethod
    def features(self, inputs: Sequence[Any]) -> list[Real]:
        """Of each input [t_i, f]. Raises VeilfedError(INPUT_INVALID)."""


class Texts(Inputs):
    """`words` [V, d] and `positions` [t, d] are float32."""

    modality = "text"

    def __init__(self, about: dict[str, Any], arrays: dict[str, NDArray[np.float32]]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(about["tokenizer"])
        self._tokenizer.no_padding()
        self._words, self._positions = arrays["words"], arrays["positions"]
        self._tokens, self._epsilon = int(about["tokens"]), float(about["epsilon"])

    def features(self, inputs: Sequence[str]) -> list[Real]:
        return [self._stream(np.asarray(found.ids)) for found in self._tokenizer.encode_batch_fast(list(inputs))]

    def _stream(self, ids: NDArray[np.int64]) -> Real:
        if len(ids) > self._tokens:  # the last one ends a text
            ids = np.append(ids[: self._tokens - 1], ids[-1])
        x = self._words[ids].astype(np.float64) + self._positions[: len(ids)]
        x -= x.mean(axis=1, keepdims=True)
        normalised: Real = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self._epsilon)
        return normalised


class Images(Inputs):
    """Squares of `side` pixels in patches; the first token has none."""

    modality = "image"

    def __init__(self, about: dict[str, Any]) -> None:
        self._side, self._patch = int(about["side"]), int(about["patch"])
        self._mean, self._deviation = np.array(about["mean"]), np.array(about["deviation"])
        self.indicators = 1 + (self._side // self._patch) ** 2

    def features(self, inputs: Sequence[bytes]) -> list[Real]:
        return [self._patches(decode(data, number)) for number, data in enumerate(inputs)]

    def _patches(self, image: Image.Image) -> Real:
        pixels = (square(image, self._side) / 255 - self._mean) / self._deviation
        patch, across = self._patch, self._side // self._patch
        # [row, y, column, x, colour] -> [row, column, colour, y, x]
        apart = pixels.reshape(across, patch, across, patch, 3).transpose(0, 2, 4, 1, 3)
        found: Real = apart.reshape(across * across, -1)
        return np.concatenate([np.zeros((1, found.shape[1])), found])


def load_inputs(path: Path) -> Inputs:
    """Raises VeilfedError: FILE_UNUSABLE, or STATE_CORRUPT for another file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["inputs"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        if about["format"] != INPUTS_FORMAT:
            raise KeyError(INPUTS_FORMAT)
        return Texts(about, arrays) if about["modality"] == "text" else Images(about)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror or 'not readable'}") from None
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError):
        raise VeilfedError(
            Code.STATE_CORRUPT, f"{path}: not the file of inputs", "Ask the model's owner for it again."
        ) from None
