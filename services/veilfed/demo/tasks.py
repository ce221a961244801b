"""The tasks of the demonstration: institutions, data, model and rates."""

from dataclasses import dataclass
from typing import Any

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """One study: which institutions, on what data, with which model, at which rates.

    The rates were chosen on a validation part of the training splits: docs/explanation/choosing-rates.md.
    """

    name: str
    title: str
    model: str  # of the oracle
    domains: dict[str, dict[str, Any]]  # institution -> the `data` section of its agent's configuration
    classes: tuple[str, ...]
    rounds: int
    blocks: int  # r
    classifier_rate: float
    transform_rate: float
    dimension: int = 384
    epochs: int = 1
    batch_size: int = 64


VADER = Task(
    name="vader",
    title="sentiment of short texts: tweets, product reviews, film reviews, newspaper (VADER, 2,000 texts each)",
    model="minilm",
    domains={
        name: {"source": "vader", "domain": name, "limit": 2000} for name in ("tweets", "amazon", "movies", "nyt")
    },
    classes=("negative", "positive"),
    rounds=6,
    blocks=24,
    classifier_rate=2e-3,
    transform_rate=1e-3,
)

EMOJI = Task(
    name="emoji",
    title="concepts drawn in five icon styles (Emoji-DG, 280 images each)",
    model="vit",
    domains={
        name: {"source": "emoji", "style": name}
        for name in ("noto", "twemoji", "openmoji", "fluent-emoji", "fluent-emoji-high-contrast")
    },
    classes=("animal", "building", "clothing", "electronics", "face", "food", "hand", "plant", "tool", "vehicle"),
    rounds=20,
    blocks=12,
    classifier_rate=1e-2,
    transform_rate=5e-4,
)

HEART = Task(
    name="heart",
    title="heart disease at four hospitals, records written as sentences (UCI)",
    model="minilm",
    domains={
        name: {"source": "heart", "hospital": name} for name in ("cleveland", "hungary", "switzerland", "va-long-beach")
    },
    classes=("absent", "present"),
    rounds=30,
    blocks=24,
    classifier_rate=5e-3,
    transform_rate=5e-4,
)

TASKS = {task.name: task for task in (VADER, EMOJI, HEART)}
