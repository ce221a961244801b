"""Class vectors from the text tower of an oracle for images, over the real service."""

from pathlib import Path

import numpy as np
import pytest

from client_agent.class_vectors import embed_classes
from client_agent.config import AgentConfig
from fm_oracle.models import registry
from tests.support.agents import agent_config, serving_oracle
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.models import TowersModel, published
from veilfed.config import load_config
from veilfed.errors import Code, VeilfedError

PROMPTS = {"dog": ["a dog"], "cat": ["a cat", "an animal that catches mice"]}


@asynchronous
async def test_prompts_are_embedded_by_the_text_tower(tmp_path: Path) -> None:
    federation = make_federation(tmp_path / "federation", ["north"])
    async with serving_oracle(federation, "north", TowersModel(), tmp_path / "state") as address:
        config = agent_config(federation, "north", tmp_path / "agent", "127.0.0.1:1", address)
        vectors = await embed_classes(load_config(AgentConfig, config), PROMPTS)
    rows = [np.array([[len(text), text.count("a")] for text in texts], float) for texts in PROMPTS.values()]
    expected = [(row / np.linalg.norm(row, axis=1, keepdims=True)).mean(axis=0) for row in rows]
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)


@asynchronous
async def test_a_model_of_images_alone_embeds_none(tmp_path: Path) -> None:
    federation = make_federation(tmp_path / "federation", ["north"])
    model = registry.load("vit", published("vit"))
    async with serving_oracle(federation, "north", model, tmp_path / "state") as address:
        config = agent_config(federation, "north", tmp_path / "agent", "127.0.0.1:1", address)
        with pytest.raises(VeilfedError, match="vit does not embed texts") as caught:
            await embed_classes(load_config(AgentConfig, config), PROMPTS)
    assert caught.value.code is Code.INPUT_INVALID
