"""Class vectors: prompts for the classes, embedded by the oracle of the own zone like any other text.

vector of a class = the mean of its prompts' embeddings, each scaled to length 1
"""

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, RootModel

from client_agent.config import AgentConfig
from client_agent.features import embed_apart
from veilfed.config import read_text, validate
from veilfed.errors import Code, VeilfedError

__all__ = ["Prompts", "class_means", "embed_classes", "read_prompts"]

# class -> its prompts
Prompts = dict[str, list[str]]

Text = Annotated[str, Field(min_length=1, max_length=10_000)]


class _File(RootModel[dict[str, Text | Annotated[list[Text], Field(min_length=1)]]]):
    model_config = ConfigDict(frozen=True)


def read_prompts(path: Path) -> Prompts:
    """The prompts of a YAML file. Raises VeilfedError(INPUT_INVALID, CONFIG_INVALID or FILE_UNUSABLE)."""
    found = validate(_File, read_text(path), str(path), Code.INPUT_INVALID).root
    if len(found) < 2:
        raise VeilfedError(Code.INPUT_INVALID, f"{path}: prompts for two classes at least are needed")
    return {name: [prompts] if isinstance(prompts, str) else prompts for name, prompts in found.items()}


async def embed_classes(config: AgentConfig, prompts: Prompts) -> NDArray[np.float32]:
    """One vector for each class: float32 [K, d]. The prompts count against the oracle's quota.

    Raises VeilfedError: INPUT_INVALID for an oracle whose model embeds no text; what the oracle or the gate say.
    """
    return class_means(prompts, await embed_apart(config, [text for texts in prompts.values() for text in texts]))


def class_means(prompts: Prompts, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vectors [K, d] of the embeddings of all prompts, in their order."""
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    ends = np.cumsum([len(texts) for texts in prompts.values()])
    return np.array([rows.mean(axis=0) for rows in np.split(units, ends[:-1])], np.float32)
