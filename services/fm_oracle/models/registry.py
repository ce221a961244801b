"""Finds models by name (entry points `veilfed.models`) and runs them in process."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

if TYPE_CHECKING:  # names are looked up where torch need not be loaded: `veilfed config check`
    from fm_oracle.models.base import Model

__all__ = ["embed", "find", "load", "names"]

GROUP = "veilfed.models"


def names() -> list[str]:
    """All models that are installed, without loading them."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def find(name: str) -> "type[Model[Any]]":
    """The class of a model. Raises VeilfedError(CONFIG_INVALID) that lists what is installed."""
    for entry in entry_points(group=GROUP, name=name):
        found: type[Model[Any]] = entry.load()
        return found
    raise VeilfedError(Code.CONFIG_INVALID, f"there is no model {name}; installed are {', '.join(names())}")


def load(name: str, folder: Path) -> "Model[Any]":
    """A model, read from the packages folder. Raises VeilfedError(CONFIG_INVALID, MODEL_MISSING, STATE_CORRUPT)."""
    return find(name).load(folder)


def embed(model_name: str, inputs: Sequence[str] | Sequence[bytes], folder: Path) -> NDArray[np.float32]:
    """Embeddings [n, d] of texts or encoded images in this process, for benchmarks and trials of the model's owner."""
    model = load(model_name, folder)
    return model.forward(model.prepare(inputs))
