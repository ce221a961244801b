"""Models for tests: the published ones, and a tiny one of our own that makes every case quick."""

import io
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fm_oracle.models import registry
from fm_oracle.models.base import Card, Model
from fm_oracle.models.encoders import ImageEncoder
from fm_oracle.models.preprocessing import Preprocessing
from fm_oracle.models.prompts import Pass
from veilfed import packages
from veilfed.errors import Code, VeilfedError

__all__ = ["PromptedModel", "TinyModel", "TowersModel", "png", "published"]


def published(name: str) -> Path:
    """The packages folder, with the files of a published model in it: downloaded once for this machine."""
    folder = packages.default_folder()
    packages.fetch(registry.find(name).files, folder)
    return folder


def png(pixels: NDArray[np.uint8], image_format: str = "PNG") -> bytes:
    """An encoded image of [h, w], [h, w, 3] or [h, w, 4] values."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, image_format)
    return out.getvalue()


class TinyModel(Model[str]):
    """A model for texts: the embedding is (length, number of the letter a). "poison" makes its pass fail.

    `passes` lists the texts of its passes; `started` counts passes and `prepared` requests. While `gate` is cleared a
    pass waits.
    """

    files = ()

    def __init__(self) -> None:
        self.card = Card("tiny", "0" * 64, "text", 2, 1, 8, 0)
        self.passes: list[list[str]] = []
        self.started = 0
        self.prepared = 0
        self.gate = threading.Event()
        self.gate.set()

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls()

    def prepare(self, inputs: Sequence[str]) -> list[NDArray[Any]]:
        if "" in inputs:
            raise VeilfedError(Code.INPUT_INVALID, f"text {list(inputs).index('')} of the batch is empty")
        self.prepared += 1
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in inputs]

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        self.started += 1
        assert self.gate.wait(30)
        texts = [array.tobytes().decode() for array in prepared]
        self.passes.append(texts)
        if "poison" in texts:
            raise ValueError("a pass that fails")
        return np.array([[len(text), text.count("a")] for text in texts], dtype=np.float32)

    @property
    def sizes(self) -> list[int]:
        return [len(texts) for texts in self.passes]


class PromptedModel(TinyModel):
    """A TinyModel with prompts of width 3: (length, letters a) + (length, 1) * (mean P0, mean of P1 P2).

    `prompts` lists the mean of each pass's prompts, beside its texts in `passes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.card = replace(self.card, prompt_width=3)
        self.prompts: list[float] = []

    def prompted(self, prepared: Sequence[NDArray[Any]], count: int) -> Iterator[Pass]:
        def encode(prompts: Tensor) -> Tensor:
            assert len(prompts) == count
            self.prompts.append(float(prompts.detach().mean()))
            h = torch.from_numpy(self.forward(prepared))
            added = torch.stack([prompts[:, 0].mean(), (prompts[:, 1] * prompts[:, 2]).mean()])
            return h + torch.stack([h[:, 0], torch.ones(len(h))], dim=1) * added

        yield slice(None), encode


class TowersModel(ImageEncoder):
    """A model of images with a text tower: (an image's first value, 1) and (length, number of the letter a)."""

    def __init__(self) -> None:
        preprocessing = Preprocessing((4, 4), 4, "nearest", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        super().__init__(Card("towers", "1" * 64, "image", 0, 0, 0, 0), preprocessing, _look, _read)


def _look(pixels: torch.Tensor) -> torch.Tensor:
    first = (pixels[:, 0, 0, 0] * 255).round()
    return torch.stack([first, torch.ones_like(first)], dim=1)


def _read(texts: Sequence[str]) -> torch.Tensor:
    return torch.tensor([[len(text), text.count("a")] for text in texts])
