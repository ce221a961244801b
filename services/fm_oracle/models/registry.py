"""Finds models by name (entry points `veilfed.models`) and runs them in process.

model = load("open_clip:ViT-B-32", folder)     "minilm", "vit", "timm:NAME", "transformers:FOLDER", "onnx:FOLDER"
model.card                                     dimension, modality, version (the key of caches), ...
model.embed(inputs) -> float32 [n, d]          texts or encoded images, as the modality says; not normalised
model.embed_texts(prompts) -> float32 [k, d]   vectors of classes, where the model reads text
"""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

if TYPE_CHECKING:  # names are looked up where torch need not be loaded: `veilfed config check`
    from fm_oracle.models.base import Loader, Model

__all__ = ["check_name", "embed", "find", "load", "names"]

GROUP = "veilfed.models"


def names() -> list[str]:
    """All models that are installed, without loading them."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def check_name(name: str) -> None:
    """Raises VeilfedError(INPUT_INVALID) that lists what is installed, without loading it."""
    kind = name.partition(":")[0]
    if kind not in names():
        raise VeilfedError(Code.INPUT_INVALID, f"there is no model {kind}; installed are {', '.join(names())}")


def find(name: str) -> "Loader":
    """What loads a model; of `timm:resnet50` that of timm. Raises VeilfedError as `check_name`."""
    check_name(name)
    (entry,) = entry_points(group=GROUP, name=name.partition(":")[0])
    found: Loader = entry.load()
    return found


def load(name: str, folder: Path) -> "Model[Any]":
    """A model: "minilm", read from the packages folder, or "open_clip:ViT-B-32" and the like.

    Raises VeilfedError: INPUT_INVALID for an unknown name, and what the model's `load` says.
    """
    found = find(name)
    kind, _, which = name.partition(":")
    if found.named and not which:
        raise VeilfedError(Code.INPUT_INVALID, f"model {kind}: say which one, as {kind}:NAME")
    if which and not found.named:
        raise VeilfedError(Code.INPUT_INVALID, f"model {kind}: is one model, {which!r} says nothing to it")
    return found.load(folder, which) if found.named else found.load(folder)


def embed(model_name: str, inputs: Sequence[str] | Sequence[bytes], folder: Path) -> NDArray[np.float32]:
    """Embeddings [n, d] of texts or encoded images in this process, for benchmarks and trials of the model's owner."""
    return load(model_name, folder).embed(inputs)
