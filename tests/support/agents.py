"""Agents as processes, with a real oracle of a tiny model in this process."""

import asyncio
import csv
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from fm_oracle.config import OracleConfig
from fm_oracle.models.base import Card, Model
from fm_oracle.models.prompts import Pass
from fm_oracle.server import service
from tests.support.identities import Federation
from tests.support.methods import ANALYTIC
from tests.support.processes import Process, veilfed
from veilfed.identity.material import load_credentials
from veilfed.jobs import StrategyName
from veilfed.rpc.server import create_server
from veilfed.v1.oracle_pb2_grpc import add_OracleServicer_to_server

__all__ = [
    "CLASSES",
    "DIMENSION",
    "LetterModel",
    "PromptedLetters",
    "agent_config",
    "running",
    "serving_oracle",
    "spec",
    "wait_for",
    "write_data",
]

CLASSES = ["consonants", "vowels"]
DIMENSION = 32


class LetterModel(Model[str]):
    """A model for texts that needs no weights: how often each letter occurs. `seen` counts the texts that it got."""

    files = ()

    def __init__(self, dimension: int = DIMENSION) -> None:
        self.card = Card("letters", f"{dimension:064x}", "text", dimension, 1, 128, 0)
        self.seen = 0

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls()

    def prepare(self, inputs: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in inputs]

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        self.seen += len(prepared)
        rows = [np.bincount(array % 32, minlength=self.card.dimension) for array in prepared]
        return np.array(rows, dtype=np.float32)


class PromptedLetters(LetterModel):
    """With prompts P [M, 8]: h + |h| tanh(A mean(P)), with an A that is always the same."""

    def __init__(self, dimension: int = DIMENSION) -> None:
        super().__init__(dimension)
        self.card = replace(self.card, prompt_width=8)
        drawn = np.random.default_rng(0).standard_normal((dimension, 8)).astype(np.float32)
        self._mixing = torch.from_numpy(drawn)

    def prompted(self, prepared: Sequence[NDArray[Any]], count: int) -> Iterator[Pass]:
        def encode(prompts: Tensor) -> Tensor:
            h = torch.from_numpy(self.forward(prepared))
            lengths = torch.linalg.vector_norm(h, dim=1, keepdim=True)
            moved: Tensor = h + lengths * torch.tanh(self._mixing @ prompts.mean(dim=0)) / 4
            return moved

        yield slice(None), encode


def write_data(path: Path, seed: int, samples: int = 100) -> Path:
    """A table of texts of two classes: mostly vowels, mostly consonants. Every text is there once."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(samples):
            label = CLASSES[number % 2]
            likely, other = ("aeiou", "bcdfg") if label == "vowels" else ("bcdfg", "aeiou")
            letters = rng.choice(list(likely * 2 + other), size=24)
            writer.writerow(["".join(letters), label])
    return path


@asynccontextmanager
async def serving_oracle(
    federation: Federation, institution: str, model: Model[Any], state: Path, **settings: Any
) -> AsyncIterator[str]:
    """The real oracle of an institution with another model; its address."""
    files = federation.oracles[institution]
    config = OracleConfig.model_validate(
        {"identity": files, "listen": "127.0.0.1:0", "model": "minilm", "state": state, **settings}
    )
    async with service(model, config) as oracle:
        server, port = create_server(load_credentials(files), config.listen)
        add_OracleServicer_to_server(oracle, server)
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


def agent_config(
    federation: Federation,
    institution: str,
    folder: Path,
    aggregator: str,
    oracle_address: str,
    **settings: Any,
) -> Path:
    """Writes an agent's configuration; returns its path."""
    document = {
        "identity": {name: str(path) for name, path in federation.agents[institution]},
        "aggregator": {"address": aggregator, "identity": str(federation.aggregator_id)},
        "oracle": {
            "address": oracle_address,
            "identity": str(federation.oracle_id(institution)),
            "root": str(federation.zone_roots[institution]),
        },
        "data": {"source": "table", "path": str(folder / "data.csv")},
        "state": str(folder / "state"),
        "policy": {"consent": "allow", "strategies": list(get_args(StrategyName))},
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "agent.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@contextmanager
def running(config: Path, log: str = "agent") -> Iterator[Process]:
    """`veilfed agent serve`; killed at the end of the block. Not waited for: it is ready once it has joined."""
    process = Process(veilfed("agent", "serve", "--config", config), config.parent / log)
    try:
        yield process
    finally:
        process.kill()


async def wait_for(awaitable: Any, seconds: float = 120.0) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


def spec(train: Sequence[str], evaluate: Sequence[str] = (), rounds: int = 2, **strategy: Any) -> dict[str, Any]:
    """A small job."""
    trained = {} if strategy.get("name") in ANALYTIC else {"batch_size": 16, "classifier_rate": 0.05}
    return {
        "name": "letters",
        "strategy": {
            "name": "fedot",
            "classes": CLASSES,
            "dimension": DIMENSION,
            **trained,
            **strategy,
        },
        "cohort": {"train": list(train), "evaluate": list(evaluate)},
        "rounds": rounds,
        "quorum": len(train),
        "deadline_seconds": 60,
    }
